"""A run from plan to result: starts generators, measures loads in the order that the plan or a
search gives, and saves the result so far after each."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.benchmark import pacer, stats, system
from penstock.benchmark.findings import MAX_CPU_SHARE
from penstock.benchmark.level import Meter
from penstock.benchmark.messages import SetUp
from penstock.benchmark.pacer import Closed, Load, Open
from penstock.benchmark.plan import BenchPlan
from penstock.benchmark.progress import LevelProgress
from penstock.benchmark.results import BenchRun, ColdStart, Level
from penstock.benchmark.search import KneeSearch, MaxRateSearch
from penstock.errors import ConfigError

# A short closed loop finds the rate at which the search starts.
PROBE_CONCURRENCY = 16
PROBE_S = 2.0
INTERRUPTED = "interrupted"


class LoadPolicy(Protocol):
    """Chooses the next load and learns from each measurement."""

    def next(self) -> Load | None: ...
    def add(self, load: Load, level: Level) -> None: ...
    def answer(self, run: BenchRun) -> None: ...


class GivenLoads:
    """The loads of the plan, in order."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._left = list(loads)

    def next(self) -> Load | None:
        return self._left.pop(0) if self._left else None

    def add(self, load: Load, level: Level) -> None:
        pass

    def answer(self, run: BenchRun) -> None:
        """Report a knee, even unasked, if the sweep goes from one client to the plateau."""
        search = KneeSearch()
        for level in run.levels:
            if not isinstance(level.load, Closed):
                return
            search.add(level.load, level.windows)
        if Closed(1) in [level.load for level in run.levels]:
            found = search.knee
            run.knee = found if found is not None and not found.reason else None


class KneeChoice:
    def __init__(self) -> None:
        self._search = KneeSearch()

    def next(self) -> Load | None:
        return self._search.next()

    def add(self, load: Load, level: Level) -> None:
        assert isinstance(load, Closed)
        self._search.add(load, level.windows)

    def answer(self, run: BenchRun) -> None:
        run.knee = self._search.knee


class MaxRateChoice:
    def __init__(self, search: MaxRateSearch) -> None:
        self._search = search

    def next(self) -> Load | None:
        return self._search.next()

    def add(self, load: Load, level: Level) -> None:
        assert isinstance(load, Open)
        self._search.add(load, level.windows)

    def answer(self, run: BenchRun) -> None:
        run.max_rate = found = self._search.max_rate
        if found is None or found.reason:
            return
        # The lowest rate above the answer ended the search.
        above = [level for level in run.levels if pacer.mean_rate(_open(level)) > found.rate.value]
        lowest = min(above, key=lambda level: pacer.mean_rate(_open(level)), default=None)
        if lowest is not None and max(lowest.generator.cpu_shares, default=0.0) >= MAX_CPU_SHARE:
            rate = pacer.label(lowest.load)
            found.reason = f"at {rate} the generator was the limit: the server may do more"


def _open(level: Level) -> Open:
    assert isinstance(level.load, Open)
    return level.load


class Conductor:
    """One run. `watch` receives progress, `keep` receives the run after each level."""

    def __init__(
        self,
        plan: BenchPlan,
        watch: Callable[[LevelProgress], None],
        keep: Callable[[BenchRun], None],
    ) -> None:
        self._plan = plan
        self._keep = keep
        self._meter = Meter(plan, watch)
        # False while the target is opened: there is nothing to keep yet.
        self.is_measuring = False

    @property
    def is_interrupted(self) -> bool:
        return self._meter.is_interrupted

    def interrupt(self) -> None:
        """End the current level and keep what was measured."""
        self._meter.is_interrupted = True

    async def measure(self) -> BenchRun:
        """Measure everything. Raises ConfigError if nothing can be measured; later failures make
        the run partial and are recorded in it."""
        try:
            run = await self._open()
            self.is_measuring = True
            run.is_partial = True
            try:
                run.problem = await self._measure_levels(run)
            except ConfigError as error:
                run.problem = "; ".join(error.problems)
            run.is_partial = bool(run.problem)
            self._keep_last(run)
            return run
        finally:
            await self._meter.crew.close()

    def _keep_last(self, run: BenchRun) -> None:
        """Save the run; a file that cannot be written must not hide the results."""
        try:
            self._keep(run)
        except ConfigError as error:
            run.is_partial = True
            run.problem = run.problem or "; ".join(error.problems)

    async def _open(self) -> BenchRun:
        plan = self._plan
        setups = [
            SetUp(plan.target, plan.inputs, index, plan.num_processes, is_first=index == 0)
            for index in range(plan.num_processes)
        ]
        opened, *_ = await self._meter.crew.start(setups)
        if opened.first_failure:
            text = f"{plan.target.address}: the first request: {opened.first_failure}"
            if opened.description.protocol == "HTTP" and "status 404" in text:
                text += "; a v2 model is addressed as http://host:port/v2/models/NAME"
            raise ConfigError([text])
        return BenchRun(
            target=opened.description,
            origin=opened.origin,
            environment=system.environment(plan.target.address),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=plan.command,
            duration_s=plan.duration_s or 0.0,
            precision_percent=plan.precision * 100,
            statistic=plan.decides.name,
            batch_size=plan.inputs.batch_size,
            slo="" if plan.slo is None else str(plan.slo),
            price_per_hour=plan.price_per_hour,
            cold_start=ColdStart(opened.first_s, opened.connect_s, opened.load_s),
            seed=plan.seed,
        )

    async def _measure_levels(self, run: BenchRun) -> str:
        """Measure all levels. Return the problem that ended the run, or an empty text."""
        choice = await self._choice()
        while not self.is_interrupted and (load := choice.next()) is not None:
            level = await self._meter.measure(load, self._plan.duration_s)
            run.levels.append(level)
            if level.ending == "lost":
                return f"the server stopped answering: {_last_failure(level)}"
            choice.add(load, level)
            self._keep(run)
        if self.is_interrupted:
            return INTERRUPTED
        choice.answer(run)
        return ""

    async def _choice(self) -> LoadPolicy:
        plan = self._plan
        if plan.question == "knee":
            return KneeChoice()
        if plan.question == "max rate":
            assert plan.slo is not None
            probe = await self._meter.measure(Closed(PROBE_CONCURRENCY), PROBE_S)
            start = max(1.0, stats.throughput_interval(probe.windows).value / 2)
            return MaxRateChoice(MaxRateSearch(plan.slo, start, arrivals=plan.arrivals, cv=plan.cv))
        return GivenLoads(plan.loads)


def _last_failure(level: Level) -> str:
    texts = [text for window in level.windows for text in window.failures]
    return texts[-1] if texts else "no answer"
