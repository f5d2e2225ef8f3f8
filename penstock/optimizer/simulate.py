"""What a serving configuration would do, from measured batch times: the real batchers on a fake
clock. Pure. Used to order candidates and never to accept one."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.benchmark.pacer import Flat, Open, due_times
from penstock.config import BatchPolicy, ModelConfig, PadAxis, ladder
from penstock.errors import Overloaded, PenstockError
from penstock.serving.batcher import Batcher
from penstock.serving.padding import Pads
from penstock.serving.slo_batcher import SloBatcher
from penstock.slo import Goodput, Latency, Slo
from penstock.types import Array, Request, Response

# What a request spends outside of queue and batch: sockets, decoding, copies. About that of a small
# request over HTTP; large tensors take longer.
OVERHEAD_S = 0.00015
# Of a batch, beyond what the model takes: the way to the worker and back, waking it up.
DISPATCH_S = 0.00015
# Processor time for each request and each byte of it and of its answer: the server's work and that
# of clients on the same machine. Cores that no instance uses do it first.
REQUEST_CPU_S = 0.00015
BYTE_CPU_S = 3e-9
# The core takes requests one after the other; no model is served faster than this allows.
CORE_S = 0.00002
# Of its cores, that a model keeps whatever comes.
MIN_FREE = 0.05
# How much batches of one size differ, as the standard deviation of the logarithm of their times, on
# a machine that has other things to do. Whoever plans tightly then refuses what could be in time.
JITTER = 0.2
# So many that a burst or two does not decide: the slowest hundredth comes in clusters.
NUM_REQUESTS = 4000
# Of the requests, left out at the start: the queue is empty then, which it will not be again.
WARM_UP = 0.1
SEED = 11
# Without a limit on latency a rate is too high when so many times a full batch is waited for.
KNEE = 10.0
# How near the highest rate is found, and how far below what is possible it is looked for.
PRECISION = 0.02
MIN_SHARE = 1 / 128


class TimeTable(msgspec.Struct):
    """How long batches take, measured with all instances computing at once.

    `seconds[bucket][rows]`; bucket is the length of the rows where that varies (padded to, or their
    own), and 0 for models whose rows are all alike."""

    num_instances: int
    num_threads: int
    seconds: dict[int, dict[int, float]]
    # Of one instance, loaded and warm.
    memory_bytes: int = 0
    load_s: float = 0.0
    # Of models that do not compute padding: the tokens of those batches, by which their time goes.
    tokens: dict[int, dict[int, float]] = {}
    # Cores of the machine that the instances leave to the server and its clients.
    num_free_cores: int = 0

    @property
    def by_tokens(self) -> dict[int, float]:
        """Seconds by tokens; empty where time goes by rows."""
        return {
            round(count): self.seconds[bucket][rows]
            for bucket, by_rows in self.tokens.items()
            for rows, count in by_rows.items()
        }

    def batch_s(self, bucket: int, num_rows: int) -> float:
        """Between what was measured by straight lines, beyond it by the last of them."""
        lengths = sorted(self.seconds)
        points = [(each, _along(self.seconds[each], num_rows)) for each in lengths]
        return _along(dict(points), bucket)

    def tokens_s(self, num_tokens: float) -> float:
        """The same by tokens."""
        return _along(self.by_tokens, num_tokens)

    @property
    def max_rows(self) -> int:
        """The largest batch that was measured."""
        return max((rows for each in self.seconds.values() for rows in each), default=1)


def as_served(table: TimeTable, config: ModelConfig, rate: float) -> TimeTable:
    """Batch times when requests come at this rate: each batch has its way to the worker, and the
    server takes from the model's cores what the free ones do not hold."""
    taken = rate * _request_cpu_s(config) - table.num_free_cores
    # A thread that loses its core makes all threads of its instance wait.
    share = max(0.0, taken) / table.num_instances
    stretch = 1 / max(1 - share, MIN_FREE)
    seconds = {
        bucket: {rows: (each + DISPATCH_S) * stretch for rows, each in by_rows.items()}
        for bucket, by_rows in table.seconds.items()
    }
    return msgspec.structs.replace(table, seconds=seconds)


def _request_cpu_s(config: ModelConfig) -> float:
    """Processor time that a request takes of the machine beside the model; GPUs lose nothing."""
    if config.device != "cpu":
        return 0.0
    num_bytes = sum(
        spec.row_bytes(spec.shape) for spec in (*config.inputs, *config.outputs) if spec.is_fixed
    )
    return REQUEST_CPU_S + BYTE_CPU_S * num_bytes


class Prediction(msgspec.Struct):
    rate: float
    p50_s: float
    p99_s: float
    goodput: float  # share of requests answered in time
    rows_per_batch: float
    utilisation: float


def _along(points: Mapping[int, float], at: float) -> float:
    """Linear; never less than a tenth of the least that was measured."""
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    index = min(max(bisect_left(known, at), 1), len(known) - 1)
    low, high = known[index - 1], known[index]
    if at == high:
        return points[high]
    slope = (points[high] - points[low]) / (high - low)
    if not low <= at <= high:
        # Noise must not make what is larger cost less.
        slope = max(slope, 0.0)
    return max(points[low] + slope * (at - low), min(points.values()) / 10)


# Rows.


def fitted(
    rows: Sequence[Mapping[str, Array]], config: ModelConfig
) -> Sequence[Mapping[str, Array]]:
    """As this configuration takes them: where a model that took one row has got a batch dimension
    since, rows still have the 1 that stood for it. The same rows, if they fit as they are."""
    ranks = {spec.name: len(spec.shape) for spec in config.inputs}

    def is_more(name: str, array: Array) -> bool:
        return name in ranks and array.ndim == ranks[name] + 1 and len(array) == 1

    first = rows[0] if rows and config.max_batch_size else {}
    if not any(is_more(name, array) for name, array in first.items()):
        return rows
    return [
        {name: array[0] if is_more(name, array) else array for name, array in row.items()}
        for row in rows
    ]


def variable_axes(config: ModelConfig) -> tuple[PadAxis, ...]:
    """The axis of each input that may have any length, filled up with 0; none where an input has
    two of them or is no number."""
    axes: list[PadAxis] = []
    for spec in config.inputs:
        if spec.is_fixed:
            continue
        free = [axis for axis, size in enumerate(spec.shape) if size < 0]
        if spec.datatype == "BYTES" or len(free) != 1:
            return ()
        axes.append(PadAxis(spec.name, free[0]))
    return tuple(axes)


def length_of(row: Mapping[str, Array], axes: Sequence[PadAxis]) -> int | None:
    """The one length that these axes have in a row; None where they differ or are not there."""
    found = {row[each.input].shape[each.axis] for each in axes if each.input in row}
    return int(found.pop()) if len(found) == 1 else None


def row_lengths(rows: Sequence[Mapping[str, Array]], config: ModelConfig) -> list[int]:
    """The length of each row along the variable axis; empty when rows have no such length."""
    axes = config.padding.axes if config.padding is not None else variable_axes(config)
    found = [length_of(row, axes) for row in rows] if axes else []
    lengths = [each for each in found if each]
    return lengths if len(lengths) == len(found) else []


def lengths_of(rows: Sequence[Mapping[str, Array]], config: ModelConfig) -> dict[int, float]:
    """The share of requests by what is computed of them: the length of the bucket, or their own
    without padding or where that is not computed; {0: 1.0} for rows that are all alike."""
    return shares_of(row_lengths(rows, config), config)


def shares_of(lengths: Sequence[int], config: ModelConfig) -> dict[int, float]:
    if not lengths:
        return {0: 1.0}
    kinds = kinds_of(lengths, config)
    counted = Counter(kinds[each].num_tokens for each in lengths)
    return {length: n / len(lengths) for length, n in sorted(counted.items())}


class Kind(NamedTuple):
    """What the server makes of a row: with whom it shares a batch, what it counts of a budget."""

    bucket: int
    num_tokens: int


def kinds_of(lengths: Collection[int], config: ModelConfig) -> dict[int, Kind]:
    """By length; what no bucket holds runs with its own."""
    if config.padding is None:
        return {each: Kind(each, max(1, each)) for each in lengths}
    pads = Pads(config)
    buckets = {each: pads.bucket(each) for each in lengths}
    return {
        each: Kind(bucket or each, pads.row_tokens(each, bucket))
        for each, bucket in buckets.items()
    }


# Prediction.


class _Nobody:
    """The sink of requests whose answer nobody reads."""

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        pass


@dataclass(slots=True)
class Outcome:
    """Of one simulated load. Latencies in the order in which requests were due; infinite: never
    answered."""

    latencies_s: Array
    num_batches: int = 0
    num_rows: int = 0
    busy_s: float = 0.0
    end: float = 0.0


class Patience:
    """When a simulation need not go on: more requests were late than the SLO lets be late."""

    def __init__(self, slo: Slo, num_requests: int) -> None:
        self._first = int(num_requests * WARM_UP)
        num = num_requests - self._first
        limits = [
            (term.limit_s, num * (1 - float(term.statistic[1:]) / 100))
            for term in slo.terms
            if isinstance(term, Latency) and term.metric == "latency" and term.statistic != "mean"
        ]
        # How many may be late, by the limit.
        self._left = [[limit_s, allowed] for limit_s, allowed in limits]
        self.is_over = False

    def ended(self, turn: int, latency_s: float) -> None:
        if turn < self._first:
            return
        for each in self._left:
            if latency_s >= each[0]:
                each[1] -= 1
                self.is_over = self.is_over or each[1] < -1e-6


class _Clock:
    """How long batches take, by the table."""

    def __init__(self, table: TimeTable) -> None:
        self._table = table
        self._by_tokens = table.by_tokens
        self._known: dict[tuple[int, int], float] = {}

    @property
    def is_by_tokens(self) -> bool:
        return bool(self._by_tokens)

    def batch_s(self, bucket: int, num_rows: int) -> float:
        key = bucket, num_rows
        if key not in self._known:
            self._known[key] = self._table.batch_s(bucket, num_rows)
        return self._known[key]

    def tokens_s(self, num_tokens: float) -> float:
        return _along(self._by_tokens, num_tokens)

    def of(self, batch: Sequence[Request]) -> float:
        if self._by_tokens:
            return self.tokens_s(_num_tokens(batch))
        return self.batch_s(batch[0].fit, len(batch))


def _num_tokens(batch: Sequence[Request]) -> int:
    return sum(request.num_tokens for request in batch)


@dataclass(slots=True)
class _Executors:
    """Instances that only take time."""

    batcher: Batcher | SloBatcher
    clock: _Clock
    num_idle: int
    outcome: Outcome
    patience: Patience
    # By turns, what batches take times their mean.
    jitter: Array
    running: list[tuple[float, int, float, list[Request]]] = field(default_factory=list)

    @property
    def next_event(self) -> float:
        end = self.running[0][0] if self.running else math.inf
        wake = self.batcher.wake_at if self.num_idle else self.batcher.next_expiry
        return min(end, math.inf if wake is None else wake)

    def add(self, request: Request, kind: Kind, now: float) -> None:
        request.timings.queued = now
        request.fit = kind.bucket
        request.num_tokens = kind.num_tokens
        try:
            self.batcher.add(request, kind.bucket, now)
        except Overloaded:
            self.patience.ended(request.turn, math.inf)

    def turn(self, now: float) -> None:
        """End what has ended, begin what may begin."""
        while self.running and self.running[0][0] <= now:
            _, _, started, batch = heapq.heappop(self.running)
            self.num_idle += 1
            if isinstance(self.batcher, SloBatcher):
                has_budget = self.batcher.policy.max_tokens is not None
                size = _num_tokens(batch) if has_budget else len(batch)
                self.batcher.observe(batch[0].fit, size, started, now)
            for request in batch:
                latency_s = now - request.timings.queued + OVERHEAD_S
                self.outcome.latencies_s[request.turn] = latency_s
                self.patience.ended(request.turn, latency_s)
        self._refuse(now)
        while self.num_idle and (batch := self.batcher.next(now) or []):
            self._start(batch, now)
        self._refuse(now)

    def _refuse(self, now: float) -> None:
        """Their latency stays infinite."""
        for request in self.batcher.expire(now):
            self.patience.ended(request.turn, math.inf)

    def _start(self, batch: list[Request], now: float) -> None:
        self.num_idle -= 1
        outcome = self.outcome
        factor = float(self.jitter[outcome.num_batches % len(self.jitter)])
        took_s = factor * self.clock.of(batch)
        outcome.num_batches += 1
        outcome.num_rows += len(batch)
        outcome.busy_s += took_s
        outcome.end = max(outcome.end, now + took_s)
        heapq.heappush(self.running, (now + took_s, outcome.num_batches, now, batch))


def run(
    table: TimeTable,
    config: ModelConfig,
    arrivals: Sequence[float],
    lengths: Sequence[int],
    patience: Patience | None = None,
    jitter: float = 0.0,
) -> Outcome:
    """Requests due at `arrivals` (ascending), each of its length (see `lengths_of`), until all have
    ended or patience is over."""
    clock = _Clock(table)
    kinds = kinds_of(set(lengths), config)
    outcome = Outcome(np.full(len(arrivals), math.inf))
    batcher = _make_batcher(config, clock, table.num_instances, {k.bucket for k in kinds.values()})
    patience = patience or Patience(Slo(()), len(arrivals))
    factors = np.random.default_rng(SEED).lognormal(-(jitter**2) / 2, jitter, NUM_REQUESTS)
    executors = _Executors(batcher, clock, table.num_instances, outcome, patience, factors)
    sink = _Nobody()
    # It takes the time between an arrival and its turn for a loop that is busy.
    is_slo = isinstance(batcher, SloBatcher)
    for index, (due, length) in enumerate(zip(arrivals, lengths, strict=True)):
        while (event := executors.next_event) <= due:
            executors.turn(event)
        request = Request(sink, (), due)
        request.turn = index
        executors.add(request, kinds[length], due)
        if executors.num_idle or is_slo:
            executors.turn(due)
        if patience.is_over:
            return outcome
    while (event := executors.next_event) < math.inf:
        executors.turn(event)
    return outcome


def _make_batcher(
    config: ModelConfig, clock: _Clock, num_instances: int, buckets: set[int]
) -> Batcher | SloBatcher:
    """As the server makes it, with the times that it would see at warm-up."""
    policy = config.batching
    if policy.slo_latency_s is None:
        return Batcher(policy)
    batcher = SloBatcher(policy, num_instances)
    for bucket in sorted(buckets):
        rungs = ladder(_max_rows(config, bucket))
        times = {rung: _warm_s(clock, policy, bucket, rung) for rung in rungs}
        if config.padding is not None:
            times = Pads(config).warm_times(times, max(1, bucket))
        batcher.seed(times, bucket)
    return batcher


def _warm_s(clock: _Clock, policy: BatchPolicy, bucket: int, num_rows: int) -> float:
    """A warm-up runs rows as long as their bucket, and no more tokens than a batch may have."""
    if not clock.is_by_tokens:
        return clock.batch_s(bucket, num_rows)
    return clock.tokens_s(_within(policy, num_rows * bucket))


def _max_rows(config: ModelConfig, bucket: int) -> int:
    """Of a batch; without batching each request runs by itself."""
    policy = config.batching
    return min(policy.max_batch_size, config.max_rows(bucket)) if policy.is_dynamic else 1


def _within(policy: BatchPolicy, num_tokens: float) -> float:
    return num_tokens if policy.max_tokens is None else min(num_tokens, policy.max_tokens)


def predict(
    table: TimeTable, config: ModelConfig, slo: Slo, rate: float, lengths: Mapping[int, float]
) -> Prediction:
    """`lengths` is the share of requests by length (see `lengths_of`); {0: 1.0} without any."""
    due, chosen = _requests(slo, rate, lengths)
    loaded = as_served(table, config, rate)
    outcome = run(loaded, config, due, chosen, jitter=JITTER)
    return _prediction(table, slo, rate, outcome)


def _requests(slo: Slo, rate: float, lengths: Mapping[int, float]) -> tuple[list[float], list[int]]:
    """When each is due, and its length; always the same ones at the same rate."""
    arrivals, cv = ("poisson", 1.0) if slo.rate is None else (slo.rate.arrivals, slo.rate.cv or 1.0)
    chunks: list[Array] = []
    for chunk in due_times(Open(Flat(rate), arrivals, cv), SEED):
        chunks.append(chunk)
        if sum(map(len, chunks)) >= NUM_REQUESTS:
            break
    due = np.concatenate(chunks)[:NUM_REQUESTS]
    shares = np.array(list(lengths.values()))
    random = np.random.default_rng(SEED)
    chosen = random.choice(np.array(list(lengths)), len(due), p=shares / shares.sum())
    return due.tolist(), chosen.tolist()


def _prediction(table: TimeTable, slo: Slo, rate: float, outcome: Outcome) -> Prediction:
    counted = _counted(outcome)
    limit_s = slo.latency_s
    in_time = np.isfinite(counted) if limit_s is None else counted < limit_s
    span_s = max(outcome.end, NUM_REQUESTS / rate)
    return Prediction(
        rate=rate,
        p50_s=percentile(counted, 50),
        p99_s=percentile(counted, 99),
        goodput=float(in_time.mean()),
        rows_per_batch=outcome.num_rows / max(1, outcome.num_batches),
        utilisation=min(1.0, outcome.busy_s / (span_s * table.num_instances)),
    )


def _counted(outcome: Outcome) -> Array:
    latencies = outcome.latencies_s
    return latencies[int(len(latencies) * WARM_UP) :]


def percentile(latencies_s: Array, percent: float) -> float:
    """The smallest that so many are not longer than; infinite where too few were answered."""
    rank = max(1, math.ceil(percent / 100 * len(latencies_s) - 1e-9))
    return float(np.partition(latencies_s, rank - 1)[rank - 1])


def _is_kept(slo: Slo, latencies_s: Array) -> bool:
    """The terms that speak of single requests; those who were refused waited for ever."""
    limit_s = slo.latency_s
    for term in slo.terms:
        if isinstance(term, Latency) and term.metric == "latency":
            if term.statistic == "mean":
                value = float(latencies_s.mean())
            else:
                value = percentile(latencies_s, float(term.statistic[1:]))
            if not term.is_kept_by(value):
                return False
        elif isinstance(term, Goodput):
            in_time = latencies_s < (math.inf if limit_s is None else limit_s)
            if not term.is_kept_by(100 * float(in_time.mean())):
                return False
    return True


def capacity(table: TimeTable, config: ModelConfig, lengths: Mapping[int, float]) -> float:
    """Requests a second that no batcher can exceed: every batch as large as is best, and a server
    that keeps up."""
    row_s = _best_row_s(_Clock(as_served(table, config, 0.0)), config, lengths)
    num_instances = table.num_instances
    # The rate at which rows take all that the server leaves of the cores.
    shared = (num_instances + table.num_free_cores) / (row_s + _request_cpu_s(config))
    return min(num_instances / row_s, shared, 1 / CORE_S)


def _best_row_s(clock: _Clock, config: ModelConfig, lengths: Mapping[int, float]) -> float:
    """Of a mean row in batches as large as is best."""
    policy = config.batching
    kinds = kinds_of(lengths, config)
    total = sum(lengths.values())
    if clock.is_by_tokens:
        mean = sum(share * kinds[each].num_tokens for each, share in lengths.items()) / total
        sizes = {_within(policy, rows * mean) for rows in ladder(_max_rows(config, 0))}
        return mean * min(clock.tokens_s(size) / size for size in sizes)
    row_s = 0.0
    for each, share in lengths.items():
        bucket = kinds[each].bucket
        rungs = ladder(_max_rows(config, bucket))
        row_s += share / total * min(clock.batch_s(bucket, rows) / rows for rows in rungs)
    return row_s


def _longest_s(clock: _Clock, config: ModelConfig, lengths: Mapping[int, float]) -> float:
    """Of the batches that there may be."""
    if clock.is_by_tokens:
        most = _max_rows(config, 0) * max(lengths)
        return clock.tokens_s(_within(config.batching, most))
    buckets = {kind.bucket for kind in kinds_of(lengths, config).values()}
    return max(clock.batch_s(each, _max_rows(config, each)) for each in buckets)


def max_rate(
    table: TimeTable,
    config: ModelConfig,
    slo: Slo,
    lengths: Mapping[int, float],
    *,
    above: float = 0.0,
) -> float:
    """The highest rate at which the SLO's latency and goodput terms hold in simulation; 0 if at
    none, or at none `above` this. Without such terms, the highest that does not end in an ever
    longer queue."""
    if not any(isinstance(term, Latency | Goodput) for term in slo.terms):
        longest_s = _longest_s(_Clock(table), config, lengths)
        slo = Slo((Latency("p99", KNEE * longest_s + OVERHEAD_S),), slo.rate)

    def holds(rate: float) -> bool:
        due, chosen = _requests(slo, rate, lengths)
        patience = Patience(slo, len(due))
        outcome = run(as_served(table, config, rate), config, due, chosen, patience, JITTER)
        return not patience.is_over and _is_kept(slo, _counted(outcome))

    high = capacity(table, config, lengths)
    low = max(high * MIN_SHARE, above)
    if low > high or not holds(low):
        return 0.0
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
