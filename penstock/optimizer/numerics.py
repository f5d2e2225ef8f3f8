"""Answers of a candidate against those of the original, example by example. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.types import Array

Answers = Sequence[Mapping[str, Array]]

MAX_CLASSES = 100_000
# An output so named is no list of classes, whatever its shape.
NO_SCORES = ("embed", "hidden", "pool", "feature", "state")
# How far apart answers are that cannot be compared. A file has no infinity.
FAR = 1e300
# Of one kind; the rest is counted.
MAX_SHOWN = 3


class Numerics(msgspec.Struct):
    num_examples: int
    is_finite: bool
    has_same_shapes: bool
    # Over all outputs: largest absolute difference, and that as a share of the output's largest
    # value; the least cosine of any example.
    max_absolute: float
    max_relative: float
    min_cosine: float
    # Share of examples whose largest element is the same one; None where outputs are no scores.
    agreement: float | None = None
    # What must not be, in words; empty: all is well.
    problems: list[str] = []


def compare(original: Answers, candidate: Answers, *, tolerance: float | None) -> Numerics:
    """`tolerance` is for `max_relative`; None accepts any finite answers of the same shapes (the
    accuracy gate then decides)."""
    if len(original) != len(candidate) or not original:
        problem = f"expected {len(original):,} answers, got {len(candidate):,}"
        return _incomparable(len(original), problem if original else "there are no answers")
    misfits = _misfits(original, candidate)
    if misfits:
        return _incomparable(len(original), *misfits)
    differences = {
        name: _difference(name, original, candidate)
        for name in original[0]
        if original[0][name].dtype.kind != "O"
    }
    problems = [each.problem for each in differences.values() if each.problem]
    is_finite = not problems
    if tolerance is not None:
        problems += _beyond(differences, tolerance)
        problems += _texts(original, candidate)
    names = score_outputs(original)
    return Numerics(
        num_examples=len(original),
        is_finite=is_finite,
        has_same_shapes=True,
        max_absolute=max((each.absolute for each in differences.values()), default=0.0),
        max_relative=max((each.relative for each in differences.values()), default=0.0),
        min_cosine=float(np.nan_to_num(cosines(original, candidate), nan=-1.0).min()),
        agreement=float(agreements(original, candidate, names).mean()) if names else None,
        problems=problems,
    )


def score_outputs(answers: Answers) -> list[str]:
    """Names of the outputs that give a score per class: one float each for 2 to 100,000 classes in
    every answer, and not called or normalised like an embedding."""
    if not answers:
        return []
    return [name for name in answers[0] if _is_scores(name, answers)]


def agreements(original: Answers, candidate: Answers, names: Sequence[str]) -> Array:
    """For each example 1 if the best class of these outputs is the same one in both, else 0."""
    return np.array(
        [
            all(np.argmax(one[name]) == np.argmax(other[name]) for name in names)
            for one, other in zip(original, candidate, strict=True)
        ],
        np.float64,
    )


def cosines(original: Answers, candidate: Answers) -> Array:
    """For each example, over all floats that are finite in the original; NaN where the candidate's
    are not, 0 where there are more or fewer of them."""
    return np.array(
        [_cosine(one, other) for one, other in zip(original, candidate, strict=True)], np.float64
    )


class _Difference(msgspec.Struct):
    absolute: float
    relative: float
    problem: str = ""


def _incomparable(num_examples: int, *problems: str) -> Numerics:
    return Numerics(num_examples, False, False, FAR, FAR, -1.0, None, list(problems))


def _misfits(original: Answers, candidate: Answers) -> list[str]:
    """Outputs, datatypes and shapes that are not those of the original."""
    problems: list[str] = []
    for position, (one, other) in enumerate(zip(original, candidate, strict=True)):
        if one.keys() != other.keys():
            problems.append(f"expected outputs {sorted(one)}, got {sorted(other)}")
            break
        for name, array in one.items():
            was, became = _form(array), _form(other[name])
            if was != became:
                problems.append(f"output '{name}', example {position}: {was} became {became}")
    num_more = len(problems) - MAX_SHOWN
    return problems[:MAX_SHOWN] + ([f"{num_more:,} more of this kind"] if num_more > 0 else [])


def _form(array: Array) -> str:
    return f"{'BYTES' if array.dtype.kind in 'OSU' else array.dtype} {list(array.shape)}"


def _difference(name: str, original: Answers, candidate: Answers) -> _Difference:
    absolute, largest, num_bad = 0.0, 0.0, 0
    for one, other in zip(original, candidate, strict=True):
        before, after = (np.asarray(each[name], np.float64) for each in (one, other))
        # What the original does not know either, such as a masked -inf, may stay as it is.
        is_known = np.isfinite(before)
        num_bad += int((is_known & ~np.isfinite(after)).sum())
        num_bad += int((~is_known & ~_same(before, after)).sum())
        both = is_known & np.isfinite(after)
        absolute = max(absolute, float(np.abs(before[both] - after[both]).max(initial=0.0)))
        largest = max(largest, float(np.abs(before[is_known]).max(initial=0.0)))
    relative = absolute / largest if largest else (FAR if absolute else 0.0)
    if not num_bad:
        return _Difference(absolute, relative)
    problem = f"output '{name}': {num_bad:,} values are not finite where the original's are"
    return _Difference(FAR, FAR, problem)


def _same(before: Array, after: Array) -> Array:
    same: Array = (before == after) | (np.isnan(before) & np.isnan(after))
    return same


def _beyond(differences: Mapping[str, _Difference], tolerance: float) -> list[str]:
    return [
        f"output '{name}': differs by {each.relative:.2g} of its largest value, allowed are "
        f"{tolerance:.2g}"
        for name, each in differences.items()
        if not each.problem and each.relative > tolerance
    ]


def _texts(original: Answers, candidate: Answers) -> list[str]:
    problems = []
    for name in (name for name, array in original[0].items() if array.dtype.kind == "O"):
        num_other = sum(
            one[name].tolist() != other[name].tolist()
            for one, other in zip(original, candidate, strict=True)
        )
        if num_other:
            problems.append(f"output '{name}': {num_other:,} of {len(original):,} texts are others")
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
    return not _are_unit_vectors(np.stack([array.ravel() for array in arrays]))


def _are_unit_vectors(rows: Array) -> bool:
    """Embeddings are often made one long; scores with negative values hardly ever are."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    return bool((np.abs(lengths - 1) < 1e-3).all() and (rows < 0).any())


def _cosine(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    before, after = _floats(one), _floats(other)
    if before.shape != after.shape:
        return 0.0
    is_known = np.isfinite(before)
    before, after = before[is_known], after[is_known]
    if not np.isfinite(after).all():
        return np.nan
    lengths = float(np.linalg.norm(before)), float(np.linalg.norm(after))
    if 0.0 in lengths:
        return 1.0 if lengths[0] == lengths[1] else 0.0
    return min(max(float(before / lengths[0] @ (after / lengths[1])), -1.0), 1.0)


def _floats(answer: Mapping[str, Array]) -> Array:
    parts = [each.ravel().astype(np.float64) for each in answer.values() if each.dtype.kind == "f"]
    return np.concatenate(parts) if parts else np.empty(0)
