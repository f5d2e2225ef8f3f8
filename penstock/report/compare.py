"""Runs side by side, in a terminal and as a page. The first is the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import units
from penstock.benchmark import stats
from penstock.benchmark.comparison import (
    ComparisonRow,
    Named,
    Pair,
    Verdict,
    pair_of,
    ratio_text,
    summary_text,
)
from penstock.benchmark.headline import headline_of
from penstock.report import bench_figures, bench_table, plots
from penstock.report.page import Card, Remark, drawn, rendered
from penstock.report.page import fragment as page_fragment
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
        parts.append(Text(summary_text(pair), style="bold"))
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
    return [pair_of(runs[0], other) for other in runs[1:]]


def _with_load_once(pair: Pair) -> Iterator[tuple[str, ComparisonRow]]:
    """Yield rows, with the load named in its first row only."""
    for last, row in zip((None, *pair.rows), pair.rows, strict=False):
        is_new = last is None or last.load != row.load or row.figure == "throughput"
        yield row.load if is_new else "", row


def page(runs: Sequence[Named]) -> str:
    pairs = _pairs(runs)
    labels = [level.label for level in runs[0].run.levels]
    curve = _curve(runs)
    values = {
        "title": "; ".join(map(summary_text, pairs)),
        "sentences": [summary_text(pair) for pair in pairs],
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
    return page_fragment(
        "; ".join(map(summary_text, pairs)),
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
        row = _most(pair, "p99")
        if row is not None:
            found.append(_tile(pair, row, len(pairs) > 1))
            found += [
                _tile(pair, other, len(pairs) > 1)
                for other in pair.rows
                if other.load == row.load and other.figure in ("throughput", "p50")
            ]
    return found


def _most(pair: Pair, figure: str) -> ComparisonRow | None:
    """Return the row of a figure that differs most; differences that are shown come first."""
    rows = [row for row in pair.rows if row.figure == figure and row.ratio.value > 0]
    return max(
        rows,
        key=lambda row: (row.verdict != "no difference shown", abs(math.log(row.ratio.value))),
        default=None,
    )


def _tile(pair: Pair, row: ComparisonRow, is_named: bool) -> Card:
    name = f"{row.figure}, {pair.other.name}" if is_named else row.figure
    return Card(name, speed_text(row), f"{row.base} → {row.other} at {row.load}")


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
    return [
        [
            *map(Cell, (load, row.figure, row.base, row.other, ratio_text(row.ratio))),
            Cell(row.verdict, style=CELL_STYLES[row.verdict]),
        ]
        for load, row in _with_load_once(pair)
    ]


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
