"""Replays arrivals against the scaling of instances, with the real batchers on a simulated clock.

Answers what scaling costs: how many requests are in time, and how many instance-seconds are used,
beside an oracle that knows each window's arrivals and starts instances in no time. Pure.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config import ModelConfig
from penstock.optimizer.simulate import Executors, Kind, TimeTable, make_executors
from penstock.serving.arrival_rates import ArrivalRates
from penstock.serving.scaling import InstanceCounts, Observation, ScalingDecision, ScalingPolicy

# Interval between decisions, as in the server.
TICK_S = 0.5
WINDOW_S = 10.0
# Share of a window's requests that an oracle answers in time.
KEPT = 0.99
# An oracle simulates each window from this many latency limits before it, so that it begins with a
# usual queue.
LEAD = 2.0
KIND = Kind(0, 1)


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """A model with an SLO, all of whose requests are alike; an instance is ready after `load_s`."""

    config: ModelConfig
    table: TimeTable
    load_s: float
    # Variation of batch times, see `simulate.JITTER`.
    jitter: float = 0.1

    @property
    def limit_s(self) -> float:
        assert self.config.batching.slo_latency_s is not None
        return self.config.batching.slo_latency_s

    def executors(self, num_instances: int, num_requests: int) -> Executors:
        table = TimeTable(num_instances, self.table.num_threads, self.table.seconds)
        return make_executors(table, self.config, num_requests, [KIND], self.jitter)


@dataclass(slots=True)
class ReplayOutcome:
    """`decisions` are those that changed the number of instances, with their times."""

    share_in_time: float = 0.0
    # From the start of each instance, loading included, to its end.
    instance_s: float = 0.0
    most: int = 0
    decisions: list[tuple[float, ScalingDecision]] = field(default_factory=list)


def replay(arrivals: Sequence[float], model: ScaledModel) -> ReplayOutcome:
    """Replay arrivals (ascending times); the model starts with its configured instances."""
    run = _Replay(arrivals, model)
    now = 0.0
    while now < arrivals[-1]:
        now += TICK_S
        run.advance(now)
        run.decide(now)
    run.executors.finish()
    latencies_s = run.executors.outcome.latencies_s
    run.outcome.share_in_time = float((latencies_s <= model.limit_s).mean())
    return run.outcome


class _Replay:
    def __init__(self, arrivals: Sequence[float], model: ScaledModel) -> None:
        config = model.config
        self._arrivals = arrivals
        self._model = model
        self._num_arrived = 0
        self._num_ready = config.num_instances
        # When those that load will be ready.
        self._starting: list[float] = []
        self._now = 0.0
        self._rates = ArrivalRates(0.0)
        limits = config.min_instances, config.max_instances
        self._policy = ScalingPolicy(*limits, config.scaling, config.batching)
        self.executors = model.executors(self._num_ready, len(arrivals))
        self.outcome = ReplayOutcome()

    @property
    def _current(self) -> int:
        return self._num_ready + len(self._starting)

    def advance(self, until: float) -> None:
        """Serve what arrives until then."""
        while self._starting and self._starting[0] <= until:
            ready_at = heapq.heappop(self._starting)
            self._serve(ready_at)
            self._set_ready(self._num_ready + 1, ready_at)
        self._serve(until)

    def _serve(self, until: float) -> None:
        arrivals = self._arrivals
        while self._num_arrived < len(arrivals) and arrivals[self._num_arrived] <= until:
            index = self._num_arrived
            self.executors.run_until(arrivals[index])
            self.executors.arrive(index, KIND, arrivals[index])
            self._num_arrived += 1
        self.executors.run_until(until)

    def _set_ready(self, count: int, now: float) -> None:
        self.executors.resize(self._num_ready, count, now)
        self._num_ready = count

    def decide(self, now: float) -> None:
        outcome, batcher = self.outcome, self.executors.batcher
        outcome.instance_s += self._current * (now - self._now)
        outcome.most = max(outcome.most, self._current)
        self._now = now
        self._rates.count(0, self._num_arrived, now)
        seen = Observation(
            self._rates.look(now),
            InstanceCounts(self._num_ready, len(self._starting)),
            batcher.num_queued,
            times_s=batcher.mean_times(),
            load_s=self._model.load_s,
            inflation=batcher.inflation,
            num_requests=self._num_arrived,
            num_late=self.executors.outcome.num_refused,
        )
        decision = self._policy.decide(seen, now)
        if decision.target != self._current:
            outcome.decisions.append((now, decision))
            self._follow(decision.target, now)

    def _follow(self, target: int, now: float) -> None:
        for _ in range(target - self._current):
            heapq.heappush(self._starting, now + self._model.load_s)
        while self._current > target and self._starting:
            self._starting.remove(max(self._starting))
        if self._current > target:
            self._set_ready(target, now)


def oracle(arrivals: Sequence[float], model: ScaledModel, window_s: float = WINDOW_S) -> list[int]:
    """Return the fewest instances for each window with which KEPT of its requests are in time, for
    one that knows the arrivals and starts and stops instances in no time; at most as many as the
    model may have."""
    counts: list[int] = []
    before = model.config.num_instances
    for window in range(math.ceil(arrivals[-1] / window_s)):
        begin, end = window * window_s, (window + 1) * window_s
        first, last = bisect_left(arrivals, begin), bisect_left(arrivals, end)
        lead = bisect_left(arrivals, begin - LEAD * model.limit_s)
        span = arrivals[lead:last]
        before = next(
            (
                count
                for count in range(1, model.config.max_instances)
                if _keeps(span, first - lead, begin, model, (before, count))
            ),
            model.config.max_instances,
        )
        counts.append(before)
    return counts


def _keeps(
    arrivals: Sequence[float],
    first: int,
    begin: float,
    model: ScaledModel,
    counts: tuple[int, int],
) -> bool:
    """Whether the requests from `first` on are in time, with the second number of instances from
    `begin` on, and the first before."""
    executors = model.executors(counts[0], len(arrivals))
    for index, due in enumerate(arrivals):
        if index == first:
            executors.run_until(begin)
            executors.resize(*counts, begin)
        executors.run_until(due)
        executors.arrive(index, KIND, due)
    executors.finish()
    judged = executors.outcome.latencies_s[first:]
    return not len(judged) or float((judged <= model.limit_s).mean()) >= KEPT
