"""Compare the logprobs of two models on the same tokens, one score per text. Pure.

`kl` is KL(original || candidate) of the next-token distributions in nats, over the original's most
likely tokens and all others lumped together. `agreement` is the share of positions with the same
most likely token. `nll` is the negative log-likelihood in nats per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import CommandLineError
from penstock.optimizer.budget import Budget
from penstock.types import Array

METRICS = ("kl", "agreement", "nll")
# More than ten times the kl of BF16 on SmolLM2-135M (0.0014).
DEFAULT = Budget("kl", 0.02, is_lower_better=True)
# Most likely tokens to compare, and how many to request so that the compared ones are among them.
NUM_COMPARED, NUM_TOLD = 16, 64
LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of one text's tokens after the first."""

    # Logprob of each token.
    own: Array
    # The most likely tokens, one row per position, most likely first.
    tokens: Array
    logprobs: Array


def check_budget(budget: Budget) -> None:
    """Raise CommandLineError for an unknown metric or the wrong direction."""
    if budget.metric not in METRICS:
        expected = f"not for language models; expected {', '.join(METRICS)}"
        raise CommandLineError([f"--accuracy: '{budget.metric}' is {expected}"])
    if budget.is_lower_better != (budget.metric != "agreement"):
        word = "drop" if budget.metric == "agreement" else "rise"
        raise CommandLineError([f"--accuracy: expected '{budget.metric} {word} <= ...'"])
    if budget.is_relative and budget.metric == "kl":
        problem = "kl cannot be relative, because the original's kl is 0"
        raise CommandLineError([f"--accuracy: {problem}"])


def scores(original: PromptLogprobs, candidate: PromptLogprobs) -> dict[str, float]:
    """Return the scores of one text by metric; the baseline's are the original against itself."""
    return {
        "kl": divergence(original, candidate),
        "agreement": float((original.tokens[:, 0] == candidate.tokens[:, 0]).mean()),
        "nll": float(-candidate.own.mean()),
    }


def divergence(original: PromptLogprobs, candidate: PromptLogprobs) -> float:
    """Return the mean KL divergence over positions. A token missing from the candidate's list gets
    the probability of the last one listed, which is an upper bound."""
    tokens = original.tokens[:, :NUM_COMPARED]
    before = np.exp(original.logprobs[:, :NUM_COMPARED].astype(np.float64))
    is_there = tokens[:, :, None] == candidate.tokens[:, None, :]
    told = np.exp(candidate.logprobs.astype(np.float64))
    after = np.where(is_there.any(2), (is_there * told[:, None, :]).sum(2), told[:, -1:])
    parts = np.concatenate([before, 1 - before.sum(1, keepdims=True)], 1).clip(LEAST, 1)
    others = np.concatenate([after, 1 - after.sum(1, keepdims=True)], 1).clip(LEAST, 1)
    return float((parts * np.log(parts / others)).sum(1).clip(0).mean())
