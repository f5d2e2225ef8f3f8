"""The time of a language model's run: how much is left for candidates, and for each part. Pure."""

from __future__ import annotations

import math

from penstock.optimizer.time_budget import TimeBudget

# Share of the time budget for the proof; least time that is worth starting a candidate or a proof.
PROOF_SHARE, MIN_TRY_S = 0.4, 20.0
# Share of the time left for candidates that one rate search may take, and its longest time.
SEARCH_SHARE, SEARCH_S = 0.4, 90.0
# Longest time of the process that computes likelihoods.
JUDGE_S = 1800.0


class TextTime(TimeBudget):
    @property
    def for_candidates_s(self) -> float:
        """Seconds left for candidates, without the proof's share."""
        left_s, budget_s = self.left_s, self.planned.budget_s
        if left_s is None or budget_s is None:
            return math.inf
        return left_s - PROOF_SHARE * budget_s

    def has_time_to_try(self) -> bool:
        """Return whether another candidate may start."""
        return self.for_candidates_s > MIN_TRY_S

    def has_time_to_prove(self, num_builds: int) -> bool:
        return self.left_s is None or self.left_s >= MIN_TRY_S

    def num_measurable(self, num_known: int, search_s: float, *, is_final: bool) -> float:
        """Return 0: every candidate is served when it is tried, and none after an interruption."""
        return 0.0

    @property
    def search_s(self) -> float:
        """Seconds for one rate search."""
        return min(SEARCH_S, max(1.0, SEARCH_SHARE * self.for_candidates_s))

    @property
    def judge_s(self) -> float:
        """Seconds for the process that computes likelihoods."""
        return min(JUDGE_S, max(1.0, self.for_candidates_s))
