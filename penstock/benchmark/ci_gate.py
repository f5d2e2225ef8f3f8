"""Pass/fail checks for CI: the SLO is kept, and nothing is slower than a saved run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock import units
from penstock.benchmark import comparison, headline, stats
from penstock.benchmark.comparison import Named
from penstock.benchmark.results import BenchRun, Level, MaxRate
from penstock.slo import Latency, Slo


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `text` gives the finding with its numbers."""

    is_passed: bool
    text: str


def checks(
    run: BenchRun, slo: Slo | None, baseline: BenchRun | None, tolerance: float
) -> list[Check]:
    """Return the checks that apply; empty when there is nothing to judge."""
    found: list[Check] = []
    if run.is_partial:
        found.append(Check(False, f"the run is partial: {run.problem}"))
    if slo is not None:
        found += _slo_checks(run, slo)
    if baseline is not None:
        found += _baseline_checks(run, baseline, tolerance)
    return found


def _slo_checks(run: BenchRun, slo: Slo) -> Iterator[Check]:
    if run.max_rate is not None:
        yield _max_rate_check(run.max_rate, slo)
        return
    if not run.levels:
        yield Check(False, f"{slo}: nothing was measured")
    for level in run.levels:
        for verdict in headline.verdicts_of(run, level, slo):
            text = f"{level.label}: {verdict.term}: {verdict.outcome}"
            if (found := verdict.measured) is not None:
                is_latency = isinstance(verdict.term, Latency)
                text += f", {(units.duration_interval if is_latency else units.interval)(found)}"
            yield Check(verdict.outcome == "kept", text)


def _max_rate_check(found: MaxRate, slo: Slo) -> Check:
    """Check that the highest rate reaches the SLO's. Levels above it are expected to miss."""
    rate = found.rate.value
    if not rate > 0:
        return Check(False, f"{slo}: {found.reason}")
    is_enough = slo.rate is None or rate >= slo.rate.per_s
    return Check(is_enough, f"{slo}: kept up to {rate:.4g}/s")


def _baseline_checks(run: BenchRun, baseline: BenchRun, tolerance: float) -> Iterator[Check]:
    pair = comparison.pair_of(Named("baseline", baseline), Named("run", run), tolerance)
    if not pair.rows:
        have = ", ".join(level.label for level in baseline.levels) or "nothing"
        yield Check(False, f"the baseline holds {have}: nothing to compare with")
    for row in pair.rows:
        ratio = comparison.ratio_text(row.ratio)
        text = f"{row.load}: {row.figure} {row.other}, was {row.base} ({ratio}): {row.verdict}"
        yield Check(row.verdict != "slower", text)
    for before, level in comparison.matched(baseline, run):
        was, now = _failed(before), _failed(level)
        shares = [units.share(each.value, 1.0) for each in (now, was)]
        text = f"{level.label}: {shares[0]} of requests failed, was {shares[1]}"
        yield Check(not now.low > was.high, text)


def _failed(level: Level) -> stats.Interval:
    failed, due = (stats.column(level.windows, name) for name in ("num_failed", "num_due"))
    return stats.share_interval(failed, due)
