"""Which rows of the GPU benchmarks run at the same time, and in which order."""

import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
FOREVER = float("inf")


@pytest.fixture
def scheduling(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import scheduling

    return scheduling


@pytest.fixture
def models(scheduling):
    import models

    return models


@pytest.fixture
def gpu_lock(scheduling):
    import gpu_lock

    return gpu_lock


@pytest.fixture
def locks(gpu_lock, tmp_path):
    """As of three processes."""
    made = [gpu_lock.GpuLock(tmp_path / "gpu.lock") for _ in range(3)]
    yield made
    for each in made:
        each.close()


def by_name(tasks) -> dict:
    return {task.name: task for task in tasks}


def test_rows_with_kernels_wait_for_the_row_that_keeps_them(scheduling, models) -> None:
    found = by_name(scheduling.tasks_of("resnet50", models.MODELS["resnet50"].techniques))
    assert found["fp16 fused"].keeps and found["fp16 compile"].keeps
    assert found["int8 fused, graphs"].keeps and not found["int8 fused, graphs"].waits_for
    for name in ("fp16 fused, graphs", "fp16 fused, graphs, two copies"):
        assert found[name].waits_for == "fp16 fused"
    assert found["fp16 compile, graphs"].waits_for == "fp16 compile"
    # Other kernels: nothing to wait for, and nothing that may be kept beside those of the first.
    assert found["bf16 fused, graphs"].waits_for == "" and not found["bf16 fused, graphs"].keeps
    assert not found["fp16 max-autotune, graphs"].keeps
    assert found["fp32 eager"].waits_for == "" and not found["fp32 eager"].keeps


def test_what_compiles_is_first_and_what_takes_minutes_last(scheduling, models) -> None:
    tasks = [
        task
        for name in ("resnet50", "vit_b")
        for task in scheduling.tasks_of(name, models.MODELS[name].techniques)
    ]
    names = [(task.model, task.name) for task in scheduling.in_order(tasks)]
    assert names[:2] == [("resnet50", "fp16 compile"), ("vit_b", "fp16 compile")]
    assert [name for _, name in names[-2:]] == ["fp16 max-autotune, graphs"] * 2
    assert sorted(names) == sorted((task.model, task.name) for task in tasks)


def test_no_more_than_so_many_run_and_none_before_what_it_waits_for(scheduling) -> None:
    tasks = [
        scheduling.Task("a", "reads", waits_for="writes"),
        scheduling.Task("a", "writes"),
        scheduling.Task("b", "reads", waits_for="writes"),
        *(scheduling.Task("a", f"other {number}") for number in range(6)),
    ]
    running, most, ended = set(), [], []
    lock = threading.Lock()

    def run(task):
        with lock:
            running.add(task)
            most.append(len(running))
            if task == tasks[0]:
                assert tasks[1] in ended
        return task.name

    def done(task, name) -> None:
        assert name == task.name
        with lock:
            running.discard(task)
            ended.append(task)

    assert scheduling.run_all(tasks, run, done, 3, FOREVER) == []
    assert len(ended) == len(tasks) and max(most) <= 3


def test_nothing_begins_when_time_is_over(scheduling) -> None:
    tasks = [scheduling.Task("a", str(number)) for number in range(3)]
    now, ended = [0.0], []

    def done(task, _) -> None:
        ended.append(task)
        now[0] += 10

    left = scheduling.run_all(tasks, lambda task: None, done, 1, 15.0, lambda: now[0])
    assert ended == tasks[:2] and left == tasks[2:]


def test_some_compile_together_and_one_measures_alone(locks) -> None:
    first, second, measuring = locks
    is_alone, may_end = threading.Event(), threading.Event()

    def measure() -> None:
        with measuring.alone():
            is_alone.set()
            may_end.wait(30)

    thread = threading.Thread(target=measure)
    with first.together(), second.together():
        thread.start()
        assert not is_alone.wait(0.2)
    assert is_alone.wait(30)

    def compile_more() -> None:
        with first.together():
            pass

    later = threading.Thread(target=compile_more)
    later.start()
    later.join(0.2)
    assert later.is_alive()
    may_end.set()
    later.join(30)
    thread.join(30)
    assert not later.is_alive() and measuring.waited_s >= 0.2


def test_who_holds_it_alone_may_ask_again_but_not_who_shares_it(locks) -> None:
    lock = locks[0]
    with lock.alone(), lock.alone(), lock.together():
        pass
    with lock.together(), pytest.raises(RuntimeError, match="asked for alone"), lock.alone():
        pass


def test_tuners_compile_together_and_time_alone(gpu_lock, monkeypatch) -> None:
    from contextlib import contextmanager

    from penstock.kernels import convolution

    held: list[str] = []

    class Watched:
        @contextmanager
        def alone(self):
            held.append("alone")
            yield

        @contextmanager
        def together(self):
            held.append("together")
            yield

    class Doubled:
        """A layer with two ways to the same answer."""

        def key(self, x) -> str:
            return "doubled"

        def implementations(self, x):
            return {convolution.REFERENCE: lambda x: x + x, "other": lambda x: 2 * x}

    monkeypatch.setattr(convolution.GpuTimer, "seconds", lambda self, call: 1.0)
    monkeypatch.setattr(convolution.GpuTimer, "done", lambda self: None)
    # Put back behind this test.
    for name in gpu_lock.TUNER_METHODS:
        monkeypatch.setattr(convolution.Tuner, name, getattr(convolution.Tuner, name))
    gpu_lock.time_kernels_in_turns(Watched())
    timer = convolution.GpuTimer.__new__(convolution.GpuTimer)
    tuner = convolution.Tuner(timer, torch.device("cpu"))
    assert tuner.find(Doubled(), torch.ones(2)) is None
    tuner.tune()
    # A layer as a whole, and each of its two ways in it.
    assert held == ["together", "alone", "alone", "alone"]
    assert tuner.find(Doubled(), torch.ones(2)) is not None


def test_who_compiles_shares_the_gpu_and_who_runs_has_it_alone(scheduling, models) -> None:
    pytest.importorskip("safetensors")
    import run

    class Named:
        def alone(self) -> str:
            return "alone"

        def together(self) -> str:
            return "together"

    rows = models.MODELS["resnet50"].techniques

    def held(name: str, **how: bool) -> object:
        found = run.calling(Named(), rows[name], **how)
        return found if isinstance(found, str) else "free"

    assert held("fp16 eager", is_loading=True) == "free" and held("fp16 eager") == "alone"
    assert held("fp16 compile", is_loading=True) == held("fp16 compile") == "together"
    assert held("fp16 max-autotune, graphs", is_loading=True) == "alone"
    # Its tuner takes it; afterwards only cuDNN has to choose, at the first call.
    assert held("fp16 fused") == "free"
    assert held("fp16 fused, graphs", is_tuned=True) == "alone"
    assert held("fp16 fused, graphs", is_tuned=True, is_loading=True) == "free"
