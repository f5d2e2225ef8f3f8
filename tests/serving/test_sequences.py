"""The table of live sequences: what is counted, and what late requests are told. How sequences run
is in test_sequence_batcher.py."""

from penstock.errors import InvalidRequest
from penstock.serving.model_gauges import ModelGauges
from penstock.serving.sequences import MAX_REMEMBERED, SequenceTable, read_gauges
from penstock.types import CallbackSink, Request


def make(id: int, flags: str = "s") -> Request:
    request = Request(CallbackSink(lambda request, answer: None), (), 0.0)
    request.parameters = {
        "sequence_id": id,
        "sequence_start": "s" in flags,
        "sequence_end": "e" in flags,
    }
    return request


def run(table: SequenceTable, request: Request, now: float = 0.0) -> None:
    sequence = table.add(request, now)
    assert table.ready(0) == [request]
    table.take(request, sequence)
    table.finish(request, now)


def refusal(table: SequenceTable, id: int, now: float) -> str:
    try:
        table.add(make(id, ""), now)
    except InvalidRequest as error:
        return str(error)
    raise AssertionError("it was not refused")


def test_sequences_are_counted_with_how_they_ended():
    counts = {"end": 7}
    table = SequenceTable("m", 2, 1.0, counts)
    assert set(counts) == {"end", "restarted", "idle", "lost", "cancelled"}
    assert set(counts.values()) == {0}
    table.open(0)
    run(table, make(1, "se"))
    run(table, make(2))
    run(table, make(2))
    table.expire(1.0)
    run(table, make(3), 1.0)
    table.close(0, "its worker crashed")
    sequence = table.add(cancelled := make(4), 2.0)
    table.remove(cancelled, sequence, 2.0)
    assert counts == {"end": 1, "restarted": 1, "idle": 1, "lost": 1, "cancelled": 1}


def test_gauges_have_the_sequences_and_what_else_there_is():
    table = SequenceTable("m", 1, 1.0)
    table.open(0)
    for id in (1, 2, 3):
        table.add(make(id), 0.0)
    found = read_gauges(lambda: ModelGauges(pinned_bytes=5), table)
    assert found == ModelGauges(pinned_bytes=5, num_sequences=1, num_waiting_sequences=2)


def test_only_the_last_fates_are_remembered():
    table = SequenceTable("m", 1, 1.0)
    table.open(0)
    for id in range(1, MAX_REMEMBERED + 2):
        now = 10.0 * id
        run(table, make(id), now)
        table.expire(now + 1.0)
    assert "without a request" not in refusal(table, 1, 1e6)
    assert "ended after 1 s without a request" in refusal(table, 2, 1e6)
    run(table, make(2), 1e6)
    table.finish(make(2), 1e6)
    assert table.num_live == 1
