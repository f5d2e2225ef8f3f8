"""How a time budget is spent: planned once at the start, then checked against the clock.

`TimePlan` owns the arithmetic: how long one load is measured, how many rounds the proof has,
whether highest rates are searched for, how much time is reserved for finalists and proof.
`TimeBudget` owns the current stage and what the run has learned. The clock is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.errors import BackendFailed
from penstock.optimizer import wording
from penstock.optimizer.candidates import Stage
from penstock.optimizer.findings import Findings
from penstock.optimizer.plan import Plan

# One level takes at most this share of the budget: 2 s of 60 s.
LEVEL_SHARE = 1 / 30
MIN_LEVEL_S = 1.0
# Longest warm-up before a level, and its longest share of the level.
WARM_UP_S = 3.0
WARM_UP_SHARE = 0.5
# Per level besides warm-up and measurement: the generator starts, the last answers arrive. 0.5 s
# with a small ONNX model (2 cores, 2026-11).
LEVEL_OVERHEAD_S = 1.0
# Start of one server until it is measured: 1.5 s with a small ONNX model (2 cores, 2026-11). On a
# GPU the import of torch and the device context take most of it.
START_S, START_ON_GPU_S = 3.0, 25.0
# Before the original is served: open the model, audit the data, batch times. 5 s for small ONNX.
OPEN_S, OPEN_ON_GPU_S = 8.0, 40.0
# Commit and report.
CLOSE_S = 2.0
NUM_ROUNDS = 2
# Search for the highest rate of one build: the longest, the shortest that is useful, and the time
# of the probe before it.
SEARCH_S, MIN_SEARCH_S, PROBE_COST_S = 60.0, 20.0, 4.0
# The same if the SLO has a cost term, so that every served measurement needs a search.
COST_SHARE, MIN_COST_SEARCH_S = 1 / 12, 5.0
# Proofs with two rounds and with highest rates may take at most these shares of the budget.
ROUNDS_SHARE, RATES_SHARE = 0.45, 0.55
# Shares of a budget with highest rates that are reserved for finalists and proof; the second if the
# SLO is out of reach, so that finalists are compared by their highest rates.
RESERVE, RESERVE_FOR_RATES = 0.3, 0.5
# A profile takes 7 s on a CPU; it must not use up the time for steps.
PROFILE_S = 30.0
# Profile of a kept step on a GPU: a few batches under the profiler, in the process that has it
# loaded.
STEP_PROFILE_S = 8.0
# What passes take on a GPU beyond the load and the batch times of a candidate: they time or compile
# kernels. Cheaper passes come first, so that they are not out of time. ResNet-50, H200, 2026-11.
LONG_ON_GPU_S: Mapping[str, float] = {"conv-fusion": 45.0, "torch-compile": 90.0}
# Proofs with highest rates on a GPU may take at most this share: each step there brings more.
RATES_SHARE_ON_GPU = 0.3
# Time budget on a GPU unless one is given.
BUDGET_ON_GPU_S = 540.0
# Granularity of the budgets that messages suggest.
SUGGESTED_S = 30.0
MODEL_STAGES: tuple[Stage, ...] = ("compile", "precision", "quantise")
# Of a language model: the share of the time budget for the proof, and the least time that is worth
# starting a candidate or a proof.
PROOF_SHARE, MIN_TRY_S = 0.4, 20.0
# Share of the time left for candidates that one rate search may take, and its longest time.
SEARCH_SHARE, TEXT_SEARCH_S = 0.4, 90.0
# Longest time of the process that computes likelihoods.
JUDGE_S = 1800.0


class OutOfTime(Exception):
    """The time for the current part of the run is used up."""


class TookTooLong(BackendFailed):
    """No answer within the time limit: it may hang."""


class CutOff(TookTooLong):
    """The time budget ended first: with a larger one it may succeed."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    """Time plan of one run. Durations of measurements are estimates: they begin as assumptions, and
    `with_start` and `with_judging` replace them by measured ones."""

    # None: no limit.
    budget_s: float | None
    # Longest measurement of one load.
    level_s: float
    # Rounds of alternating measurements.
    num_rounds: int
    # Whether the highest rates of original and choice are searched for.
    has_rates: bool
    # Search for the highest rate in every served measurement; 0: none.
    cost_search_s: float
    open_s: float
    start_s: float
    # Whether servers stay up between measurements, so that the proof starts none.
    keeps_servers: bool
    # The final check on the held-out set.
    judge_s: float = 0.0

    @property
    def is_short(self) -> bool:
        """Whether the budget has room only for the most important measurements: no highest rates;
        on a CPU, candidates are timed with one instance and at few lengths."""
        return not self.has_rates

    def serve_s(self, num_builds: int = 1, num_rounds: int = 1) -> float:
        """Return the expected duration of a served measurement, including the starts of servers."""
        rate_s = self.cost_search_s + PROBE_COST_S if self.cost_search_s else 0.0
        return num_builds * (self.start_s + num_rounds * level_cost_s(self.level_s) + rate_s)

    def in_turns_s(self, num_builds: int, search_s: float = 0.0) -> float:
        """Return the expected duration of several builds in turns, or of one alone; `search_s` is
        the search for the highest rate of each, after one round."""
        if search_s:
            return self.serve_s(num_builds) + num_builds * (search_s + PROBE_COST_S)
        return self.serve_s(num_builds, 1 if num_builds == 1 else self.num_rounds)

    def num_in_turns(self, left_s: float, num_known: int, search_s: float = 0.0) -> int:
        """Return how many builds fit into this time, in turns with `num_known` others."""
        num = 0
        while self.in_turns_s(num_known + num + 1, search_s) <= left_s:
            num += 1
        return num

    @property
    def close_s(self) -> float:
        """Reserved for what always comes last."""
        return self.judge_s + CLOSE_S

    def prove_s(self, num_builds: int, num_rounds: int) -> float:
        """Return the expected duration of a proof at the SLO's load."""
        started_s = num_builds * self.start_s if self.keeps_servers else 0.0
        return self.serve_s(num_builds, num_rounds) - started_s

    @property
    def shortest_proof_s(self) -> float:
        """Time to measure original and choice once each."""
        return self.prove_s(2, 1) + self.close_s

    @property
    def proof_s(self) -> float:
        rates_s = 2 * (MIN_SEARCH_S + PROBE_COST_S) if self.has_rates else 0.0
        return self.prove_s(2, self.num_rounds) + rates_s + self.close_s

    @property
    def shortest_kept_s(self) -> float:
        """The minimum time of finalists and proof."""
        return self.serve_s() + self.shortest_proof_s

    def kept_s(self, *, is_far: bool = False) -> float:
        """Return the time kept for finalists and proof. `is_far`: the SLO is out of reach."""
        needed_s = self.serve_s() + self.proof_s
        if self.budget_s is None or not self.has_rates:
            return needed_s
        return max(needed_s, (RESERVE_FOR_RATES if is_far else RESERVE) * self.budget_s)

    @property
    def steps_s(self) -> float:
        """Time left for steps; infinite without a budget."""
        if self.budget_s is None:
            return math.inf
        baseline_s = self.open_s + self.serve_s()
        return max(0.0, self.budget_s - baseline_s - self.kept_s())

    def with_start(self, took_s: float) -> TimePlan:
        """Learn the start time, after one server was started and measured once. A measurement from
        the journal takes no time, and is ignored."""
        start_s = took_s - (self.serve_s() - self.start_s)
        return replace(self, start_s=start_s) if start_s > 0 else self

    def with_judging(self, took_s: float) -> TimePlan:
        """Learn the judging time: the final check runs both the original and the choice."""
        return replace(self, judge_s=max(self.judge_s, 2 * took_s))


@dataclass(frozen=True, slots=True)
class MeasurementLimits:
    num_rounds: int = NUM_ROUNDS
    # Longest search for the highest rate of one build; 0: none.
    search_s: float = SEARCH_S
    # Seconds in which measurements may still begin.
    left_s: Callable[[], float] = lambda: math.inf


def limited(plan: Plan, *, is_on_gpu: bool) -> Plan:
    """Return the plan with the default budget of a GPU, unless one is given or every step is to be
    tried: compilers alone could take hours there."""
    if not is_on_gpu or plan.budget_s is not None or plan.is_exhaustive:
        return plan
    return replace(plan, budget_s=BUDGET_ON_GPU_S)


def plan_time(plan: Plan, *, is_on_gpu: bool) -> TimePlan:
    """Plan the time. Depends only on its arguments: the same command resumes with the same plan."""
    budget_s = plan.budget_s
    whole = TimePlan(
        budget_s=budget_s,
        level_s=plan.duration_s,
        num_rounds=NUM_ROUNDS,
        has_rates=True,
        cost_search_s=SEARCH_S if plan.has_cost_limit else 0.0,
        open_s=OPEN_ON_GPU_S if is_on_gpu else OPEN_S,
        start_s=START_ON_GPU_S if is_on_gpu else START_S,
        keeps_servers=is_on_gpu,
    )
    if budget_s is None:
        return whole
    fitted = replace(whole, level_s=min(plan.duration_s, max(MIN_LEVEL_S, LEVEL_SHARE * budget_s)))
    if plan.has_cost_limit:
        search_s = min(SEARCH_S, max(MIN_COST_SEARCH_S, COST_SHARE * budget_s))
        fitted = replace(fitted, cost_search_s=search_s)
    if fitted.proof_s > (RATES_SHARE_ON_GPU if is_on_gpu else RATES_SHARE) * budget_s:
        fitted = replace(fitted, has_rates=False)
    if not fitted.has_rates and fitted.proof_s > ROUNDS_SHARE * budget_s:
        fitted = replace(fitted, num_rounds=1)
    return fitted


def warm_up_s(level_s: float) -> float:
    return min(WARM_UP_S, WARM_UP_SHARE * level_s)


def level_cost_s(level_s: float) -> float:
    return level_s + warm_up_s(level_s) + LEVEL_OVERHEAD_S


def smallest_budget_s(needed_s: float) -> float:
    """Round up to a budget to suggest."""
    return SUGGESTED_S * math.ceil(needed_s / SUGGESTED_S)


def describe(time: TimePlan, plan: Plan, *, is_on_gpu: bool) -> str:
    """Describe in one line what fits into the budget; empty without one."""
    if time.budget_s is None:
        return ""
    steps = f"about {_span(time.steps_s)} for steps"
    parts = [steps if time.steps_s >= 1 else "no time is planned for steps"]
    if time.level_s < plan.duration_s:
        parts.append(f"levels of {time.level_s:.2g} s instead of {plan.duration_s:g} s")
    if time.num_rounds < NUM_ROUNDS:
        parts.append("one round in the proof")
    if not time.has_rates:
        needed_s = SUGGESTED_S
        while not plan_time(replace(plan, budget_s=needed_s), is_on_gpu=is_on_gpu).has_rates:
            needed_s += SUGGESTED_S
        if not is_on_gpu:
            parts.append("batch times with one instance only")
        parts.append(f"no search for the highest rate (needs about {_span(needed_s)})")
    return f"budget {_span(time.budget_s)}: {', '.join(parts)}"


def _span(seconds: float) -> str:
    """Format seconds: `40 s`, `2 min`, `2 min 30 s`."""
    return wording.span(seconds).removesuffix(" 0 s")


@dataclass(slots=True)
class TimeBudget:
    plan: Plan
    findings: Findings
    clock: Callable[[], float]
    # Seconds of the clock when the run began.
    began: float
    is_on_gpu: bool = field(kw_only=True)
    # The plan at the start, the same in a run that is resumed; and with the durations that were
    # learned since.
    planned: TimePlan = field(init=False)
    estimates: TimePlan = field(init=False)
    # The current stage, or "proof".
    stage: str = "baseline"
    # Time for facts and batch times of the original: a step takes at least as long.
    step_s: float = 0.0
    # Time from the start to the end of the baseline.
    baseline_s: float = 0.0
    # The current step runs to its end, whatever is left for steps.
    is_finishing: bool = False

    def __post_init__(self) -> None:
        self.planned = self.estimates = plan_time(self.plan, is_on_gpu=self.is_on_gpu)

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    @property
    def left_s(self) -> float | None:
        """Seconds left of the time budget; None: no limit."""
        return None if self.plan.budget_s is None else self.plan.budget_s - self.elapsed_s

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
        findings = self.findings
        if len(findings.tries) <= 1:
            # A one-round proof of a candidate is worth more than a long one of the original.
            return left_s - self.estimates.shortest_kept_s
        # On GPUs the last steps reach far more than the first ones, and servers stay up.
        is_near = not findings.contenders or findings.is_in_reach(self.plan)
        return left_s - self.estimates.kept_s(is_far=not self.is_on_gpu and not is_near)

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
        return min(TEXT_SEARCH_S, max(1.0, SEARCH_SHARE * self.for_candidates_s))

    @property
    def judge_s(self) -> float:
        """Seconds for the process that computes likelihoods."""
        return min(JUDGE_S, max(1.0, self.for_candidates_s))
