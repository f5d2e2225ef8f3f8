"""Comparison of a candidate's answers with the original's, example by example. Pure.

Tolerances apply to each column of an output, relative to that column's own range (`columns`): large
pixel values do not hide changes of small scores next to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.optimizer.columns import FLOOR, are_same, as_tables, column_scales, scaled_differences
from penstock.types import Array

Answers = Sequence[Mapping[str, Array]]

MAX_CLASSES = 100_000
# Standard deviations of class scores lie within this factor of their median.
MAX_SPREAD = 50.0
# Outputs with these words in their names are not class scores, whatever their shape.
NO_SCORES = ("embed", "hidden", "pool", "feature", "state")
# Distance of answers that cannot be compared. JSON has no infinity.
FAR = 1e300
# Problems of one kind that are listed; the rest are counted.
MAX_SHOWN = 3
# Share of examples whose integers and strings a lossless step may change: rounding breaks ties.
MAX_UNEQUAL = 0.01
# Allowed difference of floats that are whole numbers, such as ids: a lossless step must keep them.
WHOLE = 0.5


class Numerics(msgspec.Struct):
    num_examples: int
    is_finite: bool
    has_same_shapes: bool
    # Over all outputs: the largest absolute difference, the largest difference as a share of its
    # column's range, and the smallest cosine of any example.
    max_absolute: float
    max_relative: float
    min_cosine: float
    # Share of examples with the same largest element; None if outputs are not class scores.
    agreement: float | None = None
    # Problems, one sentence each; empty: none.
    problems: list[str] = []


def compare(
    original: Answers,
    candidate: Answers,
    *,
    tolerance: float | None,
    names: Sequence[str] = (),
    own_floor: float = FLOOR,
) -> Numerics:
    """Compare answers. `tolerance` applies to `max_relative`; None accepts any finite answers of
    the same shapes (the accuracy gate then decides), and other numbers of rows where these depend
    on the data. `names`: the outputs that matter; default: all. `own_floor`: a column's scale is at
    least this share of its largest value, because rounding is relative to values; 1 in TF32."""
    if len(original) != len(candidate) or not original:
        problem = f"expected {len(original):,} answers, got {len(candidate):,}"
        return _incomparable(len(original), problem if original else "there are no answers")
    original, candidate = (only(answers, names) for answers in (original, candidate))
    misfits = _misfits(original, candidate, is_exact=tolerance is not None)
    if misfits:
        return _incomparable(len(original), *misfits)
    floats = [name for name, array in original[0].items() if array.dtype.kind == "f"]
    differences = {
        name: _difference(name, original, candidate, own_floor, tolerance) for name in floats
    }
    problems = [each.problem for each in differences.values() if each.problem]
    is_finite = not problems
    if tolerance is not None:
        problems += [
            f"output '{name}': column {each.column} differs by {each.relative:.2g} of its range "
            f"({each.scale:.3g}), allowed are {tolerance:.2g}"
            for name, each in differences.items()
            if not each.problem and each.relative > tolerance
        ]
        problems += _unequal(original, candidate)
    classes = score_outputs(original)
    return Numerics(
        num_examples=len(original),
        is_finite=is_finite,
        has_same_shapes=True,
        max_absolute=max((each.absolute for each in differences.values()), default=0.0),
        max_relative=max((each.relative for each in differences.values()), default=0.0),
        min_cosine=float(np.nan_to_num(cosines(original, candidate), nan=-1.0).min()),
        agreement=float(agreements(original, candidate, classes).mean()) if classes else None,
        problems=problems,
    )


def only(answers: Answers, names: Sequence[str]) -> Answers:
    """Return the named outputs of each answer; all of them without names."""
    if not names:
        return answers
    return [{name: answer[name] for name in names if name in answer} for answer in answers]


def score_outputs(answers: Answers) -> list[str]:
    """Return the outputs that are class scores: 2 to 100,000 floats in every answer, all of similar
    scale, neither named nor normalised like an embedding."""
    if not answers:
        return []
    return [name for name in answers[0] if _is_scores(name, answers)]


def agreements(original: Answers, candidate: Answers, names: Sequence[str]) -> Array:
    """Return, for each example, 1 if all these outputs have the same best class in both, else 0."""
    same = [
        all(np.argmax(one[name]) == np.argmax(other[name]) for name in names)
        for one, other in zip(original, candidate, strict=True)
    ]
    return np.array(same, np.float64)


def cosines(original: Answers, candidate: Answers) -> Array:
    """Return the cosine of each example, over all floats that are finite in the original; NaN if
    the candidate's are not, 0 if their numbers differ."""
    pairs = zip(original, candidate, strict=True)
    return np.array([cosine(_floats(one), _floats(other)) for one, other in pairs], np.float64)


class _Difference(NamedTuple):
    """Difference of one output; `relative` is that of the worst column, whose range is `scale`."""

    absolute: float
    relative: float
    column: int = 0
    scale: float = 0.0
    problem: str = ""


def _incomparable(num_examples: int, *problems: str) -> Numerics:
    return Numerics(num_examples, False, False, FAR, FAR, -1.0, None, list(problems))


def _misfits(original: Answers, candidate: Answers, *, is_exact: bool) -> list[str]:
    """Return outputs, datatypes and shapes that differ from the original's. A lossy step may change
    the number of rows of outputs in which it varies between examples anyway."""
    arrays = [name for name, array in original[0].items() if array.ndim and not is_exact]
    free = {name for name in arrays if len({len(answer[name]) for answer in original}) > 1}
    problems: list[str] = []
    for position, (one, other) in enumerate(zip(original, candidate, strict=True)):
        if one.keys() != other.keys():
            problems.append(f"expected outputs {sorted(one)}, got {sorted(other)}")
            break
        for name, array in one.items():
            was, became = _form(array), _form(other[name])
            if name in free and _form(array[:0]) == _form(other[name][:0]):
                continue
            if was != became:
                problems.append(f"output '{name}', example {position}: {was} became {became}")
    num_more = len(problems) - MAX_SHOWN
    return problems[:MAX_SHOWN] + ([f"{num_more:,} more of this kind"] if num_more > 0 else [])


def _form(array: Array) -> str:
    return f"{'BYTES' if array.dtype.kind in 'OSU' else array.dtype} {list(array.shape)}"


def _difference(
    name: str, original: Answers, candidate: Answers, own_floor: float, tolerance: float | None
) -> _Difference:
    both = [(a[name], b[name]) for a, b in zip(original, candidate, strict=True)]
    pairs = [(one, other) for one, other in both if one.shape == other.shape]
    if not pairs:
        return _Difference(0.0, 0.0)
    sides = ([np.asarray(pair[side])[None] for pair in pairs] for side in (0, 1))
    before, after = (np.concatenate(as_tables(arrays)) for arrays in sides)
    # Values that are not finite in the original, such as a masked -inf, must stay the same.
    is_known = np.isfinite(before)
    is_bad = np.where(is_known, ~np.isfinite(after), ~are_same(before, after))
    if num_bad := int(is_bad.sum()):
        problem = f"output '{name}': {num_bad:,} values are not finite where the original's are"
        return _Difference(FAR, FAR, problem=problem)
    if not before.size:
        return _Difference(0.0, 0.0)
    scales = column_scales(before, own_floor)
    if tolerance:
        exact = _whole_columns(before, np.asarray(pairs[0][0]))
        most = np.where(exact, 0.99 * WHOLE / tolerance, np.inf)
        scales = replace(scales, spreads=np.minimum(scales.spreads, most), most=most)
    shares = scaled_differences(before, after, scales)
    column = int(np.argmax(shares))
    absolute = float(np.abs(before[is_known] - after[is_known]).max(initial=0.0))
    relative = float(shares[column]) if np.isfinite(shares[column]) else FAR
    return _Difference(absolute, relative, column, float(scales.spreads[column]))


def _whole_columns(table: Array, like: Array) -> Array:
    """Return which columns hold integers that the datatype of `like` represents exactly: ids,
    counts, labels. Above that size every float is whole."""
    known = np.where(np.isfinite(table), table, 0.0)
    is_whole = (known == np.rint(known)).all(axis=0)
    largest = np.abs(known).max(axis=0, initial=0.0)
    exact: Array = is_whole & (np.spacing(largest.astype(like.dtype)) <= WHOLE)
    return exact


def _unequal(original: Answers, candidate: Answers) -> list[str]:
    """Return outputs whose integers or strings differ in more examples than ties explain."""
    problems = []
    for name in (name for name, array in original[0].items() if array.dtype.kind != "f"):
        pairs = zip(original, candidate, strict=True)
        num_other = sum(one[name].tolist() != other[name].tolist() for one, other in pairs)
        if num_other > MAX_UNEQUAL * len(original):
            counted = f"{num_other:,} of {len(original):,}"
            problems.append(f"output '{name}': {counted} answers differ, allowed are 1 %")
    return problems


def _is_scores(name: str, answers: Answers) -> bool:
    if any(word in name.lower() for word in NO_SCORES):
        return False
    arrays = [np.asarray(answer[name]) for answer in answers]
    sizes = {array.size for array in arrays}
    is_flat = all(
        array.dtype.kind == "f" and array.ndim and array.shape[-1] == array.size for array in arrays
    )
    if not is_flat or len(sizes) > 1 or not 2 <= sizes.pop() <= MAX_CLASSES:
        return False
    rows = np.stack([array.ravel() for array in arrays]).astype(np.float64)
    # Normalised like embeddings; scores with negative values hardly ever are.
    lengths = np.linalg.norm(rows, axis=1)
    are_unit_vectors = (np.abs(lengths - 1) < 1e-3).all() and (rows < 0).any()
    return not are_unit_vectors and _have_one_scale(rows)


def _have_one_scale(rows: Array) -> bool:
    """Return whether all columns have similar spread, as class scores do, or are probabilities.
    Pixels beside a confidence do not, and their largest value is no best class."""
    if bool(((rows >= 0) & (rows <= 1)).all()):
        return True
    spreads = rows[:, np.isfinite(rows).all(axis=0)].std(axis=0)
    varying = spreads[spreads > 0]
    if not varying.size:
        return True
    middle = float(np.median(varying))
    return bool((varying >= middle / MAX_SPREAD).all() and (varying <= middle * MAX_SPREAD).all())


def cosine(before: Array, after: Array) -> float:
    """Return the cosine where `before` is finite; NaN if `after` is not, 0 for other shapes."""
    if before.shape != after.shape:
        return 0.0
    is_known = np.isfinite(before)
    one, other = before[is_known].astype(np.float64), after[is_known].astype(np.float64)
    if not np.isfinite(other).all():
        return np.nan
    lengths = float(np.linalg.norm(one)), float(np.linalg.norm(other))
    if 0.0 in lengths:
        return 1.0 if lengths[0] == lengths[1] else 0.0
    return min(max(float(one / lengths[0] @ (other / lengths[1])), -1.0), 1.0)


def _floats(answer: Mapping[str, Array]) -> Array:
    parts = [each.ravel().astype(np.float64) for each in answer.values() if each.dtype.kind == "f"]
    return np.concatenate(parts) if parts else np.empty(0)
