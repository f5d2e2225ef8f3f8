"""Ranges from histograms that stream by, against numpy on all values at once."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from suites.onnx_models import build_of, drawn_rows, stack, transformer

from penstock.errors import ConfigError
from penstock.optimizer import calibration, onnx_model
from penstock.optimizer.calibration import NUM_BINS, Calibration, ValueHistogram
from penstock.optimizer.candidates import Build
from penstock.optimizer.time_plan import OutOfTime
from penstock.types import Array


def histogram(*parts: Array) -> ValueHistogram:
    made = ValueHistogram()
    for part in parts:
        made.add(part)
    return made


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), min_size=1, max_size=8
    )
)
@example([[1e-45]])
@example([[-1e-45, 0.0], [1e6]])
def test_no_value_is_lost_however_the_range_grows(parts: list[list[float]]) -> None:
    made = histogram(*(np.array(part, np.float32) for part in parts))
    everything = np.concatenate([np.array(part, np.float32) for part in parts])
    assert made.counts.sum() == everything.size
    assert made.range("minmax") == (float(everything.min()), float(everything.max()))


def test_parts_in_any_order_give_the_range_of_all_values() -> None:
    random = np.random.default_rng(0)
    values = (random.normal(size=200_000) * 3 + 1).astype(np.float32)
    low, high = histogram(*np.array_split(values, 40)).range("percentile")
    width = 2 * float(np.abs(values).max()) / NUM_BINS
    assert low == pytest.approx(np.percentile(values, 0.005), abs=2 * width)
    assert high == pytest.approx(np.percentile(values, 99.995), abs=2 * width)


@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_one_value_far_away_does_not_take_all_levels(method: calibration.Method) -> None:
    values = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    low, high = histogram(values, np.array([1000.0], np.float32)).range(method)
    assert -7 <= low < -2 and 2 < high < 100


@pytest.mark.parametrize("method", calibration.METHODS)
def test_a_range_never_leaves_what_was_seen(method: calibration.Method) -> None:
    values = np.abs(np.random.default_rng(2).normal(size=5000)).astype(np.float32)
    low, high = histogram(values).range(method)
    assert values.min() <= low <= high <= values.max()


def test_entropy_is_not_narrowed_by_zeros() -> None:
    """Which any range shows exactly: behind a ReLU, or of padding, they are most of the values."""
    values = np.abs(np.random.default_rng(7).normal(size=20_000)).astype(np.float32)
    zeros = np.zeros(180_000, np.float32)
    _, high = histogram(values).range("entropy")
    _, with_zeros = histogram(np.concatenate([values, zeros])).range("entropy")
    assert with_zeros == pytest.approx(high, rel=0.05)


def test_entropy_keeps_all_of_values_that_are_spread_evenly() -> None:
    values = np.random.default_rng(3).uniform(-1, 1, 200_000).astype(np.float32)
    assert histogram(values).range("entropy") == pytest.approx((-1, 1), abs=0.02)


@pytest.mark.parametrize("method", calibration.METHODS)
def test_zeros_alone_have_a_range_of_zero(method: calibration.Method) -> None:
    assert histogram(np.zeros(5, np.float32)).range(method) == (0.0, 0.0)
    assert histogram(np.zeros(5, np.float32), np.ones(1, np.float32)).counts.sum() == 6


def test_what_is_not_finite_has_no_range() -> None:
    with pytest.raises(ConfigError, match="not finite"):
        histogram(np.array([1.0, np.nan], np.float32))


def calibrated(
    build: Build,
    rows: list[dict[str, Array]],
    cache: Path,
    check_time: Callable[[], None] = lambda: None,
) -> Calibration:
    ready = onnx_model.prepared(onnx_model.read(build.artifact))
    names = onnx_model.float_tensors(ready.graph, ("MatMul",))
    return calibration.calibrate(ready, names, build.config, rows, cache, check_time)


def test_rows_of_several_lengths_run_each_as_it_is(tmp_path: Path) -> None:
    build = build_of(transformer(), tmp_path / "m")
    rows = [row for size in (3, 5, 9) for row in drawn_rows(build, 10, seed=size, size=size)]
    found = calibrated(build, rows, tmp_path)
    # 30 rows: 10 of each length, 32 numbers a position.
    assert found.tensors["x"].counts.sum() == 10 * (3 + 5 + 9) * 32
    low, high = found.ranges("minmax")["x"]
    assert low == min(float(row["x"].min()) for row in rows)
    assert high == max(float(row["x"].max()) for row in rows)


def test_a_second_call_reads_what_the_first_one_kept(tmp_path: Path) -> None:
    build = build_of(stack(), tmp_path / "m")
    rows = drawn_rows(build, 9)
    first = calibrated(build, rows, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    written = path.stat().st_mtime_ns
    second = calibrated(build, rows, tmp_path / "cache")
    assert path.stat().st_mtime_ns == written
    for method in calibration.METHODS:
        assert first.record(method) == second.record(method)
    other = calibrated(build, rows[:8], tmp_path / "cache")
    assert other.digest != first.digest
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_it_ends_between_two_batches_when_the_time_is_up(tmp_path: Path) -> None:
    build = build_of(transformer(), tmp_path / "m")
    rows = [row for size in (3, 5, 9) for row in drawn_rows(build, 10, seed=size, size=size)]
    left = iter([True, True])

    def check_time() -> None:
        if not next(left, False):
            raise OutOfTime

    with pytest.raises(OutOfTime):
        calibrated(build, rows, tmp_path / "cache", check_time)
    assert not (tmp_path / "cache").exists(), "half a calibration is none"


def test_a_broken_cache_is_made_again(tmp_path: Path) -> None:
    build = build_of(stack(), tmp_path / "m")
    rows = drawn_rows(build, 4)
    first = calibrated(build, rows, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert calibrated(build, rows, tmp_path / "cache").record("minmax") == first.record("minmax")


def test_the_record_says_what_inputs_were_seen(tmp_path: Path) -> None:
    build = build_of(stack(), tmp_path / "m")
    rows = drawn_rows(build, 20)
    record = json.loads(json.dumps(calibrated(build, rows, tmp_path).record("entropy")))
    values = np.concatenate([row["x"] for row in rows]).astype(np.float64)
    assert record["format"] == 1 and record["method"] == "entropy"
    assert record["inputs"]["x"] == pytest.approx(
        {
            "min": values.min(),
            "max": values.max(),
            "mean": values.mean(),
            "std": values.std(),
        }
    )


def test_without_rows_there_is_nothing_to_calibrate_with(tmp_path: Path) -> None:
    build = build_of(stack(), tmp_path / "m")
    with pytest.raises(ConfigError, match="no examples"):
        calibrated(build, [], tmp_path)


def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path) -> None:
    build = build_of(stack(), tmp_path / "m")
    rows = drawn_rows(build, 2)
    rows[1]["x"][3] = np.inf
    with pytest.raises(ConfigError, match="tensor '.+': values that are not finite"):
        calibrated(build, rows, tmp_path)
