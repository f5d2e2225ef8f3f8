"""A whole run in process: levels, trouble, interruption; what was measured is kept."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import made_runs
import numpy as np
import psutil
import pytest
from child_processes import children_running
from null_models import make

from penstock import slo
from penstock.benchmark.level import Meter, fell_silent, is_lost
from penstock.benchmark.messages import SetUp
from penstock.benchmark.pacer import Closed, Flat, Load, Open, Ramp, Replay, due_times
from penstock.benchmark.plan import BenchPlan, Decides, LevelProgress, decides_for
from penstock.benchmark.results import BenchRun, Level
from penstock.benchmark.run import Conductor, conclude
from penstock.benchmark.search import MaxRateSearch
from penstock.benchmark.stats import Window, merged, percentile_interval, throughput_interval
from penstock.benchmark.targets import TargetSpec
from penstock.data import InputSpec
from penstock.errors import ConfigError


def plan_for(model: object, *loads: Load, **more: object) -> BenchPlan:
    settings: dict[str, object] = {"duration_s": 0.6, "max_warm_up_s": 1.0, "precision": 0.0}
    settings |= more
    return BenchPlan(TargetSpec(str(model)), InputSpec(), tuple(loads), **settings)


def measure(
    plan: BenchPlan, meddle: Callable[[Conductor, LevelProgress], None] = lambda *_: None
) -> tuple[BenchRun, list[BenchRun]]:
    """The run, and what was kept on the way."""
    kept: list[BenchRun] = []

    async def whole() -> BenchRun:
        conductor = Conductor(plan, lambda progress: meddle(conductor, progress), kept.append)
        return await conductor.measure()

    return asyncio.run(whole()), kept


def test_levels_come_in_order_and_count_what_was_answered(tmp_path: Path) -> None:
    model = make(tmp_path, max_batch=1, a_ms=10)
    run, kept = measure(plan_for(model, Closed(1), Open(Flat(50.0), "constant")))
    closed, opened = run.levels
    assert not run.is_partial and run.problem == ""
    assert (closed.load, closed.ending, opened.ending) == (Closed(1), "time", "time")
    assert throughput_interval(closed.windows).value <= 105
    assert percentile_interval(opened.windows, "latency", 50).value >= 0.010
    assert sum(each.num_due for each in opened.windows) == pytest.approx(30, abs=2)
    assert closed.warm_up is not None
    assert closed.server is not None
    assert len(kept) == 3 and kept[0] is run


@pytest.mark.verify
def test_the_server_counts_what_arrived_in_the_windows(tmp_path: Path) -> None:
    """Only if no process stands still between the windows and the counters."""
    run, _ = measure(plan_for(make(tmp_path, max_batch=1, a_ms=10), Closed(1)))
    (level,) = run.levels
    assert level.warm_up is not None and level.warm_up.num_requests > 0
    assert 0 < throughput_interval(level.windows).value <= 105
    assert level.server is not None
    assert level.server.num_success == pytest.approx(
        sum(each.num_arrived for each in level.windows), abs=5
    )


def test_cold_start_is_apart(tmp_path: Path) -> None:
    run, _ = measure(plan_for(make(tmp_path, a_ms=5, load_ms=200), Closed(1)))
    assert run.cold_start is not None
    assert run.cold_start.load_s >= 0.2
    assert run.cold_start.first_s >= 0.005


def test_a_level_that_is_precise_enough_ends_early(tmp_path: Path) -> None:
    model = make(tmp_path, max_batch=1, a_ms=5)
    run, _ = measure(
        plan_for(model, Closed(1), duration_s=6.0, precision=0.5, decides=Decides(50.0))
    )
    (level,) = run.levels
    assert (level.ending, level.measured_s >= 2.0) == ("precise", True)


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
    def meddle(conductor: Conductor, progress: LevelProgress) -> None:
        if progress.phase == "measuring" and progress.index == 2:
            conductor.interrupt()

    model = make(tmp_path, a_ms=1)
    run, kept = measure(plan_for(model, Closed(1), Closed(2), Closed(4)), meddle)
    assert (run.is_partial, run.problem) == (True, "interrupted")
    assert [level.ending for level in run.levels] == ["time", "interrupted"]
    assert kept[-1] is run


def test_a_generator_that_dies_leaves_a_partial_run(tmp_path: Path) -> None:
    def meddle(conductor: Conductor, progress: LevelProgress) -> None:
        if progress.phase == "measuring" and progress.index == 2:
            for child in children_running("penstock.benchmark.generator"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    run, _ = measure(plan_for(make(tmp_path, a_ms=1), Closed(1), Closed(2)), meddle)
    assert run.is_partial
    assert run.problem == "a generator process was killed by SIGKILL"
    assert len(run.levels) == 1


def test_a_model_that_always_fails_is_not_measured(tmp_path: Path) -> None:
    """The first request says so, before minutes are spent."""
    model = make(tmp_path, fail_on=5)
    np.savez(tmp_path / "fives.npz", x=np.full((3, 1), 5, np.int32))
    plan = BenchPlan(TargetSpec(str(model)), InputSpec(str(tmp_path / "fives.npz")), (Closed(1),))
    with pytest.raises(ConfigError, match="the first request: .*fail_on"):
        measure(plan)


def test_the_knee_is_looked_for(tmp_path: Path) -> None:
    model = make(tmp_path, max_batch=1, a_ms=10)
    run, _ = measure(plan_for(model, question="knee", duration_s=0.4, max_warm_up_s=0.0))
    assert run.knee is not None
    assert run.knee.alone_s >= 0.010
    assert run.knee.concurrency == pytest.approx(run.knee.throughput * run.knee.alone_s)
    assert [level.load for level in run.levels][:3] == [Closed(1), Closed(2), Closed(4)]


@pytest.mark.slow
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


def num_due(level: Level) -> int:
    return sum(each.num_due for each in level.windows)


def test_what_is_due_after_the_end_does_not_count(tmp_path: Path) -> None:
    """Not even when the conductor is late: here it stands still for a while."""

    def meddle(_: Conductor, progress: LevelProgress) -> None:
        if progress.phase == "measuring" and progress.elapsed_s > 0.45:
            time.sleep(0.3)

    model = make(tmp_path, a_ms=0)
    load = Open(Flat(100.0), "constant")
    run, _ = measure(plan_for(model, load, duration_s=0.6, max_warm_up_s=0.0), meddle)
    (level,) = run.levels
    assert (num_due(level), level.generator.lateness.total) == (60, 60)


def test_a_level_that_is_measured_again_has_other_arrivals(tmp_path: Path) -> None:
    load = Open(Flat(200.0), "poisson")
    plan = plan_for(make(tmp_path, a_ms=0), load, load, max_warm_up_s=0.0, seed=5)
    run, _ = measure(plan)
    expected = []
    for seed in (5, 7):
        times = next(itertools.islice(due_times(load, seed), 1, None))
        expected.append(int((times < 0.6).sum()) + 1)
    assert expected[0] != expected[1]
    assert [num_due(level) for level in run.levels] == expected


def test_a_trace_without_duration_is_sent_once(tmp_path: Path) -> None:
    """It has no rate, so nothing goes before it."""
    run, _ = measure(plan_for(make(tmp_path, a_ms=1), Replay((7.0, 7.0)), duration_s=None))
    (level,) = run.levels
    assert (level.warm_up, num_due(level), level.ending) == (None, 2, "through")


@asynccontextmanager
async def answering(after_s: float) -> AsyncIterator[str]:
    """The address of a server that answers everybody after a while, however many they are."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(after_s)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=1000)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


def measure_slow(after_s: float, *loads: Load, **more: object) -> list[Level]:
    """Levels of a server that is slow and never full."""

    async def whole() -> list[Level]:
        async with answering(after_s) as address:
            settings: dict[str, object] = {"max_connections": 1000, "timeout_s": 60.0}
            settings |= {name: more.pop(name) for name in tuple(settings) if name in more}
            target = TargetSpec(address, method="GET", **settings)
            plan = BenchPlan(target, InputSpec(), loads, max_warm_up_s=0.0, **more)
            meter = Meter(plan, lambda _: None)
            try:
                await meter.crew.start([SetUp(target, plan.inputs, 0, 1, is_first=True)])
                return [await meter.measure(load, plan.duration_s) for load in loads]
            finally:
                await meter.crew.close()

    return asyncio.run(whole())


def failures(level: Level) -> dict[str, int]:
    return merged(level.windows).failures


def test_who_interrupts_does_not_wait_for_the_last_answers() -> None:
    """The first answer comes in time, the second would take ten minutes."""

    async def whole() -> BenchRun:
        async with answering_once_then_never() as address:

            def meddle(progress: LevelProgress) -> None:
                if progress.phase == "draining":
                    asyncio.get_running_loop().call_later(0.1, conductor.interrupt)

            target = TargetSpec(address, method="GET", timeout_s=600.0)
            plan = BenchPlan(target, InputSpec(), (Closed(1),), duration_s=0.3, max_warm_up_s=0.0)
            conductor = Conductor(plan, meddle, lambda _: None)
            return await conductor.measure()

    run = asyncio.run(whole())
    assert run.problem == "interrupted"
    assert failures(run.levels[0]) == {"cancelled": 1}


@asynccontextmanager
async def answering_once_then_never() -> AsyncIterator[str]:
    answered = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                if not answered:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
                answered.append(True)
        writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"


@pytest.mark.slow
def test_answers_that_are_slow_and_in_time_are_waited_for() -> None:
    """A search that has seen enough must not turn what was kept into failures."""
    (level,) = measure_slow(
        1.5,
        Open(Flat(300.0), "constant"),
        question="max rate",
        slo=slo.parse("p50 < 60s"),
        duration_s=30.0,
    )
    assert level.ending == "decided"
    assert failures(level) == {}


def test_a_level_after_one_that_was_given_up() -> None:
    """Its target works again, and what waited for a connection before is not its own."""
    stuck, free = measure_slow(
        0.5,
        Open(Flat(20.0), "constant"),
        Closed(1),
        max_connections=1,
        timeout_s=4.0,
        duration_s=1.2,
        precision=0.0,
    )
    assert failures(stuck) and stuck.generator.num_waited > 5
    assert stuck.generator.num_connections == 1
    assert failures(free) == {} and free.generator.num_waited == 0


def test_a_file_that_cannot_be_written_does_not_hide_the_run(tmp_path: Path) -> None:
    def keep(_: BenchRun) -> None:
        raise ConfigError(["run.json: cannot be written: No space left on device"])

    plan = plan_for(make(tmp_path, a_ms=1), Closed(1), Closed(2), max_warm_up_s=0.0)
    run = asyncio.run(Conductor(plan, lambda _: None, keep).measure())
    assert run.is_partial and "No space left" in run.problem
    assert len(run.levels) == 1


def test_a_sweep_to_the_plateau_has_a_knee() -> None:
    run = made_runs.sweep("")
    run.knee = None
    conclude(run, None)
    assert run.knee.concurrency == pytest.approx(run.knee.throughput * run.knee.alone_s)


@pytest.mark.parametrize(
    "loads", [[Closed(2), Closed(4), Closed(8), Closed(16)], [Closed(1)], [Open(Flat(100.0))]]
)
def test_what_is_no_sweep_has_none(loads: list[Load]) -> None:
    run = made_runs.run([made_runs.level(load, span_s=2.0) for load in loads])
    conclude(run, None)
    assert run.knee is None


@pytest.mark.parametrize(("cpu_share", "is_said"), [(0.99, True), (0.3, False)])
def test_a_search_that_the_generator_ended_says_so(cpu_share: float, is_said: bool) -> None:
    run = made_runs.max_rate()
    search = MaxRateSearch(slo.parse("p99 < 20ms"), 800.0)
    for level in run.levels:
        level.generator.cpu_shares = [cpu_share]
        search.add(level.load, level.windows)
    conclude(run, search)
    assert ("the generator was the limit" in run.max_rate.reason) == is_said


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
        ([window(0, **{"no_connection:_no_route_to_host": 5})] * 4, True),
        ([window(0, status_503=5)] * 4, False),  # It is there, and says no.
        ([window(0)] * 4, False),
    ],
)
def test_a_server_is_lost_when_only_broken_connections_come(
    windows: list[Window], expected: bool
) -> None:
    assert is_lost(windows) == expected


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([window(9), window(0, no_answer_within_5_s=2), window(0), window(0)], True),
        # Some that were due in the same moment were still answered.
        ([window(9, no_answer_within_5_s=2), window(0), window(0), window(0)], True),
        ([window(9)] + [window(0, no_answer_within_5_s=2)] * 3, True),
        ([window(9), window(0), window(0), window(0)], False),  # Nothing was asked.
        ([window(0, no_answer_within_5_s=2), window(0), window(0), window(1), window(0)], False),
        ([window(9), window(0, no_answer_within_5_s=2), window(0)], False),  # Too soon.
        ([window(9)] + [window(0, status_503=2)] * 3, False),
    ],
)
def test_a_server_that_hangs_at_the_end_has_fallen_silent(
    windows: list[Window], expected: bool
) -> None:
    assert fell_silent(windows) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99 < 20ms", Decides()),
        ("p95 < 20ms, p50 < 5ms", Decides(95.0)),
        ("p90 < 20ms, p99.9 < 50ms, p99 < 30ms", Decides(99.9)),
        ("p50 < 5ms, throughput >= 100/s", Decides()),
        ("p99.9 ttft < 1s", Decides(99.9, "ttft")),
    ],
)
def test_the_slo_says_which_percentile_decides(text: str, expected: Decides) -> None:
    assert decides_for(slo.parse(text)) == expected
