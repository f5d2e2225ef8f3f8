"""Compare the levels of runs that have the same load. The first run is the baseline; other
differences between the runs are listed, since they may make the runs incomparable. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock import units
from penstock.benchmark import stats, summary
from penstock.benchmark.results import BenchRun, Level
from penstock.benchmark.stats import Interval, RatioTest

Verdict = Literal["faster", "slower", "no difference shown"]


@dataclass(frozen=True, slots=True)
class Named:
    """A run and its name, usually its file."""

    name: str
    run: BenchRun


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of one load in both runs; `ratio` is the other over the base."""

    load: str
    figure: str
    base: str
    other: str
    ratio: Interval
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Pair:
    base: Named
    other: Named
    rows: tuple[ComparisonRow, ...]
    # Other differences between the runs, in words.
    differences: tuple[str, ...]


def pair_of(base: Named, other: Named, tolerance: float = 0.0) -> Pair:
    pairs = matched(base.run, other.run)
    rows = [row for ours, theirs in pairs for row in _rows(ours, theirs, tolerance)]
    return Pair(base, other, tuple(_judged(rows)), tuple(differences(base.run, other.run)))


def matched(base: BenchRun, other: BenchRun) -> list[tuple[Level, Level]]:
    """Pair levels with the same load; each level is used once."""
    left = list(other.levels)
    found = []
    for ours in base.levels:
        theirs = next((level for level in left if level.load == ours.load), None)
        if theirs is not None:
            left.remove(theirs)
            found.append((ours, theirs))
    return found


def _rows(ours: Level, theirs: Level, tolerance: float) -> list[tuple[float, ComparisonRow]]:
    label = ours.label
    a, b = ours.windows, theirs.windows
    speeds = [units.number(stats.throughput_interval(each).value) + "/s" for each in (a, b)]
    both = [stats.compare_throughput(*each, tolerance) for each in ((a, b), (b, a))]
    rows = [_row(label, "throughput", speeds, both)]
    metrics = [name for name in ("latency", "ttft", "tpot") if _has(a, name) and _has(b, name)]
    for metric in metrics:
        for name in ("p50", "p99"):
            percent = summary.PERCENTILES[name]
            values = [stats.percentile_interval(each, metric, percent) for each in (a, b)]
            texts = [units.duration(each.value) for each in values]
            figure = name if metric == "latency" else f"{name} {metric.upper()}"
            both = [stats.compare(*each, metric, percent, tolerance) for each in ((a, b), (b, a))]
            rows.append(_row(label, figure, texts, both))
    return rows


def _row(
    load: str, figure: str, texts: Sequence[str], both: Sequence[RatioTest]
) -> tuple[float, ComparisonRow]:
    """Return the row if the difference is shown, and its two-sided p-value (1: unknown). `both`
    compares the base with the other run and vice versa."""
    worse, better = (each.p_value for each in both)
    p_value = 1.0 if math.isnan(worse) else min(1.0, 2 * worse, 2 * better)
    verdict: Verdict = "slower" if worse < better else "faster"
    base, other = texts
    return p_value, ComparisonRow(load, figure, base, other, both[0].ratio, verdict)


def _has(windows: Sequence[stats.Window], metric: str) -> bool:
    return any(metric in window.metrics for window in windows)


def _judged(rows: Sequence[tuple[float, ComparisonRow]]) -> list[ComparisonRow]:
    """Judge all rows together (Holm's procedure): of twenty, one would differ by chance."""
    judged = [replace(row, verdict="no difference shown") for _, row in rows]
    order = sorted(range(len(rows)), key=lambda index: rows[index][0])
    for num_before, index in enumerate(order):
        p_value, row = rows[index]
        if p_value > stats.ALPHA / (len(rows) - num_before):
            break
        judged[index] = row
    return judged


def differences(base: BenchRun, other: BenchRun) -> list[str]:
    """List what makes two runs more than the same thing measured twice."""
    ours, theirs = _facts(base), _facts(other)
    found = [
        f"{name}: {mine or 'not known'} against {theirs[name] or 'not known'}"
        for name, mine in ours.items()
        if mine != theirs[name]
    ]
    matching = matched(base, other)
    alone = len(base.levels) + len(other.levels) - 2 * len(matching)
    if not matching:
        found.append("load: no level of one has a level of the same load in the other")
    elif alone:
        found.append(f"load: {units.count(alone, 'level')} of one only")
    return found


def _facts(run: BenchRun) -> dict[str, str]:
    target, machine = run.target, run.environment
    digest = f" ({run.origin.digest})" if run.origin.digest else ""
    hardware = (machine.host_cpu, units.count(machine.num_cores, "core"), *machine.gpus)
    return {
        "protocol": target.protocol,
        "server": target.server,
        "model": target.model,
        "model files": target.model_digest,
        "model configuration": target.config_digest,
        "inputs": run.origin.text + digest,
        "rows a request": str(run.batch_size),
        "hardware": ", ".join(hardware),
    }


def summary_text(pair: Pair) -> str:
    """Summarise in one sentence how p99 changed, and at how many loads."""
    tails = [row.verdict for row in pair.rows if row.figure == "p99"]
    if not tails:
        return f"{pair.other.name} and {pair.base.name} have no load in common"
    counts = {word: tails.count(word) for word in ("faster", "slower") if word in tails}
    if not counts:
        return f"{pair.other.name}: no difference to {pair.base.name} shown (p99)"
    parts = [f"{word} at {number} of {len(tails)}" for word, number in counts.items()]
    loads = "load" if len(tails) == 1 else "loads"
    return f"{pair.other.name} against {pair.base.name}: {', '.join(parts)} {loads} (p99)"


def ratio_text(ratio: Interval) -> str:
    """Format a ratio with two decimals."""
    if not math.isfinite(ratio.value):
        return units.UNKNOWN
    low = f"{ratio.low:.2f}" if ratio.low > 0 else ""
    high = f"{ratio.high:.2f}" if math.isfinite(ratio.high) else ""
    if low and high:
        return f"{ratio.value:.2f} ({low}-{high})"
    one_sided = f"> {low}" if low else f"< {high}" if high else ""
    return f"{ratio.value:.2f} ({one_sided})" if one_sided else f"{ratio.value:.2f}"
