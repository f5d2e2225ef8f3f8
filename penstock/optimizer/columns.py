"""How far two outputs differ, column by column, relative to each column's own range. Pure.

A column is one position of the last axis over all rows (of axis 1 where a row has three axes, as
images have): one score of a classifier, one coordinate of a box, one channel of a map. Columns have
their own scales: pixels stand next to scores. Knows no model and no tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.types import Array

# A column whose range is a smaller share than this of its own largest magnitude, or of the output's
# median magnitude, is rounding noise around a constant, and is measured against this share.
FLOOR = 1e-3
# The same of the output's largest magnitude: zeros among numbers are zeros up to rounding.
TINY = 1e-6
# Share of values at either end without which a range is taken: outliers must not hide errors.
TAIL = 0.05


@dataclass(frozen=True, slots=True)
class ColumnScales:
    """The scale of a value is the spread of its column, or its distance from the column's centre
    where that is larger, but never more than `most`."""

    centres: Array
    spreads: Array
    most: Array | float = np.inf

    def widened(self, least: Array) -> ColumnScales:
        return replace(self, spreads=np.maximum(self.spreads, least))

    def of(self, table: Array) -> Array:
        distances = np.abs(np.where(np.isfinite(table), table, self.centres) - self.centres)
        scales: Array = np.minimum(np.maximum(distances, self.spreads), self.most)
        return scales


def column_scales(table: Array, own_floor: float = FLOOR) -> ColumnScales:
    """Return the scales of the columns of a table. A spread is the range of the column's finite
    values without its tails (the whole range where that is 0, its largest magnitude where that is
    0, too), but at least `own_floor` of its own largest magnitude, `FLOOR` of the table's median
    magnitude, and `TINY` of the table's largest."""
    is_finite = np.isfinite(table)
    magnitudes = np.abs(np.where(is_finite, table, 0.0))
    centres, middles, ranges = _ranges(table, is_finite)
    largest = magnitudes.max(axis=0, initial=0.0)
    own = np.where(middles > 0, middles, np.where(ranges > 0, ranges, largest))
    own = np.maximum(own, own_floor * largest)
    median = float(np.median(magnitudes[is_finite])) if is_finite.any() else 0.0
    spreads = np.maximum(own, max(FLOOR * median, TINY * largest.max(initial=0.0)))
    return ColumnScales(centres, spreads)


def _ranges(table: Array, is_finite: Array) -> tuple[Array, Array, Array]:
    """Return the middle of each column, its range without tails, and its whole range."""
    if len(table) and is_finite.all():
        return _sorted_ranges(table)
    found = np.zeros((3, table.shape[1]))
    for column in range(table.shape[1]):
        values = table[is_finite[:, column], column]
        if len(values):
            found[:, column] = np.ravel(_sorted_ranges(values[:, None]))
    return found[0], found[1], found[2]


def _sorted_ranges(table: Array) -> tuple[Array, Array, Array]:
    num_rows = len(table)
    cut = int(TAIL * num_rows)
    first, middle, last = cut, num_rows // 2, num_rows - 1 - cut
    ordered = np.partition(table, sorted({first, middle, last}), axis=0)
    return ordered[middle], ordered[last] - ordered[first], np.ptp(table, axis=0)


def are_same(before: Array, after: Array) -> Array:
    """Return which values are equal; NaN equals NaN."""
    same: Array = (before == after) | (np.isnan(before) & np.isnan(after))
    return same


def scaled_differences(before: Array, after: Array, scales: ColumnScales) -> Array:
    """Return the largest difference of each column of two tables, each divided by the scale of its
    value in `before`. A value that is not finite equals only itself (NaN equals NaN); any other
    pair with it counts as infinity, and so does a difference in a column of scale 0."""
    both_finite = np.isfinite(before) & np.isfinite(after)
    is_same = are_same(before, after)
    gaps = np.abs(np.where(both_finite, before, 0.0) - np.where(both_finite, after, 0.0))
    gaps = np.where(both_finite | is_same, gaps, np.inf)
    sizes = scales.of(before)
    shares: Array = np.where(gaps > 0, np.inf, 0.0)
    np.divide(gaps, sizes, out=shares, where=sizes > 0)
    worst: Array = shares.max(axis=0, initial=0.0)
    return worst


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
