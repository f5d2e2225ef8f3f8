"""Records of traces travel in frames; traceparent is read as the W3C says."""

import msgspec
import pytest

from penstock.wire import frames
from penstock.wire.trace_records import (
    TIMESTAMPS,
    ParentSpan,
    TracedStep,
    TraceRecord,
    TraceSetting,
    TraceTable,
    parse_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", ParentSpan(TRACE, SPAN, True)),
        (f" 00-{TRACE}-{SPAN}-00 ", ParentSpan(TRACE, SPAN, False)),
        (f"00-{TRACE}-{SPAN}-03", ParentSpan(TRACE, SPAN, True)),
        # A later version may have more fields.
        (f"01-{TRACE}-{SPAN}-01-what", ParentSpan(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-01-what", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE[1:]}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
        ("-" * 5000, None),
        ("\u00fc" * 55, None),
    ],
)
def test_traceparent(header: str, expected: ParentSpan | None) -> None:
    assert parse_traceparent(header.encode()) == expected


def test_tracing_is_on_if_any_request_may_be_traced() -> None:
    on = TraceSetting((TIMESTAMPS,), 2)
    assert not TraceTable().is_on
    assert TraceTable(on).is_on
    assert TraceTable(models={"m": on}).is_on
    for off in ({"rate": 0}, {"count": 0}, {"levels": ()}):
        setting = msgspec.structs.replace(on, **off)
        assert not TraceTable(setting).is_on
    # Clients that trace are followed whatever the rate is.
    assert TraceTable(msgspec.structs.replace(on, rate=0), follows_clients=True).is_on
    assert not TraceTable(follows_clients=True).is_on


def test_a_record_and_a_table_travel_in_frames() -> None:
    step = TracedStep("m", 1.0, 2.0, (0.1, 0.2, 0.3), 3.0)
    record = TraceRecord("", "http", "m", "1", "id", 0.5, step, 3.0, 3.5)
    data = frames.join([frames.encode(frames.Traced(record))])
    [found] = frames.decode_all_from_shard(data)
    assert found == frames.Traced(record)
    table = TraceTable(models={"m": TraceSetting((TIMESTAMPS,), 5, 3, 2)}, follows_clients=True)
    published = frames.Publish(1, {}, {}, (), {}, table)
    assert frames.decode_shard_question(frames.encode(published)) == published
