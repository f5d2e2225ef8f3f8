"""A run from plan to result: starts generators, measures loads in the order that the plan or a
search gives, and saves the result so far after each."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from penstock.benchmark import pacer, stats, system
from penstock.benchmark.findings import MAX_CPU_SHARE
from penstock.benchmark.level import Meter
from penstock.benchmark.messages import SetUp
from penstock.benchmark.pacer import Closed
from penstock.benchmark.plan import BenchPlan, LevelProgress
from penstock.benchmark.results import BenchRun
from penstock.benchmark.search import KneeSearch, MaxRateSearch
from penstock.errors import ConfigError

# A short closed loop finds the rate at which the search starts.
PROBE_CONCURRENCY = 16
PROBE_S = 2.0
INTERRUPTED = "interrupted"


def conclude(run: BenchRun, search: KneeSearch | MaxRateSearch | None) -> None:
    """Add what a search found. A sweep from one client to the plateau has a knee, even unasked."""
    if isinstance(search, MaxRateSearch):
        run.max_rate = search.max_rate
        _note_generator_limit(run)
    elif search is not None:
        run.knee = search.knee
    elif Closed(1) in [level.load for level in run.levels]:
        sweep = KneeSearch()
        for level in run.levels:
            if not isinstance(level.load, Closed):
                return
            sweep.add(level.load, level.windows)
        run.knee = sweep.knee if sweep.knee is not None and not sweep.knee.reason else None


def _note_generator_limit(run: BenchRun) -> None:
    found = run.max_rate
    if found is None or found.reason:
        return
    # The lowest rate above the answer ended the search.
    rates = {pacer.flat_rate(level.load) or 0.0: level for level in run.levels}
    above = [rate for rate in rates if rate > found.rate.value]
    lowest = rates[min(above)] if above else None
    if lowest is not None and max(lowest.generator.cpu_shares, default=0.0) >= MAX_CPU_SHARE:
        found.reason = f"at {lowest.label} the generator was the limit: the server may do more"


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
            try:
                self._keep(run)
            except ConfigError as error:
                # A file that cannot be written must not hide the results.
                run.is_partial = True
                run.problem = run.problem or "; ".join(error.problems)
            return run
        finally:
            await self._meter.crew.close()

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
            cold_start=opened.cold_start,
            seed=plan.seed,
        )

    async def _measure_levels(self, run: BenchRun) -> str:
        """Measure all levels. Return the problem that ended the run, or an empty text."""
        search = await self._search()
        loads = iter(self._plan.loads)
        while not self.is_interrupted:
            load = search.next() if search is not None else next(loads, None)
            if load is None:
                break
            level = await self._meter.measure(load, self._plan.duration_s)
            run.levels.append(level)
            if level.ending == "lost":
                texts = [text for window in level.windows for text in window.failures]
                return f"the server stopped answering: {texts[-1] if texts else 'no answer'}"
            if search is not None:
                search.add(load, level.windows)
            self._keep(run)
        if self.is_interrupted:
            return INTERRUPTED
        conclude(run, search)
        return ""

    async def _search(self) -> KneeSearch | MaxRateSearch | None:
        plan = self._plan
        if plan.question == "knee":
            return KneeSearch()
        if plan.question == "max rate":
            assert plan.slo is not None
            probe = await self._meter.measure(Closed(PROBE_CONCURRENCY), PROBE_S)
            start = max(1.0, stats.throughput_interval(probe.windows).value / 2)
            return MaxRateSearch(plan.slo, start, arrivals=plan.arrivals, cv=plan.cv)
        return None
