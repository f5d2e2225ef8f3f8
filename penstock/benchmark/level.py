"""Measure one load: warm up, count, stop, wait for the last answers.

Waits, messages the generators and folds in their reports; pure functions decide.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from msgspec.structs import replace

from penstock.benchmark import pacer, stats
from penstock.benchmark.crew import GeneratorPool
from penstock.benchmark.exchange import ExchangeColumns
from penstock.benchmark.messages import Count, Counted, Ended, GeneratorReport, Go, StopLoad
from penstock.benchmark.pacer import Closed, Flat, Load, Open, Replay
from penstock.benchmark.plan import BenchPlan, LevelProgress, Phase
from penstock.benchmark.recorder import Recorder
from penstock.benchmark.results import Ending, GeneratorUse, Level, WarmUp
from penstock.benchmark.stats import Interval, Window
from penstock.benchmark.steadiness import is_growing, steadiness
from penstock.benchmark.system import SystemWatch
from penstock.benchmark.targets import Counters, combine
from penstock.benchmark.verdicts import has_overdue, is_decided, judge, of_each_request
from penstock.errors import ConfigError

TICK_S = 0.25
# Lead time, so that all generators know the start before it comes.
LEAD_S = 0.05
# A level is not called precise before this share of its time: a rare stall must get a chance.
MIN_SHARE = 1 / 3
# A server is lost after this long with no good answer and only lost connections.
LOST_S = 3.0
# Time left to requests in flight after an interrupt, or once the outcome is known.
SHORT_PATIENCE_S = 1.0
# Reports kept per generator; beyond this, every second one is dropped.
MAX_REPORTS = 1000
# The last request of a trace is due exactly at its end, and still belongs to it.
INSTANT_S = 1e-6


class Meter:
    """Measures the levels of a run, one after the other. `watch` receives progress."""

    def __init__(self, plan: BenchPlan, watch: Callable[[LevelProgress], None]) -> None:
        self._plan = plan
        self._watch = watch
        self.crew = GeneratorPool(self._heard)
        self.is_interrupted = False
        # The SLO terms that decide a search for the highest rate; None in other runs.
        self._searched = None
        if plan.question == "max rate" and plan.slo is not None:
            self._searched = of_each_request(plan.slo)
        self._index = 0
        self._waiting: list[ExchangeColumns] = []
        # By generator, while a level runs.
        self._reports: dict[int, list[GeneratorReport]] = {}

    async def measure(self, load: Load, limit_s: float | None) -> Level:
        """Measure a load for at most `limit_s`; None runs a load that has an end to its end."""
        self._index += 1
        length_s, is_warmed = pacer.duration_s(load), self._plan.max_warm_up_s > 0
        # Each level has its own arrivals, so that measuring a load again adds new information.
        seed = self._plan.seed + 2 * (self._index - 1)
        warm_up = None
        if is_warmed and length_s is not None and math.isfinite(_first_rate(load)):
            # At a constant rate: a load that changes has no steady state.
            flat = Open(Flat(_first_rate(load)))
            warm_up = await self._warm_up(flat, await self._begin(flat, seed + 1))
            await self._stop(time.monotonic(), self._plan.target.timeout_s)
        start = await self._begin(load, seed)
        if is_warmed and length_s is None:
            warm_up = await self._warm_up(load, start)
            start = time.monotonic()
        ends_s = min(each for each in (limit_s, length_s) if each is not None)
        return await self._count(load, start, ends_s, warm_up)

    async def _begin(self, load: Load, seed: int) -> float:
        await self.crew.prepare(load, seed)
        self._waiting.clear()
        self._reports.clear()
        start = time.monotonic() + LEAD_S
        self.crew.ask(Go(start))
        return start

    async def _warm_up(self, load: Load, start: float) -> WarmUp:
        recorder = Recorder(start)
        patience_s = self._plan.max_warm_up_s
        while True:
            await self._tick(recorder)
            elapsed_s = time.monotonic() - start
            windows = recorder.windows(time.monotonic())
            self._tell(load, "warm-up", (elapsed_s, patience_s), windows)
            state = steadiness(windows[:-1], patience_s)
            is_over = state.is_over or elapsed_s >= patience_s or self._is_hopeless(windows)
            if is_over or self.is_interrupted or is_lost(windows):
                num_requests = sum(window.num_due for window in windows)
                ends_s = (state.first_s, state.last_s)
                known = (None if math.isnan(each) else each for each in ends_s)
                return WarmUp(elapsed_s, num_requests, state.is_steady, *known)

    def _is_hopeless(self, windows: list[Window]) -> bool:
        """Whether the rate is far too high: it never gets steady, and the verdict is clear."""
        searched = self._searched
        return searched is not None and is_decided(windows, searched) and self._is_missed(windows)

    def _is_missed(self, windows: list[Window]) -> bool:
        assert self._searched is not None
        return any(verdict.outcome == "missed" for verdict in judge(windows, self._searched))

    async def _count(
        self, load: Load, start: float, ends_s: float, warm_up: WarmUp | None
    ) -> Level:
        recorder = Recorder(start, self._plan.slo)
        last = start + ends_s + (INSTANT_S if _is_through(load, ends_s) else 0.0)
        # Requests due later are not counted, even if a generator stops too late to hold them back.
        recorder.stop(last)
        before = await self._counters()
        watching = SystemWatch(start)
        ending: Ending | None = None
        while ending is None:
            left_s = start + ends_s - time.monotonic()
            await self._tick(recorder, min(TICK_S, max(0.0, left_s)))
            now = time.monotonic()
            watching.look(now)
            windows = recorder.windows(now)
            self._tell(load, "measuring", (now - start, ends_s), windows)
            ending = self._ending(load, windows, now - start, ends_s)
        end = min(time.monotonic(), last)
        after = await self._counters() if ending != "lost" else None
        recorder.stop(end)
        self._tell(load, "draining", (end - start, ends_s), windows)
        # Cancelled requests count as never answered; they must not make a kept SLO look missed.
        is_known = ending == "decided" and self._is_missed(windows)
        is_short = is_known or ending in ("interrupted", "lost")
        await self._stop(end, SHORT_PATIENCE_S if is_short else self._plan.target.timeout_s)
        self._drain_into(recorder)
        windows = recorder.windows(end)
        return Level(
            load=load,
            measured_s=end - start,
            ending="lost" if ending != "interrupted" and fell_silent(windows) else ending,
            warm_up=warm_up,
            windows=windows,
            service=recorder.service,
            generator=self._use(recorder, start, end),
            server=_difference(before, after),
            samples=recorder.samples,
            system=watching.samples,
            agreement=recorder.agreement,
        )

    def _ending(
        self, load: Load, windows: list[Window], elapsed_s: float, ends_s: float
    ) -> Ending | None:
        if self.is_interrupted:
            return "interrupted"
        if is_lost(windows):
            return "lost"
        if elapsed_s >= ends_s:
            return "through" if _is_through(load, ends_s) else "time"
        if pacer.duration_s(load) is not None or self._plan.precision == 0:
            return None
        if self._searched is not None and isinstance(load, Open):
            is_over = is_decided(windows, self._searched, self._num_in_flight)
            return "decided" if is_over else None
        if elapsed_s < ends_s * MIN_SHARE or (isinstance(load, Open) and is_growing(windows)):
            return None
        return "precise" if self._is_precise(windows) else None

    def _is_precise(self, windows: list[Window]) -> bool:
        figure = self._figure(windows)
        if not figure.relative_error <= self._plan.precision:
            return False
        # Streams may run long: with a limit on first tokens, the number in flight says nothing.
        within_s = figure.value if self._plan.decides.metric == "latency" else math.inf
        return not has_overdue(windows, self._num_in_flight, within_s)

    async def _stop(self, at: float, patience_s: float) -> None:
        """Stop the generators; an interrupt shortens the wait for the last answers."""
        self.crew.ask(StopLoad(at, patience_s))
        ended = asyncio.ensure_future(self.crew.expect(Ended))
        was_interrupted = self.is_interrupted
        try:
            while not (await asyncio.wait({ended}, timeout=TICK_S))[0]:
                if self.is_interrupted and not was_interrupted:
                    was_interrupted = True
                    self.crew.ask(StopLoad(at, min(patience_s, SHORT_PATIENCE_S)))
            await ended
        finally:
            ended.cancel()

    async def _counters(self) -> Counters | None:
        member = self.crew.members[0]
        member.ask(Count())
        return (await member.expect(Counted)).counters

    def _heard(self, index: int, progress: GeneratorReport) -> None:
        self._waiting.append(progress.columns)
        progress.columns = ExchangeColumns(b"", b"", b"", b"")
        reports = self._reports.setdefault(index, [])
        if len(reports) >= MAX_REPORTS:
            del reports[1::2]
        reports.append(progress)

    @property
    def _num_in_flight(self) -> int:
        return sum(reports[-1].in_flight for reports in self._reports.values())

    async def _tick(self, recorder: Recorder, wait_s: float = TICK_S) -> None:
        await asyncio.sleep(wait_s)
        if problems := self.crew.problem():
            raise ConfigError(problems)
        self._drain_into(recorder)

    def _drain_into(self, recorder: Recorder) -> None:
        for columns in self._waiting:
            recorder.add(columns)
        self._waiting.clear()

    def _use(self, recorder: Recorder, start: float, end: float) -> GeneratorUse:
        cpu_shares, in_flight, num_waited = [], 0.0, 0
        for reports in self._reports.values():
            before = [each.num_waited for each in reports if each.at < start]
            num_waited += reports[-1].num_waited - (before[-1] if before else 0)
            # Leave out the drain at the end, when fewer and fewer requests are in flight.
            inside = [each for each in reports if start <= each.at <= end]
            if len(inside) < 2:
                continue
            first, last = inside[0], inside[-1]
            span_s = last.at - first.at
            cpu_shares.append((last.cpu_s - first.cpu_s) / span_s)
            in_flight += (last.in_flight_area_s - first.in_flight_area_s) / span_s
        return GeneratorUse(
            cpu_shares=cpu_shares,
            lateness=recorder.lateness,
            mean_in_flight=in_flight,
            max_in_flight=self._most("max_in_flight"),
            # The maximum: the last report has no connections if requests were cancelled.
            num_connections=self._most("num_connections"),
            num_waited=num_waited,
        )

    def _most(self, field: str) -> int:
        every = self._reports.values()
        return sum(max(getattr(each, field) for each in reports) for reports in every)

    def _figure(self, windows: list[Window]) -> Interval:
        decides = self._plan.decides
        return stats.percentile_interval(windows, decides.metric, decides.percent)

    def _tell(
        self, load: Load, phase: Phase, elapsed_of_s: tuple[float, float], windows: list[Window]
    ) -> None:
        recent = stats.merged(windows[-4:])
        durations = recent.metrics.get(self._plan.decides.metric, stats.NO_DURATIONS)
        self._watch(
            LevelProgress(
                level=pacer.label(load),
                phase=phase,
                elapsed_s=elapsed_of_s[0],
                of_s=elapsed_of_s[1],
                rate=recent.num_arrived / recent.length_s if recent.length_s else 0.0,
                p99_s=durations.percentile(99),
                num_requests=sum(window.num_due for window in windows),
                num_failed=sum(window.num_failed for window in windows),
                statistic=self._plan.decides.name,
                interval=self._figure(windows) if windows else None,
                index=self._index,
                num_levels=len(self._plan.loads) or None,
            )
        )


def is_lost(windows: list[Window]) -> bool:
    """Whether there was nothing but broken connections for LOST_S."""
    length_s, failures = 0.0, set[str]()
    for window in reversed(windows):
        if window.num_good or window.num_arrived:
            return False
        failures.update(window.failures)
        length_s += window.length_s
        if length_s >= LOST_S:
            return bool(failures) and all(map(is_loss, failures))
    return False


def fell_silent(windows: list[Window]) -> bool:
    """Whether the server hung: requests were waiting, but the last LOST_S had no answer. A closed
    loop has few requests in flight, so no percentile would show it."""
    silent_s, is_waiting = 0.0, False
    for window in reversed(windows):
        has_waited = any(text.startswith(("no answer", "cancelled")) for text in window.failures)
        is_waiting = is_waiting or has_waited
        if window.num_arrived or window.num_good or (window.failures and not has_waited):
            break
        silent_s += window.length_s
    return is_waiting and silent_s >= LOST_S


def is_loss(failure: str) -> bool:
    """Whether the connection failed, as opposed to an answer that reports an error."""
    return failure.startswith(("connection", "no connection", "UNAVAILABLE"))


def _is_through(load: Load, ends_s: float) -> bool:
    length_s = pacer.duration_s(load)
    return length_s is not None and length_s <= ends_s


def _first_rate(load: Load) -> float:
    """Return the rate to warm up with; infinite for a trace without duration."""
    assert not isinstance(load, Closed)
    if isinstance(load, Replay) or isinstance(load.profile, Flat):
        return pacer.mean_rate(load)
    if isinstance(load.profile, pacer.Ramp):
        return max(load.profile.first, load.profile.last / 10)
    return next(step.rate for step in load.profile.steps if step.rate > 0)


def _difference(before: Counters | None, after: Counters | None) -> Counters | None:
    if before is None or after is None:
        return None
    found = combine((before, after), lambda pair: pair[1] - pair[0])
    members = {name: each for name, each in found.members.items() if not _has_restarted(each)}
    return None if _has_restarted(found) else replace(found, members=members)


def _has_restarted(difference: Counters) -> bool:
    """Whether the server restarted, or the model was reloaded."""
    return min(each or 0 for each in difference.numbers) < 0
