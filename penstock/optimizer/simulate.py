"""Simulation of serving configurations from measured batch times: the real batchers on a fake
clock. Pure. Used to order candidates, never to accept one."""

from __future__ import annotations

import functools
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
from penstock.serving.plan import UNPLANNED, Ticket
from penstock.serving.slo_batcher import SloBatcher
from penstock.slo import Goodput, Latency, Slo
from penstock.types import Array, Request, Response

# Time of a request outside of queue and batch: sockets, decoding, copies. Typical of a small
# request over HTTP; large tensors take longer.
OVERHEAD_S = 0.00015
# Overhead of a batch besides the model: wake-up of the worker, and the way there and back.
DISPATCH_S = 0.00015
# CPU time of each request, and of each byte of it and its answer, for the server and for clients on
# the same machine. Cores that no instance uses serve it first.
REQUEST_CPU_S = 0.00015
BYTE_CPU_S = 3e-9
# The core handles requests one at a time, which limits the rate of any model.
CORE_S = 0.00002
# Share of its cores that a model always keeps.
MIN_FREE = 0.05
# Variation of batch times, as the standard deviation of their logarithm, on a machine with other
# load. With it, a batcher that plans tightly refuses requests that could be in time.
JITTER = 0.2
# Enough that one or two bursts do not decide: the slowest hundredth comes in clusters.
NUM_REQUESTS = 4000
# Share of requests left out at the start, when the queue is still empty.
WARM_UP = 0.1
SEED = 11
# Without a latency limit, a rate is too high if requests wait this many times a full batch.
KNEE = 10.0
# Precision of the highest rate, and the lowest share of the capacity that is tried.
PRECISION = 0.02
MIN_SHARE = 1 / 128
Row = Mapping[str, Array]


class TimeTable(msgspec.Struct):
    """Batch times, measured with all instances computing at once.

    `seconds[bucket][rows]`; bucket is the length of the rows (padded, or their own) if that varies,
    and 0 for models whose rows all have the same shape.
    """

    num_instances: int
    num_threads: int
    seconds: dict[int, dict[int, float]]
    # One instance, loaded and warm.
    memory_bytes: int = 0
    load_s: float = 0.0
    # Tokens of those batches, for models that do not compute padding: their time depends on tokens.
    tokens: dict[int, dict[int, float]] = {}
    # Cores that the instances leave to the server and its clients.
    num_free_cores: int = 0
    # The smallest batch that ran out of the GPU's memory; 0: none did.
    ran_out_at: int = 0
    # Share of the time in which the largest batch was computed; None: unknown, or on a CPU.
    busy: float | None = None

    @property
    def by_tokens(self) -> dict[int, float]:
        """Seconds by tokens; empty if batch times depend on rows."""
        return {
            round(count): self.seconds[bucket][rows]
            for bucket, by_rows in self.tokens.items()
            for rows, count in by_rows.items()
        }

    def batch_s(self, bucket: int, num_rows: int) -> float:
        """Interpolate linearly between measured points, and extrapolate from the last two."""
        by_length = {each: _along(rows, num_rows) for each, rows in self.seconds.items()}
        return _along(by_length, bucket)

    def tokens_s(self, num_tokens: float) -> float:
        return _along(self.by_tokens, num_tokens)

    @property
    def idle_share(self) -> float:
        """Share of the largest batch's time that does not grow with its rows, of the longest rows:
        launches, and kernels too small for the device. 1 if there is only one size."""
        points = self.seconds[max(self.seconds)]
        if len(points) < 2:
            return 1.0
        before, last = sorted(points)[-2:]
        slope = max(0.0, points[last] - points[before]) / (last - before)
        return min(1.0, max(0.0, 1 - slope * last / points[last]))

    @property
    def max_rows(self) -> int:
        return max((rows for each in self.seconds.values() for rows in each), default=1)


def as_served(table: TimeTable, config: ModelConfig, rate: float) -> TimeTable:
    """Return batch times at this request rate: each batch is dispatched to a worker, and the server
    takes CPU time from the model's cores once the free ones are used up."""
    taken = rate * _request_cpu_s(config) - table.num_free_cores
    # A thread that loses its core delays all threads of its instance.
    share = max(0.0, taken) / table.num_instances
    stretch = 1 / max(1 - share, MIN_FREE)
    seconds = {
        bucket: {rows: (each + DISPATCH_S) * stretch for rows, each in by_rows.items()}
        for bucket, by_rows in table.seconds.items()
    }
    return msgspec.structs.replace(table, seconds=seconds)


def _request_cpu_s(config: ModelConfig) -> float:
    """Return the CPU time per request outside of the model; models on GPUs lose nothing by it."""
    if config.device != "cpu":
        return 0.0
    specs = (*config.inputs, *config.outputs)
    num_bytes = sum(spec.row_bytes(spec.shape) for spec in specs if spec.is_fixed)
    return REQUEST_CPU_S + BYTE_CPU_S * num_bytes


def _along(points: Mapping[int, float], at: float) -> float:
    """Interpolate linearly; never below a tenth of the smallest measured value."""
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]]
    index = min(max(bisect_left(known, at), 1), len(known) - 1)
    low, high = known[index - 1], known[index]
    if at == high:
        return points[high]
    slope = (points[high] - points[low]) / (high - low)
    if not low <= at <= high:
        # Noise must not make larger batches cheaper.
        slope = max(slope, 0.0)
    return max(points[low] + slope * (at - low), min(points.values()) / 10)


# Rows.


def fitted(rows: Sequence[Row], config: ModelConfig) -> Sequence[Row]:
    """Return rows as this configuration takes them: without the leading 1, if a model for single
    rows has a batch dimension now. Return the same object if they fit as they are."""
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
    """Return the variable axis of each input, padded with 0; empty without one in each."""
    axes: list[PadAxis] = []
    for spec in config.inputs:
        if spec.is_fixed:
            continue
        free = [axis for axis, size in enumerate(spec.shape) if size < 0]
        if spec.datatype == "BYTES" or len(free) != 1:
            return ()
        axes.append(PadAxis(spec.name, free[0]))
    return tuple(axes)


def length_of(row: Row, axes: Sequence[PadAxis]) -> int | None:
    """Return the length that all these axes have in a row; None if they differ or are missing."""
    found = {row[each.input].shape[each.axis] for each in axes if each.input in row}
    return int(found.pop()) if len(found) == 1 else None


def row_lengths(rows: Sequence[Row], config: ModelConfig) -> list[int]:
    """Return the length of each row along the variable axis; empty if rows have no such length."""
    axes = config.padding.axes if config.padding is not None else variable_axes(config)
    found = [length_of(row, axes) for row in rows] if axes else []
    lengths = [each for each in found if each]
    return lengths if len(lengths) == len(found) else []


def shares_of(lengths: Sequence[int], config: ModelConfig) -> dict[int, float]:
    """Return the share of requests by computed length: that of the bucket, or their own if padding
    is absent or not computed; {0: 1.0} without lengths, when all rows have the same shape."""
    if not lengths:
        return {0: 1.0}
    kinds = kinds_of(lengths, config)
    counted = Counter(kinds[each].num_tokens for each in lengths)
    return {length: n / len(lengths) for length, n in sorted(counted.items())}


class Kind(NamedTuple):
    """How the server classifies a row: the bucket it is batched in, and its tokens of a budget."""

    bucket: int
    num_tokens: int


def kinds_of(lengths: Collection[int], config: ModelConfig) -> dict[int, Kind]:
    """Return the kind of each length; rows longer than all buckets run at their own length."""
    if config.padding is None:
        return {each: Kind(each, max(1, each)) for each in lengths}
    pads = Pads(config)
    buckets = [(each, pads.bucket(each)) for each in lengths]
    return {each: Kind(found or each, pads.row_tokens(each, found)) for each, found in buckets}


# Prediction.


class _Nobody:
    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        pass


NOBODY = _Nobody()


@dataclass(slots=True)
class Outcome:
    """Result of one simulated load. Latencies in the order of due times; infinite: no answer."""

    latencies_s: Array
    num_batches: int = 0
    num_rows: int = 0
    busy_s: float = 0.0
    num_refused: int = 0
    # More requests were late than the SLO allows: the rest was not simulated.
    is_cut: bool = False

    @property
    def counted_s(self) -> Array:
        """Latencies after the warm-up."""
        return self.latencies_s[int(len(self.latencies_s) * WARM_UP) :]


class Patience:
    """Ends a simulation early when more requests are late than the SLO allows."""

    def __init__(self, slo: Slo, num_requests: int) -> None:
        self._first = int(num_requests * WARM_UP)
        num = num_requests - self._first
        # Each limit, and how many more requests may exceed it.
        self._left = [
            [term.limit_s, num * (1 - float(term.statistic[1:]) / 100)]
            for term in slo.terms
            if isinstance(term, Latency) and term.metric == "latency" and term.statistic != "mean"
        ]
        self.is_over = False

    def ended(self, turn: int, latency_s: float) -> None:
        if turn < self._first:
            return
        for each in self._left:
            if latency_s >= each[0]:
                each[1] -= 1
                self.is_over = self.is_over or each[1] < -1e-6


class BatchClock:
    """How long batches take."""

    def __init__(self, table: TimeTable, rungs: Sequence[int] = ()) -> None:
        """`rungs`: sizes that batches are padded to."""
        self._by_tokens = table.by_tokens
        self.is_by_tokens = bool(self._by_tokens)

        def batch_s(bucket: int, num_rows: int) -> float:
            place = bisect_left(rungs, num_rows)
            return table.batch_s(bucket, rungs[place] if place < len(rungs) else num_rows)

        self.batch_s = functools.cache(batch_s)

    def tokens_s(self, num_tokens: float) -> float:
        return _along(self._by_tokens, num_tokens)

    def of(self, batch: Sequence[Request], bucket: int) -> float:
        if self.is_by_tokens:
            return self.tokens_s(_num_tokens(batch))
        return self.batch_s(bucket, len(batch))


def _num_tokens(batch: Sequence[Request]) -> int:
    return sum(request.num_tokens for request in batch)


@dataclass(slots=True)
class Executors:
    """Instances that only take time. `num_idle` is negative while instances that were removed
    finish their batches."""

    batcher: Batcher | SloBatcher
    clock: BatchClock
    num_idle: int
    outcome: Outcome
    patience: Patience
    # Factors on batch times, used in turn.
    jitter: Array
    running: list[tuple[float, int, float, list[Request]]] = field(default_factory=list)
    # The bucket of each request, by its turn.
    buckets: list[int] = field(default_factory=list)

    @property
    def next_event(self) -> float:
        end = self.running[0][0] if self.running else math.inf
        wake = self.batcher.wake_at if self.num_idle > 0 else self.batcher.next_expiry
        return min(end, math.inf if wake is None else wake)

    def resize(self, before: int, after: int, now: float) -> None:
        """Change the number of instances; those that are removed finish their batches."""
        self.num_idle += after - before
        self.batcher.count_executors(after, now)
        self.turn(now)

    def run_until(self, due: float) -> None:
        while (event := self.next_event) <= due:
            self.turn(event)

    def add(self, request: Request, kind: Kind, now: float) -> None:
        request.timings.queued = now
        request.ticket = Ticket(UNPLANNED)
        self.buckets.append(kind.bucket)
        request.num_tokens = kind.num_tokens
        try:
            self.batcher.add(request, kind.bucket, now)
        except Overloaded:
            self.outcome.num_refused += 1
            self.patience.ended(request.turn, math.inf)

    def arrive(self, index: int, kind: Kind, now: float) -> None:
        """Add the request with this index."""
        request = Request(NOBODY, (), now)
        request.turn = index
        self.add(request, kind, now)
        # An SLO batcher gets a turn at each arrival: it would take a delay for a busy event loop.
        if self.num_idle > 0 or isinstance(self.batcher, SloBatcher):
            self.turn(now)

    def finish(self) -> None:
        """Run until nothing is queued or running."""
        while (event := self.next_event) < math.inf:
            self.turn(event)

    def turn(self, now: float) -> None:
        """Complete finished batches, refuse expired requests, and start new batches."""
        while self.running and self.running[0][0] <= now:
            _, _, started, batch = heapq.heappop(self.running)
            self.num_idle += 1
            if isinstance(self.batcher, SloBatcher):
                has_budget = self.batcher.policy.max_tokens is not None
                size = _num_tokens(batch) if has_budget else len(batch)
                self.batcher.observe(self.buckets[batch[0].turn], size, started, now)
            for request in batch:
                latency_s = now - request.timings.queued + OVERHEAD_S
                self.outcome.latencies_s[request.turn] = latency_s
                self.patience.ended(request.turn, latency_s)
        self._refuse(now)
        while self.num_idle > 0 and (batch := self.batcher.next(now) or []):
            self._start(batch, now)
        self._refuse(now)

    def _refuse(self, now: float) -> None:
        """Refuse expired requests; their latency stays infinite."""
        for request in self.batcher.expire(now):
            self.outcome.num_refused += 1
            self.patience.ended(request.turn, math.inf)

    def _start(self, batch: list[Request], now: float) -> None:
        self.num_idle -= 1
        outcome = self.outcome
        factor = float(self.jitter[outcome.num_batches % len(self.jitter)])
        took_s = factor * self.clock.of(batch, self.buckets[batch[0].turn])
        outcome.num_batches += 1
        outcome.num_rows += len(batch)
        outcome.busy_s += took_s
        heapq.heappush(self.running, (now + took_s, outcome.num_batches, now, batch))


def run(
    table: TimeTable,
    config: ModelConfig,
    arrivals: Sequence[float],
    lengths: Sequence[int],
    patience: Patience | None = None,
    jitter: float = 0.0,
) -> Outcome:
    """Simulate requests due at `arrivals` (ascending) until all ended or patience is over."""
    kinds = kinds_of(set(lengths), config)
    patience = patience or Patience(Slo(()), len(arrivals))
    executors = make_executors(table, config, len(arrivals), set(kinds.values()), jitter)
    executors.patience, outcome = patience, executors.outcome
    for index, (due, length) in enumerate(zip(arrivals, lengths, strict=True)):
        executors.run_until(due)
        executors.arrive(index, kinds[length], due)
        if patience.is_over:
            outcome.is_cut = True
            return outcome
    executors.finish()
    return outcome


def make_executors(
    table: TimeTable,
    config: ModelConfig,
    num_requests: int,
    kinds: Collection[Kind],
    jitter: float = 0.0,
) -> Executors:
    """Make the instances of a table, with the batcher that the server would have."""
    clock = BatchClock(table, _rungs(config))
    outcome = Outcome(np.full(num_requests, math.inf))
    batcher = _make_batcher(config, clock, table.num_instances, {kind.bucket for kind in kinds})
    factors = np.random.default_rng(SEED).lognormal(-(jitter**2) / 2, jitter, NUM_REQUESTS)
    patience = Patience(Slo(()), num_requests)
    return Executors(batcher, clock, table.num_instances, outcome, patience, factors)


def _rungs(config: ModelConfig) -> list[int]:
    """Return the sizes that the engine of GPUs pads batches to; empty: none."""
    is_padded = config.uses_gpu and config.engine == "pytorch" and config.batching.is_dynamic
    return ladder(config.max_batch_size) if is_padded else []


def _make_batcher(
    config: ModelConfig, clock: BatchClock, num_instances: int, buckets: set[int]
) -> Batcher | SloBatcher:
    """Make the batcher as the server does, with the times that it would measure at warm-up."""
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


def _warm_s(clock: BatchClock, policy: BatchPolicy, bucket: int, num_rows: int) -> float:
    """Return a warm-up time: rows as long as their bucket, within the batch's token budget."""
    if not clock.is_by_tokens:
        return clock.batch_s(bucket, num_rows)
    return clock.tokens_s(_within(policy, num_rows * bucket))


def _max_rows(config: ModelConfig, bucket: int) -> int:
    """Return the largest batch; 1 without batching."""
    policy = config.batching
    return min(policy.max_batch_size, config.max_rows(bucket)) if policy.is_dynamic else 1


def _within(policy: BatchPolicy, num_tokens: float) -> float:
    return num_tokens if policy.max_tokens is None else min(num_tokens, policy.max_tokens)


def simulate_rate(
    table: TimeTable,
    config: ModelConfig,
    slo: Slo,
    rate: float,
    lengths: Mapping[int, float],
    *,
    is_patient: bool = True,
) -> Outcome:
    """Simulate requests at one rate. `lengths` is the share of requests by length, see `shares_of`.
    Without patience, stop once the SLO is missed."""
    due, chosen = _requests(slo, rate, lengths)
    patience = None if is_patient else Patience(slo, len(due))
    return run(as_served(table, config, rate), config, due, chosen, patience, JITTER)


def _requests(slo: Slo, rate: float, lengths: Mapping[int, float]) -> tuple[list[float], list[int]]:
    """Return when each request is due, and its length; deterministic for a rate."""
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


def percentile(latencies_s: Array, percent: float) -> float:
    """Return a percentile (nearest rank); infinite if too few requests were answered."""
    rank = max(1, math.ceil(percent / 100 * len(latencies_s) - 1e-9))
    return float(np.partition(latencies_s, rank - 1)[rank - 1])


def _is_kept(slo: Slo, latencies_s: Array) -> bool:
    """Return whether the latency and goodput terms hold; refused requests have infinite latency."""
    limit_s = math.inf if slo.latency_s is None else slo.latency_s
    for term in slo.terms:
        if isinstance(term, Goodput):
            value = 100 * float((latencies_s < limit_s).mean())
        elif not isinstance(term, Latency) or term.metric != "latency":
            continue
        elif term.statistic == "mean":
            value = float(latencies_s.mean())
        else:
            value = percentile(latencies_s, float(term.statistic[1:]))
        if not term.is_kept_by(value):
            return False
    return True


def capacity(table: TimeTable, config: ModelConfig, lengths: Mapping[int, float]) -> float:
    """Return the upper limit of the rate for any batcher: batches of the best size."""
    row_s = _best_row_s(BatchClock(as_served(table, config, 0.0)), config, lengths)
    num_instances = table.num_instances
    # The rate at which rows and server together use all cores.
    shared = (num_instances + table.num_free_cores) / (row_s + _request_cpu_s(config))
    return min(num_instances / row_s, shared, 1 / CORE_S)


def _best_row_s(clock: BatchClock, config: ModelConfig, lengths: Mapping[int, float]) -> float:
    """Return the mean time per row in batches of the best size."""
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


def _longest_s(table: TimeTable, config: ModelConfig, lengths: Mapping[int, float]) -> float:
    if table.tokens:
        return table.tokens_s(_within(config.batching, _max_rows(config, 0) * max(lengths)))
    buckets = {kind.bucket for kind in kinds_of(lengths, config).values()}
    return max(table.batch_s(each, _max_rows(config, each)) for each in buckets)


def max_rate(
    table: TimeTable,
    config: ModelConfig,
    slo: Slo,
    lengths: Mapping[int, float],
    *,
    above: float = 0.0,
) -> float:
    """Return the highest rate at which the SLO's latency and goodput terms hold in simulation; 0 if
    there is no such rate, or none `above` this. Without such terms, the highest rate at which the
    queue does not grow without bound."""
    if not any(isinstance(term, Latency | Goodput) for term in slo.terms):
        longest_s = _longest_s(table, config, lengths)
        slo = Slo((Latency("p99", KNEE * longest_s + OVERHEAD_S),), slo.rate)

    def holds(rate: float) -> bool:
        outcome = simulate_rate(table, config, slo, rate, lengths, is_patient=False)
        return not outcome.is_cut and _is_kept(slo, outcome.counted_s)

    high = capacity(table, config, lengths)
    low = max(high * MIN_SHARE, above)
    if low > high or not holds(low):
        return 0.0
    while high > low * (1 + PRECISION):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
