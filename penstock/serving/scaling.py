"""How many instances a model should have now. Pure: time is an argument.

Scales up at once, by as many as the load needs at the time at which they would be ready. Scales
down one at a time, after the load has allowed it for a while. Knows no process: the actor
(`serving.scaler`) observes, starts and stops.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config import BatchPolicy, ScalingConfig
from penstock.serving.arrival_rates import LONG_S, SHORT_S, Arrivals
from penstock.serving.sustained_rate import ExecutorModel

# An instance is stopped only if the others sustain this much more than the present rate.
HYSTERESIS = 0.05
# An instance is added if more than this share of the requests is late, and more than a few are:
# predictions may be wrong.
LATE, MIN_LATE = 0.01, 3
# Without T(b), instances are added above this share of their time, and removed below that one.
BUSY, QUIET = 0.7, 0.4


@dataclass(frozen=True, slots=True)
class InstanceCounts:
    """Instances that can run a batch, those that load, and how many more memory has room for."""

    num_ready: int
    num_starting: int = 0
    room: int = 1 << 16

    @property
    def current(self) -> int:
        return self.num_ready + self.num_starting


@dataclass(frozen=True, slots=True)
class Observation:
    """What the controller sees. `num_queued` in rows, or tokens with a token budget; `busy` is the
    share of their time in which the ready instances ran batches; `load_s` is how long an instance
    takes to be ready."""

    arrivals: Arrivals
    instances: InstanceCounts
    num_queued: float = 0.0
    busy: float = 0.0
    # T(b); empty if it is unknown. The slowest batches take `inflation` times as long.
    times_s: Mapping[int, float] = field(default_factory=dict)
    load_s: float = 0.0
    inflation: float = 1.0
    # Requests so far, and those that were answered late or refused for lack of time.
    num_requests: float = 0
    num_late: float = 0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many instances there should be, and why, in one sentence."""

    target: int
    reason: str


class ScalingPolicy:
    """The controller of one model. `least` and `most` limit the number of instances; 0 is reached
    only without requests. An instance runs `num_slots` batches at once."""

    def __init__(
        self,
        least: int,
        most: int,
        config: ScalingConfig,
        batching: BatchPolicy,
        num_slots: int = 1,
    ) -> None:
        self._least = least
        self._most = most
        self._num_slots = num_slots
        self._config = config
        self._batching = batching
        # Since when fewer instances would do.
        self._quiet_since: float | None = None
        # Times, requests and late ones so far, of the last LONG_S; and from when on they count: not
        # before the instances that were added last are ready.
        self._lateness: deque[tuple[float, float, float]] = deque()
        self._judged_from = -math.inf

    def decide(self, seen: Observation, now: float) -> ScalingDecision:
        current, idle_s = seen.instances.current, seen.arrivals.idle_s
        is_asked = seen.num_queued > 0 or idle_s < self._config.scale_to_zero_s
        is_quiet = not is_asked or (idle_s > SHORT_S and not seen.num_queued)
        if self._least == 0 and current == 0 and is_quiet:
            return ScalingDecision(0, f"no request for {idle_s:.0f} s")
        if self._least == 0 and current == 1 and not seen.instances.num_starting and not is_asked:
            return ScalingDecision(0, f"no request for {idle_s:.0f} s")
        needed, why = self._needed(seen)
        late = self._late(seen, now)
        if late > LATE and needed <= current:
            needed, why = current + 1, f"{why}; {late:.1%} of the requests are late"
        needed = min(self._most, max(self._least, needed))
        if needed > current:
            self._quiet_since = None
            self._judged_from = now + seen.load_s
            return self._grow(needed, why, seen.instances)
        if needed < current and self._allows_fewer(seen):
            return self._shrink(current, why, now)
        self._quiet_since = None
        return ScalingDecision(current, why)

    def _late(self, seen: Observation, now: float) -> float:
        """Return the share of requests that were late, since the last instances were added; 0 if
        there were few."""
        self._lateness.append((now, seen.num_requests, seen.num_late))
        while self._lateness[0][0] < max(now - LONG_S, min(now, self._judged_from)):
            self._lateness.popleft()
        _, num_requests, num_late = self._lateness[0]
        late = seen.num_late - num_late
        return late / max(1.0, seen.num_requests - num_requests) if late >= MIN_LATE else 0.0

    def _grow(self, needed: int, why: str, instances: InstanceCounts) -> ScalingDecision:
        reached = min(needed, instances.current + max(0, instances.room))
        if reached < needed:
            why += f"; memory has room for {reached}"
        return ScalingDecision(reached, why)

    def _shrink(self, current: int, why: str, now: float) -> ScalingDecision:
        """Stop one instance, once the load has allowed it for long enough."""
        if self._quiet_since is None:
            self._quiet_since = now
        quiet_s = now - self._quiet_since
        why = f"{why}, for {quiet_s:.0f} s"
        if quiet_s < self._config.scale_down_s:
            return ScalingDecision(current, why)
        self._quiet_since = now
        return ScalingDecision(current - 1, why)

    def _needed(self, seen: Observation) -> tuple[int, str]:
        """Return how many instances the load needs when an added one would be ready, at least one,
        and why."""
        if not seen.times_s:
            return self._needed_by_time(seen)
        arrivals, model = seen.arrivals, self._model(seen)
        rate, why = arrivals.long, f"{_rate(arrivals.long)} arrive"
        if arrivals.has_burst:
            # The long window's mean is that of its middle.
            slope = (arrivals.short - arrivals.long) / ((LONG_S - SHORT_S) / 2)
            rate = arrivals.short + slope * seen.load_s
            why = f"{_rate(arrivals.short)} arrive, and {_rate(rate)} once an instance is loaded"
        slots = self._num_slots
        capacity = model.capacity(slots * max(1, seen.instances.num_ready))
        overdue = seen.num_queued - capacity * model.limit_s
        if overdue > 0:
            rate += overdue / model.limit_s
            why += f"; {seen.num_queued:.0f} are queued"
        needed = max(1, -(-model.num_needed(rate, slots * self._most) // slots))
        sustained = f"{_rate(model.max_rate(slots * needed))} within {model.limit_s * 1e3:.4g} ms"
        verb = "sustains" if needed == 1 else "sustain"
        return needed, f"{why}; {_instances(needed)} {verb} {sustained}"

    def _needed_by_time(self, seen: Observation) -> tuple[int, str]:
        """Without T(b), keep the instances busy for a part of their time."""
        busy, ready = seen.busy, seen.instances.num_ready
        needed = max(ready, math.ceil(ready * busy / BUSY)) if busy > QUIET else ready - 1
        return max(1, needed), f"{_instances(ready)} computed for {busy:.0%} of the time"

    def _allows_fewer(self, seen: Observation) -> bool:
        """Whether one instance less would do, with a margin."""
        fewer = seen.instances.current - 1
        if not seen.times_s:
            return seen.busy * seen.instances.num_ready < BUSY * fewer
        rate = seen.arrivals.long * (1 + HYSTERESIS)
        if rate <= 0:
            # Even if fewer instances cannot answer a single request within the limit.
            return True
        return self._model(seen).sustains(rate, self._num_slots * fewer)

    def _model(self, seen: Observation) -> ExecutorModel:
        spread = seen.arrivals.dispersion, seen.inflation
        return ExecutorModel.of(self._batching, seen.times_s, *spread)


def _instances(count: int) -> str:
    return f"{count} instance{'' if count == 1 else 's'}"


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}/s"
