"""Whether CI may go on: the SLO was kept, and nothing became slower than a saved run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.benchmark import pacer, stats
from penstock.benchmark.results import Level, Run
from penstock.slo import Slo


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `text` says what was found, with its numbers."""

    is_passed: bool
    text: str


def checks(
    run: Run, slo: Slo | None, baseline: Run | None, figure: tuple[str, float], tolerance: float
) -> list[Check]:
    """`figure` is the metric and percentile that decides. Empty where there is nothing to judge."""
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
        for verdict in stats.verdicts(level.windows, slo):
            yield Check(verdict.is_kept, f"{pacer.label(level.load)}: {verdict}")


def _baseline_checks(
    run: Run, baseline: Run, figure: tuple[str, float], tolerance: float
) -> Iterator[Check]:
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


def _compared(
    before: Level, level: Level, figure: tuple[str, float], tolerance: float
) -> Iterator[Check]:
    metric, percent = figure
    name = pacer.label(level.load)
    slower = stats.compare(before.windows, level.windows, metric, percent, tolerance)
    yield Check(slower.verdict != "regression", f"{name}: p{percent:g} {metric} {slower}")
    fewer = stats.compare_throughput(before.windows, level.windows, tolerance)
    yield Check(fewer.verdict != "regression", f"{name}: throughput {fewer}")
