"""Runs side by side, in a terminal and as a page. The first is the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import units
from penstock.benchmark import comparison, stats
from penstock.benchmark.comparison import ComparisonRow, Named, Pair, Verdict
from penstock.benchmark.headline import headline_of
from penstock.report import bench_figures, bench_table, plots
from penstock.report.page import Card, Remark, drawn, render_fragment, rendered
from penstock.report.plots import Plot
from penstock.report.tables import TERMINAL_STYLES, Cell, terminal_table

CELL_STYLES: dict[Verdict, str] = {
    "faster": "kept-text",
    "slower": "missed-text",
    "no difference shown": "quiet-text",
}
DASHES = ("", "6 4", "2 3", "8 3 2 3")
PLOTS = {
    "curve": (
        "Throughput and p99",
        "Each point is a level, with its 95 % interval. Right and low is good.",
    ),
    "cdf": (
        "Latency of good answers",
        "Share of requests answered within a time, at the load chosen above. Further left is"
        " faster.",
    ),
}


def shown(runs: Sequence[Named]) -> Group:
    parts: list[RenderableType] = []
    for pair in _pairs(runs):
        parts.append(Text(comparison.summary_text(pair), style="bold"))
        parts += [
            Text(f"warning: not the same: {each}", style="yellow") for each in pair.differences
        ]
        if pair.rows:
            names = [Path(each.name).name for each in (pair.base, pair.other)]
            parts.append(terminal_table(_head(*names), _cells(pair)))
    for each in runs:
        verdict = headline_of(each.run)
        style = TERMINAL_STYLES[bench_table.OUTCOME_STYLES[verdict.outcome]]
        parts.append(Text.assemble(f"{each.name}: ", (verdict.text, style)))
    return Group(*parts)


def _pairs(runs: Sequence[Named]) -> list[Pair]:
    return [comparison.pair_of(runs[0], other) for other in runs[1:]]


def page(runs: Sequence[Named]) -> str:
    pairs = _pairs(runs)
    labels = [level.label for level in runs[0].run.levels]
    curve = _curve(runs)
    values = {
        "title": "; ".join(map(comparison.summary_text, pairs)),
        "sentences": [comparison.summary_text(pair) for pair in pairs],
        "style": style(pairs),
        "tiles": tiles(pairs),
        "verdicts": {each.name: headline_of(each.run).text for each in runs},
        "warnings": [
            Remark("warning", f"not the same: {each}", f"{pair.base.name}, {pair.other.name}")
            for pair in pairs
            for each in pair.differences
        ],
        "figures": drawn({"curve": curve}, PLOTS, has_wide=False),
        "levels": [
            (index, label, drawn({"cdf": _cdf(runs, index)}, PLOTS, has_wide=curve is None))
            for index, label in enumerate(labels)
        ],
        "tables": [
            (f"{other} against {base}", _head(base, other), _cells(pair))
            for pair in pairs
            for base, other in [(pair.base.name, pair.other.name)]
            if pair.rows
        ],
        "commands": [(each.name, each.run.command) for each in runs],
    }
    return rendered("compare.html.jinja", values)


def fragment(runs: Sequence[Named]) -> str:
    pairs = _pairs(runs)
    shown = [_curve(runs), _cdf(runs, len(runs[0].run.levels) - 1) if runs[0].run.levels else None]
    return render_fragment(
        "; ".join(map(comparison.summary_text, pairs)),
        style(pairs),
        tiles(pairs),
        drawn(dict(zip(PLOTS, shown, strict=True)), PLOTS),
        (_head(pairs[0].base.name, pairs[0].other.name), _cells(pairs[0])),
    )


def tiles(pairs: Sequence[Pair]) -> list[Card]:
    """Return the ratio of the tail at the load where it differs most; then throughput and median
    at that load, and other comparisons."""
    found = []
    for pair in pairs:
        tails = [row for row in pair.rows if row.figure == "p99" and row.ratio.value > 0]
        if tails:
            most = max(tails, key=_difference)
            at_load = [row for row in pair.rows if row.load == most.load]
            others = [row for row in at_load if row.figure in ("throughput", "p50")]
            for row in (most, *others):
                name = f"{row.figure}, {pair.other.name}" if len(pairs) > 1 else row.figure
                text = f"{row.base} → {row.other} at {row.load}"
                found.append(Card(name, speed_text(row), text))
    return found


def _difference(row: ComparisonRow) -> tuple[bool, float]:
    """Order rows by how much they differ; differences that are shown come first."""
    return row.verdict != "no difference shown", abs(math.log(row.ratio.value))


def speed_text(row: ComparisonRow) -> str:
    """Format as `1.24 times faster`, or that no difference was shown."""
    if row.verdict == "no difference shown":
        return "no difference"
    ratio = row.ratio.value if row.figure == "throughput" else 1 / row.ratio.value
    times = units.number(max(ratio, 1 / ratio))
    return f"{times} times {row.verdict}"


def style(pairs: Sequence[Pair]) -> str:
    """Choose the colour by the tail alone, as the summary does."""
    tails = {row.verdict for pair in pairs for row in pair.rows if row.figure == "p99"}
    if {"faster", "slower"} <= tails:
        return "mixed"
    if "slower" in tails:
        return "missed"
    return "kept" if "faster" in tails else "plain"


def _head(base: str, other: str) -> list[str]:
    return ["load", "figure", base, other, "ratio (95 % CI)", "verdict"]


def _cells(pair: Pair) -> list[list[Cell]]:
    """Return the rows of the table; a load is named in its first row only."""
    cells, last = [], ""
    for row in pair.rows:
        load = row.load if row.load != last or row.figure == "throughput" else ""
        texts = (load, row.figure, row.base, row.other, comparison.ratio_text(row.ratio))
        cells.append([*map(Cell, texts), Cell(row.verdict, style=CELL_STYLES[row.verdict])])
        last = row.load
    return cells


def _cdf(runs: Sequence[Named], index: int) -> Plot | None:
    """Plot all runs at the load of one level of the first."""
    load = runs[0].run.levels[index].load
    found = []
    for number, (each, colour) in enumerate(zip(runs, plots.ramp(len(runs)), strict=True)):
        level = next((level for level in each.run.levels if level.load == load), None)
        if level is not None:
            seen, dash = stats.histogram(level.windows, "latency"), DASHES[number % len(DASHES)]
            found.append(bench_figures.cdf_series(seen, each.name, colour, dash))
    lines = bench_figures.limit_lines("x", bench_figures.limits(runs[0].run))
    return bench_figures.cdf_plot(found, lines)


def _curve(runs: Sequence[Named]) -> Plot | None:
    series = [
        bench_figures.curve_series(each.run, each.name, "p99", colour)
        for each, colour in zip(runs, plots.ramp(len(runs)), strict=True)
    ]
    lines = bench_figures.limit_lines("y", bench_figures.limits(runs[0].run))
    has_curve = any(len(each.x) > 1 for each in series)
    return bench_figures.curve_plot(series, lines) if has_curve else None
