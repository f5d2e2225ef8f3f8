"""Answers compared with recorded ones, request by request. Pure.

An answer agrees if it has every recorded output with the same shape, and the same values: floats up
to a tolerance relative to the output's largest value, everything else exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.serving.padding import bf16_floats
from penstock.types import Array, Tensor, to_array

# The tolerances that padding has, for the same reason: rounding depends on the batch.
TOLERANCES = {"FP64": 1e-6, "FP32": 1e-3, "FP16": 1e-2, "BF16": 5e-2}


class Agreement(msgspec.Struct):
    """How many answers were compared with recorded ones, and how many agreed."""

    num_compared: int = 0
    num_agreed: int = 0

    def add(self, other: Agreement) -> None:
        self.num_compared += other.num_compared
        self.num_agreed += other.num_agreed

    def count(self, answer: Sequence[Tensor] | None, expected: Sequence[Tensor]) -> None:
        self.num_compared += 1
        self.num_agreed += answer is not None and agrees(answer, expected)


def agrees(answer: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    found = {each.name: each for each in answer}
    return all(each.name in found and _is_same(found[each.name], each) for each in expected)


def _is_same(answer: Tensor, expected: Tensor) -> bool:
    if answer.datatype != expected.datatype or tuple(answer.shape) != tuple(expected.shape):
        return False
    tolerance = TOLERANCES.get(expected.datatype)
    if tolerance is None:
        return bytes(answer.data) == bytes(expected.data)
    ours, theirs = _floats(answer), _floats(expected)
    is_known = np.isfinite(theirs)
    if not np.array_equal(ours[~is_known], theirs[~is_known], equal_nan=True):
        return False
    largest = float(np.abs(theirs[is_known]).max(initial=0.0))
    apart = np.abs(ours[is_known] - theirs[is_known])
    return bool((apart <= tolerance * largest).all())


def _floats(tensor: Tensor) -> Array:
    array = to_array(tensor)
    return (bf16_floats(array) if tensor.datatype == "BF16" else array).astype(np.float64)
