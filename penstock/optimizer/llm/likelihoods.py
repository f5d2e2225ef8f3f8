"""What two models say of the same tokens, as one score per text. Pure.

`kl` is how far the candidate's next-token distribution is from the original's, in nats: over the
tokens that are likeliest by the original, and all others together. `agreement` is the share of
places with the same likeliest token, `nll` how unlikely the text was, in nats per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import CommandLineError
from penstock.optimizer.budget import Budget
from penstock.types import Array

METRICS = ("kl", "agreement", "nll")
# More than ten times what BF16 does to SmolLM2-135M (0.0014).
DEFAULT = Budget("kl", 0.02, is_lower_better=True)
# Likeliest tokens that are compared, and those that are told so that they are found.
NUM_COMPARED, NUM_TOLD = 16, 64
LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Told:
    """Of the tokens of one text after its first."""

    # The logarithm of what each had.
    own: Array
    # The likeliest, one row a token, from the likeliest on.
    tokens: Array
    logprobs: Array


def check_budget(budget: Budget) -> None:
    """ConfigError for what is not measured here, or the wrong way round."""
    if budget.metric not in METRICS:
        listed = ", ".join(METRICS)
        raise CommandLineError(
            [f"--accuracy: '{budget.metric}' is not for language models; expected {listed}"]
        )
    if budget.is_lower_better != (budget.metric != "agreement"):
        word = "drop" if budget.metric == "agreement" else "rise"
        raise CommandLineError([f"--accuracy: expected '{budget.metric} {word} <= ...'"])
    if budget.is_relative and budget.metric == "kl":
        raise CommandLineError(
            ["--accuracy: kl cannot be relative, because the original's kl is 0"]
        )


def scores(original: Told, candidate: Told) -> dict[str, float]:
    """Of one text, by metric; the original's own are those of it with itself."""
    return {
        "kl": divergence(original, candidate),
        "agreement": float((original.tokens[:, 0] == candidate.tokens[:, 0]).mean()),
        "nll": float(-candidate.own.mean()),
    }


def divergence(original: Told, candidate: Told) -> float:
    """The mean over places. Where the candidate does not tell of a token it has at most what the
    last has that it tells of, and that is taken."""
    tokens = original.tokens[:, :NUM_COMPARED]
    before = np.exp(original.logprobs[:, :NUM_COMPARED].astype(np.float64))
    is_there = tokens[:, :, None] == candidate.tokens[:, None, :]
    told = np.exp(candidate.logprobs.astype(np.float64))
    after = np.where(is_there.any(2), (is_there * told[:, None, :]).sum(2), told[:, -1:])
    parts = np.concatenate([before, 1 - before.sum(1, keepdims=True)], 1).clip(LEAST, 1)
    others = np.concatenate([after, 1 - after.sum(1, keepdims=True)], 1).clip(LEAST, 1)
    return float((parts * np.log(parts / others)).sum(1).clip(0).mean())
