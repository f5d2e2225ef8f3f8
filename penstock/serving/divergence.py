"""How far the answers of two versions to the same request differ, output by output. Pure.

A row of class scores disagrees where its best class differs; integers and strings where they are
not equal; any row whose values are far apart. Knows neither requests nor tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.config import ModelConfig
from penstock.serving.padding import bf16_floats
from penstock.serving.split_counts import OutputCounts, SplitCounts
from penstock.types import Array, Tensor, TensorSpec, to_array

# As in `optimizer.numerics`: outputs with these words in their names are no class scores, and
# scores have at most so many classes.
NO_SCORES = ("embed", "hidden", "pool", "feature", "state")
MAX_CLASSES = 100_000
# Distance of a row from which it disagrees: that of `optimizer.output_checks` for the median row.
MAX_DISTANCE = 0.3
# Distance of rows that cannot be compared: other shapes, or values that are not finite.
FARTHEST = 2.0
FLOATS = ("FP16", "FP32", "FP64", "BF16")
# Deviation of the length of a vector from 1 by which it counts as normalised.
UNIT = 1e-3
# Larger values count as this one: sums of their squares must be finite.
LARGEST = 1e140


class OutputComparer:
    """Compares rows of one output. Distances are relative to the usual length of the stable
    version's rows: values near zero that differ are close to each other if others are large."""

    def __init__(self, spec: TensorSpec, has_rows: bool) -> None:
        self._has_rows = has_rows
        self._is_float = spec.datatype in FLOATS
        is_named = not any(word in spec.name.lower() for word in NO_SCORES)
        self._may_be_scores = is_named and 1 <= len(spec.shape) <= 2
        self._squares = 0.0
        self._num_rows = 0

    def compare(self, stable: Tensor, candidate: Tensor) -> tuple[Array, Array]:
        """Return, for each row, how much of it disagrees and its distance."""
        before, after = _read(stable), _read(candidate)
        num_rows = before.shape[0] if self._has_rows and before.ndim else 1
        if before.shape != after.shape:
            return np.ones(num_rows), np.full(num_rows, FARTHEST)
        if not before.size:
            return np.zeros(num_rows), np.zeros(num_rows)
        rows = before.reshape(num_rows, -1), after.reshape(num_rows, -1)
        if not self._is_float:
            unequal = (rows[0] != rows[1]).any(axis=1).astype(np.float64)
            return unequal, FARTHEST * unequal
        return self._compare_floats(*rows, before.shape[-1] if before.ndim else 1)

    def _compare_floats(self, before: Array, after: Array, last: int) -> tuple[Array, Array]:
        is_known = np.isfinite(before)
        is_same = (before == after) | (np.isnan(before) & np.isnan(after))
        is_bad = np.where(is_known, ~np.isfinite(after), ~is_same).any(axis=1)
        one, other = np.where(is_known, before, 0.0), np.where(is_known, after, 0.0)
        other = np.where(np.isfinite(other), other, 0.0)
        one, other = np.clip(one, -LARGEST, LARGEST), np.clip(other, -LARGEST, LARGEST)
        lengths = np.linalg.norm(one, axis=1)
        self._squares += float((lengths**2).sum())
        self._num_rows += len(lengths)
        scale = np.sqrt(self._squares / self._num_rows)
        most = np.maximum(np.maximum(lengths, np.linalg.norm(other, axis=1)), scale)
        apart = np.linalg.norm(one - other, axis=1)
        distances = np.divide(apart, most, out=np.zeros_like(apart), where=most > 0)
        distances = np.where(is_bad, FARTHEST, np.minimum(distances, FARTHEST))
        disagreeing = (distances > MAX_DISTANCE).astype(np.float64)
        if self._may_be_scores and 2 <= last <= MAX_CLASSES:
            is_vector = (np.abs(lengths - 1) < UNIT) & (one < 0).any(axis=1)
            others = np.where(is_vector, 0.0, _other_classes(one, other, last))
            disagreeing = np.maximum(disagreeing, others)
        return disagreeing, distances


def _other_classes(before: Array, after: Array, num_classes: int) -> Array:
    """Return the share of each row's positions at which the best class differs."""
    shape = len(before), -1, num_classes
    classes = before.reshape(shape).argmax(axis=2), after.reshape(shape).argmax(axis=2)
    shares: Array = (classes[0] != classes[1]).mean(axis=1)
    return shares


def _read(tensor: Tensor) -> Array:
    array = to_array(tensor)
    if tensor.datatype == "BF16":
        array = bf16_floats(array)
    return array.astype(np.float64) if tensor.datatype in FLOATS else array


class Divergence:
    """Compares the answers of two versions of a model, and counts."""

    def __init__(self, config: ModelConfig, counts: SplitCounts) -> None:
        self._comparers = {
            spec.name: OutputComparer(spec, config.max_batch_size > 0) for spec in config.outputs
        }
        self._counts = counts

    def compare(self, stable: Sequence[Tensor], candidate: Sequence[Tensor]) -> None:
        """Count the rows of two answers to one request."""
        others = {tensor.name: tensor for tensor in candidate}
        worst: Array | None = None
        for tensor in stable:
            other = others.get(tensor.name)
            if other is None or tensor.name not in self._comparers:
                continue
            disagreeing, distances = self._comparers[tensor.name].compare(tensor, other)
            worst = disagreeing if worst is None else np.maximum(worst, disagreeing)
            counts = self._counts.outputs.setdefault(tensor.name, OutputCounts())
            wrong, distance = float(disagreeing.sum()), float(distances.sum())
            farthest = float(distances.max(initial=0.0))
            counts.merge(OutputCounts(len(disagreeing), wrong, distance, farthest))
        if worst is not None:
            self._counts.num_compared += len(worst)
            self._counts.num_disagreeing += float(worst.sum())

    def fail(self, num_rows: int) -> None:
        """Count rows that only the stable version could answer."""
        self._counts.num_compared += num_rows
        self._counts.num_disagreeing += num_rows
