"""Choice of examples that best reveal whether rows of a batch influence each other: those that are
extreme in some respect, and ordinary ones beside them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.types import Array

Row = Mapping[str, Array]

SEED = 18
# Most features of a row, evenly spaced, and most values of all rows for per-feature statistics.
MAX_FEATURES = 4096
MAX_VALUES = 8_000_000
# Values are clipped here: larger ones reveal no more, and their squares must not overflow.
LARGEST = 1e150


def choose_rows(rows: Sequence[Row], num_rows: int) -> list[int]:
    """Return the indices of at most `num_rows` rows: extreme ones and random ones alternate, the
    most informative first. A row is extreme by its size, its largest absolute value or its norm
    (largest and smallest), or by one feature that is far from its values in other rows."""
    if not rows:
        return []
    ordinary = np.random.default_rng(SEED).permutation(len(rows)).tolist()
    alternating = zip(_by_extremes(rows), ordinary, strict=True)
    return list(dict.fromkeys(index for pair in alternating for index in pair))[:num_rows]


def _by_extremes(rows: Sequence[Row]) -> list[int]:
    """Return indices by extremeness: the first of each ranking, then the second of each, ..."""
    max_features = min(MAX_FEATURES, max(1, MAX_VALUES // len(rows)))
    features: list[Array] = []
    measures = np.empty((3, len(rows)))
    for index, row in enumerate(rows):
        parts = [np.empty(0), *(as_floats(row[name]).ravel() for name in sorted(row))]
        vector = np.clip(np.nan_to_num(np.concatenate(parts), nan=0.0), -LARGEST, LARGEST)
        features.append(vector[:: -(-len(vector) // max_features) or 1].copy())
        norm = float(np.sqrt(np.square(vector).sum()))
        measures[:, index] = np.abs(vector).max(initial=0.0), norm, len(vector)
    rankings = [np.argsort(-_outlyingness(features), kind="stable")]
    for measure in measures:
        if measure.min() < measure.max():
            ascending = np.argsort(measure, kind="stable")
            rankings += [ascending[::-1], ascending]
    by_place = (int(index) for place in zip(*rankings, strict=True) for index in place)
    return list(dict.fromkeys(by_place))


def as_floats(values: Array) -> Array:
    """Return the values as floats; of strings, their lengths."""
    if values.dtype.kind in "OSU":
        return np.array([len(each) for each in values.ravel()], np.float64)
    return values.astype(np.float64)


def _outlyingness(features: Sequence[Array]) -> Array:
    """Return, for each row, how many standard deviations its most unusual feature is from that
    feature's mean; 0 if rows have different numbers of features."""
    if len({len(each) for each in features}) > 1 or not len(features[0]):
        return np.zeros(len(features))
    table = np.stack(features)
    deviation = table.std(axis=0)
    distances = np.abs(table - table.mean(axis=0))
    shares = np.divide(distances, deviation, out=np.zeros_like(table), where=deviation > 0)
    found: Array = shares.max(axis=1)
    return found
