"""The conductor of a run: starts generators, says what to send, folds what they report, decides
with `stats` and `search` when a level is warm, precise enough or lost.

What decides is pure and elsewhere; this file waits, asks and keeps the order of things.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.benchmark import pacer, search, stats, system
from penstock.benchmark.crew import Crew
from penstock.benchmark.exchange import Columns
from penstock.benchmark.inputs import InputSpec
from penstock.benchmark.messages import Count, Counted, Ended, Go, Progress, SetUp, Stop
from penstock.benchmark.pacer import Closed, Flat, Load, Open
from penstock.benchmark.report.live import Phase
from penstock.benchmark.report.live import Progress as Shown
from penstock.benchmark.results import (
    ColdStart,
    Ending,
    GeneratorUse,
    Level,
    Run,
    SystemSample,
    WarmUp,
)
from penstock.benchmark.stats import Interval
from penstock.benchmark.targets import Counters, TargetSpec
from penstock.errors import ConfigError
from penstock.slo import Latency, Slo

TICK_S = 0.1
SYSTEM_S = 0.5
# Generators hear of the start before it comes.
LEAD_S = 0.05
# A level does not end early before this part of its time: a rare stall wants a chance to be seen.
MIN_SHARE = 1 / 3
# So long without one good answer, and with lost connections, is a server that is gone.
LOST_S = 3.0
# What is under way when somebody interrupts, or when the outcome is known, may take so long.
SHORT_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Decides:
    """The figure whose interval ends a level: a percentile of a metric."""

    percent: float = 99.0
    metric: str = "latency"

    @property
    def name(self) -> str:
        return f"p{self.percent:g}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and how long."""

    target: TargetSpec
    inputs: InputSpec
    # None for the questions that choose loads themselves.
    loads: tuple[Load, ...] = ()
    question: str = ""  # "", "knee" or "max rate"
    slo: Slo | None = None
    decides: Decides = Decides()
    # Of one level, at most; None: a trace or profile to its end.
    duration_s: float | None = 10.0
    precision: float = 0.05
    max_warm_up_s: float = 10.0
    num_processes: int = 1
    arrivals: str = "poisson"
    cv: float = 1.0
    seed: int = 0
    price_per_hour: float | None = None
    command: str = ""


class Search(Protocol):
    def next(self) -> Load | None: ...
    def add(self, load: Load, level: Level) -> None: ...


class GivenLoads:
    """The loads of the command line, in order."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._left = list(loads)

    def next(self) -> Load | None:
        return self._left.pop(0) if self._left else None

    def add(self, load: Load, level: Level) -> None:
        pass


class Conductor:
    """One run. `watch` hears how it stands, `keep` gets the run after each level."""

    def __init__(
        self, plan: Plan, watch: Callable[[Shown], None], keep: Callable[[Run], None]
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._keep = keep
        self._crew = Crew(self._heard)
        self._waiting: list[Columns] = []
        # Of each generator, while a level runs.
        self._reports: dict[int, list[Progress]] = {}
        self.is_interrupted = False
        self._phase = ""
        self._level_index = 0
        self.run: Run | None = None

    def interrupt(self) -> None:
        """End the level that runs, keep what was measured."""
        self.is_interrupted = True

    async def measure(self) -> Run:
        """ConfigError when there is nothing to measure; later trouble is in the run, which is then
        partial."""
        try:
            self.run = await self._open()
            try:
                await self._measure_levels(self.run)
            except ConfigError as error:
                self.run.is_partial = True
                self.run.problem = "; ".join(error.problems)
            self._keep(self.run)
            return self.run
        finally:
            await self._crew.close()

    async def _open(self) -> Run:
        plan = self._plan
        setups = [
            SetUp(plan.target, plan.inputs, index, plan.num_processes, is_first=index == 0)
            for index in range(plan.num_processes)
        ]
        opened, *_ = await self._crew.start(setups)
        if opened.first_failure:
            raise ConfigError([f"{plan.target.address}: the first request: {opened.first_failure}"])
        return Run(
            target=opened.description,
            origin=opened.origin,
            environment=system.environment(plan.target.address),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=plan.command,
            duration_s=plan.duration_s or 0.0,
            precision_percent=plan.precision * 100,
            statistic=plan.decides.name,
            slo="" if plan.slo is None else str(plan.slo),
            price_per_hour=plan.price_per_hour,
            cold_start=ColdStart(opened.first_s, opened.connect_s, opened.load_s),
            seed=plan.seed,
        )

    async def _measure_levels(self, run: Run) -> None:
        searching = await self._make_search()
        while not self.is_interrupted and (load := searching.next()) is not None:
            level = await self._measure(load)
            run.levels.append(level)
            self._level_index += 1
            searching.add(load, level)
            if level.ending == "lost":
                run.is_partial = True
                run.problem = f"the server stopped answering: {_last_failure(level)}"
                return
            run.is_partial = True
            self._keep(run)
        run.is_partial = self.is_interrupted
        if self.is_interrupted:
            run.problem = "interrupted"
            return
        if isinstance(searching, search.KneeSearch):
            run.knee = searching.answer()
        elif isinstance(searching, search.MaxRateSearch):
            run.max_rate = searching.answer()

    async def _make_search(self) -> Search:
        plan = self._plan
        if plan.question == "knee":
            return search.KneeSearch()
        if plan.question == "max rate":
            assert plan.slo is not None
            probe = await self._measure(Closed(PROBE_CONCURRENCY), probe_s=PROBE_S)
            start = stats.throughput_interval(probe.windows).value / 2
            return search.MaxRateSearch(plan.slo, start, plan.arrivals, plan.cv)
        return GivenLoads(plan.loads)

    # One level.

    async def _measure(self, load: Load, probe_s: float | None = None) -> Level:
        warm_up = None
        is_endless = pacer.duration_s(load) is None
        if not is_endless and self._plan.max_warm_up_s > 0:
            warm_up = await self._warm_up_for(load)
        await self._crew.prepare(load, self._plan.seed)
        self._begin_reports()
        start = time.monotonic() + LEAD_S
        self._crew.ask(Go(start))
        if is_endless and self._plan.max_warm_up_s > 0:
            warm_up = await self._warm_up(load, start)
            start = time.monotonic()
        return await self._count(load, start, warm_up, probe_s)

    async def _warm_up_for(self, load: Load) -> WarmUp:
        """Loads that change have no steady state: a flat one goes before."""
        flat = Open(Flat(pacer.first_rate(load)))
        await self._crew.prepare(flat, self._plan.seed + 1)
        self._begin_reports()
        start = time.monotonic() + LEAD_S
        self._crew.ask(Go(start))
        warm_up = await self._warm_up(flat, start)
        await self._stop(time.monotonic(), self._plan.target.timeout_s)
        return warm_up

    async def _warm_up(self, load: Load, start: float) -> WarmUp:
        recorder = stats.Recorder(start, None)
        steadiness = stats.Steadiness()
        limit_s = self._plan.max_warm_up_s
        while True:
            await self._tick(recorder)
            elapsed_s = time.monotonic() - start
            windows = recorder.windows(time.monotonic())
            self._tell(load, "warm-up", elapsed_s, limit_s, windows)
            if steadiness.judge(windows) or elapsed_s >= limit_s or self.is_interrupted:
                return steadiness.warm_up(windows, elapsed_s)
            if _is_lost(windows):
                return steadiness.warm_up(windows, elapsed_s)

    async def _count(
        self, load: Load, start: float, warm_up: WarmUp | None, probe_s: float | None
    ) -> Level:
        recorder = stats.Recorder(start, self._plan.slo)
        before = await self._counters()
        watching = SystemWatch(start)
        limit_s = _limit(self._plan.duration_s if probe_s is None else probe_s, load)
        while True:
            await self._tick(recorder)
            now = time.monotonic()
            windows = recorder.windows(now)
            watching.look(now)
            self._tell(load, "measuring", now - start, limit_s, windows)
            if ending := self._ending(load, windows, now - start, limit_s):
                break
        end = time.monotonic()
        if ending == "through":
            end = start + (pacer.duration_s(load) or 0.0)
        after = await self._counters() if ending != "lost" else None
        is_short = ending in ("interrupted", "lost", "decided")
        patience_s = SHORT_PATIENCE_S if is_short else self._plan.target.timeout_s
        self._tell(load, "draining", end - start, limit_s, windows)
        await self._stop(end, patience_s)
        recorder_windows = self._drain_into(recorder).windows(end)
        return Level(
            load=load,
            measured_s=end - start,
            ending=ending,
            warm_up=warm_up,
            windows=recorder_windows,
            service=recorder.service,
            generator=self._use(recorder, start, end),
            server=_difference(before, after),
            samples=recorder.samples,
            system=watching.samples,
        )

    def _ending(
        self, load: Load, windows: list[stats.Window], elapsed_s: float, limit_s: float
    ) -> Ending | None:
        plan = self._plan
        if self.is_interrupted:
            return "interrupted"
        if _is_lost(windows):
            return "lost"
        if elapsed_s >= limit_s:
            length_s = pacer.duration_s(load)
            return "through" if length_s is not None and length_s <= limit_s else "time"
        if plan.question == "max rate" and isinstance(load, Open):
            assert plan.slo is not None
            return "decided" if search.is_decided(windows, plan.slo) else None
        if pacer.duration_s(load) is not None or elapsed_s < limit_s * MIN_SHARE:
            return None
        figure = self._figure(windows)
        is_tight = (figure.high - figure.low) / 2 <= plan.precision * figure.value
        return "precise" if plan.precision > 0 and is_tight else None

    async def _stop(self, at: float, patience_s: float) -> None:
        self._crew.ask(Stop(at, patience_s))
        await self._crew.expect(Ended)

    async def _counters(self) -> Counters | None:
        member = self._crew.members[0]
        member.ask(Count())
        return (await member.expect(Counted)).counters

    # What generators report.

    def _heard(self, index: int, progress: Progress) -> None:
        self._waiting.append(progress.columns)
        progress.columns = Columns(b"", b"", b"", b"")
        self._reports.setdefault(index, []).append(progress)

    def _begin_reports(self) -> None:
        self._waiting.clear()
        self._reports.clear()

    async def _tick(self, recorder: stats.Recorder) -> None:
        await asyncio.sleep(TICK_S)
        if problems := self._crew.problem():
            raise ConfigError(problems)
        self._drain_into(recorder)

    def _drain_into(self, recorder: stats.Recorder) -> stats.Recorder:
        for columns in self._waiting:
            recorder.add(columns)
        self._waiting.clear()
        return recorder

    def _use(self, recorder: stats.Recorder, start: float, end: float) -> GeneratorUse:
        cpu_shares, in_flight = [], 0.0
        for reports in self._reports.values():
            inside = [each for each in reports if start <= each.at <= end + TICK_S]
            if len(inside) < 2:
                continue
            first, last = inside[0], inside[-1]
            cpu_shares.append((last.cpu_s - first.cpu_s) / (last.at - first.at))
            num_looks = last.num_in_flight_samples - first.num_in_flight_samples
            in_flight += (last.in_flight_sum - first.in_flight_sum) / max(1, num_looks)
        lasts = [reports[-1] for reports in self._reports.values() if reports]
        return GeneratorUse(
            cpu_shares=cpu_shares,
            lateness=recorder.lateness,
            mean_in_flight=in_flight,
            max_in_flight=sum(each.max_in_flight for each in lasts),
            num_connections=sum(each.num_connections for each in lasts),
            num_waited=sum(each.num_waited for each in lasts),
        )

    def _figure(self, windows: list[stats.Window]) -> Interval:
        decides = self._plan.decides
        return stats.percentile_interval(windows, decides.metric, decides.percent)

    def _tell(
        self,
        load: Load,
        phase: Phase,
        elapsed_s: float,
        of_s: float,
        windows: list[stats.Window],
    ) -> None:
        decides = self._plan.decides
        recent = windows[-4:]
        span_s = sum(window.length_s for window in recent)
        latest = stats.percentile_interval(recent, decides.metric, decides.percent)
        self._watch(
            Shown(
                level=pacer.label(load),
                phase=phase,
                elapsed_s=elapsed_s,
                of_s=of_s,
                rate=sum(window.num_arrived for window in recent) / span_s if span_s else 0.0,
                p99_s=latest.value,
                num_requests=sum(window.num_due for window in windows),
                num_failed=sum(sum(window.failures.values()) for window in windows),
                statistic=decides.name,
                interval=self._figure(windows) if windows else None,
                index=self._level_index + 1,
                num_levels=len(self._plan.loads) or None,
            )
        )


PROBE_CONCURRENCY = 16
PROBE_S = 2.0


class SystemWatch:
    """A look at the machine every half second."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._next = start + SYSTEM_S
        self._sampler = system.Sampler()
        self.samples: list[SystemSample] = []

    def look(self, now: float) -> None:
        if now >= self._next:
            self._next = now + SYSTEM_S
            self.samples.append(self._sampler.sample(now - self._start))


def decides_for(slo: Slo | None) -> Decides:
    """The tightest tail an SLO speaks of; p99 latency where it speaks of none."""
    for term in () if slo is None else slo.terms:
        if isinstance(term, Latency) and term.is_tail:
            return Decides(float(term.statistic[1:]), term.metric)
    return Decides()


def _limit(asked_s: float | None, load: Load) -> float:
    length_s = pacer.duration_s(load)
    limits = [each for each in (asked_s, length_s) if each is not None]
    return min(limits)


def _is_lost(windows: list[stats.Window]) -> bool:
    """For a while nothing came but broken connections."""
    recent: list[stats.Window] = []
    for window in reversed(windows):
        recent.append(window)
        if sum(each.length_s for each in recent) >= LOST_S:
            break
    else:
        return False
    if any(window.num_good or window.num_arrived for window in recent):
        return False
    failures = [text for window in recent for text in window.failures]
    return bool(failures) and all(map(is_loss, failures))


def is_loss(failure: str) -> bool:
    """Whether nobody was there to answer, as opposed to an answer that says no."""
    return failure.startswith(("connection", "UNAVAILABLE", "cannot connect"))


def _last_failure(level: Level) -> str:
    texts = [text for window in level.windows for text in window.failures]
    return texts[-1] if texts else "no answer"


def _difference(before: Counters | None, after: Counters | None) -> Counters | None:
    if before is None or after is None:
        return None
    found: dict[str, int | None] = {}
    for name in Counters.__struct_fields__:
        first, last = getattr(before, name), getattr(after, name)
        found[name] = None if first is None or last is None else last - first
    if any(value is not None and value < 0 for value in found.values()):
        return None  # The server was restarted, or the model loaded again.
    return Counters(**found)  # type: ignore[arg-type]
