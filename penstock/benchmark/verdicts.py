"""Whether a measurement keeps the SLO, and with what confidence. Pure.

Failed and refused requests count as never answered, so failing fast cannot keep an SLO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.benchmark import stats
from penstock.benchmark.stats import CONFIDENCE, Interval, Window, Windows
from penstock.benchmark.steadiness import is_growing
from penstock.slo import Goodput, Latency, Outcome, Slo, Term, Throughput

# Optional stopping inflates false positives, so early stops need a higher confidence.
EARLY_CONFIDENCE = 0.995
MIN_EARLY_REQUESTS = 1000
# Requests that must lie beyond the percentile.
MIN_EARLY_BEYOND = 20
# Fewer requests suffice when even the lower end of an interval is FAR times its limit.
MIN_HOPELESS_REQUESTS = 200
FAR = 3.0


@dataclass(frozen=True, slots=True)
class IntervalVerdict:
    """One term and its measured interval."""

    term: Term
    measured: Interval | None

    @property
    def outcome(self) -> Outcome:
        if self.measured is None or math.isnan(self.measured.value):
            return "not measured"
        return "kept" if self.term.is_kept_by(self.measured.value) else "missed"

    @property
    def is_close(self) -> bool:
        """Whether the verdict is uncertain: no interval, or the limit lies inside it."""
        if self.measured is None or math.isnan(self.measured.low + self.measured.high):
            return True
        is_kept_by = self.term.is_kept_by
        return is_kept_by(self.measured.low) != is_kept_by(self.measured.high)


Verdicts = tuple[IntervalVerdict, ...]


def measured(windows: Windows, slo: Slo, confidence: float = CONFIDENCE) -> dict[str, Interval]:
    """Return intervals by `term.name`, without terms that windows cannot measure (cost, memory)."""
    found = {}
    for term in slo.terms:
        if isinstance(term, Latency):
            found[term.name] = _latency(windows, term, confidence)
        elif isinstance(term, Throughput):
            found[term.name] = stats.throughput_interval(windows, confidence)
        elif isinstance(term, Goodput):
            found[term.name] = _goodput(windows, slo, confidence)
    return found


def _latency(windows: Windows, term: Latency, confidence: float) -> Interval:
    if term.statistic == "mean":
        if any(window.num_failed for window in windows):
            return Interval(math.inf, math.inf, math.inf)
        return stats.mean_interval(windows, term.metric, confidence)
    percent = float(term.statistic.removeprefix("p"))
    return stats.percentile_interval(
        windows, term.metric, percent, with_failures=True, confidence=confidence
    )


def _goodput(windows: Windows, slo: Slo, confidence: float) -> Interval:
    """Return the percentage of due requests that met the SLO."""
    parts = np.array([_num_in_time(window, slo) for window in windows], np.float64)
    share = stats.share_interval(parts, stats.column(windows, "num_due"), confidence)
    return Interval(share.value * 100, share.low * 100, share.high * 100)


def _num_in_time(window: Window, slo: Slo) -> float:
    """NaN: it takes limits per request, and they were not recorded."""
    if window.num_in_slo is not None:
        return window.num_in_slo
    bounds = slo.limits_s
    if not bounds or not window.num_good:
        return window.num_good
    if bounds.keys() != {"latency"}:
        return math.nan
    return window.metrics["latency"].num_below(bounds["latency"])


def verdicts(slo: Slo, measured: Mapping[str, Interval]) -> Verdicts:
    """Judge each term."""
    return tuple(IntervalVerdict(term, measured.get(term.name)) for term in slo.terms)


def judge(windows: Windows, slo: Slo, confidence: float = CONFIDENCE) -> Verdicts:
    return verdicts(slo, measured(windows, slo, confidence))


def of_each_request(slo: Slo) -> Slo:
    """Keep the terms on latency and goodput: a low rate would miss any throughput target."""
    return Slo(tuple(term for term in slo.terms if isinstance(term, Latency | Goodput)), slo.rate)


def has_overdue(windows: Windows, num_in_flight: int, within_s: float) -> bool:
    """Whether more requests are in flight than were due in twice `within_s`, or half as many as
    have ended. Windows hold only ended ones, so a stalled server looks fast until it answers."""
    span_s = sum(window.length_s for window in windows)
    num_ended = sum(window.num_due for window in windows)
    is_late = num_in_flight * span_s > 2 * (num_ended + num_in_flight) * within_s
    return is_late or 2 * num_in_flight > num_ended


def is_decided(windows: Windows, slo: Slo, num_in_flight: int = 0) -> bool:
    """Whether more data cannot change the verdict: one term is clearly missed, or all are clearly
    kept, latency is not growing and nothing is overdue. Needs a minimum number of requests."""
    num_due = sum(window.num_due for window in windows)
    if num_due < MIN_HOPELESS_REQUESTS:
        return False
    found = judge(windows, slo, EARLY_CONFIDENCE)
    judged = [verdict for verdict in found if verdict.outcome != "not measured"]
    if num_due < _min_early_requests(slo):
        return any(map(_is_far_beyond, judged))
    if any(verdict.outcome == "missed" and not verdict.is_close for verdict in judged):
        return True
    is_kept = all(verdict.outcome == "kept" and not verdict.is_close for verdict in judged)
    if not judged or not is_kept or is_growing(windows):
        return False
    return not has_overdue(windows, num_in_flight, slo.limits_s.get("latency", math.inf))


def _is_far_beyond(verdict: IntervalVerdict) -> bool:
    """Whether a limit is missed by so much that fewer requests prove it."""
    term, found = verdict.term, verdict.measured
    return isinstance(term, Latency) and found is not None and found.low > FAR * term.limit_s


def _min_early_requests(slo: Slo) -> float:
    tails = [
        1 - float(term.statistic.removeprefix("p")) / 100
        for term in slo.terms
        if isinstance(term, Latency) and term.is_tail
    ]
    return max([MIN_EARLY_REQUESTS, *(MIN_EARLY_BEYOND / tail for tail in tails)])
