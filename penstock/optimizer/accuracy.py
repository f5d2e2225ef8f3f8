"""The accuracy gate: paired, one-sided, closed unless the examples open it. Pure."""

from __future__ import annotations

import msgspec

from penstock.optimizer.budget import Budget
from penstock.types import Array

ALPHA = 0.05


class Judgement(msgspec.Struct):
    """Original and candidate on the same examples."""

    metric: str
    original: float
    candidate: float
    # How much is lost (positive: the candidate is worse), and the one-sided upper bound of it.
    loss: float
    loss_bound: float
    limit: float
    num_examples: int
    # Examples on which the candidate was better and worse.
    num_better: int
    num_worse: int
    method: str  # "exact binomial on discordant pairs", "paired BCa bootstrap"
    alpha: float
    is_passed: bool
    # When the bound is too wide to decide: about so many examples would be enough; None: the loss
    # itself is beyond the limit, or it passed.
    num_needed: int | None = None
    # "choice" or "held out".
    part: str = "choice"
    # One sentence, as the journal and the report show it.
    text: str = ""


def judge(
    original: Array, candidate: Array, budget: Budget, *, alpha: float = ALPHA, part: str = "choice"
) -> Judgement:
    """From one score per example, in the same order. NaN anywhere, or nothing at all: no pass."""
    raise NotImplementedError
