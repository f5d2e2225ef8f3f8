"""Step time model, fitted to past steps. It tells how many prompt tokens a step may compute without
delaying decodes.

Pure: times are passed in. A step has a fixed cost, and a cost for each prompt token, for each
decoding sequence, for each token of their context, for each sequence that drafts and for each
drafted token.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from penstock.types import Array

# Steps after which the weight of a measurement halves: the machine or the load may change.
HALF_LIFE = 200
# Steps needed before predictions are used.
MIN_STEPS = 8
# Least prompt tokens per step, however slow steps are, so that prefill always progresses.
MIN_CHUNK = 16
# Ridge term, relative: shares cost among inputs that always change together, avoids singularity.
RIDGE = 1e-6
# Inputs of the fit.
NUM_COSTS = 6


@dataclass(frozen=True, slots=True)
class StepWork:
    num_prompt_tokens: int
    num_generating: int
    # Total over the decoding sequences.
    num_context_tokens: int = 0
    # Sequences with drafted tokens, and these tokens.
    num_drafting: int = 0
    num_drafted: int = 0

    @property
    def features(self) -> Array:
        """Inputs of the fit, scaled to similar sizes for numerical stability."""
        prompt, decodes = self.num_prompt_tokens / 1e3, self.num_generating / 1e2
        drafts = self.num_drafting / 1e1, self.num_drafted / 1e1
        return np.array([1.0, prompt, decodes, self.num_context_tokens / 1e5, *drafts])


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds; None without a target."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(slots=True)
class StepTimeModel:
    """Least squares with exponentially decaying weights. Costs are not negative: terms that come
    out negative are dropped, and the rest is fitted again."""

    targets: Targets = Targets()
    num_steps: int = 0
    # Steps with drafted tokens.
    num_drafting: int = 0
    _squares: Array = field(default_factory=lambda: np.zeros((NUM_COSTS, NUM_COSTS)))
    _sums: Array = field(default_factory=lambda: np.zeros(NUM_COSTS))
    _costs: Array | None = None

    def add(self, work: StepWork, took_s: float) -> None:
        features = work.features
        keep = 0.5 ** (1 / HALF_LIFE)
        # Minimise relative errors, so that long steps do not dominate.
        weight = 1 / max(took_s, 1e-6) ** 2
        self._squares = keep * self._squares + weight * np.outer(features, features)
        self._sums = keep * self._sums + weight * took_s * features
        self._costs = None
        self.num_steps += 1
        self.num_drafting += work.num_drafting > 0

    @property
    def is_known(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def step_s(self, work: StepWork) -> float:
        return float(self._solved() @ work.features)

    def max_tokens(self, decodes: StepWork, limit: int) -> int:
        """Return the token budget of a step with these decodes: as many as keep the TPOT target, at
        most `limit`."""
        if self.targets.tpot_s is None or not decodes.num_generating or not self.is_known:
            return limit
        left_s, token_s = self.targets.tpot_s - self.step_s(decodes), self.prompt_token_s
        most = left_s / token_s if token_s > 0 else float(limit)
        return min(limit, decodes.num_generating + int(max(MIN_CHUNK, min(most, limit))))

    @property
    def prompt_token_s(self) -> float:
        return float(self._solved()[1]) / 1e3

    def _solved(self) -> Array:
        if self._costs is None:
            self._costs = _not_negative(self._squares, self._sums)
        return self._costs


def _not_negative(squares: Array, sums: Array) -> Array:
    kept: Many[int] = range(len(sums))
    costs = np.zeros(len(sums))
    while kept:
        part = squares[np.ix_(kept, kept)]
        steady = part + RIDGE * max(float(part.diagonal().max()), 1e-300) * np.eye(len(kept))
        found = np.linalg.solve(steady, sums[list(kept)])
        if (found >= 0).all():
            costs[list(kept)] = found
            break
        kept = [place for place, cost in zip(kept, found, strict=True) if cost >= 0]
    return costs
