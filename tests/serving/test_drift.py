"""Drift: alarms when inputs change, none when they do not, and an end of alarms."""

import msgspec
import numpy as np
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.serving.drift import (
    DISTANCE_LIMIT,
    MIN_ROWS,
    WINDOW_S,
    DriftMonitor,
    InputDrift,
    lower_share,
    share_limit,
)
from penstock.serving.input_sketch import QuantitySketch
from penstock.serving.input_statistics import ReferenceQuantity, collect, references, watched_inputs
from penstock.types import Array, TensorSpec
from penstock.wire.frames import Sketched

CONFIG = ModelConfig("m", "1", "null", "", (TensorSpec("x", "FP32", (8,)),), (), 8, BatchPolicy(8))


def reference(rows: Array) -> ReferenceQuantity:
    data = [{"x": row} for row in rows]
    statistics = msgspec.to_builtins(collect(watched_inputs(CONFIG), data))
    (found,) = references(CONFIG, {"input_statistics": statistics})
    return found


def report(known: ReferenceQuantity, rows: Array) -> Sketched:
    sketch = QuantitySketch(known, np.array(known.edges))
    for row in rows:
        sketch.add(np.sort(row))
    return Sketched((sketch.take(),))


class Stream:
    """A monitor that gets 20 rows a second."""

    def __init__(self, rows: Array) -> None:
        self.known = reference(rows)
        self.monitor = DriftMonitor([self.known])
        self.now = 0.0
        self.changes: list[InputDrift] = []

    def send(self, rows: Array) -> None:
        for start in range(0, len(rows), 20):
            self.now += 1.0
            sketched = report(self.known, rows[start : start + 20])
            self.changes += self.monitor.add(sketched, self.now)

    @property
    def state(self) -> InputDrift:
        return self.monitor.states[0]


def normal(count: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> Array:
    made = np.random.default_rng(seed).normal(shift, scale, (count, 8))
    return made.astype(np.float32)


@pytest.mark.parametrize("num_rows", [20, 100, 1000])
def test_the_same_distribution_raises_no_alarm(num_rows: int) -> None:
    for seed in range(20):
        stream = Stream(normal(num_rows, seed))
        stream.send(normal(2000, 1000 + seed))
        assert stream.changes == [] and stream.state.num_rows == 2000


def test_rows_that_are_alike_within_raise_no_alarm() -> None:
    """All values of a row are equal: as many independent values as rows, not as elements."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        rows = np.repeat(random.normal(size=(3000, 1)), 8, axis=1).astype(np.float32)
        stream = Stream(rows[:1000])
        stream.send(rows[1000:])
        assert stream.changes == []


@pytest.mark.parametrize(
    "shift, scale, reason",
    [
        (6.0, 1.0, "outside"),
        (0.0, 3.0, "outside"),
        (0.9, 1.0, "distribution"),
        (0.0, 0.3, "distribution"),
    ],
)
def test_another_distribution_raises_an_alarm(shift: float, scale: float, reason: str) -> None:
    stream = Stream(normal(1000, 1))
    stream.send(normal(MIN_ROWS - 20, 2, shift, scale))
    assert stream.changes == [] and stream.state.outside_share is None
    stream.send(normal(120, 3, shift, scale))
    (change,) = stream.changes
    assert change.is_alarm and reason in change.text and change.tensor == "x"
    assert stream.monitor.notes == [f"inputs have drifted: {stream.state.text}"]


def test_drift_after_a_long_time_is_seen_within_seconds_and_ends() -> None:
    stream = Stream(normal(1000, 1))
    stream.send(normal(20_000, 2))
    assert stream.changes == []
    stream.send(normal(200, 3, shift=6.0))
    assert [each.is_alarm for each in stream.changes] == [True]
    stream.send(normal(20 * int(WINDOW_S) + 40, 4))
    assert [each.is_alarm for each in stream.changes] == [True, False]
    assert "inputs are like those of the evidence" in stream.monitor.notes[0]


def test_an_alarm_stays_until_the_figures_are_within_their_limits() -> None:
    stream = Stream(normal(1000, 1))
    stream.send(normal(1200, 2, shift=0.9))
    assert [each.is_alarm for each in stream.changes] == [True]
    distances = []
    while stream.state.is_alarm:
        stream.send(normal(20, len(distances)))
        distances.append(stream.state.distance)
    *before, last = distances
    assert min(before) > DISTANCE_LIMIT >= last
    assert [each.is_alarm for each in stream.changes] == [True, False]


def test_few_rows_are_kept_however_old_they_are() -> None:
    stream = Stream(normal(1000, 1))
    for number in range(300):
        stream.now += 600.0
        stream.changes += stream.monitor.add(
            report(stream.known, normal(1, number, shift=6.0)), stream.now
        )
    assert [each.is_alarm for each in stream.changes] == [True]


def test_the_figures_are_those_of_the_window_alone() -> None:
    before, after = normal(4000, 1, 0.3), normal(int(20 * WINDOW_S) + 20, 2)
    stream, fresh = Stream(normal(500, 0)), Stream(normal(500, 0))
    stream.send(before)
    stream.send(after)
    fresh.send(after)
    assert stream.state.outside_share == fresh.state.outside_share
    assert stream.state.distance == pytest.approx(fresh.state.distance, abs=1e-9)
    for each in (stream, fresh):
        each.send(normal(1200, 3, 0.9))
    alarms = [[each.num_rows for each in known.changes] for known in (stream, fresh)]
    assert alarms[0] == [count + len(before) for count in alarms[1]] != []


def test_a_slight_change_is_no_drift() -> None:
    stream = Stream(normal(1000, 1))
    stream.send(normal(5000, 2, shift=0.1))
    assert stream.changes == [] and 0.02 < (stream.state.distance or 0) < 0.1


def test_one_row_in_many_outside_is_no_drift() -> None:
    stream = Stream(normal(1000, 1))
    rows = normal(5000, 2)
    rows[::200, 0] = 100.0
    stream.send(rows)
    assert stream.changes == [] and stream.state.outside_share == pytest.approx(0.005, abs=2e-3)


def test_a_range_without_a_distribution_is_enough_for_an_alarm() -> None:
    calibration = {"num_examples": 300, "inputs": {"x": {"min": -4.0, "max": 4.0}}}
    (known,) = references(CONFIG, {"calibration": calibration})
    monitor = DriftMonitor([known])
    changes = monitor.add(report(known, normal(300, 1, shift=8.0)), 1.0)
    assert changes[0].is_alarm and "was calibrated on" in changes[0].text
    assert changes[0].distance is None


def test_limits_follow_from_the_size_of_the_data() -> None:
    assert share_limit(10**6) == 0.01
    assert 0.015 < share_limit(1000) < 0.02 < share_limit(300) < 0.07
    assert share_limit(5) > 1
    assert lower_share(100, 1000) < 0.1 < lower_share(130, 1000)
    assert lower_share(0, 1000) == pytest.approx(0, abs=1e-9)


def test_what_is_not_known_is_ignored() -> None:
    stream = Stream(normal(100, 1))
    other = Stream(np.ones((3, 8), np.float32))
    assert stream.monitor.add(report(other.known, normal(500, 1)), 1.0) == []
    assert DriftMonitor().add(report(stream.known, normal(500, 1)), 1.0) == []
    assert DriftMonitor().notes == []


def test_the_note_says_how_far_it_is() -> None:
    stream = Stream(normal(100, 1))
    stream.send(normal(40, 2))
    assert stream.monitor.notes == ["inputs are compared with the evidence from 200 rows on: 40"]
