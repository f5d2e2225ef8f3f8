"""Why a text is not JSON, in words that fit."""

import msgspec
import pytest

from penstock.wire.json_errors import explain


def explained(text: bytes) -> str:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text, type=dict)
    return explain(memoryview(text), caught.value)


@pytest.mark.parametrize("text", [b"", b"  \n"])
def test_an_empty_text_is_empty(text: bytes) -> None:
    assert explained(text) == "the body is empty; expected JSON"


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb'{"a": "\ud800"}', r"\ud800"),
        (rb'{"a": "\uD834\uDD1E \udBFF!"}', r"\udBFF"),
        (rb'{"a": "\udc00"}', r"\udc00"),
        (rb'{"a": "\\\ud800"}', r"\ud800"),
        (rb'{"a": "\ud800\ud800\udc00"}', r"\ud800"),
    ],
)
def test_half_a_surrogate_pair_is_named(text: bytes, half: str) -> None:
    assert f"a lone surrogate ({half})" in explained(text)


@pytest.mark.parametrize("text", [b"{", rb'{"a": "\\ud800', rb'{"a": "\ud834\udd1e'])
def test_half_a_text_is_truncated(text: bytes) -> None:
    assert explained(text) == "Input data was truncated"


def test_a_text_of_another_form_is_told_as_such() -> None:
    assert "Expected `object`" in explained(rb'["\ud834\udd1e"]')
