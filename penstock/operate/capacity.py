"""How many replicas a load needs, what they cost, and when to add one. Pure.

A replica is one server, as the evidence of a version measured it. Its rate is the highest that kept
the SLO with the SLO's arrivals or, if none was searched for, what a simulation with the measured
batch times says. Knows no cluster: `export` writes the files that use these figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock import slo as slos
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer import simulate
from penstock.optimizer.simulate import TimeTable
from penstock.slo import Slo

# Share of a replica's rate that is kept free by default: p99 rises steeply in the last tenth.
HEADROOM = 0.1
# p99 over mean of exponential times.
P99_OVER_MEAN = math.log(100)
# Evidence of batch times, see `optimizer.evidence`.
BATCH_TIMES = "batch_times"


@dataclass(frozen=True, slots=True)
class Replica:
    """One server: the highest rate per second that keeps its SLO, and where that is from."""

    rate: float
    source: str
    slo: str = ""
    # Mean time in the queue with `HEADROOM` free, by simulation; None: batch times are unknown.
    queue_s: float | None = None

    @property
    def limit_s(self) -> float | None:
        """The SLO's longest latency."""
        return slos.parse(self.slo).latency_s if self.slo else None


@dataclass(frozen=True, slots=True)
class Demand:
    """A load per second, and what must hold. `failure_domain`: replicas that fail together, such as
    those of one node; the others must take the whole load then. 0: a failure may refuse some."""

    rate: float
    headroom: float = HEADROOM
    failure_domain: int = 1
    # Per replica and hour.
    price: float | None = None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Replicas for a demand. `needed` for the load with headroom; `total` also if a failure domain
    is down, in whole domains."""

    replica: Replica
    demand: Demand
    needed: int
    total: int

    @property
    def num_domains(self) -> int:
        return math.ceil(self.total / max(1, self.demand.failure_domain))

    @property
    def utilisation(self) -> float:
        """Share of the highest rate that each replica serves."""
        return self.demand.rate / (self.total * self.replica.rate)

    @property
    def degraded_utilisation(self) -> float:
        """The same while a failure domain is down."""
        left = self.total - self.demand.failure_domain
        return self.demand.rate / (left * self.replica.rate)

    @property
    def cost_per_hour(self) -> float | None:
        return None if self.demand.price is None else self.demand.price * self.total

    @property
    def cost_per_million(self) -> float | None:
        cost = self.cost_per_hour
        return None if cost is None else cost / (3600 * self.demand.rate) * 1e6

    @property
    def rate_threshold(self) -> float:
        """Requests per second and replica above which another is added."""
        return (1 - self.demand.headroom) * self.replica.rate

    @property
    def queue_threshold(self) -> float | None:
        """Queued requests per replica above which another is added: the mean at `rate_threshold`,
        by Little's law. If the time in the queue was not simulated, it is at most the mean latency,
        which is p99 / ln 100 for exponential times."""
        queue_s, limit_s = self.replica.queue_s, self.replica.limit_s
        if queue_s is None and limit_s is not None:
            queue_s = limit_s / P99_OVER_MEAN
        return None if queue_s is None else max(1.0, self.rate_threshold * queue_s)


def plan(replica: Replica, demand: Demand) -> CapacityPlan:
    """Return the fewest replicas that serve the demand; ConfigError if it makes no sense."""
    problems = []
    if not demand.rate > 0 or not math.isfinite(demand.rate):
        problems.append(f"rate: {demand.rate:g}/s; expected a number above 0")
    if not 0 <= demand.headroom < 1:
        problems.append(f"headroom: {demand.headroom:.0%}; expected from 0 % to below 100 %")
    if not replica.rate > 0:
        problems.append(f"rate of a replica: {replica.rate:g}/s; expected a number above 0")
    if problems:
        raise ConfigError(problems)
    needed = math.ceil(demand.rate / ((1 - demand.headroom) * replica.rate) - 1e-9)
    domain = demand.failure_domain
    # While a domain is down, the others have no headroom.
    total = max(needed, math.ceil(demand.rate / replica.rate - 1e-9) + domain)
    if domain > 1:
        total = math.ceil(total / domain) * domain
    return CapacityPlan(replica, demand, needed, total)


def max_demand(replica: Replica, total: int, demand: Demand) -> float:
    """Return the highest rate that `total` replicas serve, with the headroom and the failure domain
    of this demand; 0 if there is no such rate."""
    with_headroom = (1 - demand.headroom) * total * replica.rate
    return max(0.0, min(with_headroom, (total - demand.failure_domain) * replica.rate))


def replica_of(evidence: Mapping[str, object], config: ModelConfig) -> Replica:
    """Read the rate of a replica from a version's evidence; ConfigError if it has none."""
    text = evidence.get("slo")
    slo = text if isinstance(text, str) else config.slo
    table = _batch_times(evidence)
    if (rate := _measured_rate(evidence)) is not None:
        source = "measured: the highest rate that kept the SLO"
        return Replica(rate, source, slo, _queue_s(table, config, slo, rate))
    if table is not None and slo:
        rate = simulate.max_rate(table, config, slos.parse(slo), _lengths(table))
        if rate <= 0:
            raise ConfigError(
                f"{config.name}/{config.version}: one replica, with the measured batch times, "
                f"cannot keep {slo} at any rate; optimize the model, or change the SLO"
            )
        source = "simulated: the highest rate that keeps the SLO, from measured batch times"
        return Replica(rate, source, slo, _queue_s(table, config, slo, rate))
    promised = slos.parse(slo).rate if slo else None
    if promised is not None and evidence.get("outcome") in ("kept", "met"):
        return Replica(promised.per_s, "the SLO's own rate, which was kept: it may do more", slo)
    raise ConfigError(
        f"{config.name}/{config.version}: its evidence has no rate; measure one with "
        "penstock bench --max-rate --slo SLO, and give it as --replica-rate"
    )


def _measured_rate(evidence: Mapping[str, object]) -> float | None:
    """Return the lower end of the highest rate that kept the SLO."""
    measured = evidence.get("measured")
    found = measured.get("max_rate") if isinstance(measured, dict) else None
    ends = [found.get(end) for end in ("low", "value")] if isinstance(found, dict) else []
    return next((float(end) for end in ends if isinstance(end, int | float) and end > 0), None)


def _batch_times(evidence: Mapping[str, object]) -> TimeTable | None:
    try:
        return msgspec.convert(evidence.get(BATCH_TIMES), TimeTable | None, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"evidence.{BATCH_TIMES}: {error}") from None


def _lengths(table: TimeTable) -> dict[int, float]:
    """Return equal shares of all lengths that were measured."""
    return dict.fromkeys(table.seconds, 1.0)


def _queue_s(table: TimeTable | None, config: ModelConfig, slo: str, rate: float) -> float | None:
    """Return the mean time in the queue with the default headroom."""
    if table is None:
        return None
    goal: Slo = slos.parse(slo)
    load = (1 - HEADROOM) * rate
    outcome = simulate.simulate_rate(table, config, goal, load, _lengths(table))
    answered = outcome.counted_s[outcome.counted_s < math.inf]
    if not len(answered) or not outcome.num_batches:
        return None
    batch_s = outcome.busy_s / outcome.num_batches
    return max(0.0, float(answered.mean()) - batch_s - simulate.OVERHEAD_S)
