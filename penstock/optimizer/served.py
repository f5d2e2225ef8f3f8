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
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import psutil

from penstock.benchmark import pacer, stats, verdicts
from penstock.benchmark import plan as bench
from penstock.benchmark.pacer import Closed, Flat, Load, Open
from penstock.benchmark.progress import LevelProgress
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
from penstock.optimizer.conditions import CpuMeter
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
from penstock.optimizer.time_plan import (
    MIN_COST_SEARCH_S,
    MIN_SEARCH_S,
    PROBE_COST_S,
    SEARCH_S,
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
MAX_CLIENTS = 256
# Client timeouts: this long, or this multiple of the SLO's latency limit; LONG_PATIENCE_S without
# such a limit. Overloaded builds are not waited for.
PATIENCE_S = 3.0
LONG_PATIENCE_S = 60.0
PATIENCE = 3.0
NO_RATE = Interval(math.nan, math.nan, math.nan)
UNLIMITED = MeasurementLimits()


def measure(
    build: Build,
    plan: Plan,
    rows: Sequence[Row],
    watch: Watch,
    servers: Servers | None = None,
    limits: MeasurementLimits = UNLIMITED,
) -> ServedMeasurement:
    """Measure at the SLO's load. With a price and a cost term, also search for the highest rate."""
    with _stage([build], rows, servers, limits) as endpoints:
        (served,) = _measured(endpoints, plan, watch, replace(limits, num_rounds=1))
        return served


def measure_alternately(
    builds: Sequence[Build],
    plan: Plan,
    rows: Sequence[Row],
    watch: Watch,
    servers: Servers | None = None,
    limits: MeasurementLimits = UNLIMITED,
) -> list[ServedMeasurement]:
    """Measure several in turns (A B A B), so that changes of the machine affect all of them."""
    with _stage(builds, rows, servers, limits) as endpoints:
        return _measured(endpoints, plan, watch, limits)


def answers(
    build: Build,
    rows: Sequence[Row],
    seconds: float,
    limits: MeasurementLimits = UNLIMITED,
    servers: Servers | None = None,
) -> list[tuple[int, dict[str, Array]]]:
    """Return the answers of the build behind its server, with the index of each row."""
    with _stage([build], rows, servers, limits) as endpoints:
        return served_answers.ask(endpoints[0].address, build.config, rows, seconds)


def max_rates(
    builds: Sequence[Build],
    plan: Plan,
    rows: Sequence[Row],
    watch: Watch,
    search_s: float = SEARCH_S,
) -> list[tuple[Interval, Curve | None]]:
    """Return only the highest rate of each, measured in turns; used by the benchmarks."""
    with _stage(builds, rows, None, UNLIMITED) as endpoints:
        return _max_rates(endpoints, plan, watch, search_s)


def with_rates(
    builds: Sequence[Build],
    plan: Plan,
    rows: Sequence[Row],
    watch: Watch,
    limits: MeasurementLimits = UNLIMITED,
    servers: Servers | None = None,
) -> list[ServedMeasurement]:
    """Measure once at the SLO's load, then up to the highest rate of each, in turns. A search
    without time for another level ends with what it has."""
    with _stage(builds, rows, servers, limits) as endpoints:
        found = _in_turns(endpoints, plan, watch, replace(limits, num_rounds=1))
        return _rated(endpoints, found, plan, watch, _search_s(len(builds), limits))


def prove(
    builds: Sequence[Build],
    plan: Plan,
    rows: Sequence[Row],
    watch: Watch,
    limits: MeasurementLimits = UNLIMITED,
    servers: Servers | None = None,
) -> list[ServedMeasurement]:
    """Measure at the SLO's load and up to the highest rate of each: with rates, costs and curves.
    Rates are left out if there is no time to search for them, unless the SLO limits cost."""
    shortest_s = MIN_COST_SEARCH_S if _has_cost(plan) else MIN_SEARCH_S
    with _stage(builds, rows, servers, limits) as endpoints:
        found = _in_turns(endpoints, plan, watch, limits)
        search_s = _search_s(len(builds), limits)
        return found if search_s < shortest_s else _rated(endpoints, found, plan, watch, search_s)


def _search_s(num_builds: int, limits: MeasurementLimits) -> float:
    """Return the time for each search for a highest rate; searches take turns."""
    return min(limits.search_s, limits.left_s() / num_builds - PROBE_COST_S)


def _rated(
    endpoints: Sequence[ServedEndpoint],
    found: Sequence[ServedMeasurement],
    plan: Plan,
    watch: Watch,
    search_s: float,
) -> list[ServedMeasurement]:
    rates = _max_rates(endpoints, plan, watch, search_s)
    return [
        msgspec.structs.replace(priced(each, rate, plan), curve=curve)
        for each, (rate, curve) in zip(found, rates, strict=True)
    ]


def curve_of(levels: Sequence[Level]) -> Curve:
    """Return throughput and latency at increasing rates; if a rate was measured twice, the last
    one."""
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
    low, value, high = (goals.cost_per_million(each, price) for each in _ends(max_rate))
    # A higher rate means a lower cost.
    cost = Interval(value, min(low, high), max(low, high))
    judged = [
        _verdict(term, cost) if isinstance(term, Cost) else known
        for term, known in zip(_terms(plan), served.verdicts, strict=True)
    ]
    return msgspec.structs.replace(
        served, max_rate=max_rate, cost_per_million=cost.value, verdicts=judged
    )


def repriced(served: ServedMeasurement, plan: Plan) -> ServedMeasurement:
    """Recompute costs with the current price."""
    return served if served.max_rate is None else priced(served, served.max_rate, plan)


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.low, interval.value, interval.high


# The server.


class ServedEndpoint:
    """`penstock serve` with one build on a free port; stopped when the block ends in any way, and
    killed when this process dies. `data` is the file with its inputs."""

    # Duration of a throughput probe, and precision of the search for the highest rate.
    probe_s = PROBE_S
    precision = SEARCH_PRECISION

    @property
    def may_be_late(self) -> bool:
        """Whether a run in which no client got an answer in time counts as a measurement."""
        return False

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
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

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
        if not run.levels or (run.problem and not self.may_be_late):
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

    def _stop(self) -> None:
        # Workers normally end with the server; any that remain are killed.
        self._process.stop(STOP_TIMEOUT_S)


def _describe(progress: LevelProgress) -> str:
    p99 = "" if math.isnan(progress.p99_s) else f", p99 {progress.p99_s * 1e3:.3g} ms"
    return f"{progress.level}, {progress.phase} {progress.elapsed_s:.0f} s{p99}"


class Servers:
    """A server for each build, with the rows in a file. Idle servers sleep, so callers with enough
    memory keep them for the next measurement; `close` stops all."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        # Start timeout of the next server.
        self.start_timeout_s: Callable[[], float] = lambda: START_TIMEOUT_S
        self._endpoints: dict[Path, ServedEndpoint] = {}
        # Row files by form of the inputs, which is the same for nearly all builds.
        self._files: dict[object, str] = {}
        self._scratch: Path | None = None

    def opened(self, builds: Sequence[Build], rows: Sequence[Row]) -> list[ServedEndpoint]:
        """Return endpoints of these builds, started if they do not run. The rows must be the same
        each time."""
        has_others = bool(self._endpoints)
        try:
            return [self._opened(build, rows) for build in builds]
        except BackendFailed:
            if not has_others:
                raise
            # Other servers may hold the memory that this one needs.
            self.close()
            return [self._opened(build, rows) for build in builds]

    def close(self) -> None:
        self._endpoints.clear()
        self._files.clear()
        self._scratch = None
        self._stack.close()

    def _opened(self, build: Build, rows: Sequence[Row]) -> ServedEndpoint:
        known = self._endpoints.get(build.folder)
        if known is not None and known.is_running:
            return known
        endpoint = ServedEndpoint(build, self._written(build.config, rows))
        endpoint.start_timeout_s = self.start_timeout_s()
        self._stack.enter_context(endpoint)
        self._endpoints[build.folder] = endpoint
        return endpoint

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


@contextlib.contextmanager
def _stage(
    builds: Sequence[Build], rows: Sequence[Row], servers: Servers | None, limits: MeasurementLimits
) -> Iterator[list[ServedEndpoint]]:
    """Open endpoints for a measurement. Kept servers stay up unless it fails, as their state is
    unknown then."""
    own = Servers() if servers is None else servers
    own.start_timeout_s = lambda: min(START_TIMEOUT_S, max(MIN_START_S, limits.left_s()))
    try:
        yield own.opened(builds, rows)
    except BaseException:
        own.close()
        raise
    if servers is None:
        own.close()


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


def bench_plan(endpoint: ServedEndpoint, plan: Plan, loads: Sequence[Load]) -> bench.BenchPlan:
    return bench.BenchPlan(
        endpoint.target(plan),
        endpoint.inputs(plan),
        tuple(loads),
        slo=plan.slo,
        decides=bench.decides_for(plan.slo),
        duration_s=max(endpoint.level_s(plan, load) for load in loads),
        max_warm_up_s=min(WARM_UP_S, warm_up_s(plan.duration_s)),
        seed=plan.seed,
        price_per_hour=plan.price_per_hour,
    )


def patience_s(slo: Slo | None) -> float:
    """Return the client's timeout. Without a latency limit, a batch may take long."""
    limit_s = None if slo is None else slo.latency_s
    return LONG_PATIENCE_S if limit_s is None else max(PATIENCE_S, PATIENCE * limit_s)


def load_of(slo: Slo | None) -> Load:
    """Return the load at which the SLO must hold: its rate, or slightly more than its throughput,
    or one client. If only throughput counts, arrivals are constant: Poisson arrivals often bring
    fewer requests than asked for, whatever the server does."""
    if slo is None:
        return Closed(1)
    if slo.rate is not None:
        return _open(slo.rate.per_s, slo)
    asked = [term.min_per_s for term in slo.terms if isinstance(term, Throughput)]
    if not asked:
        return Closed(1)
    is_timed = any(isinstance(term, Latency | Goodput) for term in slo.terms)
    return Open(Flat(ABOVE * max(asked)), "poisson" if is_timed else "constant")


def _open(rate: float, slo: Slo | None) -> Open:
    if slo is None or slo.rate is None:
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
    num_runs: int = 0
    # The windows of each round, and the state of the machine during it.
    rounds: list[tuple[Sequence[Window], Conditions]] = field(default_factory=list)

    def add(self, level: Level, memory_bytes: int, conditions: Conditions) -> None:
        """Add a round; its windows follow those of earlier rounds without a gap."""
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
        self.memory_bytes = max(self.memory_bytes, memory_bytes)
        self.num_runs += 1


def _measured(
    endpoints: Sequence[ServedEndpoint], plan: Plan, watch: Watch, limits: MeasurementLimits
) -> list[ServedMeasurement]:
    found = _in_turns(endpoints, plan, watch, limits)
    if _has_cost(plan):
        search_s = max(MIN_COST_SEARCH_S, _search_s(len(endpoints), limits))
        rates = [rate for rate, _ in _max_rates(endpoints, plan, watch, search_s)]
        found = [priced(each, rate, plan) for each, rate in zip(found, rates, strict=True)]
    return found


def _has_cost(plan: Plan) -> bool:
    """Return whether judging the SLO needs highest rates."""
    return plan.price_per_hour is not None and any(isinstance(each, Cost) for each in _terms(plan))


def _in_turns(
    endpoints: Sequence[ServedEndpoint], plan: Plan, watch: Watch, limits: MeasurementLimits
) -> list[ServedMeasurement]:
    """Measure in rounds; those after the first are left out if there is no time for all builds."""
    load = load_of(plan.slo)
    accounts = [ServedAccount(each.build.config) for each in endpoints]
    for number in range(limits.num_rounds):
        if number and limits.left_s() < len(endpoints) * level_cost_s(plan.duration_s):
            break
        for endpoint, account in zip(endpoints, accounts, strict=True):
            run = endpoint.measured(bench_plan(endpoint, plan, [load]), watch)
            account.add(run.levels[0], endpoint.memory_bytes, endpoint.conditions)
            account.gpu_memory_bytes = endpoint.gpu_memory_bytes
    return [served_of(account, load, plan) for account in accounts]


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
        num_runs=account.num_runs,
        failure=_commonest_failure(windows),
        gpu_memory_bytes=max(account.gpu_memory_bytes, default=0),
        streams=_streams(windows),
        turns=turns,
    )


def _turn(windows: Sequence[Window], conditions: Conditions, plan: Plan) -> Turn:
    latencies = stats.histogram(windows)
    limit_s = None if plan.slo is None else plan.slo.latency_s
    is_waiting = conditions.is_generator_waiting
    calm = list(windows) if is_waiting else calm_windows(windows, limit_s)
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
    if plan.slo is None:
        return True
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
    sums = {
        "queue": sum(each.queue_ns for each in counters),
        "preprocess" if has_preprocess else "compute input": sum(
            each.compute_input_ns for each in counters
        ),
        "compute": sum(each.compute_infer_ns for each in counters),
        "postprocess" if has_postprocess else "compute output": sum(
            each.compute_output_ns for each in counters
        ),
    }
    found = {name: each / num / 1e9 for name, each in sums.items()}
    found["network and codec"] = max(0.0, latency_s - sum(found.values()))
    return found


def _goodput(windows: Sequence[Window], slo: Slo | None) -> float:
    """Return the share of requests that were answered successfully and in time."""
    limits = [term for term in (slo.terms if slo else ()) if isinstance(term, Latency)]
    whole = Slo((*limits, Goodput(100.0)))
    return verdicts.measured(windows, whole)["goodput"].value / 100


def _terms(plan: Plan) -> Sequence[Term]:
    return () if plan.slo is None else plan.slo.terms


def _verdicts(
    rounds: Sequence[Sequence[Window]], memory_bytes: int, plan: Plan
) -> list[TermVerdict]:
    if plan.slo is None:
        return []
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


def _max_rates(
    endpoints: Sequence[ServedEndpoint],
    plan: Plan,
    watch: Watch,
    search_s: float = SEARCH_S,
) -> list[tuple[Interval, Curve | None]]:
    """Return the highest rate of each that keeps the latency terms, with a curve of the measured
    levels. Without such terms, return the throughput at saturation. NaN: unknown."""
    has_limits = any(isinstance(term, Latency | Goodput) for term in _terms(plan))
    probes = [_probe(endpoint, plan, watch) for endpoint in endpoints]
    rates = [stats.throughput_interval(windows) for windows in probes]
    if not has_limits:
        return [(rate, None) for rate in rates]
    assert plan.slo is not None
    searches = [
        RateSearch(endpoint, plan, max(1.0, rate.value / 2), search_s)
        for endpoint, rate in zip(endpoints, rates, strict=True)
    ]
    while left := [each for each in searches if each.is_open]:
        for each in left:
            each.step(watch)
    return [
        (_believable(search, probe), curve_of(search.levels))
        for search, probe in zip(searches, probes, strict=True)
    ]


def _believable(search: RateSearch, probe: Sequence[Window]) -> Interval:
    """Return the highest rate; unknown if the same server just answered far more in time."""
    measured = [probe, *(level.windows for level in search.levels)]
    answered = max(_in_time_rate(windows, search.slo) for windows in measured)
    return NO_RATE if is_void(search.rate, answered) else search.rate


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


def saturated(endpoint: ServedEndpoint, plan: Plan, watch: Watch) -> Interval:
    """Return the throughput at saturation."""
    return stats.throughput_interval(_probe(endpoint, plan, watch))


def _probe(endpoint: ServedEndpoint, plan: Plan, watch: Watch) -> Sequence[Window]:
    """Measure a closed loop with enough clients to saturate the server."""
    wanted = bench_plan(endpoint, plan, [Closed(endpoint.num_clients)])
    short = replace(wanted, duration_s=endpoint.probe_s, max_warm_up_s=SEARCH_WARM_UP_S)
    return endpoint.measured(short, watch).levels[0].windows


class RateSearch:
    """The bench's search for the highest rate, one level at a time, so that several take turns.
    Rates below `floor` are not measured."""

    def __init__(
        self, endpoint: ServedEndpoint, plan: Plan, start: float, left_s: float, floor: float = 0.0
    ) -> None:
        assert plan.slo is not None
        self.slo = plan.slo
        self._floor = floor
        self._endpoint = endpoint
        self._plan = plan
        self._left_s = left_s
        self.levels: list[Level] = []
        first = _open(start, plan.slo)
        self._search = MaxRateSearch(
            plan.slo, start, precision=endpoint.precision, arrivals=first.arrivals, cv=first.cv
        )
        self._next = self._search.next()

    @property
    def is_open(self) -> bool:
        if self._next is None or self._left_s <= 0:
            return False
        if self.levels and self._left_s < self._level_s:
            return False
        return pacer.mean_rate(self._next) >= self._floor

    @property
    def rate(self) -> Interval:
        found = self._search.max_rate
        return NO_RATE if found is None else found.rate

    @property
    def _level_s(self) -> float:
        """Longest measurement of the next rate."""
        assert self._next is not None
        enough_s = max(SEARCH_LEVEL_S, SEARCH_REQUESTS / pacer.mean_rate(self._next))
        return min(self._endpoint.level_s(self._plan, self._next), enough_s)

    def step(self, watch: Watch) -> None:
        assert self._next is not None
        began = time.monotonic()
        wanted = bench_plan(self._endpoint, self._plan, [self._next])
        short = replace(wanted, duration_s=self._level_s, max_warm_up_s=SEARCH_WARM_UP_S)
        level = self._endpoint.measured(short, watch).levels[0]
        self.levels.append(level)
        self._search.add(self._next, level.windows)
        self._left_s -= time.monotonic() - began
        self._next = self._search.next()
