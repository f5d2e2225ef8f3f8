"""Checks of every output of a lossy candidate against the original's, over one part. Pure.

Labels and evaluators judge the outputs that they read; here only the scale of those is checked. All
others must pass every check, so that no output breaks unnoticed. Owns the thresholds; knows nothing
of labels or budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from penstock.optimizer.columns import as_tables, column_scales
from penstock.optimizer.numerics import FAR, Answers, cosine, score_outputs
from penstock.types import Array

MIN_MEDIAN_COSINE = 0.99
MIN_WORST_COSINE = 0.95
# Minimum share of examples with the same best class, or equal integers or text.
MIN_AGREEMENT = 0.95
# Error norm of the median row, relative to the row's norm. Cosines do not see a change of scale,
# and labels see only the best class.
MAX_MEDIAN_ERROR = 0.3
# A column's root mean square error over its standard deviation. A healthy INT8 build has 0.02 to
# 0.2; a column that has lost all information has 1.
MAX_COLUMN_ERROR = 0.5
# Share of a column's values that are off by more than the column's usual spread, or than their own
# distance from its middle. Outliers inflate the standard deviation above, but not this.
MAX_COLUMN_LOST = 0.05
# Range of a normal distribution without its tails, in standard deviations.
DEVIATIONS = 3.3
# Least scale of a column: shares of its own magnitude, and of the output's median magnitude.
OWN_FLOOR, OUTPUT_FLOOR = 0.01, 1e-3
# Fewer values do not show how much a column varies.
MIN_COLUMN_VALUES = 10
# Rows this much smaller than the median row have no direction worth comparing.
NEGLIGIBLE = 0.05

Kind = Literal["scores", "values", "rows", "equal"]


class OutputCheck(msgspec.Struct):
    """Check of one output. `kind`: scores per class; values at fixed places; rows whose number
    depends on the data, matched to the nearest; equal or not (integers and text)."""

    name: str
    kind: Kind
    num_examples: int
    # The score judges it: only its scale is checked.
    is_judged: bool = False
    # None: not applicable.
    median_error: float | None = None
    median_cosine: float | None = None
    worst_cosine: float | None = None
    agreement: float | None = None
    worst_column: int | None = None
    worst_column_error: float | None = None
    # Share of one column's values that are off by more than its usual spread.
    lost_column: int | None = None
    lost_column_share: float | None = None
    # Like `worst_column`, along the first axis of outputs with two: one token of a sequence.
    worst_position: int | None = None
    worst_position_error: float | None = None
    # The failed checks, with figures; empty if the output passes.
    problem: str = ""


def check_outputs(
    original: Answers, candidate: Answers, names: Sequence[str], judged: Set[str] = frozenset()
) -> list[OutputCheck]:
    """Check these outputs of answers to the same examples; `judged`: those that a score reads."""
    if not original:
        return []
    are_scores = set(score_outputs(original))
    found = []
    for name in names:
        check = _check(name, original, candidate, name in are_scores)
        check.is_judged = name in judged
        if problems := "; ".join(_problems(check)):
            check.problem = check.problem or f"output '{name}': {problems}"
        found.append(check)
    return found


def _check(name: str, original: Answers, candidate: Answers, is_scores: bool) -> OutputCheck:
    before = [np.asarray(answer[name]) for answer in original]
    after = [np.asarray(answer[name]) for answer in candidate]
    if before[0].dtype.kind != "f":
        same = [np.array_equal(one, other) for one, other in zip(before, after, strict=True)]
        return OutputCheck(name, "equal", len(before), agreement=float(np.mean(same)))
    if any(one.shape != other.shape for one, other in zip(before, after, strict=True)):
        return _rows(name, before, after)
    cosines = _row_cosines(before, after)
    check = OutputCheck(name, "scores" if is_scores else "values", len(before))
    check.median_error = float(np.median(list(map(_error, before, after))))
    check.median_cosine, check.worst_cosine = float(np.median(cosines)), float(cosines.min())
    if is_scores:
        pairs = zip(before, after, strict=True)
        same = [np.argmax(one) == np.argmax(other) for one, other in pairs]
        check.agreement = float(np.mean(same))
    # Probabilities of classes that never occur are near zero, where any noise is relatively large.
    are_shares = all(bool(((each >= 0) & (each <= 1)).all()) for each in before)
    if not is_scores or not are_shares:
        tables = _table(before), _table(after)
        check.worst_column, check.worst_column_error = _worst_column(*tables)
        check.lost_column, check.lost_column_share = _lost_column(*tables)
        if before[0].ndim == 2 and len({each.shape for each in before}) == 1:
            turned = [_table([each.T for each in arrays]) for arrays in (before, after)]
            check.worst_position, check.worst_position_error = _worst_column(*turned)
    return check


def _error(before: Array, after: Array) -> float:
    """Return the norm of the difference over that of the original; 0 if both are 0."""
    is_known = np.isfinite(before)
    one, other = before[is_known].astype(np.float64), after[is_known].astype(np.float64)
    length, rest = float(np.linalg.norm(one)), float(np.linalg.norm(other - one))
    if not math.isfinite(rest):
        return FAR
    return rest / length if length else (FAR if rest else 0.0)


def _rows(name: str, before: Sequence[Array], after: Sequence[Array]) -> OutputCheck:
    """Check an output whose number of rows depends on the data, such as detections: each row is
    compared with the nearest one, and rows without a partner count as lost."""
    check = OutputCheck(name, "rows", len(before))
    found = []
    for one, other in zip(before, after, strict=True):
        if one.ndim == 0 or one.shape[1:] != other.shape[1:]:
            check.problem = f"output '{name}': {list(one.shape)} became {list(other.shape)}"
            return check
        found.append(matched_cosine(one, other))
    check.median_cosine, check.worst_cosine = float(np.median(found)), float(np.min(found))
    return check


def _row_cosines(before: Sequence[Array], after: Sequence[Array]) -> Array:
    """Return the cosine of each example; -1 if not finite. Rows near zero must stay so."""
    sizes = [float(np.linalg.norm(one[np.isfinite(one)].astype(np.float64))) for one in before]
    usual = float(np.median(sizes))
    found = []
    for one, other, size in zip(before, after, sizes, strict=True):
        is_finite = bool(np.isfinite(other[np.isfinite(one)]).all())
        if is_finite and size < NEGLIGIBLE * usual:
            rest = other[np.isfinite(one)].astype(np.float64) - one[np.isfinite(one)]
            found.append(1.0 if np.linalg.norm(rest) < NEGLIGIBLE * usual else 0.0)
        else:
            found.append(cosine(one, other))
    cosines: Array = np.nan_to_num(np.array(found), nan=-1.0)
    return cosines


def matched_cosine(before: Array, after: Array) -> float:
    """Return the mean cosine of rows with their nearest partners, each used once, over the longer
    side: rows without a partner count as 0."""
    num_rows = max(len(before), len(after))
    if not num_rows:
        return 1.0
    if not before.size or not after.size or not np.isfinite(after).all():
        return 0.0
    one = before.reshape(len(before), -1).astype(np.float64)
    other = after.reshape(len(after), -1).astype(np.float64)
    scale = np.maximum(np.abs(one).max(axis=0), 1e-12)
    distances = np.abs(one[:, None] / scale - other[None] / scale).mean(axis=2)
    total = 0.0
    for _ in range(min(len(one), len(other))):
        row, partner = np.unravel_index(int(np.argmin(distances)), distances.shape)
        total += cosine(one[row] / scale, other[partner] / scale)
        distances[row], distances[:, partner] = np.inf, np.inf
    return total / num_rows


def _table(arrays: Sequence[Array]) -> Array:
    return np.concatenate(as_tables([each[None] for each in arrays]))


def _worst_column(one: Array, other: Array) -> tuple[int | None, float | None]:
    """Return the column with the largest error, in its standard deviations, and that error."""
    if len(one) < MIN_COLUMN_VALUES:
        return None, None
    is_known = np.isfinite(one)
    errors = np.where(is_known, other - np.where(is_known, one, 0.0), 0.0)
    known = np.where(is_known, one, np.nan)
    magnitude = float(np.nanmedian(np.abs(known))) if is_known.any() else 0.0
    worst: tuple[int | None, float | None] = (None, None)
    for column in range(one.shape[1]):
        values = known[is_known[:, column], column]
        if len(values) < MIN_COLUMN_VALUES:
            continue
        own = OWN_FLOOR * float(np.sqrt(np.mean(values**2)))
        scale = max(float(values.std()), own, OUTPUT_FLOOR * magnitude)
        error = float(np.sqrt(np.mean(errors[is_known[:, column], column] ** 2)))
        share = error / scale if scale else (math.inf if error else 0.0)
        share = share if math.isfinite(share) else FAR
        if worst[1] is None or share > worst[1]:
            worst = column, share
    return worst


def _lost_column(one: Array, other: Array) -> tuple[int | None, float | None]:
    """Return the column with the largest share of values beyond its spread, and that share."""
    if len(one) < MIN_COLUMN_VALUES or not one.shape[1]:
        return None, None
    is_known = np.isfinite(one)
    known = np.where(is_known, one, 0.0)
    scales = column_scales(np.where(is_known, one, np.nan), own_floor=0.0)
    scales = replace(scales, spreads=scales.spreads / DEVIATIONS)
    sizes = scales.widened(OWN_FLOOR * np.median(np.abs(known), axis=0)).of(known)
    with np.errstate(invalid="ignore"):
        is_lost = is_known & ~(np.abs(other - known) <= sizes)
    shares = is_lost.sum(axis=0) / np.maximum(is_known.sum(axis=0), 1)
    column = int(np.argmax(shares))
    return column, float(shares[column])


def _problems(check: OutputCheck) -> Iterator[str]:
    if check.median_error is not None and check.median_error > MAX_MEDIAN_ERROR:
        error = min(check.median_error, 1e6)
        yield f"the median row is off by {error:.2g} of its length, at most {MAX_MEDIAN_ERROR}"
    if check.is_judged:
        return
    # Only the order of class scores counts, and healthy builds change their direction.
    if check.kind != "scores" and check.median_cosine is not None:
        worst = 1.0 if check.worst_cosine is None else check.worst_cosine
        if check.median_cosine < MIN_MEDIAN_COSINE:
            yield f"median cosine {check.median_cosine:.4f}, at least {MIN_MEDIAN_COSINE}"
        elif worst < MIN_WORST_COSINE:
            yield f"worst row's cosine {worst:.4f}, at least {MIN_WORST_COSINE}"
    if check.agreement is not None and check.agreement < MIN_AGREEMENT:
        what = "the same best class" if check.kind == "scores" else "equal"
        yield f"{what} in {check.agreement:.1%} of the examples, at least {MIN_AGREEMENT:.0%}"
    yield from _column_problems(check)


def _column_problems(check: OutputCheck) -> Iterator[str]:
    """Yield the first problem of a column or position."""
    for name, place, error in (
        ("column", check.worst_column, check.worst_column_error),
        ("position", check.worst_position, check.worst_position_error),
    ):
        if error is not None and error > MAX_COLUMN_ERROR:
            shown = f"{min(error, 1e6):.2g} of its standard deviation, at most {MAX_COLUMN_ERROR}"
            yield f"{name} {place} is off by {shown}"
            return
    if check.lost_column_share is not None and check.lost_column_share > MAX_COLUMN_LOST:
        share = f"{check.lost_column_share:.1%} of its values, at most {MAX_COLUMN_LOST:.0%}"
        yield f"column {check.lost_column} is off by more than its usual spread in {share}"
