"""The first line of every report: whether the SLO was kept. Pure.

Failed requests count as never answered here, unlike in the percentiles that are shown.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from penstock import slo as promises
from penstock import units
from penstock.benchmark import pacer, stats, verdicts
from penstock.benchmark.results import BenchRun, Level, MaxRate
from penstock.benchmark.stats import Interval
from penstock.benchmark.summary import in_order, slo_of
from penstock.benchmark.verdicts import IntervalVerdict, Verdicts
from penstock.slo import Goodput, Latency, Memory, Slo, Term, Throughput

Outcome = Literal["kept", "missed", "partly kept", "not measured", "no SLO"]
SIGNS = re.compile(" (<=|>=|<) ")
OPPOSITES = {"<": ">=", ">=": "<", "<=": ">"}


@dataclass(frozen=True, slots=True)
class Headline:
    outcome: Outcome
    text: str


@dataclass(frozen=True, slots=True)
class _Judged:
    """One level and the verdict of each term there."""

    level: Level
    terms: Verdicts

    @property
    def outcome(self) -> promises.Outcome:
        outcomes = {each.outcome for each in self.terms}
        if "missed" in outcomes:
            return "missed"
        return "kept" if outcomes == {"kept"} else "not measured"

    @property
    def text(self) -> str:
        """The terms that decided the outcome, and the load."""
        terms = [term_text(each) for each in self.terms if each.outcome == self.outcome]
        return f"{', '.join(terms)} at {self.level.label}"


def headline_of(run: BenchRun) -> Headline:
    found = _headline(run)
    return Headline(found.outcome, f"{found.text} (partial run)") if run.is_partial else found


def _headline(run: BenchRun) -> Headline:
    limits = slo_of(run)
    if limits is None:
        return Headline("no SLO", _without_slo(run))
    if run.max_rate is not None:
        return _of_max_rate(run.max_rate)
    if any(level.ending == "lost" for level in run.levels):
        # Its earlier percentiles do not matter.
        return Headline("missed", f"SLO missed: {run.problem}")
    levels = _levels_at(in_order(run), limits)
    judged = [_Judged(level, verdicts_of(run, level, limits)) for level in levels]
    if not judged:
        return Headline("not measured", "SLO not judged: nothing was measured")
    outcomes = [each.outcome for each in judged]
    place = " at every level" if len(judged) > 1 else ""
    if "not measured" in outcomes and "missed" not in outcomes:
        return Headline("not measured", f"SLO not judged: {_first(judged, 'not measured').text}")
    if set(outcomes) == {"kept"}:
        return Headline("kept", f"SLO kept{place}: {judged[-1].text}")
    if "kept" in outcomes:
        return Headline("partly kept", _partly_text(judged))
    return Headline("missed", f"SLO missed{place}: {_first(judged, 'missed').text}")


def _without_slo(run: BenchRun) -> str:
    """Summarise the highest throughput and its latency."""
    if run.knee is not None:
        knee = run.knee
        plateau = f"a plateau of {units.number(knee.throughput)}/s"
        return f"No SLO was given: {plateau}, knee at concurrency {units.number(knee.concurrency)}"
    answered = [level for level in run.levels if any(each.num_good for each in level.windows)]
    if not answered:
        return "No SLO was given"
    rates = [stats.throughput_interval(level.windows).value for level in answered]
    best = answered[rates.index(max(rates))]
    p99 = stats.percentile_interval(best.windows, "latency", 99.0)
    text = f"{units.number(max(rates))}/s with p99 {units.duration_interval(p99)}"
    return f"No SLO was given: {text} at {best.label}"


def level_outcome(run: BenchRun, level: Level) -> promises.Outcome:
    """Return the outcome of a level; "not measured" also without an SLO."""
    limits = slo_of(run)
    if limits is None:
        return "not measured"
    return _Judged(level, verdicts_of(run, level, limits)).outcome


def verdicts_of(run: BenchRun, level: Level, limits: Slo) -> Verdicts:
    """Judge each term, including cost where the price is known."""
    measured = verdicts.measured(level.windows, limits)
    if (price := run.price_per_hour) is not None:
        rate = stats.throughput_interval(level.windows)
        rates = (rate.value, rate.high, rate.low)
        costs = (price / 3600 / each * 1e6 if each else math.inf for each in rates)
        measured["cost"] = Interval(*costs)
    return verdicts.verdicts(limits, measured)


def _levels_at(run: BenchRun, limits: Slo) -> list[Level]:
    """Return the levels at the SLO's rate, if it names one that was measured."""
    if limits.rate is None:
        return run.levels
    rates = [pacer.flat_rate(level.load) or 0.0 for level in run.levels]
    pairs = zip(run.levels, rates, strict=True)
    asked = limits.rate.per_s
    return [each for each, rate in pairs if math.isclose(rate, asked, rel_tol=0.01)] or run.levels


def _first(judged: list[_Judged], outcome: promises.Outcome) -> _Judged:
    return next(each for each in judged if each.outcome == outcome)


def _partly_text(judged: list[_Judged]) -> str:
    outcomes = [each.outcome for each in judged]
    index = next(i for i, outcome in enumerate(outcomes) if outcome != "kept")
    if index > 0 and set(outcomes[index:]) == {"missed"}:
        kept = judged[index - 1].level.label
        return f"SLO kept up to {kept}, then missed: {judged[index].text}"
    missed = _first(judged, "missed").text
    return f"SLO missed at {outcomes.count('missed')} of {len(judged)} levels: {missed}"


def _of_max_rate(found: MaxRate) -> Headline:
    reason = f" ({found.reason})" if found.reason else ""
    if not found.rate.value > 0:
        return Headline("missed", f"SLO missed at every rate tried: {found.slo}{reason}")
    return Headline("kept", f"SLO kept up to {rate_text(found.rate)}: {found.slo}{reason}")


def rate_text(rate: Interval, unit: str = "/s") -> str:
    text = units.range_of(rate)
    return f"{units.number(rate.value)}{unit}" + (f" ({text})" if text else "")


def term_text(verdict: IntervalVerdict) -> str:
    """Format a verdict: `p99 12.1 ms (11.8-12.6) < 20 ms`."""
    term, measured = verdict.term, verdict.measured
    head, sign, limit = SIGNS.split(str(term), maxsplit=1)
    if measured is None or verdict.outcome == "not measured":
        return f"{head} was not measured ({term})"
    sign = OPPOSITES[sign] if verdict.outcome == "missed" else sign
    limit = re.sub(r"(\d)([a-zA-Z])", r"\1 \2", limit, count=1)  # 20ms to 20 ms
    close = ""
    if verdict.is_close and not math.isinf(measured.value):
        is_bounded = math.isfinite(measured.low) and math.isfinite(measured.high)
        close = f", too {'close' if is_bounded else 'few'} to be sure"
    return f"{head} {_measured_text(term, measured)} {sign} {limit}{close}"


def _measured_text(term: Term, measured: Interval) -> str:
    if isinstance(term, Latency):
        if math.isinf(measured.value):
            return "infinite (too many requests failed)"
        return units.duration_interval(measured)
    if isinstance(term, Memory):
        return units.size(measured.value)
    unit = "/s" if isinstance(term, Throughput) else " %" if isinstance(term, Goodput) else ""
    return rate_text(measured, unit)
