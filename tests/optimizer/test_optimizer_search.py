"""The loop by itself: a laboratory that makes things up, so that every turn can be forced."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock import slo
from penstock.benchmark.stats import Interval
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed
from penstock.optimizer import simulate
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import STAGES, Build, Candidate, Skip, Step
from penstock.optimizer.evaluator import KeptLayers
from penstock.optimizer.facts import Facts
from penstock.optimizer.findings import Findings, arrangement
from penstock.optimizer.machine import Machine
from penstock.optimizer.numerics import Numerics
from penstock.optimizer.passes import Pass, PassContext
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import Progress, ProgressReporter, stages_of
from penstock.optimizer.results import FallbackLayer, ServedMeasurement, TermVerdict
from penstock.optimizer.search import Search
from penstock.optimizer.shapes import with_batching
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.time_plan import TimeBudget
from penstock.profiling.results import StepTime
from penstock.types import TensorSpec

WISH = slo.parse("p99 < 50ms at 200/s")
MACHINE = Machine("a processor", 1, 1 << 30, ("avx2",))
ROW = {"x": np.zeros(4, np.float32)}


# Steps that change nothing but how a model is served.
ON_SERVING = ("batching", "instances")


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates here differ by far more than simulations of this length do."""
    monkeypatch.setattr(simulate, "NUM_REQUESTS", 500)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MadePass(Pass):
    """Proposes these settings, each as a step, whatever the situation."""

    name: str
    stage: str
    settings: Sequence[str] = ("",)
    changes_answers: bool = False
    is_config_only: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)

    def propose(self, situation: PassContext) -> list[Step | Skip]:
        return [Step(self.name, {"s": each} if each else {}) for each in self.settings]

    def build(self, *_: object) -> None:
        raise AssertionError("the laboratory builds")

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        return [self.problems[key] for key in [step.settings.get("s", "")] if key in self.problems]


class MadeLayers(MadePass):
    """Some of its layers may stay in float."""

    def fall_back(self, *_: object) -> None:
        raise AssertionError("the laboratory finds them")


class MadeLab:
    """A row takes `row_ms` by the last step of a candidate; what is served does as `served_rate`
    says, or as predicted."""

    def __init__(self, row_ms: Mapping[str, float], plan: Plan) -> None:
        # It is all of its parts.
        self.run = self.builder = self.inspector = self.gate = self.measurements = self
        self.plan = plan
        self.machine = MACHINE
        self.row_ms = row_ms
        self.served_rates: dict[str, float] = {}
        self.highest_rates: dict[str, float] = {}
        self.rated: list[str] = []
        self.losses: dict[str, float] = {}
        self.broken: set[str] = set()
        self.differing: set[str] = set()
        self.unsteady: set[str] = set()
        # What "faster" tells of its nodes.
        self.on_cpu: dict[str, str] = {}
        self.unservable: set[str] = set()
        self.kept = KeptLayers()
        self.examples: object | None = object()
        self.rows = [ROW]
        self.clock = Clock()
        # Of the search that asks; see `made_search`.
        self.time_budget: TimeBudget
        # Of the first build of a model.
        self.try_s = 0.0
        self.built: set[str] = set()
        self.interrupt_at = ""
        self.served: list[str] = []
        self.device = "cpu"
        self.spread: Sequence[str] = ()
        self.options: dict[str, dict[str, str]] = {}
        self.memory_bytes = 0
        self.asked: list[str] = []
        self.instances: list[int] = []

    @property
    def original(self) -> Build:
        return self.build(Candidate())

    def build(self, candidate: Candidate) -> Build:
        if last(candidate) in self.broken:
            raise BackendFailed("it does not build")
        if last(candidate) == self.interrupt_at and self.interrupt_at:
            raise KeyboardInterrupt
        is_model = bool(candidate.steps) and candidate.steps[-1].pass_name not in ON_SERVING
        if is_model and candidate.key not in self.built:
            self.clock.now += self.try_s
        self.built.add(candidate.key)
        tensors = (TensorSpec("x", "FP32", (4,)),)
        batching = BatchPolicy(8, is_dynamic=True)
        backend = "null" if self.device == "cpu" else "pytorch"
        options = self.options.get(model_step(candidate), {})
        config = ModelConfig("m", "1", backend, "", tensors, tensors, 8, batching, options=options)
        config = config.on(self.spread) if self.spread else replace(config, device=self.device)
        return Build(candidate, Path("m"), config)

    def facts(self, build: Build) -> Facts:
        problem = "example 3 moved" if last(build.candidate) in self.unsteady else ""
        built = self.on_cpu if last(build.candidate) == "faster" else {}
        return Facts("null", built=dict(built), repeat_problem=problem)

    def numerics(self, build: Build, *, is_exact: bool) -> Numerics:
        self.asked.append(f"numerics {last(build.candidate)} {is_exact}")
        problems = ["too far off"] if last(build.candidate) in self.differing else []
        return Numerics(1, True, True, 0.0, 0.0, 1.0, problems=problems)

    def judge(self, build: Build, part: str, alpha: float = 0.05) -> Judgement:
        self.asked.append(f"accuracy {last(build.candidate)}")
        loss = self.losses.get(last(build.candidate), 0.0)
        text = f"loss {loss}"
        return Judgement(
            "top1", 0.9, 0.9 - loss, loss, loss, 0.01, 100, 0, 0, "", 0.05, loss <= 0.01, text=text
        )

    def times(self, build: Build, num_instances: int, num_threads: int) -> TimeTable:
        self.asked.append(f"times {last(build.candidate)}")
        self.instances.append(num_instances)
        row_s = self.row_ms[model_step(build.candidate)] / 1e3
        seconds = {0: {1: row_s, 8: 8 * row_s}}
        return TimeTable(num_instances, num_threads, seconds, memory_bytes=self.memory_bytes)

    def profile(self, build: Build) -> None:
        self.asked.append("profile")
        raise BackendFailed("nothing to profile")

    def step_time(self, build: Build, num_rows: int) -> StepTime:
        self.asked.append(f"step time {last(build.candidate)}")
        row_s = self.row_ms[model_step(build.candidate)] / 1e3
        return StepTime(num_rows, {"matrix kernel": num_rows * row_s}, 5, row_s, 0.0, 0.0, 0.0)

    def fall_back(self, parent: Build, step: Step, check_time: Callable[[], None]) -> KeptLayers:
        check_time()
        self.asked.append("fall back")
        return self.kept

    def serve(self, builds: Sequence[Build]) -> list[ServedMeasurement]:
        if any(model_step(build.candidate) in self.unservable for build in builds):
            raise BackendFailed("it does not start")
        self.served += [str(build.candidate) for build in builds]
        return [self._served(build) for build in builds]

    def with_rates(self, builds: Sequence[Build], search_s: float) -> list[ServedMeasurement]:
        self.rated += [model_step(build.candidate) for build in builds]
        rates = [self.highest_rates.get(model_step(each.candidate), math.nan) for each in builds]
        return [
            msgspec.structs.replace(each, max_rate=near(rate))
            for each, rate in zip(self.serve(builds), rates, strict=True)
        ]

    def _served(self, build: Build) -> ServedMeasurement:
        name = model_step(build.candidate)
        rate = self.served_rates.get(name, 1e3 / self.row_ms[name])
        p99_s = 0.01 * 200 / rate if rate >= 200 else 1.0
        verdict = TermVerdict(
            "p99 < 50ms", "kept" if rate >= 200 else "missed", near(p99_s), 0.05, "s"
        )
        return ServedMeasurement(
            "200/s", near(p99_s / 2), near(p99_s), near(rate), 1.0, [verdict], 100, 0, {}, 1.0, 0
        )


def near(value: float) -> Interval:
    return Interval(value, value * 0.99, value * 1.01)


def last(candidate: Candidate) -> str:
    return str(candidate.steps[-1]) if candidate.steps else "original"


def model_step(candidate: Candidate) -> str:
    """The last step that is not about serving."""
    names = [str(each) for each in candidate.steps if each.pass_name not in ON_SERVING]
    return names[-1] if names else "original"


SERVING = [MadePass("batching", "batching"), MadePass("instances", "instances")]


def made_search(
    lab: MadeLab,
    watch: Callable[[Progress], None],
    passes: Sequence[MadePass],
    began: float | None = None,
) -> Search:
    findings, is_on_gpu = Findings(), lab.device != "cpu"
    began = lab.clock() if began is None else began
    lab.time_budget = TimeBudget(lab.plan, findings, lab.clock, began, is_on_gpu=is_on_gpu)
    progress = ProgressReporter(
        watch,
        findings,
        lab.time_budget,
        stages_of(is_on_gpu),
        judges_lossless=lab.examples is not None,
    )
    return Search(lab, findings, lab.time_budget, progress, passes)  # type: ignore[arg-type]


def searched(
    row_ms: Mapping[str, float], *passes: MadePass, **wishes: object
) -> tuple[MadeLab, Callable[[], Search]]:
    plan = Plan("m.onnx", "m", "out", slo=WISH, **wishes)  # type: ignore[arg-type]
    lab = MadeLab(row_ms, plan)
    told: list[Progress] = []

    def run() -> Search:
        search = made_search(lab, told.append, [*passes, *SERVING])
        search.run()
        return search

    return lab, run


def outcome_of(search: Search, name: str) -> tuple[str, str]:
    found = [each for each in search.findings.tries if str(each.candidate.steps[-1:]).count(name)]
    return found[0].outcome, found[0].reason


FASTER = MadePass("faster", "compile")
LOSSY = MadePass("lossy", "quantise", changes_answers=True)


def test_an_original_that_keeps_the_slo_is_the_end() -> None:
    lab, run = searched({"original": 2.0, "faster": 1.0}, FASTER)
    search = run()
    assert [str(each.candidate) for each in search.findings.tries] == ["original"]
    assert search.findings.finalists[0].build.candidate == Candidate()


def test_everything_is_tried_when_asked_to() -> None:
    lab, run = searched({"original": 2.0, "faster": 1.0}, FASTER, is_exhaustive=True)
    search = run()
    assert outcome_of(search, "faster")[0] == "kept"
    assert model_step(search.findings.finalists[0].build.candidate) == "faster"


def test_the_first_stage_that_is_enough_is_the_last() -> None:
    lab, run = searched({"original": 20.0, "faster": 2.0, "lossy": 1.0}, FASTER, LOSSY)
    search = run()
    assert model_step(search.findings.finalists[0].build.candidate) == "faster"
    assert "accuracy lossy" not in lab.asked


def test_what_keeps_the_slo_without_room_is_not_the_end() -> None:
    # 250 of 200 asked for: kept, and 80 % loaded.
    lab, run = searched({"original": 20.0, "faster": 4.0, "lossy": 1.0}, FASTER, LOSSY)
    search = run()
    assert any("faster" in text and "lossy" not in text for text in lab.served)
    assert model_step(search.findings.finalists[0].build.candidate) == "lossy"


def test_an_original_that_keeps_the_slo_without_room_is_the_end() -> None:
    lab, run = searched({"original": 4.0, "faster": 1.0}, FASTER)
    search = run()
    assert [str(each.candidate) for each in search.findings.tries] == ["original"]


LATE = [MadePass("solid", "compile"), MadePass("late", "compile")]
PAIR = [MadePass("solid", "compile"), MadePass("hollow", "compile")]


def test_where_nothing_keeps_the_slo_the_highest_rate_decides() -> None:
    # Overrun, the hollow one answers more; within the SLO's latency it answers less.
    lab, run = searched({"original": 90.0, "solid": 10.1, "hollow": 9.9}, *PAIR)
    lab.served_rates = {"solid": 100.0, "hollow": 130.0}
    lab.highest_rates = {"solid": 80.0, "hollow": 40.0}
    search = run()
    best = search.findings.finalists[0]
    assert model_step(best.build.candidate) == "solid"
    assert best.served.max_rate == near(80.0)
    assert set(lab.rated) >= {"solid", "hollow"}


def test_rates_are_not_looked_for_where_the_slo_is_kept() -> None:
    lab, run = searched({"original": 20.0, "solid": 4.1, "hollow": 4.0}, *PAIR)
    run()
    assert not lab.rated


def test_far_from_the_slo_the_best_of_different_builds_are_asked() -> None:
    # Predicted at less than half of the best, and better when it is served.
    lab, run = searched({"original": 90.0, "solid": 22.0, "hollow": 9.9}, *PAIR)
    lab.highest_rates = {"solid": 80.0, "hollow": 40.0, "original": 5.0}
    search = run()
    assert set(lab.rated) == {"original", "solid", "hollow"}
    assert model_step(search.findings.finalists[0].build.candidate) == "solid"


def two_cores(lab: MadeLab) -> None:
    """One instance gains nothing by a second thread, and two instances nearly double each
    other's time."""
    lab.machine = msgspec.structs.replace(MACHINE, num_cores=2, memory_bytes=1 << 40)
    plain = lab.times

    def times(build: Build, num_instances: int, num_threads: int) -> TimeTable:
        table = plain(build, num_instances, num_threads)
        seconds = {
            bucket: {rows: each * 1.05 * num_instances for rows, each in by_rows.items()}
            for bucket, by_rows in table.seconds.items()
        }
        return msgspec.structs.replace(table, seconds=seconds)

    lab.times = times  # type: ignore[method-assign]


def arrangements(served: Sequence[str]) -> list[str]:
    return [text.partition("instances(")[2] for text in served if "instances(" in text]


def test_finalists_differ_in_threads_too() -> None:
    lab, run = searched({"original": 20.0, "faster": 4.0}, FASTER)
    two_cores(lab)
    run()
    assert set(arrangements(lab.served)) == {
        "instances=1, threads=2)",
        "instances=1, threads=1)",
        "instances=2, threads=1)",
    }


def test_far_from_the_slo_the_best_is_asked_in_another_arrangement_too() -> None:
    lab, run = searched({"original": 90.0, "solid": 9.9}, *PAIR[:1])
    two_cores(lab)
    run()
    solid = [text for text in lab.served if text.startswith("solid")]
    assert len(set(arrangements(solid))) == 2


def test_where_no_rate_keeps_the_slo_whoever_answers_soonest_is_served() -> None:
    rows = {"original": 200.0, "one": 190.0, "two": 180.0, "three": 170.0, "solid": 60.0}
    passes = [MadePass(each, "compile") for each in ("one", "two", "three", "solid")]
    lab, run = searched(rows, *passes, budget_s=100.0)
    search = run()
    assert all(each.rate == 0 for each in search.findings.contenders)
    assert not lab.rated
    assert model_step(search.findings.finalists[0].build.candidate) == "solid"


@pytest.mark.parametrize(("budget_s", "num_rated"), [(180.0, 1), (240.0, 2)])
def test_rates_are_looked_for_as_long_as_there_is_time(budget_s: float, num_rated: int) -> None:
    # Some is kept for the proof.
    lab, run = searched({"original": 90.0, "solid": 10.1, "hollow": 9.9}, *PAIR, budget_s=budget_s)
    built: list[str] = []
    build = lab.build
    lab.build = lambda each: (built.append(last(each)), build(each))[1]  # type: ignore[method-assign]
    run()
    assert len(lab.rated) == num_rated
    # What would not be measured is not built either.
    assert sum(each.startswith("instances") for each in built) == num_rated


def test_a_small_budget_has_no_time_for_highest_rates() -> None:
    lab, run = searched({"original": 90.0, "solid": 10.1, "hollow": 9.9}, *PAIR, budget_s=100.0)
    search = run()
    assert not lab.rated
    assert len(search.findings.finalists) > 1


@pytest.mark.parametrize(("budget_s", "is_short"), [(100.0, True), (600.0, False)])
def test_a_small_budget_times_one_instance_only(budget_s: float, is_short: bool) -> None:
    lab, run = searched({"original": 90.0, "solid": 10.1, "hollow": 9.9}, *PAIR, budget_s=budget_s)
    lab.machine = msgspec.structs.replace(MACHINE, num_cores=2, memory_bytes=1 << 40)
    run()
    assert set(lab.instances) == ({1} if is_short else {1, 2})


def test_where_the_time_is_up_far_from_the_slo_rates_are_looked_for_too() -> None:
    lab, run = searched({"original": 90.0, "solid": 10.1, "hollow": 9.9}, *PAIR, budget_s=400.0)
    lab.try_s = 220.0
    lab.highest_rates = {"original": 5.0, "solid": 80.0}
    search = run()
    assert search.findings.is_out_of_time
    assert lab.rated
    assert model_step(search.findings.finalists[0].build.candidate) == "solid"


def test_what_is_served_in_the_end_has_time_to_be_compiled() -> None:
    """Also when the search has none left: it was kept for that, and for the proof."""
    lab, run = searched({"original": 90.0, "solid": 10.0, "late": 9.9}, *LATE, budget_s=400.0)
    left: dict[str, float] = {}
    build = lab.build

    def built(candidate: Candidate) -> Build:
        left[last(candidate)] = lab.time_budget.stage_left_s
        lab.clock.now += 250.0 * (last(candidate) == "solid")
        return build(candidate)

    lab.build = built  # type: ignore[method-assign]
    search = run()
    assert search.findings.is_out_of_time
    (served_s,) = [left_s for name, left_s in left.items() if name.startswith("instances")]
    # Levels of 10 s, a warm-up of 3 s: each build is served once in the shortest proof.
    assert served_s == pytest.approx(150.0 - (2 * (3 + 14) + 2))


def test_a_stage_that_is_not_enough_is_followed_by_the_next() -> None:
    lab, run = searched({"original": 20.0, "faster": 8.0, "lossy": 2.0}, FASTER, LOSSY)
    search = run()
    best = search.findings.finalists[0]
    assert [step.pass_name for step in best.build.candidate.steps][:2] == ["faster", "lossy"]
    assert best.contender.is_lossy
    assert best.served.is_met


def test_lossless_steps_are_compared_exactly_and_lossy_ones_judged() -> None:
    lab, run = searched({"original": 20.0, "faster": 8.0, "lossy": 2.0}, FASTER, LOSSY)
    run()
    assert "numerics faster True" in lab.asked
    assert "accuracy faster" not in lab.asked
    assert "numerics lossy False" in lab.asked
    assert "accuracy lossy" in lab.asked


def test_no_data_no_lossy_step() -> None:
    lab, run = searched({"original": 20.0, "faster": 8.0, "lossy": 2.0}, FASTER, LOSSY)
    lab.examples = None
    search = run()
    assert [skip.pass_name for skip in search.findings.skipped] == ["lossy"]
    assert "needs data" in search.findings.skipped[0].reason
    assert model_step(search.findings.finalists[0].build.candidate) == "faster"


def test_what_the_gate_refuses_is_not_chosen_however_fast() -> None:
    lab, run = searched({"original": 20.0, "lossy": 1.0}, LOSSY)
    lab.losses = {"lossy": 0.3}
    search = run()
    assert outcome_of(search, "lossy") == ("rejected", "loss 0.3")
    assert not any("lossy" in text for text in lab.served)


@pytest.mark.parametrize("gate", ["build", "read back", "placement", "repeats", "numerics"])
def test_each_gate_ends_a_candidate_with_its_reason(gate: str) -> None:
    step = MadePass(
        "faster", "compile", problems={"": "FP32 all over"} if gate == "read back" else {}
    )
    lab, run = searched({"original": 20.0, "faster": 1.0}, step)
    if gate == "build":
        lab.broken = {"faster"}
    if gate == "placement":
        lab.on_cpu = {"nodes_fallen_back_to_cpu": "2: 2 Det"}
    if gate == "repeats":
        lab.unsteady = {"faster"}
    if gate == "numerics":
        lab.differing = {"faster"}
    outcome, reason = outcome_of(run(), "faster")
    assert (outcome, reason) == {
        "build": ("failed", "it does not build"),
        "read back": ("rejected", "not what was asked for: FP32 all over"),
        "placement": (
            "rejected",
            "not what was asked for: nodes fell back to the CPU: 2: 2 Det",
        ),
        "repeats": (
            "rejected",
            "the same rows give different answers each time: example 3 moved",
        ),
        "numerics": ("rejected", "too far off"),
    }[gate]
    assert not any("faster" in text for text in lab.served)


def test_what_is_no_faster_is_called_equal_and_the_simpler_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulate, "NUM_REQUESTS", 4000)  # A small difference.
    lab, run = searched({"original": 20.0, "faster": 19.8}, FASTER)
    search = run()
    assert outcome_of(search, "faster")[0] == "equal"
    assert search.findings.best.candidate == Candidate()


def test_what_is_slower_is_told_so() -> None:
    lab, run = searched({"original": 20.0, "faster": 40.0}, FASTER)
    assert outcome_of(run(), "faster")[0] == "slower"


def test_faster_in_process_and_slower_when_served_is_not_chosen() -> None:
    passes = [MadePass("solid", "compile"), MadePass("hollow", "compile")]
    lab, run = searched({"original": 20.0, "solid": 3.9, "hollow": 3.5}, *passes)
    lab.served_rates = {"hollow": 60.0, "solid": 250.0}
    search = run()
    assert any("hollow" in text for text in lab.served)
    assert model_step(search.findings.finalists[0].build.candidate) == "solid"


def test_a_finalist_that_cannot_be_served_is_a_result() -> None:
    passes = [MadePass("solid", "compile"), MadePass("hollow", "compile")]
    lab, run = searched({"original": 20.0, "solid": 3.9, "hollow": 3.5}, *passes)
    lab.unservable = {"hollow"}
    search = run()
    assert model_step(search.findings.finalists[0].build.candidate) == "solid"
    assert ("failed", "not served: it does not start") in [
        (each.outcome, each.reason) for each in search.findings.tries
    ]


def test_of_equals_the_simpler_is_served_too() -> None:
    lab, run = searched(
        {"original": 20.0, "plain": 4.05, "lossy": 4.0},
        MadePass("plain", "compile"),
        LOSSY,
        is_exhaustive=True,
    )
    search = run()
    assert any("plain" in text and "lossy" not in text for text in lab.served)
    assert model_step(search.findings.finalists[0].build.candidate) == "plain"


def test_variants_are_timed_once_and_the_most_accurate_is_taken() -> None:
    variants = MadeLayers("int8", "quantise", ("a", "b", "c"), changes_answers=True)
    names = [f"int8(s={each})" for each in "abc"]
    lab, run = searched({"original": 20.0, **dict.fromkeys(names, 2.0)}, variants)
    lab.losses = {names[0]: 0.02, names[1]: 0.004, names[2]: 0.008}
    search = run()
    assert model_step(search.findings.finalists[0].build.candidate) == names[1]
    assert [text for text in lab.asked if text.startswith("times int8")] == [f"times {names[1]}"]
    assert outcome_of(search, "'a'")[0] == "rejected"
    assert outcome_of(search, "'c'")[0] == "equal"


def test_layers_fall_back_when_no_variant_passes() -> None:
    variants = MadeLayers("int8", "quantise", ("a", "b"), changes_answers=True)
    kept = "int8(s=b, keep=head)"
    lab, run = searched({"original": 20.0, "int8(s=a)": 2.0, "int8(s=b)": 2.0, kept: 2.2}, variants)
    lab.losses = {"int8(s=a)": 0.3, "int8(s=b)": 0.2}
    layers = [FallbackLayer("head", "MatMul", 0.9, 0.001)]
    lab.kept = KeptLayers(Step("int8", {"s": "b", "keep": "head"}), layers)
    search = run()
    best = search.findings.finalists[0]
    assert model_step(best.build.candidate) == kept
    assert best.served.is_met
    assert [each.fallback for each in search.findings.tries if each.fallback] == [layers]


def test_a_refusal_names_the_layers_that_lose_most() -> None:
    variants = MadeLayers("int8", "quantise", ("a",), changes_answers=True)
    lab, run = searched({"original": 20.0, "int8(s=a)": 2.0}, variants)
    lab.losses = {"int8(s=a)": 0.3}
    layers = [FallbackLayer(name, "MatMul", share, 0.0) for name, share in (("q", 0.6), ("k", 0.3))]
    lab.kept = KeptLayers(None, layers)
    outcome, reason = outcome_of(run(), "int8")
    assert outcome == "rejected"
    assert reason.endswith("layers that cause most of the error: q (60%), k (30%)")


def test_layers_are_not_looked_at_for_what_is_no_faster() -> None:
    variants = MadeLayers("int8", "quantise", ("a",), changes_answers=True)
    lab, run = searched({"original": 20.0, "int8(s=a)": 21.0}, variants)
    lab.losses = {"int8(s=a)": 0.3}
    search = run()
    assert "fall back" not in lab.asked
    assert "no faster either" in outcome_of(search, "int8")[1]


@pytest.mark.parametrize("is_finite", [False, True])
def test_a_precision_that_fails_is_tried_again_with_layers_in_float(is_finite: bool) -> None:
    """Whether its answers were refused by the numbers, as with an overflow, or by the score."""
    halves = MadeLayers("half", "precision", ("fp16", "bf16"), changes_answers=True)
    halves.steps_differ = True
    kept = "half(s=fp16, keep=middle)"
    times = {"original": 20.0, "half(s=fp16)": 2.0, "half(s=bf16)": 3.0, kept: 2.2}
    lab, run = searched(times, halves)
    if is_finite:
        lab.losses = {"half(s=fp16)": 0.3}
    else:
        lab.differing = {"half(s=fp16)"}
    layers = [FallbackLayer("middle", "Linear", 0.9, 0.001)]
    lab.kept = KeptLayers(Step("half", {"s": "fp16", "keep": "middle"}), layers)
    search = run()
    assert model_step(search.findings.finalists[0].build.candidate) == kept
    assert [each.fallback for each in search.findings.tries if each.fallback] == [layers]
    # The other step is timed by itself.
    assert "times half(s=bf16)" in lab.asked


def test_what_was_not_built_as_asked_for_keeps_no_layers() -> None:
    halves = MadeLayers(
        "half", "precision", ("fp16",), changes_answers=True, problems={"fp16": "it is FP32"}
    )
    halves.steps_differ = True
    lab, run = searched({"original": 20.0, "half(s=fp16)": 2.0}, halves)
    run()
    assert "fall back" not in lab.asked


def test_out_of_time_the_best_so_far_is_measured() -> None:
    slow, on_gpus = MadePass("slow", "precision"), MadePass("on GPUs", "quantise")
    on_gpus.is_for_gpus = True
    lab, run = searched(
        {"original": 20.0, "faster": 8.0, "slow": 7.0}, FASTER, slow, LOSSY, on_gpus, budget_s=100.0
    )
    lab.try_s = 30.0
    search = run()
    assert search.findings.is_out_of_time
    assert "lossy" not in [last(each.candidate) for each in search.findings.tries]
    assert [skip.cut_by for skip in search.findings.skipped if skip.pass_name == "lossy"] == [
        "time"
    ]
    # There is no GPU, so more time would not have helped it.
    assert "on GPUs" not in [skip.pass_name for skip in search.findings.skipped]
    assert len(search.findings.finalists) > 1


def test_out_of_time_what_can_never_apply_is_skipped_with_its_own_reason() -> None:
    slow, never = (
        MadePass("slow", "precision"),
        Choosy("never", "quantise", refused=("original", "faster", "slow")),
    )
    rows = {"original": 20.0, "faster": 8.0, "slow": 7.0}
    lab, run = searched(rows, FASTER, slow, LOSSY, never, budget_s=100.0)
    lab.try_s = 30.0
    search = run()
    assert search.findings.is_out_of_time
    found = [(each.pass_name, each.reason, each.cut_by) for each in search.findings.skipped]
    assert ("never", "not for this", "") in found
    assert [name for name, _, cut_by in found if cut_by == "time"] == ["lossy"]


def test_out_of_time_a_variant_that_has_passed_is_timed_and_served() -> None:
    variants = MadeLayers("int8", "quantise", ("a", "b", "c"), changes_answers=True)
    names = [f"int8(s={each})" for each in "abc"]
    lab, run = searched({"original": 20.0, **dict.fromkeys(names, 2.0)}, variants, budget_s=100.0)
    lab.losses = {names[0]: 0.3}
    lab.try_s = 30.0
    search = run()
    assert search.findings.is_out_of_time
    assert names[2] not in [last(each.candidate) for each in search.findings.tries]
    assert model_step(search.findings.finalists[0].build.candidate) == names[1]


def test_out_of_time_after_the_best_were_served_others_are() -> None:
    """Of what is as good by prediction, not only what was served before the time was up."""
    names = ["one", "two", "three"]
    passes = [MadePass(each, "compile") for each in names]
    late = MadePass("late", "precision", ("a", "b"))
    row_ms = {"original": 20.0, "one": 4.0, "two": 4.0, "three": 4.05, "late(s=a)": 40.0}
    lab, run = searched(row_ms, *passes, late, budget_s=1000.0)
    lab.served_rates = {"one": 150.0, "two": 150.0, "three": 250.0}

    def slow_late(build: Build) -> Facts:
        lab.clock.now += 800.0 * (last(build.candidate) == "late(s=a)")
        return Facts("null")

    lab.facts = slow_late  # type: ignore[method-assign]
    search = run()
    assert search.findings.is_out_of_time
    assert model_step(search.findings.finalists[0].build.candidate) == "three"


def test_cut_short_after_some_were_served_the_best_is_served_too() -> None:
    later, never = MadePass("later", "precision"), MadePass("never", "precision")
    row_ms = {"original": 20.0, "faster": 4.0, "later": 2.0, "never": 3.0}
    lab, run = searched(row_ms, FASTER, later, never)
    lab.served_rates = {"faster": 150.0}
    lab.interrupt_at = "never"
    search = run()
    assert any("faster" in text and "later" not in text for text in lab.served)
    assert model_step(search.findings.finalists[0].build.candidate) == "later"


def test_interrupted_the_best_so_far_is_measured_once() -> None:
    lab, run = searched({"original": 20.0, "faster": 8.0, "lossy": 2.0}, FASTER, LOSSY)
    lab.interrupt_at = "lossy"
    search = run()
    assert search.findings.is_interrupted
    assert model_step(search.findings.finalists[0].build.candidate) == "faster"
    assert len(lab.served) == 2


@pytest.mark.slow
@pytest.mark.parametrize("interrupt_at", ["faster", "later", "never", "lossy"])
def test_what_an_interruption_announces_is_what_is_measured_and_saved(interrupt_at: str) -> None:
    later, never = MadePass("later", "precision"), MadePass("never", "precision")
    # Predicted to be the best; the original does better when both are served.
    row_ms = {"original": 20.0, "faster": 19.9, "later": 4.0, "never": 10.0, "lossy": 2.0}
    plan = Plan("m.onnx", "m", "out", slo=WISH)
    lab = MadeLab(row_ms, plan)
    lab.served_rates = {"later": 150.0, "original": 190.0}
    lab.interrupt_at = interrupt_at
    told: list[Progress] = []
    announced: list[Progress] = []
    build = lab.build

    def interrupted(candidate: Candidate) -> Build:
        try:
            return build(candidate)
        except KeyboardInterrupt:
            # Ctrl-C announces the last progress message.
            announced.append(told[-1])
            lab.served.clear()
            raise

    lab.build = interrupted  # type: ignore[method-assign]
    passes = [FASTER, later, never, LOSSY, *SERVING]
    search = made_search(lab, told.append, passes)
    search.run()
    (said,) = announced
    assert [each for each in lab.served if each == said.to_measure] == lab.served[-1:]
    saved = str(search.findings.finalists[0].build.candidate)
    kept = said.to_save.removesuffix(" (unless the held-out examples refuse it)")
    assert saved in {said.to_measure, kept} - {""}


@pytest.mark.slow
def test_the_same_answers_lead_to_the_same_choice() -> None:
    row_ms = {"original": 20.0, "faster": 8.0, "lossy": 2.0}
    chosen = set()
    for _ in range(2):
        _, run = searched(row_ms, FASTER, LOSSY)
        chosen.add(str(run().findings.finalists[0].build.candidate))
    assert len(chosen) == 1


COMPILED = MadePass("compiled", "compile")
HALF = MadePass("half", "precision", changes_answers=True)


@pytest.mark.slow
def test_on_a_gpu_what_is_compiled_begins_with_sixteen_bits() -> None:
    lab, run = searched({"original": 20.0, "half": 12.0, "compiled": 11.0}, COMPILED, HALF)
    lab.device = "cuda"
    tried = [str(each.candidate) for each in run().findings.tries]
    assert tried[:3] == ["original", "half", "half → compiled"]
    assert "compiled" not in tried


@pytest.mark.slow
@pytest.mark.parametrize(("device", "first"), [("cuda", "precision"), ("cpu", "compile")])
def test_whoever_watches_knows_the_order(device: str, first: str) -> None:
    plan = Plan("m.onnx", "m", "out", slo=WISH)
    lab = MadeLab({"original": 20.0, "half": 12.0}, plan)
    lab.device = device
    told: list[Progress] = []
    search = made_search(lab, told.append, [HALF, *SERVING])
    search.run()
    search.progress.tell("anything")
    assert told[-1].stages[:2] == ("baseline", first)
    assert set(told[-1].stages) == set(STAGES)


@pytest.mark.slow
def test_on_a_gpu_what_does_not_bear_sixteen_bits_is_compiled_without() -> None:
    lab, run = searched({"original": 10.0, "half": 6.0, "compiled": 8.0}, COMPILED, HALF)
    lab.device, lab.losses = "cuda", {"half": 0.5}
    tried = [str(each.candidate) for each in run().findings.tries]
    assert tried[:3] == ["original", "half", "compiled"]


@dataclass
class Choosy(MadePass):
    """Has nothing for what these steps have made."""

    refused: Sequence[str] = ()

    def propose(self, situation: PassContext) -> list[Step | Skip]:
        if last(situation.build.candidate) in self.refused:
            return [Skip(self.name, "not for this")]
        return super().propose(situation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "is_exhaustive", "is_tried"),
    [
        ("graphs", "cuda", False, False),
        ("graphs", "cuda", True, True),
        ("graphs", "cpu", False, True),
        ("torch-compile", "cuda", False, True),
        ("another-engine", "cuda", False, True),
    ],
)
def test_on_a_gpu_what_adds_to_the_best_is_not_tried_on_others(
    name: str, device: str, is_exhaustive: bool, is_tried: bool
) -> None:
    rows = {"original": 20.0, "fused": 10.0, name: 15.0}
    fused, other = MadePass("fused", "compile"), Choosy(name, "compile", refused=("fused",))
    other.starts_over = name == "another-engine"
    lab, run = searched(rows, fused, other, is_exhaustive=is_exhaustive)
    lab.device = device
    search = run()
    tried = [str(each.candidate) for each in search.findings.tries]
    assert (name in tried) == is_tried
    skipped = [each.reason for each in search.findings.skipped if each.pass_name == name]
    assert skipped == ([] if is_tried else ["not for this"])


@dataclass
class Modes(MadePass):
    def propose(self, situation: PassContext) -> list[Step | Skip]:
        return [Step(self.name, {"mode": each}) for each in self.settings]


def test_on_a_gpu_a_compiler_that_failed_is_not_told_to_be_behind() -> None:
    rows = {"original": 10.0}
    lab, run = searched(rows, Modes("torch-compile", "compile", ("fast", "long")))
    lab.device, lab.broken = "cuda", {"torch-compile(mode=fast)"}
    (skip,) = [each for each in run().findings.skipped if each.pass_name == "torch-compile"]
    assert skip.reason.startswith("torch-compile(mode=fast) failed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fast_ms", "outcome", "is_longer"), [(12.0, "slower", False), (5.0, "kept", True)]
)
def test_on_a_gpu_a_compiler_gets_more_time_only_if_it_is_ahead(
    fast_ms: float, outcome: str, is_longer: bool
) -> None:
    rows = {
        "original": 10.0,
        "torch-compile(mode=fast)": fast_ms,
        "torch-compile(mode=long)": 4.0,
    }
    lab, run = searched(rows, Modes("torch-compile", "compile", ("fast", "long")))
    lab.device = "cuda"
    search = run()
    assert outcome_of(search, "fast")[0] == outcome
    tried = [str(each.candidate) for each in search.findings.tries]
    assert ("torch-compile(mode=long)" in tried) == is_longer
    skipped = [str(each.step) for each in search.findings.skipped]
    assert ("torch-compile(mode=long)" in skipped) == (not is_longer)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "half_ms"), [("cuda", 7.5), ("cpu", 4.2)])
def test_on_a_gpu_servers_are_started_on_the_way_only_if_that_may_be_the_end(
    device: str, half_ms: float
) -> None:
    """What is near the rate that is asked for, without room, is not the end in any case."""
    rows = {"original": 20.0, "half": half_ms, "quantised": 2.0}
    quantised = MadePass("quantised", "quantise", changes_answers=True)
    lab, run = searched(rows, HALF, quantised)
    lab.device = device
    found = run().findings
    (half,) = [each for each in found.contenders if str(each.candidate) == "half"]
    assert 0.85 * 200 <= half.rate < 1.3 * 200
    is_served = any("half" in each and "quantised" not in each for each in lab.served)
    assert is_served == (device == "cpu")
    assert any("quantised" in each for each in lab.served)


@pytest.mark.parametrize(("budget_s", "is_profiled"), [(360.0, False), (1800.0, True)])
def test_on_a_gpu_a_short_budget_has_no_room_for_a_profile(
    budget_s: float, is_profiled: bool
) -> None:
    lab, run = searched({"original": 20.0}, budget_s=budget_s)
    lab.device = "cuda"
    run()
    assert ("profile" in lab.asked) == is_profiled


def test_those_that_are_measured_together_share_the_time() -> None:
    lab, run = searched({"original": 20.0, "solid": 4.1, "hollow": 4.0}, *PAIR)
    serve = lab.serve
    calls: list[int] = []

    def timed(builds: Sequence[Build]) -> list[ServedMeasurement]:
        calls.append(len(builds))
        lab.clock.now += 12.0
        return serve(builds)

    lab.serve = timed  # type: ignore[method-assign]
    search = run()
    served = [each for each in search.findings.tries if each.served is not None]
    assert len(served) == 3
    assert sum(each.seconds for each in served) == pytest.approx(12.0 * len(calls))
    assert all(each.seconds > 0 for each in served)


def test_one_that_cannot_be_served_took_its_time_too() -> None:
    lab, run = searched({"original": 20.0, "solid": 4.1}, PAIR[0])
    lab.unservable = {"solid"}
    serve = lab.serve

    def timed(builds: Sequence[Build]) -> list[ServedMeasurement]:
        lab.clock.now += 5.0
        return serve(builds)

    lab.serve = timed  # type: ignore[method-assign]
    failed = [each for each in run().findings.tries if each.outcome == "failed"]
    assert failed and all(each.seconds == 5.0 for each in failed)


def test_it_is_known_what_was_profiled() -> None:
    lab, run = searched({"original": 20.0, "faster": 10.0, "lossy": 9.0}, FASTER, LOSSY)
    lab.profile = lambda build: "a profile"  # type: ignore[method-assign, assignment, return-value]
    findings = run().findings
    assert findings.profiled == Candidate((Step("faster"),)).key


def test_on_a_cpu_the_best_stands_for_its_backend() -> None:
    lab, run = searched({"original": 10.0, "compiled": 12.0, "half": 6.0}, COMPILED, HALF)
    lab.options = {"compiled": {"penstock.compile": "default"}}
    assert "compiled → half" not in [str(each.candidate) for each in run().findings.tries]


def test_on_a_gpu_one_instance_and_two_are_timed_however_many_cores_there_are() -> None:
    lab, run = searched({"original": 2.0})
    lab.device = "cuda"
    # More than a quarter of the machine's memory, which is not where it lies.
    lab.memory_bytes = 1 << 30
    run()
    assert lab.instances == [1, 2]


def test_instances_of_one_gpu_share_its_memory() -> None:
    lab, run = searched({"original": 2.0})
    lab.device, lab.memory_bytes = "cuda", 100 << 20
    lab.plan = replace(lab.plan, slo=slo.parse("p99 < 50ms, memory <= 150MiB at 200/s"))
    contender = run().findings.contenders[0]
    counts = {step.settings.get("instances") for steps, _ in contender.shapes for step in steps}
    assert {"1", "2"} <= counts


def left_for_steps(
    original_ms: float, budget_s: float | None, device: str = "cpu"
) -> list[float | None]:
    """What the lab is told by the second and third step, which is begun 50 s later. For the first
    one only the shortest proof is kept."""
    names = ("zero", "one", "two")
    passes = [MadePass(each, "compile") for each in names]
    rows = {"original": original_ms} | dict.fromkeys(names, 40.0)
    lab, run = searched(rows, *passes, budget_s=budget_s)
    lab.device, lab.served_rates, lab.try_s = device, {"original": 100.0}, 50.0
    told: list[float | None] = []
    build = lab.build

    def built(candidate: Candidate) -> Build:
        if len(candidate.steps) == 1 and candidate.key not in lab.built:
            told.append(lab.time_budget.stage_left_s)
        return build(candidate)

    lab.build = built  # type: ignore[method-assign]
    run()
    return told[1:]


def test_the_lab_knows_how_long_the_search_may_still_take() -> None:
    told = left_for_steps(3.0, 600.0)
    assert told[:2] == pytest.approx([370.0, 320.0])


def test_far_from_the_slo_more_is_kept_for_the_end() -> None:
    told = left_for_steps(20.0, 600.0)
    assert told[:2] == pytest.approx([250.0, 200.0])


def test_on_a_gpu_the_first_steps_do_not_say_how_far_the_slo_is() -> None:
    told = left_for_steps(20.0, 600.0, "cuda:0")
    assert told[0] == pytest.approx(370.0)
    told = left_for_steps(20.0, None)
    assert told[0] is None


TYPES = MadePass("half", "precision", ("fp16", "bf16", "tf32"), changes_answers=True)


@pytest.mark.parametrize(
    ("losses", "tried"),
    [
        ({}, ["fp16"]),
        ({"half(s=fp16)": 0.5}, ["fp16", "bf16"]),
        pytest.param(
            {"half(s=fp16)": 0.5, "half(s=bf16)": 0.5},
            ["fp16", "bf16", "tf32"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_on_a_gpu_the_next_precision_is_for_what_does_not_bear_the_one_before(
    losses: Mapping[str, float], tried: list[str]
) -> None:
    rows = {"original": 20.0} | {f"half(s={each})": 10.0 for each in ("fp16", "bf16", "tf32")}
    lab, run = searched(rows, TYPES)
    lab.device, lab.losses = "cuda", dict(losses)
    search = run()
    named = [each for each in search.findings.tries if each.stage == "precision"]
    assert [each.candidate.steps[-1].settings["s"] for each in named] == tried
    skipped = [each for each in search.findings.skipped if each.pass_name == "half"]
    assert len(skipped) == 3 - len(tried)


def test_on_a_gpu_what_is_far_behind_is_not_timed_any_further() -> None:
    lab, run = searched({"original": 10.0, "compiled": 40.0}, COMPILED)
    lab.device = "cuda"
    search = run()
    assert lab.instances == [1, 2, 1]
    assert outcome_of(search, "compiled")[0] == "slower"


def test_on_several_gpus_neither() -> None:
    lab, run = searched({"original": 10.0, "compiled": 40.0}, COMPILED)
    lab.device, lab.spread = "cuda:0", ("cuda:0", "cuda:1")
    run()
    assert lab.instances == [2, 4, 2]


def test_on_a_gpu_steps_that_lose_nothing_come_before_the_servers() -> None:
    """FP16 alone would be enough; fusion and graphs take seconds."""
    graphs, fusion = MadePass("cuda-graphs", "compile"), MadePass("conv-fusion", "compile")
    rows = {"original": 20.0, "half": 2.0, "cuda-graphs": 1.5, "conv-fusion": 1.0}
    lab, run = searched(rows, fusion, graphs, HALF)
    lab.device = "cuda"
    search = run()
    tried = [last(each.candidate) for each in search.findings.tries]
    # The cheap one first.
    assert tried[:4] == ["original", "half", "cuda-graphs", "conv-fusion"]
    assert all("half" in each and "conv-fusion" in each for each in lab.served[1:2])


def test_on_a_gpu_the_compiler_is_not_waited_for_if_all_is_well_without_it() -> None:
    rows = {"original": 20.0, "half": 2.0, "cuda-graphs": 1.5, "torch-compile(mode=a)": 1.0}
    graphs, compiler = MadePass("cuda-graphs", "compile"), Modes("torch-compile", "compile", ("a",))
    lab, run = searched(rows, compiler, graphs, HALF)
    lab.device = "cuda"
    search = run()
    assert not any("torch-compile" in str(each.candidate) for each in search.findings.tries)
    assert search.findings.is_met()


def test_on_a_gpu_every_kept_step_is_profiled() -> None:
    rows = {"original": 20.0, "half": 12.0, "compiled": 15.0, "quantised": 8.0}
    quantised = MadePass("quantised", "quantise", changes_answers=True)
    lab, run = searched(rows, COMPILED, HALF, quantised)
    lab.device = "cuda"
    search = run()
    profiled = {last(each.candidate) for each in search.findings.tries if each.step_time}
    assert profiled == {"original", "half", "quantised"}
    assert "step time compiled" not in lab.asked


def test_on_a_cpu_no_step_is_profiled() -> None:
    lab, run = searched({"original": 20.0, "faster": 8.0}, FASTER)
    run()
    assert not any(text.startswith("step time") for text in lab.asked)


def test_a_step_that_cannot_be_profiled_is_kept_all_the_same() -> None:
    lab, run = searched({"original": 20.0, "half": 12.0}, HALF)
    lab.device = "cuda"

    def failing(build: Build, num_rows: int) -> StepTime:
        raise BackendFailed("another tool is watching")

    lab.step_time = failing  # type: ignore[method-assign]
    assert outcome_of(run(), "half")[0] == "kept"


def idle_gpu(lab: MadeLab, gain: float) -> None:
    """Batches take the same time whatever their size; each doubling of instances gains so much."""
    lab.device = "cuda"

    def times(build: Build, num_instances: int, num_threads: int) -> TimeTable:
        lab.instances.append(num_instances)
        row_s = lab.row_ms[model_step(build.candidate)] / 1e3
        factor = num_instances / gain ** math.log2(num_instances)
        seconds = {0: {1: row_s * factor, 8: 1.1 * row_s * factor}}
        return TimeTable(num_instances, num_threads, seconds, busy=0.99)

    lab.times = times  # type: ignore[method-assign]


@pytest.mark.parametrize(("gain", "timed"), [(1.0, [1, 2, 4]), (1.6, [1, 2, 4, 8])])
def test_on_a_gpu_that_is_idle_the_best_gets_more_instances(gain: float, timed: list[int]) -> None:
    lab, run = searched({"original": 10.0})
    idle_gpu(lab, gain)
    search = run()
    assert lab.instances == timed
    counts = {arrangement(steps)[0] for steps, _ in search.findings.best.shapes}
    assert (8 in counts) == (gain > 1)
    skipped = [each for each in search.findings.skipped if each.pass_name == "instances"]
    assert any("no more than with fewer instances" in each.reason for each in skipped) == (
        gain == 1.0
    )


def test_a_server_without_memory_is_tried_with_half_of_its_batch() -> None:
    lab, run = searched({"original": 20.0, "faster": 2.0}, FASTER)
    lab.device = "cuda"
    serve = lab.serve
    sizes: list[int] = []
    build = lab.build

    def with_batch(candidate: Candidate) -> Build:
        made = build(candidate)
        steps = [step for step in candidate.steps if "max_batch" in step.settings]
        if not steps:
            return made
        return replace(made, config=with_batching(made.config, steps[-1].settings, None))

    def small(builds: Sequence[Build]) -> list[ServedMeasurement]:
        batched = [each for each in builds if "max_batch" in str(each.candidate)]
        sizes.extend(each.config.max_batch_size for each in batched)
        if any(each.config.max_batch_size > 2 for each in batched):
            raise BackendFailed("the worker failed: CUDA out of memory")
        return serve(builds)

    lab.build, lab.serve = with_batch, small  # type: ignore[method-assign]
    search = run()
    assert min(sizes) == 2
    best = search.findings.finalists[0]
    assert model_step(best.build.candidate) == "faster"
    assert best.build.config.max_batch_size == 2
