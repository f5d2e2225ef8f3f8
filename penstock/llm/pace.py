"""How long steps take, learnt from those that ran, and what follows from it: how many tokens of
prompts a step may compute without keeping those that generate waiting, and when a request that
comes now would have its first token.

Pure: times are told. A step takes a while by itself, and then for each token of a prompt, for each
sequence that generates, and for each token of context that these read.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from penstock.types import Array

# Steps after which one counts half: the machine, or what is asked, may change.
HALF_LIFE = 200
# Before so many nothing is known.
MIN_STEPS = 8
# Of prompts, however slow the others are: somebody who waits gets on.
MIN_CHUNK = 16
# Of what is measured: what cannot be told apart is shared out, and nothing is divided by zero.
RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes."""

    num_prompt_tokens: int
    num_generating: int
    # Of those that generate, all together.
    num_context_tokens: int = 0

    @property
    def features(self) -> Array:
        """Of about the same size, for the sake of the arithmetic."""
        return np.array(
            [
                1.0,
                self.num_prompt_tokens / 1e3,
                self.num_generating / 1e2,
                self.num_context_tokens / 1e5,
            ]
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None where nothing was promised."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(slots=True)
class Pace:
    """Least squares, in which older steps count less and less. Nothing takes less than no time:
    what comes out negative is left out, and the rest found again."""

    targets: Targets = Targets()
    num_steps: int = 0
    _squares: Array = field(default_factory=lambda: np.zeros((4, 4)))
    _sums: Array = field(default_factory=lambda: np.zeros(4))
    _costs: Array | None = None

    def add(self, work: Work, took_s: float) -> None:
        features = work.features
        keep = 0.5 ** (1 / HALF_LIFE)
        # Relative errors count: a long step is not more true than a short one.
        weight = 1 / max(took_s, 1e-6) ** 2
        self._squares = keep * self._squares + weight * np.outer(features, features)
        self._sums = keep * self._sums + weight * took_s * features
        self._costs = None
        self.num_steps += 1

    @property
    def is_known(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def step_s(self, work: Work) -> float:
        return float(self._solved() @ work.features)

    def max_tokens(self, num_generating: int, num_context_tokens: int, limit: int) -> int:
        """Of a step in which so many generate: as many as keep the promise on time per token, and
        at most the limit."""
        if self.targets.tpot_s is None or not num_generating or not self.is_known:
            return limit
        left_s = self.targets.tpot_s - self.step_s(Work(0, num_generating, num_context_tokens))
        per_token_s = float(self._solved()[1]) / 1e3
        most = left_s / per_token_s if per_token_s > 0 else float(limit)
        chunk = max(float(MIN_CHUNK), min(most, float(limit)))
        return min(limit, num_generating + int(chunk))

    def first_token_s(self, num_tokens_before: int, num_prompt: int, running: Work) -> float:
        """Until the first token of a prompt of so many that comes now, behind so many of others',
        while so many generate."""
        limit = max(1, num_tokens_before + num_prompt)
        budget = self.max_tokens(running.num_generating, running.num_context_tokens, limit)
        chunk = max(1, budget - running.num_generating)
        num_steps = -(-(num_tokens_before + num_prompt) // chunk)
        whole = Work(0, running.num_generating, running.num_context_tokens)
        per_token_s = float(self._solved()[1]) / 1e3
        return num_steps * self.step_s(whole) + (num_tokens_before + num_prompt) * per_token_s

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
