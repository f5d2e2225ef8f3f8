"""Statistics of inputs: what is collected from data, and what a worker compares with."""

import json

import msgspec
import numpy as np
import pytest

from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding, Preprocess
from penstock.errors import ConfigError
from penstock.serving.input_statistics import (
    LENGTH,
    MAX_ELEMENTS,
    MAX_ROWS,
    VALUE,
    WatchedInput,
    collect,
    num_finite,
    references,
    sample,
    shares_at,
    watched_inputs,
)
from penstock.serving.padding import bf16_bits
from penstock.types import TensorSpec

FLOATS = TensorSpec("x", "FP32", (4,))
DOUBLES = TensorSpec("x", "FP64", (4,))
TOKENS = TensorSpec("ids", "INT64", (-1,))
TEXT = TensorSpec("s", "BYTES", (1,))


def config(*inputs: TensorSpec, **more: object) -> ModelConfig:
    return ModelConfig("m", "1", "null", "", inputs, (), 8, BatchPolicy(8), **more)


def test_figures_of_floats() -> None:
    rows = [{"x": np.array([0, 1, 2, np.nan], np.float32)}, {"x": np.full(4, 3, np.float32)}]
    found = collect([WatchedInput(FLOATS)], rows)["x"][VALUE]
    assert (found.num_rows, found.count, found.min, found.max) == (2, 8, 0.0, 3.0)
    assert found.mean == pytest.approx(15 / 7) and found.zeros == 1 / 8
    assert found.not_finite == pytest.approx(1 / 8)
    assert found.edges == (0.0, 1.0, 2.0, 3.0)
    # The first row has three finite values, the second only threes.
    assert found.shares == pytest.approx((1 / 6, 1 / 3, 1 / 2, 1.0))
    assert found.deviations == pytest.approx((1 / 6, 1 / 3, 1 / 2, 0.0))


@pytest.mark.parametrize("strangest", [[1e308], [-1e308], [1e308, -1e308]])
def test_the_largest_doubles_do_not_spoil_the_evidence(strangest: list[float]) -> None:
    rows = [{"x": np.array([1.0, 2.0, *strangest])} for _ in range(20)]
    statistics = msgspec.to_builtins(collect([WatchedInput(DOUBLES)], rows))
    written = json.loads(json.dumps({"input_statistics": statistics}, allow_nan=False))
    (found,) = references(config(DOUBLES), written)
    assert found.low <= min(strangest) and found.high >= max(strangest)


def test_edges_are_quantiles() -> None:
    values = np.random.default_rng(1).normal(size=(1000, 4)).astype("f4")
    rows = [{"x": row} for row in values]
    found = collect([WatchedInput(FLOATS)], rows)["x"][VALUE]
    assert len(found.edges) == 19
    np.testing.assert_allclose(found.shares, np.arange(1, 20) / 20, atol=0.005)


def test_sizes_of_variable_inputs_are_a_quantity() -> None:
    rows = [{"ids": np.arange(size)} for size in (3, 5, 5)]
    found = collect([WatchedInput(TOKENS)], rows)["ids"]
    assert found[LENGTH].min == 3 and found[LENGTH].max == 5 and found[LENGTH].count == 3
    assert found[VALUE].max == 4
    assert LENGTH not in collect([WatchedInput(FLOATS)], [{"x": np.zeros(4, "f4")}])["x"]


def test_padding_is_left_out() -> None:
    padded = WatchedInput(TOKENS, pad=0)
    found = padded.measure(np.array([5, 7, 0, 0]))
    assert found[VALUE].tolist() == [5, 7] and found[LENGTH].tolist() == [2]
    both = (
        collect([padded], [{"ids": np.array([5, 7])}]),
        collect([padded], [{"ids": np.array([5, 7, 0, 0])}]),
    )
    assert both[0] == both[1]


def test_texts_are_measured_by_their_length() -> None:
    rows = [{"s": np.array([text], object)} for text in (b"a", b"four", b"")]
    found = collect([WatchedInput(TEXT)], rows)["s"][VALUE]
    assert (found.min, found.max, found.zeros) == (0.0, 4.0, pytest.approx(1 / 3))


def test_bf16_is_measured_as_floats() -> None:
    spec = TensorSpec("x", "BF16", (2,))
    found = WatchedInput(spec).measure(bf16_bits(np.array([2.0, -1.0], np.float32)))
    assert found[VALUE].tolist() == [-1.0, 2.0]


def test_large_rows_are_sampled_evenly() -> None:
    elements, step = sample(np.arange(10 * MAX_ELEMENTS).reshape(10, -1))
    assert step == 10 and elements.size == MAX_ELEMENTS and elements[1] == 10
    assert sample(np.zeros((0,)))[0].size == 0


def test_many_rows_are_sampled() -> None:
    rows = [{"x": np.full(4, number, np.float32)} for number in range(3 * MAX_ROWS)]
    found = collect([WatchedInput(FLOATS)], rows)["x"][VALUE]
    assert found.num_rows == MAX_ROWS and found.max > 3 * MAX_ROWS - 5


def test_nothing_is_said_about_inputs_without_values() -> None:
    rows = [{"x": np.full(4, np.nan, np.float32)}]
    assert collect([WatchedInput(FLOATS), WatchedInput(TEXT)], rows) == {}


def test_sorted_values() -> None:
    values = np.sort(np.array([1.0, np.nan, -np.inf, 2.0]))
    assert num_finite(values) == 2 and num_finite(np.array([3, 4])) == 2
    assert num_finite(np.array([])) == 0 and num_finite(np.array([1.0, np.inf])) == 1
    assert shares_at(np.array([1, 2, 2, 3]), np.array([0.0, 2.0, 9.0])).tolist() == [0, 0.75, 1]


def evidence(rows: int = 50, **more: object) -> dict[str, object]:
    made = [{"x": np.array([0, 1, 2, 10], np.float32)} for _ in range(rows)]
    found = collect([WatchedInput(FLOATS)], made)
    return {"input_statistics": msgspec.to_builtins(found), **more}


def test_a_worker_compares_with_the_range_and_a_margin() -> None:
    (found,) = references(config(FLOATS, TEXT), evidence())
    assert (found.low, found.high) == (-0.5, 10.5)
    assert (found.num_range_rows, found.is_calibrated) == (50, False)
    assert found.edges == (0.0, 1.0, 2.0, 10.0) and not found.takes_not_finite


def test_a_calibrated_range_goes_first() -> None:
    calibration = {"num_examples": 30, "inputs": {"x": {"min": 0.0, "max": 2.0, "mean": 1.0}}}
    (found,) = references(config(FLOATS), evidence(calibration=calibration))
    assert (found.low, found.high) == pytest.approx((-0.1, 2.1))
    assert found.is_calibrated and found.num_range_rows == 30 and found.statistics is not None
    # A function makes the model's inputs from those that the worker gets.
    processed = config(FLOATS, preprocess=Preprocess("p.py:f", (FLOATS,)))
    (other,) = references(processed, evidence(calibration=calibration))
    assert not other.is_calibrated
    (alone,) = references(config(FLOATS), {"calibration": calibration})
    assert alone.statistics is None and alone.edges == ()


def test_versions_without_statistics_are_not_compared() -> None:
    assert references(config(FLOATS), {}) == []
    assert references(config(FLOATS), {"input_statistics": None, "calibration": None}) == []


def test_invalid_evidence_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"evidence\.input_statistics: .*num_rows"):
        references(config(FLOATS), {"input_statistics": {"x": {"value": {"min": 1}}}})
    with pytest.raises(ConfigError, match=r"evidence\.calibration"):
        references(config(FLOATS), {"calibration": {"inputs": {}}})


def test_constant_data_has_a_range() -> None:
    rows = [{"x": np.full(4, 5.0, np.float32)}]
    found = collect([WatchedInput(FLOATS)], rows)
    (reference,) = references(config(FLOATS), {"input_statistics": msgspec.to_builtins(found)})
    assert reference.low < 5.0 < reference.high < 5.001


def test_padding_is_that_of_the_configuration() -> None:
    padding = Padding((PadAxis("ids", 0, -1.0),))
    found = watched_inputs(config(TOKENS, FLOATS, padding=padding))
    assert [each.pad for each in found] == [-1.0, None]
