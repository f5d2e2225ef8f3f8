"""A whole run in process: levels, trouble, interruption; what was measured is kept."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from null_models import make

from penstock import slo
from penstock.benchmark.inputs import InputSpec
from penstock.benchmark.level import is_lost
from penstock.benchmark.pacer import Closed, Flat, Load, Open, Ramp, Replay
from penstock.benchmark.plan import Decides, Plan, decides_for
from penstock.benchmark.report.live import Progress
from penstock.benchmark.results import Run
from penstock.benchmark.run import Conductor
from penstock.benchmark.stats import Window, percentile_interval, throughput_interval
from penstock.benchmark.targets import TargetSpec
from penstock.errors import ConfigError


def plan_for(model: object, *loads: Load, **more: object) -> Plan:
    settings: dict[str, object] = {"duration_s": 0.6, "max_warm_up_s": 1.0, "precision": 0.0}
    settings |= more
    return Plan(TargetSpec(str(model)), InputSpec(), tuple(loads), **settings)


def measure(
    plan: Plan, meddle: Callable[[Conductor, Progress], None] = lambda *_: None
) -> tuple[Run, list[Run]]:
    """The run, and what was kept on the way."""
    kept: list[Run] = []

    async def whole() -> Run:
        conductor = Conductor(plan, lambda progress: meddle(conductor, progress), kept.append)
        return await conductor.measure()

    return asyncio.run(whole()), kept


def test_levels_come_in_order_and_count_what_was_answered(tmp_path: Path) -> None:
    model = make(tmp_path, max_batch=1, a_ms=10)
    run, kept = measure(plan_for(model, Closed(1), Open(Flat(50.0), "constant")))
    closed, opened = run.levels
    assert not run.is_partial and run.problem == ""
    assert (closed.load, closed.ending, opened.ending) == (Closed(1), "time", "time")
    assert 0 < throughput_interval(closed.windows).value <= 105
    assert percentile_interval(opened.windows, "latency", 50).value >= 0.010
    assert sum(each.num_due for each in opened.windows) == pytest.approx(30, abs=2)
    assert closed.warm_up is not None and closed.warm_up.num_requests > 0
    assert closed.server is not None
    assert closed.server.num_success == pytest.approx(
        sum(each.num_arrived for each in closed.windows), abs=5
    )
    assert len(kept) == 3 and kept[0] is run


def test_cold_start_is_apart(tmp_path: Path) -> None:
    run, _ = measure(plan_for(make(tmp_path, a_ms=5, load_ms=200), Closed(1)))
    assert run.cold_start is not None
    assert run.cold_start.load_s >= 0.2
    assert run.cold_start.first_s >= 0.005


def test_a_level_that_is_precise_enough_ends_early(tmp_path: Path) -> None:
    model = make(tmp_path, max_batch=1, a_ms=5)
    run, _ = measure(plan_for(model, Closed(1), duration_s=6.0, precision=0.5))
    (level,) = run.levels
    assert level.ending == "precise"
    assert 2.0 <= level.measured_s < 6.0


@pytest.mark.parametrize(
    "load", [Replay((0.0, 0.1, 0.1, 0.4), 1.0, "t"), Open(Ramp(10.0, 30.0, 0.5), "constant")]
)
def test_a_load_with_an_end_runs_to_it(tmp_path: Path, load: Load) -> None:
    run, _ = measure(plan_for(make(tmp_path, a_ms=1), load, duration_s=None))
    (level,) = run.levels
    assert level.ending == "through"
    num_due = 4 if isinstance(load, Replay) else 10
    assert sum(each.num_due for each in level.windows) == pytest.approx(num_due, abs=num_due // 10)
    assert sum(each.num_good for each in level.windows) == sum(e.num_due for e in level.windows)


def test_interrupting_keeps_what_was_measured(tmp_path: Path) -> None:
    def meddle(conductor: Conductor, progress: Progress) -> None:
        if progress.phase == "measuring" and progress.index == 2:
            conductor.interrupt()

    model = make(tmp_path, a_ms=1)
    run, kept = measure(plan_for(model, Closed(1), Closed(2), Closed(4)), meddle)
    assert (run.is_partial, run.problem) == (True, "interrupted")
    assert [level.ending for level in run.levels] == ["time", "interrupted"]
    assert kept[-1] is run


def test_a_generator_that_dies_leaves_a_partial_run(tmp_path: Path) -> None:
    def meddle(conductor: Conductor, progress: Progress) -> None:
        if progress.phase == "measuring" and progress.index == 2:
            for child in psutil.Process().children():
                os.kill(child.pid, signal.SIGKILL)

    run, _ = measure(plan_for(make(tmp_path, a_ms=1), Closed(1), Closed(2)), meddle)
    assert run.is_partial
    assert run.problem == "a generator process ended by signal 9"
    assert len(run.levels) == 1


def test_a_model_that_always_fails_is_not_measured(tmp_path: Path) -> None:
    """The first request says so, before minutes are spent."""
    model = make(tmp_path, fail_on=5)
    np.savez(tmp_path / "fives.npz", x=np.full((3, 1), 5, np.int32))
    plan = Plan(TargetSpec(str(model)), InputSpec(str(tmp_path / "fives.npz")), (Closed(1),))
    with pytest.raises(ConfigError, match="the first request: .*fail_on"):
        measure(plan)


def test_the_knee_is_looked_for(tmp_path: Path) -> None:
    model = make(tmp_path, max_batch=1, a_ms=10)
    run, _ = measure(plan_for(model, question="knee", duration_s=0.4, max_warm_up_s=0.0))
    assert run.knee is not None
    assert run.knee.alone_s >= 0.010
    assert run.knee.concurrency == pytest.approx(run.knee.throughput * run.knee.alone_s)
    assert [level.load for level in run.levels][:3] == [Closed(1), Closed(2), Closed(4)]


def test_the_highest_rate_is_looked_for(tmp_path: Path) -> None:
    model = make(tmp_path, max_batch=1, a_ms=10)
    wanted = slo.parse("p99 < 200ms")
    plan = plan_for(
        model,
        question="max rate",
        slo=wanted,
        arrivals="constant",
        duration_s=0.4,
        max_warm_up_s=0.0,
    )
    run, _ = measure(plan)
    assert run.max_rate is not None
    assert run.max_rate.slo == "p99 < 200ms"
    rates = [level.load.profile.rate for level in run.levels]
    assert len(set(rates)) > 2
    assert not run.max_rate.rate.value > max(rates)


def window(num_good: int, **failures: int) -> Window:
    named = {text.replace("_", " "): count for text, count in failures.items()}
    num_due = num_good + sum(named.values())
    return Window(0.0, 1.0, num_due, num_good, num_good, failures=named)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([window(0, connection_refused=5)] * 4, True),
        ([window(0, connection_refused=5)] * 2, False),  # Too soon.
        ([window(9)] + [window(0, connection_lost=1)] + [window(0)] * 3, False),
        ([window(1, connection_refused=5)] * 4, False),
        ([window(0, status_503=5)] * 4, False),  # It is there, and says no.
        ([window(0)] * 4, False),
    ],
)
def test_a_server_is_lost_when_only_broken_connections_come(
    windows: list[Window], expected: bool
) -> None:
    assert is_lost(windows) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99 < 20ms", Decides()),
        ("p95 < 20ms, p50 < 5ms", Decides(95.0)),
        ("p50 < 5ms, throughput >= 100/s", Decides()),
        ("p99.9 ttft < 1s", Decides(99.9, "ttft")),
    ],
)
def test_the_slo_says_which_percentile_decides(text: str, expected: Decides) -> None:
    assert decides_for(slo.parse(text)) == expected
