"""The SLO's requirements as numbers, to rank and compare candidates by. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock import units
from penstock.benchmark.stats import Interval
from penstock.optimizer.results import ServedMeasurement
from penstock.slo import Cost, Latency, Slo, Throughput

# Predictions are off by this much and more; candidates this close are worth a measurement.
HOPE = 0.85
# Rates that differ by less are equal: batch times do not repeat any better.
NOISE = 0.05
# Goodputs that differ by less are equal.
MIN_GOODPUT = 0.05


def required_rate(slo: Slo, price_per_hour: float | None) -> float:
    """Return the requests per second that one machine must answer; 0: not specified."""
    rates = [0.0 if slo.rate is None else slo.rate.per_s]
    for term in slo.terms:
        if isinstance(term, Throughput):
            rates.append(term.limit)
        elif isinstance(term, Cost) and price_per_hour is not None:
            rates.append(price_per_hour / 3600 * 1e6 / term.limit)
    return max(rates)


def is_within_reach(predicted_rate: float, slo: Slo, price_per_hour: float | None) -> bool:
    return predicted_rate >= HOPE * required_rate(slo, price_per_hour)


def is_better(rate: float, than: float) -> bool:
    return rate > than * (1 + NOISE)


def order(servings: Sequence[ServedMeasurement], simplicity: Sequence[int]) -> list[int]:
    """Return indices from best to worst: first by whether the SLO is kept, then by differences
    beyond chance, then by simplicity (a lower number is simpler)."""
    left = sorted(range(len(servings)), key=lambda index: simplicity[index])
    ranked: list[int] = []
    while left:
        best = left[0]
        for index in left[1:]:
            if _beats(servings[index], servings[best]):
                best = index
        ranked.append(best)
        left.remove(best)
    return ranked


def compare(one: ServedMeasurement, other: ServedMeasurement) -> int:
    """Return 1 if `one` is better beyond chance, -1 if `other` is, 0 if neither."""
    return _beats(one, other) - _beats(other, one)


def _beats(one: ServedMeasurement, other: ServedMeasurement) -> bool:
    """Compare by goodput at the SLO's load first, then by highest rate."""
    if one.is_met != other.is_met:
        return one.is_met
    if abs(one.goodput - other.goodput) > MIN_GOODPUT:
        return one.goodput > other.goodput
    if one.is_sure != other.is_sure:
        return one.is_sure
    rate, against = one.max_rate, other.max_rate
    if rate and against and not (math.isnan(rate.value) and math.isnan(against.value)):
        return _is_above(rate, against)
    if one.is_met:
        return _is_below(one.p99, other.p99)
    # Both miss the SLO: compare throughput. The latency of a growing queue only depends on how long
    # it was measured, so it decides only between equal throughputs.
    if _is_above(one.throughput, other.throughput) or _is_above(other.throughput, one.throughput):
        return _is_above(one.throughput, other.throughput)
    return _is_below(one.p50, other.p50)


def _is_below(one: Interval, other: Interval) -> bool:
    """Return whether `one` is below `other` beyond both the intervals and the noise."""
    is_sure = one.high < other.value and one.value < other.low
    return is_sure and one.value * (1 + NOISE) < other.value


def _is_above(one: Interval, other: Interval) -> bool:
    """Return whether `one` is above `other`. An unknown rate is below all others; unknown ends of
    an interval count as the estimate."""
    if math.isnan(other.value) or math.isnan(one.value):
        return math.isnan(other.value) and not math.isnan(one.value)
    low = one.value if math.isnan(one.low) else one.low
    high = other.value if math.isnan(other.high) else other.high
    return is_better(one.value, other.value) and (low > other.value or one.value > high)


def binding(served: ServedMeasurement, slo: Slo, *, can_add_instances: bool) -> str:
    """Return the bottleneck, where most of a request's time goes: "compute (71 % of a request's 34
    ms)". More instances are advised only if some could be added."""
    total = sum(served.phases.values())
    if not total:
        return ""
    name, seconds = max(served.phases.items(), key=lambda item: item[1])
    text = f"{name} ({units.share(seconds, total)} of a request's {units.duration(total)})"
    limits = [term.limit_s for term in slo.terms if isinstance(term, Latency)]
    compute_s = served.phases.get("compute", 0.0)
    if name != "queue" or not limits or compute_s >= min(limits):
        return text
    more = "more instances or a faster machine" if can_add_instances else "a faster machine"
    return f"{text}; {more} would shorten the queue"
