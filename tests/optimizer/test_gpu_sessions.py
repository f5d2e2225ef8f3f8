"""Builds that are loaded once for all that is asked of them; a GPU that computes nothing stands in
for one that does."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from made_evaluators import made_evaluator
from served_builds import null_build, read

from penstock import slo
from penstock.errors import BackendFailed
from penstock.optimizer import builder, endpoints, influence, measurements, trials
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.examples import signature_examples
from penstock.optimizer.findings import Findings
from penstock.optimizer.gpu_sessions import GpuSession, WarmSpare
from penstock.optimizer.influence import RowCheck
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.plan import Plan
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.subject import Subject
from penstock.optimizer.time_plan import CutOff, TimeBudget, TookTooLong
from penstock.system import devices

MOST = 2, 4
BATCHING = Step("batching", {"mode": "fixed", "max_batch": "4"})


def on_gpu(build: Build) -> Build:
    return replace(build, config=replace(build.config, device="cuda:0"))


def numbers(*values: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.array([value], np.int32)} for value in values]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configurations that children were told to load, by their batches and slots."""
    seen: list[str] = []
    load = trials.TrialProcess.load

    def counted(self: trials.TrialProcess, run_timeout_s: float | None = None):
        seen.append(f"{self.config.num_instances} slots")
        return load(self, run_timeout_s)

    monkeypatch.setattr(trials.TrialProcess, "load", counted)
    monkeypatch.setattr(trials, "POINT_S", 0.02)
    return seen


@pytest.fixture
def spare() -> Iterator[WarmSpare]:
    before = set(psutil.Process().children())
    spare = WarmSpare()
    yield spare
    spare.close()
    assert set(psutil.Process().children()) <= before


@pytest.fixture
def sit(spare: WarmSpare) -> Iterator:
    """Makes sittings that end with the test."""
    made: list[GpuSession] = []

    def sitting(build: Build) -> GpuSession:
        made.append(GpuSession(on_gpu(build), MOST, spare))
        return made[-1]

    yield sitting
    for each in made:
        each.close()


def test_everything_is_asked_of_one_process(tmp_path: Path, loads: list[str], sit) -> None:
    sitting = sit(null_build(tmp_path, a_ms=20, copy_ms=2))
    assert sitting.inspect().built["device"] == "cuda:0"
    assert [each["y"].tolist() for each in sitting.answers(numbers(1, 2, 3))] == [[1], [2], [3]]
    alone = sitting.times(numbers(1), (1, 4))
    both = sitting.times(numbers(1), (2, 4))
    assert loads == ["2 slots"]
    # One is copied and computed; of two, one is copied while the other is computed.
    assert alone.seconds[0][1] >= 0.022
    assert both.seconds[0][1] >= 0.038
    assert alone.seconds[0][1] < both.seconds[0][1]
    assert (alone.num_instances, both.num_instances) == (1, 2)
    assert both.num_threads == 4


def test_how_many_slots_it_was_loaded_with_is_no_fact_of_the_build(tmp_path: Path, sit) -> None:
    assert "slots" not in sit(null_build(tmp_path)).inspect().built


def test_what_killed_the_process_does_not_spoil_the_next_question(
    tmp_path: Path, loads: list[str], sit
) -> None:
    sitting = sit(null_build(tmp_path, crash_on=7))
    with pytest.raises(BackendFailed, match="SIGABRT"):
        sitting.answers(numbers(7))
    assert len(loads) == 1
    assert sitting.answers(numbers(1))[0]["y"].tolist() == [1]
    assert len(loads) == 2


def test_what_fails_after_others_is_asked_once_more_of_a_new_process(
    tmp_path: Path, loads: list[str], sit
) -> None:
    sitting = sit(null_build(tmp_path, fail_on=7))
    sitting.answers(numbers(1))
    with pytest.raises(BackendFailed, match="fail_on"):
        sitting.answers(numbers(7))
    assert len(loads) == 2
    # And the one after that is not asked of a process in which something failed.
    sitting.answers(numbers(1))
    assert len(loads) == 3


def test_a_failure_that_came_of_what_was_before_is_none(tmp_path: Path, sit) -> None:
    """As of memory that was full."""
    sitting = sit(null_build(tmp_path))
    heard: list[str] = []

    def fail_once(num_done: int) -> None:
        heard.append("asked")
        if len(heard) == 1:
            raise BackendFailed("out of memory")

    sitting.answers(numbers(1))
    assert len(sitting.answers(numbers(1, 2), fail_once)) == 2
    assert heard == ["asked", "asked"]


def test_a_model_that_hangs_is_waited_for_once(
    tmp_path: Path, loads: list[str], sit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "RUN_TIMEOUT_S", 0.5)
    sitting = sit(null_build(tmp_path, hang_on=7))
    sitting.answers(numbers(1))
    with pytest.raises(TookTooLong) as caught:
        sitting.answers(numbers(7))
    assert len(loads) == 1
    assert not isinstance(caught.value, CutOff), "it hung; no budget ended"


def test_an_interruption_ends_the_process(tmp_path: Path, loads: list[str], sit) -> None:
    def interrupt(num_done: int) -> None:
        raise KeyboardInterrupt

    sitting = sit(null_build(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        sitting.answers(numbers(1), interrupt)
    assert sitting.answers(numbers(5))[0]["y"].tolist() == [5]
    assert len(loads) == 2


class TestSpare:
    def test_the_next_child_is_started_with_the_one_before_it(
        self, tmp_path: Path, spare: WarmSpare
    ):
        build = on_gpu(null_build(tmp_path))
        before = set(psutil.Process().children())
        with spare.take(build.config):
            first = set(psutil.Process().children()) - before
            assert len(first) == 2
        with spare.take(build.config) as child:
            # It was there already, and one more was started.
            (fresh,) = set(psutil.Process().children()) - before - first
            child.load()
            assert fresh.is_running()

    def test_of_another_backend_there_is_none(self, tmp_path: Path, spare: WarmSpare):
        config = on_gpu(null_build(tmp_path)).config
        with spare.take(replace(config, backend="nothing")):
            pass
        with spare.take(config) as child:
            child.load()


class TestLab:
    """The lab on a GPU: one load for a candidate, however much is asked of it."""

    @pytest.fixture
    def lab(self, tmp_path: Path) -> Iterator[Evaluator]:
        build = on_gpu(null_build(tmp_path / "original"))
        plan = Plan("m", "model", str(tmp_path), slo=slo.parse("p99 < 1s at 20/s"))
        machine = Machine("a processor", 4, 1 << 33, ())
        examples = signature_examples(build.config.inputs, True, 1, 8)
        with Journal(tmp_path / "run") as journal:
            lab = made_evaluator(plan, machine, Subject(build, "null", "", ""), examples, journal)
            yield lab
            lab.close()

    def candidate(self, folder: Path, name: str) -> Build:
        build = on_gpu(null_build(folder / name))
        return replace(build, candidate=Candidate((Step(name),)))

    def ask_all(self, lab: Evaluator, build: Build) -> None:
        lab.inspector.facts(build)
        lab.gate.numerics(build, is_exact=True)
        for pair in ((1, 4), (2, 4)):
            lab.measurements.times(build, *pair)

    def test_one_load_for_each(self, lab: Evaluator, tmp_path: Path, loads: list[str]):
        lab.data.check()
        lab.inspector.facts(lab.run.original)
        assert loads == ["2 slots"]
        self.ask_all(lab, self.candidate(tmp_path, "one"))
        self.ask_all(lab, self.candidate(tmp_path, "other"))
        assert loads == ["2 slots"] * 3

    def test_real_rows_are_checked_in_the_same_process(
        self, lab: Evaluator, loads: list[str], monkeypatch: pytest.MonkeyPatch
    ):
        checked: list[int] = []

        def found(child, build, rows, *, is_rounded):
            checked.append(len(rows))
            return RowCheck(batching_problem="example 1 moved next to example 2")

        monkeypatch.setattr(influence, "check_rows", found)
        lab.run.plan = replace(lab.run.plan, data="rows.npz")
        lab.inspector.check_rows()
        assert checked == [8]
        assert loads == ["2 slots"]
        assert not lab.run.original.config.batching.is_dynamic
        # As it is served: one row at a time.
        assert set(lab.measurements.times(lab.run.original, 1, 4).seconds[0]) == {1}

    def test_what_is_known_loads_nothing(self, lab: Evaluator, tmp_path: Path, loads: list[str]):
        build = self.candidate(tmp_path, "one")
        self.ask_all(lab, build)
        num = len(loads)
        self.ask_all(lab, build)
        assert len(loads) == num

    def test_what_is_only_served_otherwise_is_not_read_again(
        self, lab: Evaluator, loads: list[str]
    ):
        facts = lab.inspector.facts(lab.run.original)
        instances = Step("instances", {"instances": "2", "threads": "4"})
        served = lab.builder.build(Candidate().then(BATCHING, instances))
        assert served.config.num_instances == 2
        assert lab.inspector.facts(served) == facts
        assert loads == ["2 slots"]

    def test_on_a_cpu_every_question_has_a_process_of_its_own(
        self, lab: Evaluator, tmp_path: Path, loads: list[str]
    ):
        build = read(null_build(tmp_path / "plain").folder)
        plain = replace(build, candidate=Candidate((Step("plain"),)))
        lab.inspector.facts(plain)
        lab.source.answers(plain, (0, 1))
        assert len(loads) == 2


def compiled_build(root: Path) -> Build:
    """Says that it is compiled when it is loaded; it never is."""
    folder = root / "model"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "module.py").write_text("")
    (folder / "config.pbtxt").write_text(
        'backend: "pytorch" max_batch_size: 8 dynamic_batching { }'
        ' input { name: "x" data_type: TYPE_FP32 dims: 1 }'
        ' output { name: "y" data_type: TYPE_FP32 dims: 1 }'
        ' parameters { key: "penstock.compile" value { string_value: "default" } }'
        " instance_group { kind: KIND_GPU }"
    )
    return read(folder)


@pytest.fixture
def compiled_lab(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[Evaluator]]:
    """Opens labs of one run, each with what those before it have written down, at this stage."""
    build = compiled_build(tmp_path / "original")
    examples = signature_examples(build.config.inputs, True, 1, 8)

    @contextlib.contextmanager
    def opened(stage: str = "baseline") -> Iterator[Evaluator]:
        wish = slo.parse("p99 < 1s at 20/s")
        plan = Plan("m", "model", str(tmp_path), slo=wish, budget_s=60.0)
        machine = Machine("a processor", 4, 1 << 33, ())
        with Journal(tmp_path / "run") as journal:
            subject = Subject(build, "pytorch", "", "")
            budget = TimeBudget(plan, Findings(), lambda: 0.0, 0.0, is_on_gpu=True)
            budget.stage = stage
            lab = made_evaluator(plan, machine, subject, examples, journal, budget)
            with contextlib.closing(lab):
                yield lab

    return opened


class TestRoom:
    """Where memory is short, servers that were kept go before anything else is loaded."""

    @pytest.fixture
    def events(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        seen: list[str] = []

        def told(name: str, answer: object):
            return lambda *_: (seen.append(name), answer)[1]

        full = devices.Gpu(0, "GPU-0", "none", 80 << 30, 10 << 30)
        monkeypatch.setattr(devices, "read_gpus", lambda: (full,))
        monkeypatch.setattr(endpoints.Servers, "close", told("servers closed", None))
        monkeypatch.setattr(trials, "keep_compiled", told("compiled", 0))
        monkeypatch.setattr(trials, "times", told("timed", TimeTable(2, 4, {0: {1: 0.1}})))
        monkeypatch.setattr(measurements, "profile_build", told("profiled", None))
        return seen

    def test_is_made_for_a_compiler(self, compiled_lab, events: list[str]):
        with compiled_lab() as lab:
            lab.builder.build(Candidate().then(BATCHING))
            assert events == ["servers closed", "compiled"]

    def test_is_made_for_times_on_several_gpus(self, compiled_lab, events: list[str]):
        with compiled_lab() as lab:
            config = lab.run.original.config.on(["cuda:0", "cuda:1"])
            lab.measurements.times(replace(lab.run.original, config=config), 2, 4)
            assert events == ["servers closed", "timed"]

    def test_is_made_for_a_profile(self, compiled_lab, events: list[str]):
        with compiled_lab() as lab:
            with pytest.raises(msgspec.ValidationError):
                lab.measurements.profile(lab.run.original)
            assert events == ["servers closed", "profiled"]


def test_a_build_that_had_too_little_time_is_no_build_that_never_ends(
    compiled_lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = Candidate().then(BATCHING)

    def too_long(*_: object) -> int:
        raise TookTooLong("no answer within 20 s")

    monkeypatch.setattr(trials, "keep_compiled", too_long)
    for _ in range(builder.MAX_BEGUN + 1):
        with compiled_lab() as lab, pytest.raises(TookTooLong) as hung:
            lab.builder.build(candidate)
        assert not isinstance(hung.value, CutOff)
    cut_off = pytest.raises(CutOff, match="compiling it takes too long")
    with compiled_lab("compile") as lab, cut_off:
        lab.builder.build(candidate)
    monkeypatch.setattr(trials, "keep_compiled", lambda *_: 0)
    with compiled_lab() as lab:
        assert lab.builder.build(candidate).config.max_batch_size == 4
