"""Messages of any size between the core and a renderer."""

from penstock.llm import text_messages as messages
from penstock.llm.token_bytes import Vocabulary, pack


def joined(message):
    joiner = messages.Joiner()
    found = [joiner.add(datagram) for datagram in messages.encode(message)]
    assert all(each is None for each in found[:-1])
    return found[-1], len(found)


def test_a_large_message_travels_in_parts():
    text = "a" * (3 * messages.PART_BYTES)
    data, num_datagrams = joined(messages.EncodeTexts(7, [text, "b"], True))
    found = messages.decode_to_renderer(data)
    assert (found.job, found.texts, found.is_whole) == (7, [text, "b"], True)
    assert num_datagrams == 4
    assert all(
        len(each) <= messages.PART_BYTES + 1
        for each in messages.encode(messages.EncodeTexts(7, [text], True))
    )


def test_a_vocabulary_comes_as_it_was():
    data, ends = pack([b"a", b"", b"bc"])
    known = Vocabulary(data, ends, {2: b"c"}, frozenset({0}), frozenset({1}), {"x": "y"}, "t", 3)
    found = messages.decode_from_renderer(joined(messages.TextReady(1, known))[0])
    assert found.vocabulary == known and found.vocabulary.piece(2) == b"bc"
    assert found.vocabulary.num_tokens == 3 and found.vocabulary.piece(3) == b""
