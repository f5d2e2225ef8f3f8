"""Measure builds as they would be served, by `python -m penstock serve` and the bench's
conductor."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import re
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import psutil

from penstock.benchmark import pacer, stats, verdicts
from penstock.benchmark import plan as bench
from penstock.benchmark.pacer import Closed, Flat, Load, Open
from penstock.benchmark.plan import LevelProgress
from penstock.benchmark.results import BenchRun, Level
from penstock.benchmark.run import Conductor
from penstock.benchmark.search import MaxRateSearch
from penstock.benchmark.stats import Interval, Window
from penstock.benchmark.targets import Counters, TargetSpec
from penstock.config import ModelConfig
from penstock.data import InputSpec
from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import goals, served_answers
from penstock.optimizer.candidates import Build
from penstock.optimizer.disturbance import MIN_CALM, calm_windows, is_void
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import (
    Conditions,
    Curve,
    ServedMeasurement,
    Streams,
    TermVerdict,
    Turn,
)
from penstock.optimizer.simulate import fitted
from penstock.optimizer.this_machine import CpuMeter
from penstock.optimizer.time_plan import (
    MIN_COST_SEARCH_S,
    MIN_SEARCH_S,
    PROBE_COST_S,
    WARM_UP_S,
    CutOff,
    MeasurementLimits,
    level_cost_s,
    warm_up_s,
)
from penstock.processes.tool import ToolProcess
from penstock.serving.explain import Explanation
from penstock.slo import Cost, Goodput, Latency, Memory, Slo, Term, Throughput
from penstock.types import DATATYPES, Array, TensorSpec, pack_bytes

# Receives what is being done, for the live view.
Watch = Callable[[str], None]
Row = Mapping[str, Array]

START_TIMEOUT_S = 900.0
# Minimum time to start a server, however little of the budget is left.
MIN_START_S = 10.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05
ASK_TIMEOUT_S = 10.0
ADDRESS = re.compile(r"(http://[^\s\"/]+/v2)\b")
# Maximum number of distinct rows to send.
MAX_ROWS = 4096
MAX_BYTES = 256 << 20
# Load for a throughput term, relative to it: slightly above, so that the load is not the limit.
ABOVE = 1.05
SEARCH_LEVEL_S = 4.0
# A level is extended to this many requests, if allowed: fewer say nothing about a tail.
SEARCH_REQUESTS = 400
SEARCH_WARM_UP_S = 1.0
SEARCH_PRECISION = 0.05
PROBE_S = 2.0
# Duration of a single-client measurement that gives the first rate of streams, and the lowest rate.
ALONE_S, LOWEST_RATE = 5.0, 0.01
MAX_CLIENTS = 256
# Client timeouts: this long, or this multiple of the SLO's latency limit; LONG_PATIENCE_S without
# such a limit. Overloaded builds are not waited for.
PATIENCE_S = 3.0
LONG_PATIENCE_S = 60.0
PATIENCE = 3.0
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
            if not _has_cost(self.plan):
                return found
            search_s = max(MIN_COST_SEARCH_S, self._search_s(builds))
            return bench._rated(builds, found, search_s)

    def with_rates(self, builds: Sequence[Build]) -> list[ServedMeasurement]:
        """Measure once at the SLO's load, then up to the highest rate of each. A search without
        time for another level ends with what it has."""
        with self._stage(builds) as bench:
            found = bench._in_turns(builds, 1)
            return bench._rated(builds, found, self._search_s(builds))

    def prove(
        self, builds: Sequence[Build], starts: Sequence[float | None] = ()
    ) -> list[ServedMeasurement]:
        """Measure at the SLO's load and up to the highest rate of each, from its start if that is
        given: with rates, costs and curves. Rates are left out if there is no time to search for
        them, unless the SLO limits cost."""
        shortest_s = MIN_COST_SEARCH_S if _has_cost(self.plan) else MIN_SEARCH_S
        with self._stage(builds) as bench:
            found = bench._in_turns(builds, self.limits.num_rounds)
            search_s = self._search_s(builds)
            if search_s < shortest_s:
                return found
            return bench._rated(builds, found, search_s, starts)

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
            level = shown_level(search.levels, search.rate)
            account = ServedAccount(build.config)
            account.add(level, endpoint)
        found = served_of(account, level.load, self.plan)
        rate = None if math.isnan(search.rate.value) else search.rate
        found = msgspec.structs.replace(found, max_rate=rate, curve=curve_of(search.levels))
        return found, search.has_ended

    def answers(self, build: Build, seconds: float) -> list[tuple[int, dict[str, Array]]]:
        """Return the answers of the build behind its server, with the index of each row."""
        with self._stage([build]) as bench:
            address = bench._endpoint(build).address
            return served_answers.ask(address, build.config, self.rows, seconds)

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
        accounts = [ServedAccount(build.config) for build in builds]
        for number in range(num_rounds):
            round_s = len(accounts) * level_cost_s(self.plan.duration_s)
            if number and self.limits.left_s() < round_s:
                break
            for build, account in zip(builds, accounts, strict=True):
                endpoint = self._endpoint(build)
                account.add(self.level(endpoint, load), endpoint)
        return [served_of(account, load, self.plan) for account in accounts]

    def _rated(
        self,
        builds: Sequence[Build],
        found: Sequence[ServedMeasurement],
        search_s: float,
        starts: Sequence[float | None] = (),
    ) -> list[ServedMeasurement]:
        rates = self._max_rates(builds, search_s, starts or [None] * len(builds))
        return [
            msgspec.structs.replace(priced(each, rate, self.plan), curve=curve)
            for each, (rate, curve) in zip(found, rates, strict=True)
        ]

    def _max_rates(
        self, builds: Sequence[Build], search_s: float, starts: Sequence[float | None]
    ) -> list[tuple[Interval, Curve | None]]:
        """Return the highest rate of each that keeps the latency terms, with a curve of the
        measured levels. Without such terms, return the throughput at saturation. NaN: unknown."""
        if not has_limits(self.plan):
            probes = [self.saturate(self._endpoint(build)) for build in builds]
            return [(stats.throughput_interval(windows), None) for windows in probes]
        searches: list[RateSearch] = []
        for build, start in zip(builds, starts, strict=True):
            searches.append(RateSearch(self, self._endpoint(build), search_s, start))
            # The next server may replace this one.
            while self.servers is not None and self.servers.is_alone and searches[-1].is_open:
                searches[-1].step()
        while left := [each for each in searches if each.is_open]:
            for each in left:
                each.step()
        return [(each.believable_rate, curve_of(each.levels)) for each in searches]

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
        """Return the rate of one client in a closed loop."""
        level = self.level(endpoint, Closed(1), min(ALONE_S, self.plan.duration_s), 0.0)
        mean_s = stats.histogram(level.windows).mean()
        if not mean_s > 0:
            raise BackendFailed("not one request of a client alone was answered well")
        return max(LOWEST_RATE, 1 / mean_s)


def curve_of(levels: Sequence[Level]) -> Curve:
    """Return throughput and latency at increasing rates, each as measured last."""
    by_rate = {pacer.mean_rate(each.load): each for each in levels if isinstance(each.load, Open)}
    ordered = [by_rate[rate] for rate in sorted(by_rate)]
    histograms = [stats.histogram(level.windows) for level in ordered]
    return Curve(
        rates=sorted(by_rate),
        throughput=[stats.throughput_interval(level.windows).value for level in ordered],
        p50_s=[each.percentile(50) for each in histograms],
        p99_s=[each.percentile(99) for each in histograms],
        ttft_p99_s=_p99s(ordered, "ttft"),
        tpot_p99_s=_p99s(ordered, "tpot"),
    )


def _p99s(levels: Sequence[Level], metric: str) -> list[float]:
    """Return p99 of each level; empty if answers are not streamed."""
    found = [stats.histogram(level.windows, metric).percentile(99) for level in levels]
    return [] if all(map(math.isnan, found)) else found


def priced(served: ServedMeasurement, max_rate: Interval, plan: Plan) -> ServedMeasurement:
    """Add the highest rate, the cost of a million answers at it, and the verdict on that."""
    if plan.price_per_hour is None:
        return msgspec.structs.replace(served, max_rate=max_rate)
    price = plan.price_per_hour
    ends = (max_rate.low, max_rate.value, max_rate.high)
    low, value, high = (goals.cost_per_million(each, price) for each in ends)
    # A higher rate means a lower cost.
    cost = Interval(value, min(low, high), max(low, high))
    judged = [
        _verdict(term, cost) if isinstance(term, Cost) else known
        for term, known in zip(plan.slo.terms, served.verdicts, strict=True)
    ]
    return msgspec.structs.replace(
        served, max_rate=max_rate, cost_per_million=cost.value, verdicts=judged
    )


def repriced(served: ServedMeasurement, plan: Plan) -> ServedMeasurement:
    """Recompute costs with the current price."""
    return served if served.max_rate is None else priced(served, served.max_rate, plan)


# The server.


class ServedEndpoint:
    """`penstock serve` with one build on a free port; stopped when the block ends in any way, and
    killed when this process dies. `data` is the file with its inputs."""

    # Duration of a throughput probe, and precision of the search for the highest rate.
    probe_s = PROBE_S
    precision = SEARCH_PRECISION
    # Whether answers are streams, which take seconds.
    is_streaming = False

    def __init__(self, build: Build, data: str) -> None:
        self.build = build
        self.data = data
        self.address = ""
        # State of the machine during the last measurement.
        self.conditions = Conditions()
        self.start_timeout_s = START_TIMEOUT_S

    def __enter__(self) -> Self:
        flags = ["--http-port", "0", "--no-grpc", "--no-metrics", "--drain-s", "1"]
        # Builds hard-link files that they do not change.
        flags.append("--allow-hard-links")
        self._process = ToolProcess("penstock", ["serve", str(self.build.folder), *flags])
        try:
            self.address = self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Workers normally end with the server; any that remain are killed.
        self._process.stop(STOP_TIMEOUT_S)

    def target(self, plan: Plan) -> TargetSpec:
        """Return the bench's target."""
        return TargetSpec(self.address, timeout_s=patience_s(plan.slo))

    def inputs(self, plan: Plan) -> InputSpec:
        return InputSpec(path=self.data, seed=plan.seed)

    def level_s(self, plan: Plan, load: Load) -> float:
        """Return the longest measurement of a load."""
        return plan.duration_s

    @property
    def num_clients(self) -> int:
        """Number of clients that keep it busy."""
        return num_clients(self.build.config)

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    @property
    def memory_bytes(self) -> int:
        """Memory of all workers; shared memory counts once."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for worker in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    use = worker.memory_full_info()
                    total += getattr(use, "pss", use.rss)
        return total

    @property
    def gpu_memory_bytes(self) -> list[int]:
        """GPU memory of each worker, as reported by the server; empty on CPUs."""
        # No proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError):
            with opener.open(f"{self.address}/explain", timeout=ASK_TIMEOUT_S) as answer:
                explained = msgspec.json.decode(answer.read(), type=Explanation)
            found = [each.gpu_memory_bytes for each in explained.instances]
            return [each for each in found if each]
        return []

    def measured(self, plan: bench.BenchPlan, watch: Watch) -> BenchRun:
        """Run the bench once; BackendFailed with the server's log if it failed."""

        def report(progress: LevelProgress) -> None:
            watch(_describe(progress))

        meter = CpuMeter()
        try:
            run = asyncio.run(Conductor(plan, report, lambda run: None).measure())
        except ConfigError as error:
            raise ConfigError(
                [f"{text}{self._process.tail('the server')}" for text in error.problems]
            ) from None
        # At too high a rate, all answers of a level may time out if they take seconds.
        may_be_late = self.is_streaming and self.is_running
        if not run.levels or (run.problem and not may_be_late):
            raise BackendFailed(
                f"{run.problem or 'nothing was measured'}{self._process.tail('the server')}"
            )
        self.conditions = meter.read()
        if self.build.config.uses_gpu:
            # The speed probe measures the CPU, which does not compute the model.
            self.conditions = msgspec.structs.replace(self.conditions, speed_s=0.0)
        return run

    def _wait_until_ready(self) -> str:
        last = time.monotonic() + self.start_timeout_s
        while time.monotonic() < last:
            # Polled before reading: the output of an ended process is then complete.
            has_ended = not self._process.is_running
            found = ADDRESS.search(self._process.output)
            if found:
                return f"{found[1]}/models/{self.build.config.name}"
            if has_ended:
                raise BackendFailed(f"the server did not start{self._process.tail('the server')}")
            time.sleep(POLL_S)
        kind = CutOff if self.start_timeout_s < START_TIMEOUT_S else BackendFailed
        raise kind(
            f"not ready after {self.start_timeout_s:.3g} s{self._process.tail('the server')}"
        )


def _describe(progress: LevelProgress) -> str:
    p99 = "" if math.isnan(progress.p99_s) else f", p99 {progress.p99_s * 1e3:.3g} ms"
    return f"{progress.level}, {progress.phase} {progress.elapsed_s:.0f} s{p99}"


class Servers:
    """A server for each build, with the rows in a file. Idle servers sleep, so callers with enough
    memory keep them for the next measurement; `close` stops all. `is_alone`: one at a time, because
    each takes all the memory there is."""

    def __init__(self, *, is_alone: bool = False) -> None:
        self.is_alone = is_alone
        self._stack = contextlib.ExitStack()
        # Start timeout of the next server.
        self.start_timeout_s: Callable[[], float] = lambda: START_TIMEOUT_S
        self._endpoints: dict[Path, ServedEndpoint] = {}
        # Row files by form of the inputs, which is the same for nearly all builds.
        self._files: dict[object, str] = {}
        self._scratch: Path | None = None

    def open(self, builds: Sequence[Build], rows: Sequence[Row]) -> list[ServedEndpoint]:
        """Return endpoints of these builds, started if needed. Rows must be the same each time."""
        has_others = bool(self._endpoints)
        try:
            return [self._open_one(build, rows) for build in builds]
        except BackendFailed:
            if not has_others:
                raise
            # Other servers may hold the memory that this one needs.
            self.close()
            return [self._open_one(build, rows) for build in builds]

    def close(self) -> None:
        self._endpoints.clear()
        self._files.clear()
        self._scratch = None
        self._stack.close()

    def _open_one(self, build: Build, rows: Sequence[Row]) -> ServedEndpoint:
        known = self._endpoints.get(build.folder)
        if known is not None and known.is_running:
            return known
        if self.is_alone:
            self.close()
        endpoint = self._make_endpoint(build, rows)
        endpoint.start_timeout_s = self.start_timeout_s()
        self._stack.enter_context(endpoint)
        self._endpoints[build.folder] = endpoint
        return endpoint

    def _make_endpoint(self, build: Build, rows: Sequence[Row]) -> ServedEndpoint:
        return ServedEndpoint(build, self._written(build.config, rows))

    def _written(self, config: ModelConfig, rows: Sequence[Row]) -> str:
        if self._scratch is None:
            scratch = tempfile.TemporaryDirectory(prefix="penstock-")
            self._scratch = Path(self._stack.enter_context(scratch))
        form = config.inputs, config.max_batch_size > 0
        if form not in self._files:
            folder = self._scratch / str(len(self._files))
            folder.mkdir()
            self._files[form] = write_rows(rows, config, folder)
        return self._files[form]


# Inputs.


def write_rows(rows: Sequence[Row], config: ModelConfig, folder: Path) -> str:
    """Write a bench data file with the model's inputs only. Empty without rows: inputs are then
    drawn from the signature."""
    if not rows:
        return ""
    chosen = fitted(rows[: _num_sent(rows)], config)
    specs = [spec for spec in config.inputs if spec.name in chosen[0]]
    if all(_is_stackable(spec, chosen) for spec in specs):
        path = folder / "rows.npz"
        arrays = {
            spec.name: _plain(spec, np.stack([r[spec.name] for r in chosen])) for spec in specs
        }
        np.savez(path, **arrays)  # type: ignore[arg-type]
        return str(path)
    path = folder / "rows.jsonl"
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for row in chosen:
            line = {spec.name: _json(spec, row[spec.name]) for spec in specs if spec.name in row}
            file.write(encoder.encode(line) + b"\n")
    return str(path)


def _num_sent(rows: Sequence[Row]) -> int:
    """Return how many rows to send: at most `MAX_ROWS`, with at most `MAX_BYTES`."""
    total = 0
    for count, row in enumerate(rows[:MAX_ROWS]):
        total += sum(_num_bytes(array) for array in row.values())
        if total > MAX_BYTES:
            return max(1, count)
    return min(len(rows), MAX_ROWS)


def _num_bytes(array: Array) -> int:
    if array.dtype.kind == "O":
        return sum(len(each) for each in array.ravel().tolist())
    return int(array.nbytes)


def _is_stackable(spec: TensorSpec, rows: Sequence[Row]) -> bool:
    """Return whether rows fit one array. `file` is a parameter name of `np.savez`."""
    if spec.datatype == "BYTES" or spec.name == "file":
        return False
    shapes = {np.shape(row[spec.name]) if spec.name in row else None for row in rows}
    return len(shapes) == 1


def _plain(spec: TensorSpec, array: Array) -> Array:
    """Return the array as stored in files: rows hold BF16 as bits, files hold floats."""
    if spec.datatype == "BF16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, DATATYPES[spec.datatype].numpy)


def _json(spec: TensorSpec, array: Array) -> object:
    if spec.datatype != "BYTES":
        return _plain(spec, np.asarray(array)).tolist()
    packed = base64.b64encode(pack_bytes(np.asarray(array))).decode()
    return {"content": {"b64": packed}, "shape": list(np.shape(array))}


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
        max_warm_up_s=0.0 if is_alone else min(WARM_UP_S, warm_up_s(plan.duration_s)),
        seed=plan.seed,
        price_per_hour=plan.price_per_hour,
    )


def patience_s(slo: Slo) -> float:
    """Return the client's timeout. Without a latency limit, a batch may take long."""
    limit_s = slo.latency_s
    return LONG_PATIENCE_S if limit_s is None else max(PATIENCE_S, PATIENCE * limit_s)


def load_of(slo: Slo) -> Load:
    """Return the load at which the SLO must hold: its rate, or slightly more than its throughput,
    or one client. If only throughput counts, arrivals are constant: Poisson arrivals often bring
    fewer requests than asked for, whatever the server does."""
    if slo.rate is not None:
        return _open(slo.rate.per_s, slo)
    asked = [term.min_per_s for term in slo.terms if isinstance(term, Throughput)]
    if not asked:
        return Closed(1)
    is_timed = any(isinstance(term, Latency | Goodput) for term in slo.terms)
    return Open(Flat(ABOVE * max(asked)), "poisson" if is_timed else "constant")


def _open(rate: float, slo: Slo) -> Open:
    if slo.rate is None:
        return Open(Flat(rate))
    return Open(Flat(rate), slo.rate.arrivals, slo.rate.cv or 1.0)


# At the load of the SLO.


@dataclass(slots=True)
class ServedAccount:
    """All measurements of one build, over its rounds."""

    config: ModelConfig
    windows: list[Window] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    memory_bytes: int = 0
    # For each worker.
    gpu_memory_bytes: Sequence[int] = ()
    # The windows of each round, and the state of the machine during it.
    rounds: list[tuple[Sequence[Window], Conditions]] = field(default_factory=list)

    def add(self, level: Level, endpoint: ServedEndpoint) -> None:
        """Add a round; its windows follow those of earlier rounds without a gap."""
        conditions = endpoint.conditions
        if level.generator.num_waited:
            # All connections were busy: the server delayed requests, not the machine.
            conditions = msgspec.structs.replace(conditions, is_generator_waiting=True)
        self.rounds.append((level.windows, conditions))
        start_s = max((each.start_s + each.length_s for each in self.windows), default=0.0)
        for window in level.windows:
            window.start_s += start_s
            self.windows.append(window)
        if level.server is not None:
            self.counters.append(level.server)
        self.memory_bytes = max(self.memory_bytes, endpoint.memory_bytes)
        self.gpu_memory_bytes = endpoint.gpu_memory_bytes


def has_limits(plan: Plan) -> bool:
    """Return whether the SLO limits latency or goodput, so that a highest rate exists."""
    return any(isinstance(term, Latency | Goodput) for term in plan.slo.terms)


def _has_cost(plan: Plan) -> bool:
    """Return whether judging the SLO needs highest rates."""
    return plan.price_per_hour is not None and any(
        isinstance(each, Cost) for each in plan.slo.terms
    )


def served_of(account: ServedAccount, load: Load, plan: Plan) -> ServedMeasurement:
    """Combine all rounds; intervals cover the spread between them."""
    windows = account.windows
    turns = [_turn(*each, plan) for each in account.rounds]
    num_due = sum(window.num_due for window in windows)
    num_executions = sum(each.num_executions for each in account.counters)
    num_inferences = sum(each.num_inferences for each in account.counters)
    return ServedMeasurement(
        load=pacer.label(load),
        p50=spread(stats.percentile_interval(windows, "latency", 50), [t.p50_s for t in turns]),
        p99=spread(stats.percentile_interval(windows, "latency", 99), [t.p99_s for t in turns]),
        throughput=spread(stats.throughput_interval(windows), [t.throughput for t in turns]),
        goodput=_goodput(windows, plan.slo),
        verdicts=_verdicts([each for each, _ in account.rounds], promised_bytes(account), plan),
        num_requests=num_due,
        num_failed=sum(window.num_failed for window in windows),
        phases=phases(
            account.counters,
            stats.histogram(windows).mean(),
            has_preprocess=account.config.preprocess is not None,
            has_postprocess=account.config.postprocess is not None,
        ),
        rows_per_batch=num_inferences / num_executions if num_executions else math.nan,
        memory_bytes=account.memory_bytes,
        num_runs=len(turns),
        failure=_commonest_failure(windows),
        gpu_memory_bytes=max(account.gpu_memory_bytes, default=0),
        streams=_streams(windows),
        turns=turns,
    )


def _turn(windows: Sequence[Window], conditions: Conditions, plan: Plan) -> Turn:
    latencies = stats.histogram(windows)
    is_waiting = conditions.is_generator_waiting
    calm = list(windows) if is_waiting else calm_windows(windows, plan.slo.latency_s)
    share = len(calm) / len(windows) if windows else 0.0
    return Turn(
        p50_s=latencies.percentile(50),
        p99_s=latencies.percentile(99),
        throughput=stats.throughput_interval(windows).value,
        goodput=_goodput(windows, plan.slo),
        is_kept=_is_kept(windows, plan),
        is_kept_calm=_is_kept(calm, plan) if share >= MIN_CALM else None,
        p99_calm_s=stats.histogram(calm).percentile(99) if share >= MIN_CALM else None,
        late_share=1 - share,
        conditions=conditions,
    )


def _is_kept(windows: Sequence[Window], plan: Plan) -> bool:
    """Return whether no term that windows can judge is missed, by its estimate."""
    found = verdicts.measured(windows, plan.slo)
    judged = verdicts.verdicts(plan.slo, found)
    return all(each.outcome != "missed" for each in judged)


def spread(measured: Interval, values: Sequence[float]) -> Interval:
    """Widen an interval to cover each repetition: differences between them are not chance."""
    known = [each for each in values if not math.isnan(each)]
    if len(known) < 2:
        return measured
    low = measured.low if math.isnan(measured.low) else min(measured.low, *known)
    high = measured.high if math.isnan(measured.high) else max(measured.high, *known)
    return Interval(measured.value, low, high)


def _streams(windows: Sequence[Window]) -> Streams | None:
    length_s = sum(window.length_s for window in windows)
    if not length_s or not any(window.num_output_tokens for window in windows):
        return None
    return Streams(
        ttft=stats.percentile_interval(windows, "ttft", 99),
        tpot=stats.percentile_interval(windows, "tpot", 99),
        prompt_tokens_per_s=sum(window.num_input_tokens for window in windows) / length_s,
        tokens_per_s=sum(window.num_output_tokens for window in windows) / length_s,
    )


def promised_bytes(account: ServedAccount) -> int:
    """Return the memory that the SLO's memory term limits: GPU memory for models on GPUs."""
    if account.config.uses_gpu:
        return sum(account.gpu_memory_bytes)
    return account.memory_bytes


def _commonest_failure(windows: Sequence[Window]) -> str:
    counts = sum((Counter(window.failures) for window in windows), Counter[str]())
    return counts.most_common(1)[0][0] if counts else ""


def phases(
    counters: Sequence[Counters],
    latency_s: float,
    *,
    has_preprocess: bool = False,
    has_postprocess: bool = False,
) -> dict[str, float]:
    """Return mean seconds of a request by phase, from the server's counters; the rest of the
    client's latency is network and codec. With a preprocessing or postprocessing function, that
    dominates compute input or output, and names the phase."""
    num = sum(each.num_success for each in counters)
    if not num:
        return {}
    fields = {
        "queue": "queue_ns",
        "preprocess" if has_preprocess else "compute input": "compute_input_ns",
        "compute": "compute_infer_ns",
        "postprocess" if has_postprocess else "compute output": "compute_output_ns",
    }
    found = {
        name: sum(getattr(each, field) for each in counters) / num / 1e9
        for name, field in fields.items()
    }
    found["network and codec"] = max(0.0, latency_s - sum(found.values()))
    return found


def _goodput(windows: Sequence[Window], slo: Slo) -> float:
    """Return the share of requests that were answered successfully and in time."""
    limits = [term for term in slo.terms if isinstance(term, Latency)]
    whole = Slo((*limits, Goodput(100.0)))
    return verdicts.measured(windows, whole)["goodput"].value / 100


def _verdicts(
    rounds: Sequence[Sequence[Window]], memory_bytes: int, plan: Plan
) -> list[TermVerdict]:
    found = verdicts.measured([window for each in rounds for window in each], plan.slo)
    turns = [verdicts.measured(each, plan.slo) for each in rounds]
    found = {
        name: spread(interval, [turn[name].value for turn in turns])
        for name, interval in found.items()
    }
    if memory_bytes:
        found[Memory.name] = Interval(*3 * (float(memory_bytes),))
    return [_verdict(term, found.get(term.name)) for term in plan.slo.terms]


def _verdict(term: Term, measured: Interval | None) -> TermVerdict:
    limit, unit = _limit(term)
    judged = verdicts.IntervalVerdict(term, measured)
    return TermVerdict(str(term), judged.outcome, measured, limit, unit)


def _limit(term: Term) -> tuple[float, str]:
    if isinstance(term, Latency):
        return term.limit_s, "s"
    if isinstance(term, Throughput):
        return term.min_per_s, "/s"
    if isinstance(term, Goodput):
        return term.min_percent, "%"
    if isinstance(term, Memory):
        return float(term.max_bytes), "bytes"
    return term.max_per_million, "per million"


# The highest rate.


def shown_level(levels: Sequence[Level], rate: Interval) -> Level:
    """Return the level of the highest rate that met the SLO, or of the lowest rate if none did."""
    rates = {pacer.mean_rate(each.load): each for each in levels if isinstance(each.load, Open)}
    kept = [each for each in rates if each <= rate.value * (1 + 1e-9)]
    return rates[max(kept)] if kept else rates[min(rates)]


def _in_time_rate(windows: Sequence[Window], slo: Slo) -> float:
    """Return the requests per second that were answered within the limits."""
    length_s = sum(window.length_s for window in windows)
    num_due = sum(window.num_due for window in windows)
    return _goodput(windows, slo) * num_due / length_s if length_s and num_due else 0.0


def num_clients(config: ModelConfig) -> int:
    """Return enough clients that every instance has a full batch and the next one queued. In slo
    mode, late requests are refused and clients retry at once: many clients would leave the server
    no time to answer. So only one request is queued then, not a batch."""
    is_refusing = config.batching.slo_latency_s is not None
    num_rows = 1 if is_refusing or not config.batching.is_dynamic else config.max_batch_size
    return min(MAX_CLIENTS, max(4, 2 * config.num_instances * num_rows))


class RateSearch:
    """The bench's search for the highest rate, one level at a time, so that several take turns.
    Without a start, it begins at half of the saturation rate; for streams at the SLO's rate, or at
    that of one client. With `is_floor`, rates below the start are not measured."""

    def __init__(
        self,
        bench: ServedBench,
        endpoint: ServedEndpoint,
        left_s: float,
        start: float | None = None,
        *,
        is_floor: bool = False,
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
            start = max(1.0, stats.throughput_interval(self._probe).value / 2)
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
        answered = max(_in_time_rate(windows, self._slo) for windows in measured)
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
