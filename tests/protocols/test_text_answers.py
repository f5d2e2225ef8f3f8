"""What lies between a request for text and its answer; both protocols' tests go through it."""

from penstock.protocols.text_answers import salt_of


def test_keys_do_not_share_prompts():
    salts = [
        salt_of({}),
        salt_of({b"authorization": b"Bearer a"}),
        salt_of({b"authorization": b"Bearer b"}),
        salt_of({b"x-api-key": b"c"}),
    ]
    assert len(set(salts)) == 4 and "Bearer" not in "".join(salts)
