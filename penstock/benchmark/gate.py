"""Whether CI may go on: the SLO was kept, and nothing became slower than a saved run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.benchmark import pacer, stats, verdicts
from penstock.benchmark.plan import Decides
from penstock.benchmark.results import Level, Run
from penstock.slo import Latency, Slo, Term


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `text` says what was found, with its numbers."""

    is_passed: bool
    text: str


def checks(
    run: Run, slo: Slo | None, baseline: Run | None, figure: Decides, tolerance: float
) -> list[Check]:
    """`figure` is the percentile that is compared. Empty where there is nothing to judge."""
    found: list[Check] = []
    if run.is_partial:
        found.append(Check(False, f"the run is partial: {run.problem}"))
    if slo is not None:
        found += _slo_checks(run, slo)
    if baseline is not None:
        found += _baseline_checks(run, baseline, figure, tolerance)
    return found


def _slo_checks(run: Run, slo: Slo) -> Iterator[Check]:
    if run.max_rate is not None:
        return
    if not run.levels:
        yield Check(False, f"{slo}: nothing was measured")
    for level in run.levels:
        for verdict in verdicts.verdicts(slo, verdicts.measured(level.windows, slo)):
            is_kept = verdict.outcome == "kept"
            text = f"{verdict.term}: {verdict.outcome}{_shown(verdict.term, verdict.measured)}"
            yield Check(is_kept, f"{pacer.label(level.load)}: {text}")


def _baseline_checks(run: Run, baseline: Run, figure: Decides, tolerance: float) -> Iterator[Check]:
    levels = {pacer.label(level.load): level for level in baseline.levels}
    matched = 0
    for level in run.levels:
        before = levels.get(pacer.label(level.load))
        if before is not None:
            matched += 1
            yield from _compared(before, level, figure, tolerance)
    if matched == 0:
        have = ", ".join(levels) or "nothing"
        yield Check(False, f"the baseline holds {have}: nothing to compare with")


def _compared(before: Level, level: Level, figure: Decides, tolerance: float) -> Iterator[Check]:
    name = pacer.label(level.load)
    latency = stats.compare(before.windows, level.windows, figure.metric, figure.percent, tolerance)
    yield _check(f"{name}: {figure.name} {figure.metric}", latency)
    yield _check(
        f"{name}: throughput", stats.compare_throughput(before.windows, level.windows, tolerance)
    )


def _check(what: str, found: stats.Comparison) -> Check:
    ratio = found.ratio
    text = f"{ratio.value:.3f} of the baseline's ({ratio.low:.3f} to {ratio.high:.3f})"
    return Check(found.finding != "regression", f"{what} {text}: {found.finding}")


def _shown(term: Term, found: stats.Interval | None) -> str:
    if found is None:
        return ""
    scale, unit = (1e3, " ms") if isinstance(term, Latency) else (1.0, "")
    low, value, high = found.low * scale, found.value * scale, found.high * scale
    return f", {value:.4g}{unit} ({low:.4g} to {high:.4g})"
