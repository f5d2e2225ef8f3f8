"""Builds of language models measured as they would be served: `penstock serve`, and the bench as a
client of OpenAI's API that reads streams."""

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
from penstock.benchmark.inputs import InputSpec
from penstock.benchmark.pacer import Closed, Load, Open
from penstock.benchmark.results import Level
from penstock.benchmark.stats import Interval
from penstock.benchmark.targets import TargetSpec
from penstock.errors import BackendFailed
from penstock.llm.settings import settings_of
from penstock.optimizer.candidates import Build
from penstock.optimizer.llm.text_prompts import Prompts, write_load
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Served
from penstock.optimizer.served import (
    LONG_PATIENCE_S,
    PATIENCE,
    PATIENCE_S,
    Account,
    Endpoint,
    RateSearch,
    Watch,
    bench_plan,
    curve_of,
    load_of,
    saturated,
    served_of,
)
from penstock.optimizer.time_plan import MIN_SEARCH_S
from penstock.slo import Goodput, Latency, Slo

# Answers take seconds, so few come in a level: rates are not known any better than this.
PRECISION = 0.15
# All answers are as long as was asked for, so that all candidates have the same work.
EXTRA = '{"ignore_eos": true}'
# Of a measurement of how much is answered at all.
PROBE_S = 20.0
# One client alone, to know where rates begin.
ALONE_S = 5.0
NUM_ROUNDS = 2
# Of what is left, for searches: the last level of each ends after its time.
IN_TIME = 0.7
# Of the search for the highest rate of one build.
SEARCH_S = 90.0
LOWEST_RATE = 0.01
# Of a level, and how long those are waited for at most.
MIN_REQUESTS, MAX_LEVEL_S = 6, 60.0


class TextEndpoint(Endpoint):
    """Asked over OpenAI's API, in each level by prompts that it has not seen: those of a level are
    written to `file`."""

    probe_s = PROBE_S
    precision = PRECISION

    def __init__(self, build: Build, prompts: Prompts, file: Path, patience_s: float) -> None:
        super().__init__(build, str(file))
        self._prompts = prompts
        self._patience_s = patience_s
        # Every server has the same prompts in its levels.
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
        # The same prompts would be found in the cache of what was computed before.
        level = next(self._levels)
        write_load(self._prompts, Path(self.data), level)
        return InputSpec(path=self.data, seed=plan.seed + level)

    def level_s(self, plan: Plan, load: Load) -> float:
        """Longer where hardly a request would come in the time that was asked for."""
        if not isinstance(load, Open):
            return plan.duration_s
        enough_s = MIN_REQUESTS / max(LOWEST_RATE, pacer.mean_rate(load))
        return max(plan.duration_s, min(MAX_LEVEL_S, enough_s))

    @property
    def may_be_late(self) -> bool:
        """Answers take seconds: at a rate that is too high all may be late. Not where nobody is
        there who could answer."""
        return self.is_running

    @property
    def num_clients(self) -> int:
        return settings_of(self.build.config).max_sequences


def patience_of(slo: Slo | None, num_tokens: int) -> float:
    """How long a whole answer is waited for, by what the SLO says of its parts."""
    limits = {"latency": math.inf, "ttft": math.inf, "tpot": math.inf}
    for term in () if slo is None else slo.terms:
        if isinstance(term, Latency) and term.metric in limits:
            limits[term.metric] = min(limits[term.metric], term.limit_s)
    whole_s = min(limits["latency"], limits["ttft"] + num_tokens * limits["tpot"])
    return LONG_PATIENCE_S if math.isinf(whole_s) else max(PATIENCE_S, PATIENCE * whole_s)


class TextServers:
    """Servers of builds, started when they are asked for. `is_alone`: one at a time, because each
    takes what memory there is. All are stopped by `close`."""

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
    """Whether a highest rate can be looked for."""
    terms = () if plan.slo is None else plan.slo.terms
    return any(isinstance(term, Latency | Goodput) for term in terms)


def rated(
    servers: TextServers,
    build: Build,
    plan: Plan,
    watch: Watch,
    start: float | None,
    search_s: float,
) -> tuple[Served, bool]:
    """Up to the highest rate that keeps the SLO, from `start` on; below that nobody wants to know,
    if one is given. The figures are those of the highest rate that was kept, or else of the lowest
    that was tried. And whether more time would not have told more."""
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
    account = Account(build.config)
    account.add(level, endpoint.memory_bytes, endpoint.conditions)
    account.gpu_memory_bytes = endpoint.gpu_memory_bytes
    found = served_of(account, level.load, plan)
    rate = None if math.isnan(search.rate.value) else search.rate
    found = msgspec.structs.replace(found, max_rate=rate, curve=curve_of(search.levels))
    return found, is_through


def shown_level(levels: Sequence[Level], rate: Interval) -> Level:
    """Of the highest rate that was kept; of the lowest where none was."""
    rates = {pacer.mean_rate(each.load): each for each in levels if isinstance(each.load, Open)}
    kept = [each for each in rates if each <= rate.value * (1 + 1e-9)]
    return rates[max(kept)] if kept else rates[min(rates)]


def level_plan(endpoint: TextEndpoint, plan: Plan, load: Load) -> bench.Plan:
    """Clients that wait for their answers begin with the measurement: after a warm-up, the next
    request of one whose answer takes longer than the level would be due when it is over."""
    wanted = bench_plan(endpoint, plan, [load])
    return replace(wanted, max_warm_up_s=0.0) if isinstance(load, Closed) else wanted


def _first_rate(endpoint: TextEndpoint, plan: Plan, watch: Watch) -> float:
    """The SLO's, or as many as one client gets answered that never waits."""
    if plan.slo is not None and plan.slo.rate is not None:
        return plan.slo.rate.per_s
    alone = replace(level_plan(endpoint, plan, Closed(1)), duration_s=min(ALONE_S, plan.duration_s))
    (level,) = endpoint.measured(alone, watch).levels
    mean_s = stats.histogram(level.windows).mean()
    if not mean_s > 0:
        raise BackendFailed("not one request of a client alone was answered well")
    return max(LOWEST_RATE, 1 / mean_s)


def _whole(endpoint: TextEndpoint, plan: Plan, watch: Watch) -> Served:
    """Where nothing is promised to single requests: as many as there is room for."""
    rate = saturated(endpoint, plan, watch)
    load = load_of(plan.slo)
    (level,) = endpoint.measured(level_plan(endpoint, plan, load), watch).levels
    account = Account(endpoint.build.config)
    account.add(level, endpoint.memory_bytes, endpoint.conditions)
    return msgspec.structs.replace(served_of(account, load, plan), max_rate=rate)


def prove(
    servers: TextServers,
    builds: Sequence[Build],
    plan: Plan,
    watch: Watch,
    starts: Sequence[float | None],
    left: Callable[[], float | None],
) -> tuple[list[Served], bool]:
    """At the load of the SLO in turns (A B A B), then up to the highest rate of each, in turns too
    where all may run at once. Rates are left out where there is no time; and whether there was."""
    load = load_of(plan.slo)
    accounts = [Account(build.config) for build in builds]
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
            # The next one takes its place.
            while search.is_open:
                search.step(watch)
    for search in _in_turns(searches):
        search.step(watch)
    return searches


def _in_turns(searches: Sequence[RateSearch]) -> Iterator[RateSearch]:
    while any(each.is_open for each in searches):
        yield from (each for each in searches if each.is_open)
