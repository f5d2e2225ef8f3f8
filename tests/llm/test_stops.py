"""Text that ends a sequence, whatever the borders of its pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.llm.stops import StopTexts


def sent(pieces, texts) -> tuple[str, str | None]:
    """All that was sent, and what was found; whoever is sent to must never have to take back."""
    stops = StopTexts(texts)
    found = ""
    for piece in pieces:
        found += stops.add(piece)
        if stops.found is not None:
            return found, stops.found
    return found + stops.rest(), None


@pytest.mark.parametrize(
    ("pieces", "texts", "expected"),
    [
        (["one ", "two"], [], ("one two", None)),
        (["one ", "two END three"], ["END"], ("one two ", "END")),
        (["a E", "N", "D b"], ["END"], ("a ", "END")),
        (["a E", "N", "X b"], ["END"], ("a ENX b", None)),
        (["EN"], ["END"], ("EN", None)),
        (["\n", "\n", "\n"], ["\n\n"], ("", "\n\n")),
        (["ab"], ["b", "ab"], ("", "ab")),
        (["xaab"], ["aab", "ab"], ("x", "aab")),
        (["x\nUser", ":"], ["\nUser:", "User"], ("x\n", "User")),
    ],
)
def test_what_is_sent_and_what_ends_it(pieces, texts, expected):
    assert sent(pieces, texts) == expected


def test_nothing_is_held_back_longer_than_needed():
    stops = StopTexts(["END"])
    assert [stops.add(each) for each in ("a", "bE", "N", "X", "c")] == ["a", "b", "", "ENX", "c"]


words = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(words, max_size=3))
def test_borders_of_pieces_do_not_matter(pieces, texts):
    whole = "".join(pieces)
    assert sent(pieces, texts) == sent(list(whole), texts)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(words, min_size=1, max_size=3))
def test_it_ends_where_the_first_of_them_ends(pieces, texts):
    whole = "".join(pieces)
    ends = [whole.find(each) + len(each) for each in texts if each in whole]
    found, stop = sent(pieces, texts)
    if ends:
        assert whole.startswith(found) and len(found) + len(stop) == min(ends)
    else:
        assert (found, stop) == (whole, None)
