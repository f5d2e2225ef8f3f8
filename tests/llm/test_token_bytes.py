"""Tokens as bytes and as a growing text, of small tokenizers of each kind."""

import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tiny_text import TOKENIZER, WITH_BYTES, WITH_MARKS

from penstock.llm import messages
from penstock.llm.stops import StopTexts
from penstock.llm.text import Text
from penstock.llm.token_bytes import Vocabulary, pack

KINDS = {"bytes": TOKENIZER, "words": WITH_BYTES, "marks": WITH_MARKS}
TEXTS = {name: Text(tokenizer) for name, tokenizer in KINDS.items()}
SOME = st.sampled_from(["the", " the", "  c", "é", "日本", "🎡", "\n", " ", "x", "\ufffd"])


def streamed(text, prompt, generated):
    stream = text.vocabulary.stream(prompt)
    return [*map(stream.add, generated), stream.rest()]


def after(whole, prompt):
    """What a text has beyond its prompt, whose last character may have been made whole."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    assert prompt.endswith("\ufffd") and whole.startswith(prompt[:-1])
    return whole[len(prompt) - 1 :]


@st.composite
def token_lists(draw, name):
    """Whatever a model may say: parts of characters, special tokens, some that nobody knows."""
    size = KINDS[name].get_vocab_size()
    parts = KINDS[name].encode("日é", add_special_tokens=False).ids
    one = st.one_of(st.integers(0, size + 2), st.sampled_from(parts), st.integers(0, 260))
    return draw(st.lists(one, max_size=12)), draw(st.lists(one, max_size=16))


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=at_most(300))
@given(data=st.data())
def test_what_is_streamed_is_the_text_of_all_tokens_after_that_of_the_prompt(name, data):
    text = TEXTS[name]
    prompt, generated = data.draw(token_lists(name))
    whole = text.vocabulary.decode([*prompt, *generated])
    assert "".join(streamed(text, prompt, generated)) == after(
        whole, text.vocabulary.decode(prompt)
    )


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=at_most(200))
@given(data=st.data())
def test_a_text_is_what_the_tokenizer_says_it_is(name, data):
    tokens, _ = data.draw(token_lists(name))
    found, expected = TEXTS[name].vocabulary.decode(tokens), KINDS[name].decode(tokens)
    if name == "bytes" or "\ufffd" not in expected:
        assert found == expected
    else:
        # It gives up all bytes in a row for one that is wrong; those that are right are kept here.
        assert "\ufffd" in found and len(found) <= len(expected)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=100)
@given(begin=st.lists(SOME, max_size=4), end=st.lists(SOME, max_size=6))
def test_characters_come_whole_and_nothing_of_them_is_lost(name, begin, end):
    text = TEXTS[name]
    tokens = text.encode("".join([*begin, *end]))
    said = text.vocabulary.decode(tokens)
    # Of marks at the beginning the tokenizer itself keeps none.
    assert name == "marks" or said == "".join([*begin, *end])
    for at in range(len(tokens) + 1):
        pieces = streamed(text, tokens[:at], tokens[at:])
        assert after(said, text.vocabulary.decode(tokens[:at])) == "".join(pieces)
        assert sum(piece.count("\ufffd") for piece in pieces) <= said.count("\ufffd")


def test_a_word_that_follows_a_prompt_keeps_its_space():
    text, word = TEXTS["words"], WITH_BYTES.token_to_id("▁the")
    assert streamed(text, text.encode("the"), [word, word]) == [" the", " the", ""]
    # Before it there is nothing that anybody sees.
    assert streamed(text, [WITH_BYTES.token_to_id("<s>")], [word, word]) == ["the", " the", ""]
    assert text.vocabulary.token(word) == " the" and text.vocabulary.decode([word]) == "the"


def test_a_line_comes_when_it_ends():
    """However it goes on: what ends with it would otherwise end a token late."""
    text = TEXTS["words"]
    line, wrong = (WITH_BYTES.token_to_id(name) for name in ("<0x0A>", "<0xFF>"))
    assert streamed(text, text.encode("a"), [line, wrong]) == ["\n", "\ufffd", ""]


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=at_most(200))
@given(said=st.lists(SOME, min_size=1, max_size=10), data=st.data())
def test_a_text_that_ends_it_is_found_whatever_its_tokens_are(name, said, data):
    text, whole = TEXTS[name], "the" + "".join(said)
    at = data.draw(st.integers(3, len(whole) - 1))
    stop = whole[at : at + data.draw(st.integers(1, 4))]
    prompt, tokens = text.encode("the"), text.encode(whole)
    if text.vocabulary.decode(tokens[: len(prompt)]) != "the":
        return
    stops, found = StopTexts([stop]), ""
    for piece in streamed(text, prompt, tokens[len(prompt) :]):
        if stops.found is None:
            found += stops.add(piece)
    assert stops.found == stop and found == whole[3 : whole.index(stop, 3)]


def test_a_character_that_was_never_whole_comes_at_the_end():
    text = TEXTS["bytes"]
    tokens = text.encode("日")[:-1]
    stream = text.vocabulary.stream()
    assert "".join(map(stream.add, tokens)) == ""
    assert stream.rest() == text.vocabulary.decode(tokens) == "\ufffd"
    assert text.vocabulary.stream().rest() == ""


def test_special_tokens_are_not_part_of_the_text():
    text = TEXTS["bytes"]
    stream = text.vocabulary.stream()
    assert "".join(map(stream.add, [*text.encode("cat"), 0])) == "cat"
    assert text.vocabulary.token(0) == "<|end|>"


def test_a_vocabulary_comes_as_it_was():
    data, ends = pack([b"a", b"", b"bc"])
    known = Vocabulary(data, ends, {2: b"c"}, frozenset({0}), frozenset({1}), {"x": "y"}, "t", 3)
    found = messages.decode_from_renderer(messages.encode(messages.TextReady(1, known)))
    assert found.vocabulary == known and found.vocabulary.piece(2) == b"bc"
    assert found.vocabulary.num_tokens == 3 and found.vocabulary.piece(3) == b""
