"""Runs of several batch sizes in a terminal: one table, with a curve of the throughput."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock import units
from penstock.benchmark import summary
from penstock.benchmark.results import BenchRun

BAR_WIDTH = 24


def shown(runs: Sequence[BenchRun]) -> Group:
    """Show a row for each batch size and load; inferences count rows."""
    rows = [(run, summary.figures_of(run, level)) for run in runs for level in run.levels]
    rates = [row.throughput.value * run.batch_size for run, row in rows]
    best = max(rates, default=0.0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("batch size", "load", "requests/s", "inferences/s", "", "p50", "p99", "failed"):
        is_text = column in ("load", "")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for (run, row), rate in zip(rows, rates, strict=True):
        bar = "█" * max(1, round(BAR_WIDTH * rate / best)) if best else ""
        p50, p99 = (units.duration(row.latency[name].value) for name in ("p50", "p99"))
        figures = (units.number(row.throughput.value), units.number(rate))
        curve = Text(bar, style="cyan")
        failed = str(row.num_failed)
        table.add_row(str(run.batch_size), row.label, *figures, curve, p50, p99, failed)
    target = runs[0].target
    parts = [Text(headline(runs), style="bold"), Text(f"target  {target.address}", "dim")]
    problems = [Text(run.problem, style="red") for run in runs if run.problem]
    return Group(*parts, table, *problems)


def headline(runs: Sequence[BenchRun]) -> str:
    """Say at which batch size most rows are computed."""
    best_rate, best_size = 0.0, 0
    for run in runs:
        for level in run.levels:
            rate = summary.figures_of(run, level).throughput.value * run.batch_size
            if rate > best_rate:
                best_rate, best_size = rate, run.batch_size
    if not best_size:
        return "nothing was measured"
    number = units.number(best_rate)
    return f"highest throughput: {number} inferences/s at batch size {best_size}"
