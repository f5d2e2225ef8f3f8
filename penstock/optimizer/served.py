"""Measure builds as they would be served, by `python -m penstock serve` and the bench's
conductor: at the SLO's load, and up to the highest rate that keeps it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.benchmark import pacer, stats
from penstock.benchmark import plan as bench
from penstock.benchmark.pacer import Closed, Flat, Load, Open
from penstock.benchmark.results import Level
from penstock.benchmark.search import MaxRateSearch
from penstock.benchmark.stats import Interval, Window
from penstock.errors import BackendFailed
from penstock.optimizer import served_figures, time_plan
from penstock.optimizer.candidates import Build
from penstock.optimizer.disturbance import is_void
from penstock.optimizer.endpoints import START_TIMEOUT_S, ServedEndpoint, Servers, Watch
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import ServedMeasurement
from penstock.optimizer.simulate import Row
from penstock.optimizer.time_plan import PROBE_COST_S, MeasurementLimits
from penstock.slo import Goodput, Latency, Slo, Throughput
from penstock.types import Array

# Minimum time to start a server, however little of the budget is left.
MIN_START_S = 10.0
# Load for a throughput term, relative to it: slightly above, so that the load is not the limit.
ABOVE = 1.05
SEARCH_LEVEL_S = 4.0
# A level is extended to this many requests, if allowed: fewer say nothing about a tail.
SEARCH_REQUESTS = 400
SEARCH_WARM_UP_S = 1.0
# Duration of a single-client measurement that gives the first rate of streams, and the lowest rate.
ALONE_S, LOWEST_RATE = 5.0, 0.01
NO_RATE = Interval(math.nan, math.nan, math.nan)
UNLIMITED = MeasurementLimits()


@dataclass(frozen=True, slots=True)
class ServedBench:
    """Measures builds of a plan's model, each behind its server. `watch` receives what is being
    done. Several builds take turns (A B A B), so that changes of the machine affect all of them."""

    plan: Plan
    rows: Sequence[Row]
    watch: Watch
    # Kept running for the next measurement; None: each measurement starts its own.
    servers: Servers | None = None
    limits: MeasurementLimits = UNLIMITED

    def measure(self, builds: Sequence[Build]) -> list[ServedMeasurement]:
        """Measure at the SLO's load, one build once; if cost is limited, highest rates too."""
        num_rounds = 1 if len(builds) == 1 else self.limits.num_rounds
        with self._stage(builds) as bench:
            found = bench._in_turns(builds, num_rounds)
            if self.plan.has_cost_limit:
                return bench._rated(builds, found, min_search_s=time_plan.MIN_COST_SEARCH_S)
            return found

    def with_rates(self, builds: Sequence[Build]) -> list[ServedMeasurement]:
        """Measure once at the SLO's load, then up to the highest rate of each. A search without
        time for another level ends with what it has."""
        with self._stage(builds) as bench:
            return bench._rated(builds, bench._in_turns(builds, 1))

    def prove(
        self, builds: Sequence[Build], starts: Sequence[float | None] = ()
    ) -> list[ServedMeasurement]:
        """Measure at the SLO's load and up to the highest rate of each, from its start if that is
        given: with rates, costs and curves. Rates are left out if there is no time to search for
        them; an SLO that limits cost makes do with a shorter search."""
        has_cost = self.plan.has_cost_limit
        shortest_s = time_plan.MIN_COST_SEARCH_S if has_cost else time_plan.MIN_SEARCH_S
        with self._stage(builds) as bench:
            found = bench._in_turns(builds, self.limits.num_rounds)
            if self._search_s(builds) < shortest_s:
                return found
            return bench._rated(builds, found, starts)

    def rate_from(self, build: Build, start: float | None) -> tuple[ServedMeasurement, bool]:
        """Find the highest rate that keeps the SLO, from `start` on; if that is given, lower rates
        are not tried. The figures are those of the highest rate that kept it, or else of the lowest
        one tried. Also return whether the search ended before its time was up."""
        if not has_limits(self.plan):
            return self.with_rates([build])[0], True
        with self._stage([build]) as bench:
            endpoint = bench._endpoint(build)
            search = RateSearch(self, endpoint, self.limits.search_s, start, is_floor=True)
            while search.is_open:
                search.step()
            level = served_figures.shown_level(search.levels, search.rate)
            account = served_figures.ServedAccount(build.config)
            account.add(level, endpoint)
        found = served_figures.served_of(account, level.load, self.plan)
        rate = None if math.isnan(search.rate.value) else search.rate
        curve = served_figures.curve_of(search.levels)
        return msgspec.structs.replace(found, max_rate=rate, curve=curve), search.has_ended

    def answers(self, build: Build, seconds: float) -> list[tuple[int, dict[str, Array]]]:
        """Return the answers of the build behind its server, with the index of each row."""
        with self._stage([build]) as bench:
            return bench._endpoint(build).answers(self.rows, seconds)

    @contextlib.contextmanager
    def _stage(self, builds: Sequence[Build]) -> Iterator[ServedBench]:
        """Open endpoints. Kept servers stay up unless it fails: their state is unknown then."""
        own = Servers() if self.servers is None else self.servers
        own.start_timeout_s = lambda: min(START_TIMEOUT_S, max(MIN_START_S, self.limits.left_s()))
        try:
            if not own.is_alone:
                own.open(builds, self.rows)
            yield replace(self, servers=own)
        except BaseException:
            own.close()
            raise
        if self.servers is None:
            own.close()

    def _search_s(self, builds: Sequence[Build]) -> float:
        """Return the time for each search for a highest rate; searches take turns."""
        return min(self.limits.search_s, self.limits.left_s() / len(builds) - PROBE_COST_S)

    def _endpoint(self, build: Build) -> ServedEndpoint:
        assert self.servers is not None, "outside of a stage"
        return self.servers.open([build], self.rows)[0]

    def _in_turns(self, builds: Sequence[Build], num_rounds: int) -> list[ServedMeasurement]:
        """Measure in rounds; those after the first are left out if there is no time for all."""
        load = load_of(self.plan.slo)
        accounts = [served_figures.ServedAccount(build.config) for build in builds]
        for number in range(num_rounds):
            round_s = len(accounts) * time_plan.level_cost_s(self.plan.duration_s)
            if number and self.limits.left_s() < round_s:
                break
            for build, account in zip(builds, accounts, strict=True):
                endpoint = self._endpoint(build)
                account.add(self.level(endpoint, load), endpoint)
        return [served_figures.served_of(account, load, self.plan) for account in accounts]

    def _rated(
        self,
        builds: Sequence[Build],
        found: Sequence[ServedMeasurement],
        starts: Sequence[float | None] = (),
        min_search_s: float = -math.inf,
    ) -> list[ServedMeasurement]:
        """Add the highest rate of each that keeps the latency terms, with a curve of the measured
        levels. Without such terms, add the throughput at saturation. NaN: unknown."""
        if not has_limits(self.plan):
            probes = [self.saturate(self._endpoint(build)) for build in builds]
            return [
                served_figures.priced(each, stats.throughput_interval(windows), self.plan)
                for each, windows in zip(found, probes, strict=True)
            ]
        search_s = max(min_search_s, self._search_s(builds))
        searches: list[RateSearch] = []
        asked = self.plan.slo.rate
        for number, build in enumerate(builds):
            start = starts[number] if starts else None
            kept = asked.per_s if asked is not None and found[number].is_met else 0.0
            searches.append(RateSearch(self, self._endpoint(build), search_s, start, kept=kept))
            # The next server may replace this one.
            while self.servers is not None and self.servers.is_alone and searches[-1].is_open:
                searches[-1].step()
        while left := [each for each in searches if each.is_open]:
            for each in left:
                each.step()
        return [
            msgspec.structs.replace(
                served_figures.priced(each, search.believable_rate, self.plan),
                curve=served_figures.curve_of(search.levels),
            )
            for each, search in zip(found, searches, strict=True)
        ]

    def level(
        self,
        endpoint: ServedEndpoint,
        load: Load,
        short_s: float | None = None,
        warm_up_s: float = SEARCH_WARM_UP_S,
    ) -> Level:
        """Measure one load; if that is given, for this long after this warm-up."""
        wanted = bench_plan(endpoint, self.plan, load)
        if short_s is not None:
            wanted = replace(wanted, duration_s=short_s, max_warm_up_s=warm_up_s)
        return endpoint.measured(wanted, self.watch).levels[0]

    def saturate(self, endpoint: ServedEndpoint) -> Sequence[Window]:
        """Measure a closed loop with enough clients to saturate the server."""
        return self.level(endpoint, Closed(endpoint.num_clients), endpoint.probe_s).windows

    def rate_alone(self, endpoint: ServedEndpoint) -> float:
        level = self.level(endpoint, Closed(1), min(ALONE_S, self.plan.duration_s), 0.0)
        mean_s = stats.histogram(level.windows).mean()
        if not mean_s > 0:
            raise BackendFailed("not one request of a client alone was answered well")
        return max(LOWEST_RATE, 1 / mean_s)


def bench_plan(endpoint: ServedEndpoint, plan: Plan, load: Load) -> bench.BenchPlan:
    """Return the benchmark's plan. A closed loop of streams has no warm-up: with one, a client
    whose answer takes longer than the level would send its next request after the end."""
    is_alone = endpoint.is_streaming and isinstance(load, Closed)
    return bench.BenchPlan(
        endpoint.target(plan),
        endpoint.inputs(plan),
        (load,),
        slo=plan.slo,
        decides=bench.decides_for(plan.slo),
        duration_s=endpoint.level_s(plan, load),
        max_warm_up_s=0.0 if is_alone else time_plan.warm_up_s(plan.duration_s),
        seed=plan.seed,
        price_per_hour=plan.price_per_hour,
    )


def load_of(slo: Slo) -> Load:
    """Return the load at which the SLO must hold: its rate, or slightly more than its throughput,
    or one client. If only throughput counts, arrivals are constant: Poisson arrivals often bring
    fewer requests than asked for, whatever the server does."""
    if slo.rate is not None:
        return _open(slo.rate.per_s, slo)
    asked = [term.limit for term in slo.terms if isinstance(term, Throughput)]
    if not asked:
        return Closed(1)
    is_timed = any(isinstance(term, Latency | Goodput) for term in slo.terms)
    return Open(Flat(ABOVE * max(asked)), "poisson" if is_timed else "constant")


def _open(rate: float, slo: Slo) -> Open:
    if slo.rate is None:
        return Open(Flat(rate))
    return Open(Flat(rate), slo.rate.arrivals, slo.rate.cv or 1.0)


def has_limits(plan: Plan) -> bool:
    """Return whether the SLO limits latency or goodput, so that a highest rate exists."""
    return any(isinstance(term, Latency | Goodput) for term in plan.slo.terms)


class RateSearch:
    """The bench's search for the highest rate, one level at a time, so that several take turns.
    Without a start, it begins at half of the saturation rate, or at the rate that was just `kept`;
    for streams at the SLO's rate, or at that of one client. With `is_floor`, rates below the start
    are not measured."""

    def __init__(
        self,
        bench: ServedBench,
        endpoint: ServedEndpoint,
        left_s: float,
        start: float | None = None,
        *,
        is_floor: bool = False,
        kept: float = 0.0,
    ) -> None:
        self._slo = slo = bench.plan.slo
        self._floor = 0.999 * start if is_floor and start is not None else 0.0
        self._bench = bench
        self._endpoint = endpoint
        self._left_s = left_s
        self._probe: Sequence[Window] = ()
        self.levels: list[Level] = []
        if start is None and endpoint.is_streaming:
            start = bench.rate_alone(endpoint) if slo.rate is None else slo.rate.per_s
        elif start is None:
            self._probe = bench.saturate(endpoint)
            # Few clients may leave a server that waits for batches far from saturated.
            start = max(1.0, stats.throughput_interval(self._probe).value / 2, kept)
        first = _open(start, slo)
        self._search = MaxRateSearch(
            slo, start, precision=endpoint.precision, arrivals=first.arrivals, cv=first.cv
        )
        self._next = self._search.next()

    @property
    def has_ended(self) -> bool:
        """Whether more time would not change the result."""
        return self._next is None or pacer.mean_rate(self._next) < self._floor

    @property
    def is_open(self) -> bool:
        if self.has_ended or self._left_s <= 0:
            return False
        return not self.levels or self._left_s >= self._level_s

    @property
    def rate(self) -> Interval:
        found = self._search.max_rate
        return NO_RATE if found is None else found.rate

    @property
    def believable_rate(self) -> Interval:
        """The highest rate; unknown if the same server just answered far more in time."""
        if not self._probe:
            return self.rate
        measured = [self._probe, *(level.windows for level in self.levels)]
        answered = max(served_figures.in_time_rate(windows, self._slo) for windows in measured)
        return NO_RATE if is_void(self.rate, answered) else self.rate

    @property
    def _level_s(self) -> float:
        """Longest measurement of the next rate."""
        assert self._next is not None
        enough_s = max(SEARCH_LEVEL_S, SEARCH_REQUESTS / pacer.mean_rate(self._next))
        return min(self._endpoint.level_s(self._bench.plan, self._next), enough_s)

    def step(self) -> None:
        assert self._next is not None
        began = time.monotonic()
        level = self._bench.level(self._endpoint, self._next, self._level_s)
        self.levels.append(level)
        self._search.add(self._next, level.windows)
        self._left_s -= time.monotonic() - began
        self._next = self._search.next()
