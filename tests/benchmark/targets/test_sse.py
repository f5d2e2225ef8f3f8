"""Server-sent events, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.benchmark.targets.sse import MAX_EVENT_BYTES, EventParser, NotEvents

STREAM = (
    b"\n: a comment\nevent: message\nid: 7\nretry: 5\ndata: one\n\n"
    b"data:two\ndata:  lines\n\n\n\n"
    b'data\n\ndata: {"x": "\xc3\xa9"}\n\nother: data: no\n\n: data: no\n\ndata: [DONE]\n\n'
)
EVENTS = [b"one", b"two\n lines", b"", b'{"x": "\xc3\xa9"}', b"[DONE]"]


def parsed(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_whatever_ends_a_line(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    assert parsed(stream) == EVENTS
    assert parsed(*(stream[i : i + 1] for i in range(len(stream)))) == EVENTS
    for cut in range(len(stream)):
        assert parsed(stream[:cut], b"", stream[cut:]) == EVENTS


@given(
    st.lists(st.sampled_from([b"data: a", b"data", b":", b"x: y", b"", b"\r", b"\n", b"\r\n"])),
    st.lists(st.integers(0, 60)),
)
def test_where_it_is_cut_makes_no_difference(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"\r\n".join(lines)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert parsed(*pieces) == parsed(stream)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_an_event_is_there_with_its_last_byte(line_end: bytes) -> None:
    """Its time is what is measured: nothing may wait for the next one."""
    parser = EventParser()
    event = b"data: x" + line_end + line_end
    for _ in range(3):
        # Of a CRLF the first half says it all.
        whole = event.removesuffix(b"\n") if line_end == b"\r\n" else event
        assert parser.feed(whole[:-1]) == []
        assert parser.feed(whole[-1:]) == [b"x"]
        assert parser.feed(event[len(whole) :]) == []


def test_an_event_without_its_empty_line_counts_at_the_end() -> None:
    assert parsed(b"data: [DONE]") == [b"[DONE]"]
    assert parsed(b"data: [DONE]\n") == [b"[DONE]"]
    assert parsed(b"") == []


def test_an_absurd_event_is_refused() -> None:
    parser = EventParser()
    with pytest.raises(NotEvents, match="longer than"):
        parser.feed(b"data: " + b"x" * MAX_EVENT_BYTES)
    parser = EventParser()
    line = b"data: " + b"x" * 1000 + b"\n"
    with pytest.raises(NotEvents, match="longer than"):
        for _ in range(MAX_EVENT_BYTES // 1000 + 1):
            parser.feed(line)
