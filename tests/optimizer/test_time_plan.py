"""A time budget is planned first, and holds: by arithmetic, and over simulated runs in which every
operation takes its time."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_evaluators import made_record
from test_optimizer_search import ON_SERVING, WISH, MadeLab, MadeLayers, MadePass, made_search

from penstock import slo
from penstock.optimizer import attempts, outcomes, time_plan
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.conclusion import TensorConclusion
from penstock.optimizer.facts import Facts
from penstock.optimizer.first_line import headline
from penstock.optimizer.numerics import Numerics
from penstock.optimizer.passes import PassContext
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.time_plan import CutOff, TimePlan, describe, plan_time

BUDGETS = (25.0, 60.0, 150.0, 600.0)
NUM_PROFILES = 200


def planned(budget_s: float | None, duration_s: float = 10.0, is_on_gpu: bool = False) -> TimePlan:
    plan = Plan("m", "m", "out", slo=WISH, budget_s=budget_s, duration_s=duration_s)
    return plan_time(plan, is_on_gpu=is_on_gpu)


# The plan.


def test_without_a_budget_everything_is_done_at_full_length() -> None:
    time = planned(None)
    assert (time.level_s, time.num_rounds, time.has_rates) == (10.0, 2, True)
    assert time.steps_s == float("inf")


def test_small_budgets_have_short_levels_and_large_ones_are_not_cut() -> None:
    assert [planned(each).level_s for each in BUDGETS] == [1.0, 2.0, 5.0, 10.0]
    assert planned(600.0, duration_s=4.0).level_s == 4.0
    assert planned(60.0, duration_s=0.5).level_s == 0.5


def test_what_a_larger_budget_adds() -> None:
    plans = [planned(each) for each in BUDGETS]
    assert [each.num_rounds for each in plans] == [1, 2, 2, 2]
    assert [each.has_rates for each in plans] == [False, False, False, True]


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_the_parts_add_up_to_the_budget(is_on_gpu: bool) -> None:
    for budget_s in range(60, 3600, 20):
        time = planned(float(budget_s), is_on_gpu=is_on_gpu)
        parts_s = time.open_s + time.serve_s() + time.kept_s()
        if time.steps_s > 0:
            assert parts_s + time.steps_s == pytest.approx(budget_s)
        else:
            assert parts_s >= budget_s


def test_a_minute_has_time_for_steps_and_for_a_proof_in_turns() -> None:
    time = planned(60.0)
    assert time.steps_s >= 10.0
    assert time.num_rounds == 2


def test_measured_starts_replace_what_was_assumed() -> None:
    time = planned(60.0)
    faster = time.with_start(time.serve_s() - 2.0)
    assert faster.start_s == pytest.approx(time.start_s - 2.0)
    assert faster.kept_s() < time.kept_s()
    # From a journal.
    assert time.with_start(0.01) == time


def test_the_final_check_is_kept_time_for() -> None:
    time = planned(60.0)
    assert time.with_judging(3.0).proof_s == pytest.approx(time.proof_s + 6.0)
    assert time.with_judging(3.0).with_judging(1.0).judge_s == 6.0


def test_costs_need_rates_in_every_measurement_and_short_searches_in_small_budgets() -> None:
    wish = slo.parse("p99 < 50ms, cost <= 2 per million at 200/s")
    plan = Plan("m", "m", "out", slo=wish, price_per_hour=1.0)
    assert plan_time(plan, is_on_gpu=False).cost_search_s == time_plan.SEARCH_S
    short = plan_time(replace(plan, budget_s=60.0), is_on_gpu=False)
    assert short.cost_search_s == time_plan.MIN_COST_SEARCH_S
    assert short.serve_s() > planned(60.0).serve_s() + time_plan.MIN_COST_SEARCH_S


def test_what_fits_is_told_in_one_line() -> None:
    plan = Plan("m", "m", "out", slo=WISH, budget_s=60.0)

    def told(budget_s: float | None) -> str:
        wish = replace(plan, budget_s=budget_s)
        return describe(plan_time(wish, is_on_gpu=False), wish, is_on_gpu=False)

    assert told(60.0) == (
        "budget 1 min: about 14 s for steps, levels of 2 s instead of 10 s, batch times with "
        "one instance only, no search for the highest rate (needs about 3 min)"
    )
    assert "no time is planned for steps" in told(25.0)
    assert "one round in the proof" in told(25.0)
    assert told(600.0) == "budget 10 min: about 6 min 35 s for steps"
    assert told(None) == ""


# Simulated runs.


class Profile:
    """What operations take, in seconds: as measured of a small ONNX model with two cores, or a
    multiple of that. Opening and baseline fit into the budget: they are always done."""

    def __init__(
        self, draw: random.Random, budget_s: float = 600.0, *, is_small: bool = False
    ) -> None:
        self.draw = draw
        scales = [each for each in (1.0, 1.0, 3.0, 8.0) if 12.0 * each <= budget_s]
        self.scale = 1.0 if is_small else draw.choice(scales)
        self.longest_build_s = 2.0 if is_small else draw.choice((5.0, 60.0))

    def __call__(self, low_s: float, high_s: float) -> float:
        return self.scale * self.draw.uniform(low_s, high_s)

    @property
    def build_s(self) -> float:
        return self.draw.uniform(0.1, self.longest_build_s)


def predict(
    situation: PassContext, *, is_thorough: bool = False
) -> list[tuple[tuple[Step, ...], float]]:
    """In place of the simulation of servers: one and two instances, the second no better."""
    alone_s = min(table.seconds[0][1] for table in situation.times.values())
    serving = [
        (Step("batching"), Step("instances", {"instances": each, "threads": "1"})) for each in "12"
    ]
    return [(serving[0], 1 / alone_s), (serving[1], 0.9 / alone_s)]


@pytest.fixture(autouse=True)
def simple_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "shapes", predict)


class SlowLab(MadeLab):
    """Each answer takes its time on the clock; limits are kept as by the real lab."""

    def __init__(self, plan: Plan, profile: Profile, row_ms: dict[str, float]) -> None:
        super().__init__(row_ms, plan)
        self.profile_of = profile
        self.time = plan_time(plan, is_on_gpu=False)
        self.operations: list[float] = []
        self.proven = 0
        self.start_s = profile(0.5, 3.0)
        self.subject = SimpleNamespace(text="", digest="")
        self.notes: list[str] = []
        self.data = self
        self.samples = SimpleNamespace(text="")
        self.budget = "top1 drop <= 1 %"
        self.ensemble = None
        self.unchecked: list[str] = []
        path = Path("work/journal.jsonl")
        self.journal = SimpleNamespace(path=path, forget=lambda kinds: None)

    def spend(self, seconds: float) -> None:
        self.clock.now += seconds
        self.operations.append(seconds)

    def build(self, candidate: Candidate) -> Build:
        is_new = candidate.key not in self.built
        build = super().build(candidate)
        if is_new and candidate.steps and candidate.steps[-1].pass_name not in ("batching",):
            self._make(candidate)
        return build

    def _make(self, candidate: Candidate) -> None:
        if candidate.steps[-1].pass_name == "instances":
            self.spend(0.01)
        elif candidate.steps[-1].pass_name == "pieces":
            for _ in range(6):
                self.time_budget.check_part()
                self.spend(self.profile_of.build_s / 6)
        else:
            # A child process: at most half of what is left.
            left_s = self.time_budget.stage_left_s
            limit_s = float("inf") if left_s is None else max(20.0, left_s / 2)
            build_s = self.profile_of.build_s
            self.spend(min(limit_s, build_s))
            if build_s > limit_s:
                raise CutOff("compiling it takes too long")

    def facts(self, build: Build) -> Facts:
        self.spend(self.profile_of(0.3, 0.6) if build.candidate.steps else 0.4)
        return super().facts(build)

    def numerics(self, build: Build, *, is_exact: bool) -> Numerics:
        self.spend(self.profile_of(0.3, 0.6))
        return super().numerics(build, is_exact=is_exact)

    def judge(self, build: Build, part: str, alpha: float = 0.05) -> Judgement:
        self.spend((1 if part == "choice" else 2) * self.profile_of(0.3, 0.6))
        return super().judge(build, part, alpha)

    def check_served(self, build: Build, *, is_lossy: bool) -> str:
        return ""

    def judge_lossless(self, build: Build, part: str, alpha: float) -> Judgement:
        return self.judge(build, part, alpha)

    def times(self, build: Build, num_instances: int, num_threads: int) -> TimeTable:
        self.spend(self.profile_of(1.0, 3.0))
        return super().times(build, num_instances, num_threads)

    def profile(self, build: Build) -> None:
        self.spend(self.profile_of(5.0, 8.0))
        super().profile(build)

    def serve(self, builds: Sequence[Build]) -> list[ServedMeasurement]:
        left_s = self.time_budget.stage_left_s
        self._serve(len(builds), 1 if len(builds) == 1 else self.time.num_rounds, left_s)
        return super().serve(builds)

    def _serve(self, num_builds: int, num_rounds: int, left_s: float | None) -> None:
        ends_at = float("inf") if left_s is None else self.clock.now + left_s
        spent_s = num_builds * self.start_s
        round_s = num_builds * (time_plan.level_cost_s(self.time.level_s) - self.draw_s(0.0, 0.8))
        for number in range(num_rounds):
            left_s = ends_at - (self.clock.now + spent_s)
            if number and left_s < num_builds * time_plan.level_cost_s(self.time.level_s):
                break
            spent_s += round_s
        self.spend(spent_s)

    def draw_s(self, low_s: float, high_s: float) -> float:
        return self.profile_of.draw.uniform(low_s, high_s)

    def with_rates(self, builds: Sequence[Build], search_s: float) -> list[ServedMeasurement]:
        left_s = self.time_budget.stage_left_s
        assert left_s is not None
        self.spend(len(builds) * max(0.0, min(search_s, left_s / len(builds))))
        return super().with_rates(builds, search_s)

    def prove(
        self, builds: Sequence[Build], left_s: float | None, attempt: int
    ) -> list[ServedMeasurement]:
        assert left_s is not None
        began = self.clock.now
        self.proven += 1
        self._serve(len(builds), self.time.num_rounds, left_s)
        search_s = (left_s - (self.clock.now - began)) / len(builds) - time_plan.PROBE_COST_S
        if self.time.has_rates and search_s >= time_plan.MIN_SEARCH_S:
            self.spend(len(builds) * (min(time_plan.SEARCH_S, search_s) + 3.0))
        return [self._served(build) for build in builds]

    def clipped(self, build: Build) -> dict[str, float]:
        return {}


PASSES = (
    MadePass("child", "compile", ("a", "b")),
    MadePass("other", "compile"),
    MadePass("half", "precision", changes_answers=True),
    MadeLayers("pieces", "quantise", ("a", "b", "c"), changes_answers=True),
)
STEPS = ("child(s=a)", "child(s=b)", "other", "half", "pieces(s=a)", "pieces(s=b)", "pieces(s=c)")


def simulated(budget_s: float, profile: Profile) -> tuple[SlowLab, Optimization, float]:
    """A whole run, from opening to commit; what it took."""
    draw = profile.draw
    plan = Plan("m", "m", "out", slo=WISH, budget_s=budget_s)
    factors = {name: draw.uniform(0.3, 1.2) for name in STEPS}
    original_ms = draw.choice((6.0, 20.0, 90.0))
    rows = {"original": original_ms} | {name: original_ms * each for name, each in factors.items()}
    lab = SlowLab(plan, profile, rows)
    lab.served_rates = {"original": 100.0}
    lab.losses = {name: draw.choice((0.0, 0.0, 0.3)) for name in STEPS if "pieces" in name}
    passes = [*PASSES, MadePass("batching", "batching"), MadePass("instances", "instances")]
    run = made_search(lab, lambda progress: None, passes, began=0.0)
    lab.spend(profile(0.5, 1.5))
    judge_s = profile(0.5, 1.0)
    lab.spend(judge_s)
    run.budget.learn_judging(judge_s)
    run.run()
    found = made_record(lab, run.findings)
    TensorConclusion(lab, run, found).conclude()  # type: ignore[arg-type]
    lab.spend(0.5)
    return lab, found, lab.clock.now


@pytest.mark.parametrize("budget_s", BUDGETS)
def test_a_budget_holds_to_ten_percent_and_one_measurement(budget_s: float) -> None:
    for seed in range(NUM_PROFILES):
        lab, _, took_s = simulated(budget_s, Profile(random.Random(seed), budget_s))
        assert took_s <= 1.1 * budget_s + max(lab.operations), f"seed {seed}"


def test_a_minute_is_enough_for_a_step_and_a_proof_of_a_small_model() -> None:
    for seed in range(NUM_PROFILES):
        lab, found, took_s = simulated(60.0, Profile(random.Random(seed), is_small=True))
        steps = [each for each in found.tries if each.candidate.steps and each.stage != "batching"]
        assert steps, f"seed {seed}"
        assert lab.proven, f"seed {seed}"
        assert took_s <= 66.0, f"seed {seed}"


def test_a_budget_that_is_too_small_says_what_did_not_fit() -> None:
    lab, found, took_s = simulated(12.0, Profile(random.Random(1), is_small=True))
    assert found.chosen == Candidate()
    (note,) = [each for each in found.notes if "no step was completed" in each]
    assert "use --budget 30s or more" in note
    assert took_s <= 1.1 * 12.0 + max(lab.operations)


def test_ten_minutes_are_used_for_steps_and_rates() -> None:
    lab, found, _ = simulated(600.0, Profile(random.Random(5), is_small=True))
    assert {str(each.candidate.steps[-1]) for each in found.tries[1:]} >= {"other", "half"}
    assert lab.proven
    assert not any("no step" in each for each in found.notes)


def test_a_proof_is_begun_only_where_one_round_fits() -> None:
    plan = Plan("m", "m", "out", slo=WISH, budget_s=60.0)
    lab = SlowLab(plan, Profile(random.Random(0), is_small=True), {"original": 20.0})
    run = made_search(lab, lambda progress: None, [])
    needed_s = planned(60.0).prove_s(2, 1)
    lab.clock.now = 60.0 - needed_s
    assert run.budget.has_time_to_prove(2)
    lab.clock.now += 0.1
    assert not run.budget.has_time_to_prove(2)
    assert run.budget.has_time_to_prove(1)


def test_a_step_that_is_cut_off_between_two_pieces_is_listed_as_skipped() -> None:
    plan = Plan("m", "m", "out", slo=WISH, budget_s=60.0)
    passes = [MadePass("pieces", "compile"), MadePass("batching", "batching")]
    profile = Profile(random.Random(0), is_small=True)
    profile.longest_build_s = 1e4
    lab = SlowLab(plan, profile, {"original": 20.0, "pieces": 1.0})
    passes.append(MadePass("instances", "instances"))
    run = made_search(lab, lambda progress: None, passes)
    found = run.run()
    assert found.is_out_of_time
    assert [(each.step, each.reason) for each in found.skipped if each.step] == [
        (Step("pieces"), "cut off by the time budget")
    ]


def test_a_step_whose_process_is_cut_off_has_not_failed() -> None:
    plan = Plan("m", "m", "out", slo=WISH, budget_s=120.0)
    profile = Profile(random.Random(0), is_small=True)
    profile.longest_build_s = 1e4
    lab = SlowLab(plan, profile, {"original": 20.0, "other": 1.0})
    passes = [MadePass("other", "compile"), *(MadePass(each, each) for each in ON_SERVING)]
    run = made_search(lab, lambda progress: None, passes)
    run.run()
    found = made_record(lab, run.findings)
    TensorConclusion(lab, run, found).conclude()  # type: ignore[arg-type]
    (step,) = [each for each in found.tries if each.stage == "compile"]
    assert step.outcome == "cut off"
    assert step.reason == "cut off by the time budget: compiling it takes too long"
    assert outcomes.BUDGET_ENDED in found.notes
    line = headline(found)
    assert "not finished (cut off by the time budget): other" in line
    assert "failed" not in line


def test_a_short_budget_on_a_gpu_is_spent_on_steps() -> None:
    """210 s for ResNet-50: FP16, graphs and fusion, and a proof without the search for rates."""
    plan = Plan("m", "m", "out", slo=WISH, budget_s=210.0, duration_s=5.0)
    time = plan_time(plan, is_on_gpu=True)
    assert not time.has_rates
    assert time.steps_s > 60.0
    assert plan_time(replace(plan, budget_s=540.0), is_on_gpu=True).has_rates


def test_a_run_on_a_gpu_ends_within_ten_minutes() -> None:
    plan = Plan("m", "m", "out", slo=WISH)
    limited = time_plan.limited(plan, is_on_gpu=True)
    # What it takes to start and to write the version comes on top.
    assert limited.budget_s is not None and limited.budget_s <= 570.0
    time = plan_time(limited, is_on_gpu=True)
    # For five steps, two of which tune or compile.
    assert time.steps_s > sum(time_plan.LONG_ON_GPU_S.values()) + 3 * 20.0


@pytest.mark.parametrize(
    ("changed", "is_on_gpu"),
    [({}, False), ({"budget_s": 1800.0}, True), ({"is_exhaustive": True}, True)],
)
def test_a_plan_keeps_the_budget_that_was_given(changed: dict[str, Any], is_on_gpu: bool) -> None:
    plan = Plan("m", "m", "out", slo=WISH, **changed)
    assert time_plan.limited(plan, is_on_gpu=is_on_gpu) is plan
