"""Measure builds of language models as served: `penstock serve`, with the benchmark as a streaming
client of the OpenAI API."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock.benchmark import pacer, stats
from penstock.benchmark import plan as bench
from penstock.benchmark.pacer import Closed, Load, Open
from penstock.benchmark.results import Level
from penstock.benchmark.stats import Interval
from penstock.benchmark.targets import TargetSpec
from penstock.data import InputSpec
from penstock.errors import BackendFailed
from penstock.llm.settings import settings_of
from penstock.optimizer.candidates import Build
from penstock.optimizer.llm.text_prompts import Prompts, write_load
from penstock.optimizer.llm.text_time import SEARCH_S
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import ServedMeasurement
from penstock.optimizer.served import (
    LONG_PATIENCE_S,
    PATIENCE,
    PATIENCE_S,
    RateSearch,
    ServedAccount,
    ServedEndpoint,
    Watch,
    bench_plan,
    curve_of,
    load_of,
    saturated,
    served_of,
)
from penstock.optimizer.time_plan import MIN_SEARCH_S
from penstock.slo import Goodput, Latency, Slo

# Answers take seconds, so a level has few of them: rates cannot be known more precisely than this.
PRECISION = 0.15
# All answers have the requested length, so all candidates do the same work.
EXTRA = '{"ignore_eos": true}'
# Duration of a saturation measurement.
PROBE_S = 20.0
# Duration of a single-client measurement that gives the first rate.
ALONE_S = 5.0
NUM_ROUNDS = 2
# Share of the remaining time for searches: the last level of each overruns its time.
IN_TIME = 0.7
LOWEST_RATE = 0.01
# Requests that a level should have, and the longest time to wait for them.
MIN_REQUESTS, MAX_LEVEL_S = 6, 60.0


class TextEndpoint(ServedEndpoint):
    """Endpoint of the OpenAI API. Each level sends new prompts to the server, written to `file`."""

    probe_s = PROBE_S
    precision = PRECISION

    def __init__(self, build: Build, prompts: Prompts, file: Path, patience_s: float) -> None:
        super().__init__(build, str(file))
        self._prompts = prompts
        self._patience_s = patience_s
        # Every server gets the same prompts, level by level.
        self._levels = itertools.count()

    def target(self, plan: Plan) -> TargetSpec:
        origin = self.address.partition("/v2/")[0]
        return TargetSpec(
            f"openai+{origin}/v1",
            model=self.build.config.name,
            api="chat" if self._prompts.is_chat else "completions",
            timeout_s=self._patience_s,
            extra=EXTRA,
        )

    def inputs(self, plan: Plan) -> InputSpec:
        # The same prompts again would hit the prefix cache.
        level = next(self._levels)
        write_load(self._prompts, Path(self.data), level)
        return InputSpec(path=self.data, seed=plan.seed + level)

    def level_s(self, plan: Plan, load: Load) -> float:
        """Extend the level if too few requests would arrive in the configured time."""
        if not isinstance(load, Open):
            return plan.duration_s
        enough_s = MIN_REQUESTS / max(LOWEST_RATE, pacer.mean_rate(load))
        return max(plan.duration_s, min(MAX_LEVEL_S, enough_s))

    @property
    def may_be_late(self) -> bool:
        """Whether all answers of a level may time out: they take seconds, so at too high a rate
        they can. False if the server has died."""
        return self.is_running

    @property
    def num_clients(self) -> int:
        return settings_of(self.build.config).max_sequences


def patience_of(slo: Slo | None, num_tokens: int) -> float:
    """Return the request timeout, from the SLO's limits for a whole answer or for its parts."""
    limits = {"latency": math.inf, "ttft": math.inf, "tpot": math.inf}
    for term in () if slo is None else slo.terms:
        if isinstance(term, Latency) and term.metric in limits:
            limits[term.metric] = min(limits[term.metric], term.limit_s)
    whole_s = min(limits["latency"], limits["ttft"] + num_tokens * limits["tpot"])
    return LONG_PATIENCE_S if math.isinf(whole_s) else max(PATIENCE_S, PATIENCE * whole_s)


class TextServers:
    """Servers of builds, started on demand. `is_alone`: one at a time, because each takes all the
    memory there is. `close` stops all of them."""

    def __init__(self, prompts: Prompts, file: Path, patience_s: float, is_alone: bool) -> None:
        self._prompts, self._file, self._patience_s = prompts, file, patience_s
        self.is_alone = is_alone
        self._stack = ExitStack()
        self._running: dict[Path, TextEndpoint] = {}

    def opened(self, build: Build) -> TextEndpoint:
        known = self._running.get(build.folder)
        if known is not None and known.is_running:
            return known
        if self.is_alone:
            self.close()
        endpoint = TextEndpoint(build, self._prompts, self._file, self._patience_s)
        self._running[build.folder] = self._stack.enter_context(endpoint)
        return endpoint

    def close(self) -> None:
        self._running.clear()
        self._stack.close()


def has_limits(plan: Plan) -> bool:
    """Return whether the SLO limits latency or goodput, so that a highest rate exists."""
    terms = () if plan.slo is None else plan.slo.terms
    return any(isinstance(term, Latency | Goodput) for term in terms)


def rated(
    servers: TextServers,
    build: Build,
    plan: Plan,
    watch: Watch,
    start: float | None,
    search_s: float,
) -> tuple[ServedMeasurement, bool]:
    """Find the highest rate that meets the SLO, from `start` on; if `start` is given, lower rates
    are not tried. The figures are those of the highest rate that met it, or else of the lowest one
    tried. Also return whether the result is final: more time would not have improved it."""
    endpoint = servers.opened(build)
    if not has_limits(plan):
        return _whole(endpoint, plan, watch), True
    first = start or _first_rate(endpoint, plan, watch)
    search = RateSearch(endpoint, plan, first, search_s, floor=0.999 * (start or 0.0))
    began = time.monotonic()
    while search.is_open:
        search.step(watch)
    is_through = search_s >= SEARCH_S or time.monotonic() - began < search_s
    level = shown_level(search.levels, search.rate)
    account = ServedAccount(build.config)
    account.add(level, endpoint.memory_bytes, endpoint.conditions)
    account.gpu_memory_bytes = endpoint.gpu_memory_bytes
    found = served_of(account, level.load, plan)
    rate = None if math.isnan(search.rate.value) else search.rate
    found = msgspec.structs.replace(found, max_rate=rate, curve=curve_of(search.levels))
    return found, is_through


def shown_level(levels: Sequence[Level], rate: Interval) -> Level:
    """Return the level of the highest rate that met the SLO, or of the lowest rate if none did."""
    rates = {pacer.mean_rate(each.load): each for each in levels if isinstance(each.load, Open)}
    kept = [each for each in rates if each <= rate.value * (1 + 1e-9)]
    return rates[max(kept)] if kept else rates[min(rates)]


def level_plan(endpoint: TextEndpoint, plan: Plan, load: Load) -> bench.BenchPlan:
    """Return the benchmark plan of one level. A closed loop has no warm-up: with one, a client
    whose answer takes longer than the level would send its next request after the end."""
    wanted = bench_plan(endpoint, plan, [load])
    return replace(wanted, max_warm_up_s=0.0) if isinstance(load, Closed) else wanted


def _first_rate(endpoint: TextEndpoint, plan: Plan, watch: Watch) -> float:
    """Return the SLO's rate, or else the rate of one client in a closed loop."""
    if plan.slo is not None and plan.slo.rate is not None:
        return plan.slo.rate.per_s
    alone = replace(level_plan(endpoint, plan, Closed(1)), duration_s=min(ALONE_S, plan.duration_s))
    (level,) = endpoint.measured(alone, watch).levels
    mean_s = stats.histogram(level.windows).mean()
    if not mean_s > 0:
        raise BackendFailed("not one request of a client alone was answered well")
    return max(LOWEST_RATE, 1 / mean_s)


def _whole(endpoint: TextEndpoint, plan: Plan, watch: Watch) -> ServedMeasurement:
    """Measure the saturation rate, and one level at the SLO's load: it limits no request."""
    rate = saturated(endpoint, plan, watch)
    load = load_of(plan.slo)
    (level,) = endpoint.measured(level_plan(endpoint, plan, load), watch).levels
    account = ServedAccount(endpoint.build.config)
    account.add(level, endpoint.memory_bytes, endpoint.conditions)
    return msgspec.structs.replace(served_of(account, load, plan), max_rate=rate)


def prove(
    servers: TextServers,
    builds: Sequence[Build],
    plan: Plan,
    watch: Watch,
    starts: Sequence[float | None],
    left: Callable[[], float | None],
) -> tuple[list[ServedMeasurement], bool]:
    """Measure the builds at the SLO's load in turns (A B A B), then search for the highest rate of
    each, in turns too if all servers may run at once. Rates are left out if time is short. Also
    return whether there was time for them."""
    load = load_of(plan.slo)
    accounts = [ServedAccount(build.config) for build in builds]
    for number in range(NUM_ROUNDS):
        for build, account in zip(builds, accounts, strict=True):
            left_s = left()
            if number and left_s is not None and left_s < MIN_SEARCH_S * len(builds):
                continue
            endpoint = servers.opened(build)
            run = endpoint.measured(level_plan(endpoint, plan, load), watch)
            account.add(run.levels[0], endpoint.memory_bytes, endpoint.conditions)
            account.gpu_memory_bytes = endpoint.gpu_memory_bytes
    found = [served_of(account, load, plan) for account in accounts]
    left_s = left()
    search_s = SEARCH_S if left_s is None else min(SEARCH_S, IN_TIME * left_s / len(builds))
    if not has_limits(plan):
        return found, True
    if search_s < MIN_SEARCH_S:
        return found, search_s >= SEARCH_S
    searches = _searched(servers, builds, plan, watch, starts, search_s)
    rated = [
        msgspec.structs.replace(each, max_rate=search.rate, curve=curve_of(search.levels))
        for each, search in zip(found, searches, strict=True)
    ]
    return rated, True


def _searched(
    servers: TextServers,
    builds: Sequence[Build],
    plan: Plan,
    watch: Watch,
    starts: Sequence[float | None],
    search_s: float,
) -> list[RateSearch]:
    searches = []
    for build, start in zip(builds, starts, strict=True):
        endpoint = servers.opened(build)
        first = start or _first_rate(endpoint, plan, watch)
        search = RateSearch(endpoint, plan, first, search_s)
        searches.append(search)
        if servers.is_alone:
            # Finish now: the next server replaces this one.
            while search.is_open:
                search.step(watch)
    for search in _in_turns(searches):
        search.step(watch)
    return searches


def _in_turns(searches: Sequence[RateSearch]) -> Iterator[RateSearch]:
    while any(each.is_open for each in searches):
        yield from (each for each in searches if each.is_open)
