"""From answers to one score per example: by labels, by an evaluator, or by agreement with the
original."""

from __future__ import annotations

from penstock.optimizer.examples import Examples
from penstock.optimizer.numerics import Answers
from penstock.optimizer.plan import Plan
from penstock.types import Array


class Scorer:
    """Which score is used is decided once, from the plan and the data."""

    metric: str
    # True when there are neither labels nor an evaluator: the original's answers are the truth.
    is_agreement: bool

    def score(self, answers: Answers, indices: tuple[int, ...], original: Answers) -> Array:
        """One number per example of `indices`, whose answers these are; NaN: cannot be scored."""
        raise NotImplementedError


def make_scorer(plan: Plan, examples: Examples, original: Answers) -> Scorer:
    """`original`: some answers of the original, to see what its outputs are. ConfigError when the
    plan's metric does not fit the data."""
    raise NotImplementedError
