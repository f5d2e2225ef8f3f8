"""Answers of a candidate against those of the original, example by example. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.types import Array

Answers = Sequence[Mapping[str, Array]]


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
    raise NotImplementedError
