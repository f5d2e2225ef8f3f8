"""The time of a run: how much of its budget is left, and for what.

Owns the current stage and the estimates that the run has learned so far. The clock is an argument.
Search, evaluator and conclusion ask it; see `time_plan` for the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.optimizer.candidates import Stage
from penstock.optimizer.findings import Findings
from penstock.optimizer.plan import Plan
from penstock.optimizer.time_plan import OutOfTime, plan_time

MODEL_STAGES: tuple[Stage, ...] = ("compile", "precision", "quantise")
# Of a language model: the share of the time budget for the proof, and the least time that is worth
# starting a candidate or a proof.
PROOF_SHARE, MIN_TRY_S = 0.4, 20.0
# Share of the time left for candidates that one rate search may take, and its longest time.
SEARCH_SHARE, SEARCH_S = 0.4, 90.0
# Longest time of the process that computes likelihoods.
JUDGE_S = 1800.0


class TimeBudget:
    def __init__(
        self,
        plan: Plan,
        findings: Findings,
        clock: Callable[[], float],
        began: float | None = None,
        *,
        is_on_gpu: bool,
    ) -> None:
        self._plan = plan
        self._findings = findings
        self._is_on_gpu = is_on_gpu
        self.clock = clock
        self._began = clock() if began is None else began
        # The plan at the start, the same in a run that is resumed; and with the durations that were
        # learned since.
        self.planned = self.estimates = plan_time(plan, is_on_gpu=is_on_gpu)
        # The current stage, or "proof".
        self.stage: str = "baseline"
        # Time for facts and batch times of the original: a step takes at least as long.
        self.step_s = 0.0
        # Time from the start to the end of the baseline.
        self.baseline_s = 0.0
        # The current step runs to its end, whatever is left for steps.
        self.is_finishing = False

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self._began

    @property
    def left_s(self) -> float | None:
        """Seconds left of the time budget; None: no limit."""
        return None if self._plan.budget_s is None else self._plan.budget_s - self.elapsed_s

    # Estimates.

    def learn_judging(self, took_s: float) -> None:
        """Learn how long judging takes: the final check is expected to take as long."""
        self.estimates = self.estimates.with_judging(took_s)

    def learn_baseline(self, step_s: float, served_s: float) -> None:
        """Learn how long facts and batch times of the original took, and serving it."""
        self.step_s = step_s
        self.estimates = self.estimates.with_start(served_s)
        self.baseline_s = self.elapsed_s

    # What there is time for.

    @property
    def search_left_s(self) -> float | None:
        """Seconds left, without the time reserved for the end; None: no limit."""
        left_s = self.left_s
        if left_s is None:
            return None
        findings = self._findings
        if len(findings.tries) <= 1:
            # A one-round proof of a candidate is worth more than a long one of the original.
            return left_s - self.estimates.shortest_kept_s
        # On GPUs the last steps reach far more than the first ones, and servers stay up.
        is_near = not findings.contenders or findings.is_in_reach(self._plan)
        return left_s - self.estimates.kept_s(is_far=not self._is_on_gpu and not is_near)

    @property
    def stage_left_s(self) -> float | None:
        """How long a process of the current stage may run; None: no limit. Baseline and final check
        have none: without them there is no result. Serving may have to compile for its batches
        first; it may use the reserved time except that of the proof."""
        if self.stage in ("baseline", "proof"):
            return None
        search_left_s, left_s = self.search_left_s, self.left_s
        if search_left_s is None or left_s is None or self.stage in MODEL_STAGES:
            return search_left_s
        return max(search_left_s, left_s - self.estimates.shortest_proof_s)

    def has_search_time(self, needed_s: float) -> bool:
        left_s = self.search_left_s
        return left_s is None or left_s >= needed_s

    def check(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTime if this would use time reserved for finalists and proof."""
        if not self.has_search_time(needed_s):
            raise OutOfTime

    def check_part(self) -> None:
        """Raise OutOfTime between the parts of long work; only steps can be cut short."""
        if self.stage in MODEL_STAGES and not self.is_finishing:
            self.check()

    def has_time(self, needed_s: float) -> bool:
        """Return whether this fits before the shortest proof."""
        return self.left_s is None or self.left_s - self.estimates.shortest_proof_s >= needed_s

    def has_time_to_prove(self, num_builds: int) -> bool:
        """Return whether each can be served and measured once before the budget ends."""
        return self.left_s is None or self.left_s >= self.estimates.prove_s(num_builds, 1)

    def num_measurable(self, num_known: int, search_s: float, *, is_final: bool) -> float:
        """Return how many new builds there is time to serve beside `num_known` known ones. At the
        end, one new build is worth more than a long proof or the comparison with known ones."""
        time, left_s = self.estimates, self.left_s
        if left_s is None:
            return math.inf
        if not is_final:
            return time.num_in_turns(left_s - time.kept_s(), num_known, search_s)
        num = time.num_in_turns(left_s - time.proof_s, num_known, search_s)
        is_worth = left_s - time.shortest_proof_s >= time.in_turns_s(1, search_s)
        return max(num, 1 if is_worth and not num_known else 0)


class TextTime(TimeBudget):
    """The time of a language model's run. Every candidate is served when it is tried."""

    @property
    def for_candidates_s(self) -> float:
        """Seconds left for candidates, without the proof's share."""
        left_s, budget_s = self.left_s, self.planned.budget_s
        if left_s is None or budget_s is None:
            return math.inf
        return left_s - PROOF_SHARE * budget_s

    def has_time_to_try(self) -> bool:
        return self.for_candidates_s > MIN_TRY_S

    def has_time_to_prove(self, num_builds: int) -> bool:
        return self.left_s is None or self.left_s >= MIN_TRY_S

    def num_measurable(self, num_known: int, search_s: float, *, is_final: bool) -> float:
        """Return 0: nothing is served after an interruption."""
        return 0.0

    @property
    def search_s(self) -> float:
        """Seconds for one rate search."""
        return min(SEARCH_S, max(1.0, SEARCH_SHARE * self.for_candidates_s))

    @property
    def judge_s(self) -> float:
        """Seconds for the process that computes likelihoods."""
        return min(JUDGE_S, max(1.0, self.for_candidates_s))
