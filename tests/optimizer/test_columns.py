"""Differences by column: each column has its own scale, and what is not finite must match."""

import numpy as np
import pytest

from penstock.optimizer.columns import (
    FLOOR,
    as_table,
    as_tables,
    column_scales,
    scaled_differences,
)


def rows_of(*columns: list[float]) -> np.ndarray:
    return np.array(columns, np.float64).T


def column_differences(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    one, other = as_table(before), as_table(after)
    return scaled_differences(one, other, column_scales(one))


def test_a_large_column_does_not_hide_a_small_one() -> None:
    before = rows_of([0.0, 600.0, 1000.0], [0.1, 0.5, 0.9])
    after = before.copy()
    after[1, 1] = 0.9
    after[2, 0] = 1000.4
    assert column_differences(before, after) == pytest.approx([0.4 / 1000, 0.4 / 0.8])


def test_a_constant_column_is_measured_by_its_magnitude() -> None:
    before = rows_of([5.0, 5.0], [0.0, 10.0])
    after = rows_of([5.5, 5.0], [0.0, 10.0])
    assert column_differences(before, after) == pytest.approx([0.1, 0.0])


def test_a_column_far_below_the_median_is_measured_by_the_floor() -> None:
    before = rows_of([1e-9, 2e-9], [100.0, 110.0], [100.0, 120.0])
    after = rows_of([2e-9, 2e-9], [100.0, 110.0], [100.0, 120.0])
    median = float(np.median(before))
    assert column_differences(before, after) == pytest.approx([1e-9 / (FLOOR * median), 0, 0])


def test_columns_are_the_last_axis_over_rows_and_positions() -> None:
    before = np.zeros((2, 3, 4))
    before[..., 1] = 8.0
    before[0, 0, 1] = 0.0
    after = before.copy()
    after[1, 2, 1] = 6.0
    assert column_differences(before, after).tolist() == [0, 0.25, 0, 0]


def test_columns_of_images_are_their_channels() -> None:
    before = np.zeros((2, 3, 5, 7))
    before[:, 2] = np.arange(7.0)
    after = before.copy()
    after[1, 2, 4, 6] = 3.0
    assert column_differences(before, after).tolist() == [0, 0, 0.5]


def test_one_value_per_row_is_one_column() -> None:
    assert column_differences(np.array([1.0, 3.0]), np.array([1.0, 2.0])).tolist() == [0.5]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_must_stay_the_same(bad: float) -> None:
    before, after = rows_of([1.0, 2.0, 3.0]), rows_of([1.0, bad, 3.0])
    assert column_differences(before, after).tolist() == [np.inf]
    assert column_differences(after, before).tolist() == [np.inf]
    assert column_differences(after, after).tolist() == [0.0]


def test_one_kind_of_not_finite_is_not_another() -> None:
    before, after = rows_of([1.0, np.inf]), rows_of([1.0, -np.inf])
    assert column_differences(before, after).tolist() == [np.inf]
    assert column_differences(before, rows_of([1.0, np.nan])).tolist() == [np.inf]


def test_a_mask_of_infinities_does_not_change_the_scale() -> None:
    before = rows_of([-np.inf, 1.0, 3.0])
    assert column_scales(as_table(before)).spreads.tolist() == [2.0]
    assert column_differences(before, rows_of([-np.inf, 1.0, 2.0])).tolist() == [0.5]


def test_all_zeros_allow_no_difference_at_all() -> None:
    zeros = np.zeros((3, 2))
    assert column_differences(zeros, zeros).tolist() == [0, 0]
    assert column_differences(zeros, rows_of([0, 0, 1e-12], [0, 0, 0])).tolist() == [np.inf, 0]


def test_nothing_finite_and_nothing_at_all() -> None:
    never = np.full((2, 1), np.nan)
    assert column_differences(never, never).tolist() == [0]
    assert column_differences(np.empty((0, 3)), np.empty((0, 3))).tolist() == [0, 0, 0]
    assert column_differences(np.empty((3, 0)), np.empty((3, 0))).tolist() == []


def test_arrays_of_different_shapes_are_an_error() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        column_differences(np.zeros((2, 3)), np.zeros((2, 4)))


def test_integers_and_small_floats_are_compared_as_float64() -> None:
    before = np.array([[250], [0]], np.uint8)
    assert column_differences(before, np.array([[0], [250]], np.uint8)).tolist() == [1.0]


def test_sequences_of_several_lengths_share_their_columns() -> None:
    one, other = as_tables([np.zeros((1, 3, 4)), np.zeros((1, 5, 4))])
    assert (one.shape, other.shape) == ((3, 4), (5, 4))
    one, other = as_tables([np.zeros((1, 3)), np.zeros((1, 5))])
    assert (one.shape, other.shape) == ((3, 1), (5, 1))


def test_a_few_outliers_make_no_room_for_errors_in_other_rows() -> None:
    random = np.random.default_rng(0)
    before = random.normal(30.0, 4.0, size=(200, 1))
    before[:6] *= 400
    after = before.copy()
    after[50] += 8.0
    assert column_differences(before, after)[0] > 0.4
    # The outliers themselves may differ by a share of their own distance.
    after = before.copy()
    after[0] += 8.0
    assert column_differences(before, after)[0] < 1e-3


def test_a_column_that_is_mostly_constant_has_its_whole_range() -> None:
    before = np.zeros((100, 1))
    before[3] = 10.0
    after = before.copy()
    after[50] = 1.0
    assert column_differences(before, after).tolist() == [pytest.approx(0.1)]
