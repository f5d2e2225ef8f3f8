"""Runs side by side, in a terminal and as a page. The first is the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.benchmark import stats, summary
from penstock.benchmark.comparison import (
    Named,
    Pair,
    Row,
    Verdict,
    pair_of,
    ratio_text,
    summary_text,
)
from penstock.benchmark.headline import headline_of
from penstock.report import bench_figures, bench_table
from penstock.report.bench_figures import Figure
from penstock.report.page import Cell, Line, rendered
from penstock.slo import Latency

VERDICT_STYLES: dict[Verdict, str] = {
    "faster": "green",
    "slower": "red",
    "no difference shown": "dim",
}
CELL_STYLES: dict[Verdict, str] = {
    "faster": "kept-text",
    "slower": "missed-text",
    "no difference shown": "",
}
DASHES = ("solid", "dash", "dot", "dashdot")


def shown(runs: Sequence[Named]) -> Group:
    """Render a comparison for a terminal."""
    parts: list[RenderableType] = []
    for pair in _pairs(runs):
        parts.append(Text(summary_text(pair), style="bold"))
        parts += [
            Text(f"warning: not the same: {each}", style="yellow") for each in pair.differences
        ]
        if pair.rows:
            parts.append(_table(pair))
    for each in runs:
        verdict = headline_of(each.run)
        style = bench_table.OUTCOME_STYLES[verdict.outcome]
        parts.append(Text.assemble(f"{each.name}: ", (verdict.text, style)))
    return Group(*parts)


def _pairs(runs: Sequence[Named]) -> list[Pair]:
    return [pair_of(runs[0], other) for other in runs[1:]]


def _table(pair: Pair) -> RenderableType:
    names = [Path(each.name).name for each in (pair.base, pair.other)]
    made = bench_table.figure_table("load", "figure", *names, "ratio (95 % CI)", "verdict")
    for load, row in _with_load_once(pair):
        verdict = Text(row.verdict, style=VERDICT_STYLES[row.verdict])
        made.add_row(Text(load), row.figure, row.base, row.other, ratio_text(row.ratio), verdict)
    return made


def _with_load_once(pair: Pair) -> Iterator[tuple[str, Row]]:
    """Yield rows, with the load named in its first row only."""
    for last, row in zip((None, *pair.rows), pair.rows, strict=False):
        is_new = last is None or last.load != row.load or row.figure == "throughput"
        yield row.load if is_new else "", row


def page(runs: Sequence[Named]) -> str:
    pairs = _pairs(runs)
    values = {
        "title": "; ".join(map(summary_text, pairs)),
        "sentences": [summary_text(pair) for pair in pairs],
        "style": _style(pairs),
        "verdicts": [(each.name, headline_of(each.run).text) for each in runs],
        "warnings": [
            Line("warning", f"not the same: {each}", f"{pair.base.name}, {pair.other.name}")
            for pair in pairs
            for each in pair.differences
        ],
        "tables": [
            (f"{pair.other.name} against {pair.base.name}", _head(pair), _cells(pair))
            for pair in pairs
            if pair.rows
        ],
        "labels": [summary.label_of(level) for level in runs[0].run.levels],
        "commands": [(each.name, each.run.command) for each in runs],
    }
    return rendered("compare.html.jinja", values, _figures(runs))


def _style(pairs: Sequence[Pair]) -> str:
    """Choose the colour by the tail alone, as the summary does."""
    tails = {row.verdict for pair in pairs for row in pair.rows if row.figure == "p99"}
    if {"faster", "slower"} <= tails:
        return "mixed"
    if "slower" in tails:
        return "missed"
    return "kept" if "faster" in tails else "plain"


def _head(pair: Pair) -> list[str]:
    return ["load", "figure", pair.base.name, pair.other.name, "ratio (95 % CI)", "verdict"]


def _cells(pair: Pair) -> list[list[Cell]]:
    return [
        [
            *map(Cell, (load, row.figure, row.base, row.other, ratio_text(row.ratio))),
            Cell(row.verdict, style=CELL_STYLES[row.verdict]),
        ]
        for load, row in _with_load_once(pair)
    ]


def _figures(runs: Sequence[Named]) -> dict[str, list[Figure | None]]:
    return {
        "curve": [_curve(runs)],
        "cdf": [_cdf(runs, index) for index in range(len(runs[0].run.levels))],
    }


def _cdf(runs: Sequence[Named], index: int) -> Figure | None:
    """Plot all runs at the load of one level of the first."""
    load = runs[0].run.levels[index].load
    data = []
    for number, (each, colour) in enumerate(
        zip(runs, bench_figures.colours(len(runs)), strict=True)
    ):
        level = next((level for level in each.run.levels if level.load == load), None)
        if level is not None:
            seen, dash = stats.histogram(level.windows, "latency"), DASHES[number % len(DASHES)]
            data.append(bench_figures.cdf_trace(seen, each.name, colour, dash))
    data = [trace for trace in data if trace["x"]]
    if not data:
        return None
    layout = bench_figures.cdf_layout(data)
    slo = summary.slo_of(runs[0].run)
    for term in () if slo is None else slo.terms:
        if isinstance(term, Latency) and term.metric == "latency":
            bench_figures.add_limit(layout, term)
    return {"data": data, "layout": layout}


def _curve(runs: Sequence[Named]) -> Figure | None:
    traces = [
        bench_figures.curve_trace(each.run, each.name, "p99", colour)
        for each, colour in zip(runs, bench_figures.colours(len(runs)), strict=True)
    ]
    return bench_figures.curve_figure(traces) if any(len(t["x"]) > 1 for t in traces) else None
