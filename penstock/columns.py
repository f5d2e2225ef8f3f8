"""How far two outputs differ, column by column, relative to each column's own range. Pure.

A column is what one position of the last axis holds over all rows (of axis 1 where a row has three
axes, as images have): one score of a classifier, one coordinate of a box, one channel of a map.
Columns have scales of their own: pixels stand next to scores, and a difference that is nothing to
the one is everything to the other. Knows no model and no tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.types import Array

# A column whose range is a smaller share than this of its own largest magnitude, or of the output's
# median magnitude, is rounding noise around a constant; its differences are measured against this
# share instead.
FLOOR = 1e-3
# The same of the output's largest magnitude: zeros among numbers are zeros up to rounding.
TINY = 1e-6


def column_differences(before: Array, after: Array) -> Array:
    """Return one number per column of two arrays [rows, ...] of the same shape: the largest
    absolute difference divided by the scale of the column in `before` (`column_scales`).

    A value that is not finite equals only itself (NaN equals NaN); any other pair with it counts
    as infinity, and so does a difference in a column of scale 0.
    """
    one, other = as_table(before), as_table(after)
    return scaled_differences(one, other, column_scales(one))


def column_scales(table: Array, own_floor: float = FLOOR) -> Array:
    """Return the scale of each column of a table: its range over all finite values (its largest
    magnitude where the range is 0), but at least `own_floor` of its own largest magnitude, `FLOOR`
    of the table's median magnitude, and `TINY` of the table's largest."""
    is_finite = np.isfinite(table)
    magnitudes = np.abs(np.where(is_finite, table, 0.0))
    lows = np.where(is_finite, table, np.inf).min(axis=0, initial=np.inf)
    highs = np.where(is_finite, table, -np.inf).max(axis=0, initial=-np.inf)
    ranges = np.subtract(highs, lows, out=np.zeros_like(lows), where=lows < highs)
    largest = magnitudes.max(axis=0, initial=0.0)
    own = np.maximum(np.where(ranges > 0, ranges, largest), own_floor * largest)
    median = float(np.median(magnitudes[is_finite])) if is_finite.any() else 0.0
    scales: Array = np.maximum(own, max(FLOOR * median, TINY * largest.max(initial=0.0)))
    return scales


def scaled_differences(before: Array, after: Array, scales: Array) -> Array:
    """Return the largest difference of each column of two tables, divided by its scale."""
    both_finite = np.isfinite(before) & np.isfinite(after)
    is_same = (before == after) | (np.isnan(before) & np.isnan(after))
    gaps = np.abs(np.where(both_finite, before, 0.0) - np.where(both_finite, after, 0.0))
    gaps = np.where(both_finite | is_same, gaps, np.inf).max(axis=0, initial=0.0)
    shares: Array = np.where(gaps > 0, np.inf, 0.0)
    np.divide(gaps, scales, out=shares, where=scales > 0)
    return shares


def as_table(values: Array) -> Array:
    """Return an array [rows, ...] as float64 [rows and positions, columns]."""
    floats = np.asarray(values, np.float64)
    if floats.ndim < 2:
        return floats.reshape(-1, 1)
    if floats.ndim == 4:
        floats = np.moveaxis(floats, 1, -1)
    size = floats.shape[-1]
    return floats.reshape(floats.size // size if size else 0, size)


def as_tables(arrays: Sequence[Array]) -> list[Array]:
    """Return a table for each array [rows, ...], all with the same columns. Arrays whose last axes
    differ in size (one value per position of a sequence) have a single column."""
    tables = [as_table(each) for each in arrays]
    if len({table.shape[1] for table in tables}) > 1:
        return [table.reshape(-1, 1) for table in tables]
    return tables
