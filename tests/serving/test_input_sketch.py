"""The worker's sketch: few rows, little time, exact counts."""

import random

import msgspec
import numpy as np
import pytest
from doubles import FakeClock

from penstock.backends import Batch
from penstock.config import BatchPolicy, ModelConfig
from penstock.serving.input_sketch import MAX_SHARE, ROW_EVERY_S, SEND_EVERY_S, InputSketch
from penstock.serving.input_statistics import collect, references, watched_inputs
from penstock.types import TensorSpec
from penstock.wire.frames import Sketched, decode_from_worker

CONFIG = ModelConfig(
    "m",
    "1",
    "null",
    "",
    (TensorSpec("x", "FP32", (2,)), TensorSpec("ids", "INT64", (-1,))),
    (),
    8,
    BatchPolicy(8),
)
SENT: list[bytes] = []
ROWS = [{"x": np.array([0, n], "f4"), "ids": np.arange(1 + n % 4)} for n in range(100)]


def sketch(clock: FakeClock, config: ModelConfig = CONFIG, has_batch: bool = True) -> InputSketch:
    evidence = {"input_statistics": msgspec.to_builtins(collect(watched_inputs(config), ROWS))}
    found = references(config, evidence)
    seed = random.Random(1)
    return InputSketch(found, SENT.append, has_batch=has_batch, clock=clock, random_source=seed)


def batch(value: float, size: int = 3, count: int = 4) -> Batch:
    inputs = {"x": np.full((count, 2), value, "f4"), "ids": np.ones((count, size), np.int64)}
    return Batch(inputs, count)


def run(found: InputSketch, clock: FakeClock, batches: list[Batch]) -> list[Sketched]:
    """Offer a batch each ROW_EVERY_S."""
    SENT.clear()
    for each in batches:
        clock.advance(1.01 * ROW_EVERY_S)
        assert found.is_due(clock())
        found.add(found.take(each, clock()))
    decoded = map(decode_from_worker, SENT)
    return [each for each in decoded if isinstance(each, Sketched)]


def counts(sketched: list[Sketched]) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for each in (each for one in sketched for each in one.quantities):
        rows, outside = found.get((each.tensor, each.quantity), (0, 0))
        found[each.tensor, each.quantity] = rows + each.num_rows, outside + each.num_outside
    return found


def test_rows_are_counted_by_input_and_quantity() -> None:
    clock = FakeClock()
    found = sketch(clock)
    sent = run(found, clock, [batch(5.0), batch(500.0), batch(5.0, size=90)] * 20)
    rows = sum(number for number, _ in [counts(sent)["x", "value"]])
    assert 40 <= rows <= 60
    assert counts(sent)["x", "value"][1] == pytest.approx(rows / 3, abs=1)
    assert counts(sent)["ids", "length"][1] == pytest.approx(rows / 3, abs=1)
    assert counts(sent)["ids", "value"][1] == 0


def test_shares_at_the_edges_are_summed() -> None:
    clock = FakeClock()
    found = sketch(clock)
    sent = run(found, clock, [batch(1e9)] * 25)
    values = next(each for each in sent[0].quantities if each.tensor == "x")
    assert set(values.sums) == {0.0} and set(values.squares) == {0.0}
    sent = run(found, clock, [batch(-1e9)] * 45)
    later = [each for one in sent for each in one.quantities if each.tensor == "x"]
    assert later[-1].sums == later[-1].squares == (later[-1].num_rows,) * len(values.sums)


def test_not_more_than_some_rows_a_second_are_looked_at() -> None:
    clock = FakeClock()
    found = sketch(clock)
    taken = 0
    for _ in range(10_000):
        clock.advance(0.001)
        if found.is_due(clock()):
            taken += 1
            found.add(found.take(batch(1.0), clock()))
    assert 150 <= taken <= 10 / ROW_EVERY_S


def test_the_time_that_it_takes_is_bounded() -> None:
    class Slow(FakeClock):
        """Every reading takes 2 ms."""

        def __call__(self) -> float:
            self.now += 0.002
            return self.now

    clock = Slow()
    found = sketch(clock)
    spent, began = 0.0, clock.now
    while clock.now < began + 60:
        clock.now += 0.001
        if found.is_due(clock.now):
            before = clock.now
            found.add(found.take(batch(1.0), clock.now))
            spent += clock.now - before
    assert spent / (clock.now - began) <= 2.1 * MAX_SHARE


def test_counts_are_sent_about_once_a_second_and_start_over() -> None:
    clock = FakeClock()
    found = sketch(clock)
    sent = run(found, clock, [batch(1.0)] * int(5 / ROW_EVERY_S))
    assert 4 <= len(sent) <= 6
    assert all(each.num_rows <= 21 for one in sent for each in one.quantities)
    # After a pause, the next row is sent at once.
    clock.advance(SEND_EVERY_S)
    assert len(run(found, clock, [batch(1.0)])) == 1


def test_rows_in_several_pieces_and_without_a_batch_dimension() -> None:
    clock = FakeClock()
    found = sketch(clock)
    pieces = [batch(1.0).inputs, batch(900.0).inputs]
    sent = run(found, clock, [Batch.of(pieces, 8)] * 100)
    rows, outside = counts(sent)["x", "value"]
    assert 0.2 * rows < outside < 0.8 * rows
    alone = sketch(clock, has_batch=False)
    whole = Batch({"x": np.array([1, 2], "f4"), "ids": np.arange(3)}, 1)
    assert counts(run(alone, clock, [whole] * 25))["x", "value"][1] == 0


def test_nan_counts_as_outside_unless_the_data_had_some() -> None:
    clock = FakeClock()
    found = sketch(clock)
    sent = run(found, clock, [batch(np.nan)] * 25)
    rows, outside = counts(sent)["x", "value"]
    assert rows == outside > 0


def test_a_batch_without_an_optional_input() -> None:
    clock = FakeClock()
    found = sketch(clock)
    sent = run(found, clock, [Batch({"x": np.zeros((1, 2), "f4")}, 1)] * 25)
    assert counts(sent)["ids", "value"] == (0, 0) and counts(sent)["x", "value"][0] > 0


def test_a_row_is_copied_before_its_memory_is_used_again() -> None:
    clock = FakeClock(1000.0)
    found, one = sketch(clock), batch(1.0)
    taken = found.take(one, clock())
    one.inputs["x"][:] = 999.0
    assert taken["x"][0].tolist() == [1.0, 1.0]


def test_a_core_that_does_not_read_does_not_stop_the_worker() -> None:
    def full(data: bytes) -> None:
        raise BlockingIOError

    clock = FakeClock()
    evidence = {"input_statistics": msgspec.to_builtins(collect(watched_inputs(CONFIG), ROWS))}
    found = InputSketch(references(CONFIG, evidence), full, has_batch=True, clock=clock)
    clock.advance(2 * SEND_EVERY_S)
    found.add(found.take(batch(1.0), clock()))
