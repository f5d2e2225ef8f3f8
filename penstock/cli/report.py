"""The `report` command: saved results, shown again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.commands import fail
from penstock.cli.options import Command
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.benchmark.comparison import Named


@click.command(
    cls=Command,
    short_help="Show saved results again, or compare them.",
    examples=["penstock report run.json", "penstock report before.json after.json --html c.html"],
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN.JSON…")
@click.option(
    "--html",
    metavar="FILE",
    default="",
    help="Write a self-contained HTML page to FILE. Default: none. Use it to share the results.",
)
@click.option(
    "--csv",
    metavar="FILE",
    default="",
    help="Write a row per level as CSV to FILE. Default: none. Use it where scripts read "
    "perf_analyzer's columns.",
)
def report(runs: tuple[str, ...], html: str, csv: str) -> None:
    """Show a saved result of bench or optimize; compare several runs of bench with the first."""
    from penstock.api import terminal

    try:
        show([Path(each) for each in runs], html, csv, terminal.console())
    except ConfigError as error:
        fail(error)


def show(paths: Sequence[Path], html: str | Path, csv: str | Path, console: Console) -> None:
    """Write to the console and the requested files; ConfigError for files that cannot be read."""
    from penstock.benchmark import run_files
    from penstock.optimizer import optimization_files
    from penstock.report import bench, bench_table, compare, optimize, optimize_table

    if len(paths) == 1 and optimization_files.is_optimization(paths[0]):
        if csv:
            raise ConfigError([f"csv: holds a bench run; {paths[0]} is an optimisation"])
        optimization = optimization_files.read_optimization(paths[0])
        console.print(optimize_table.shown(optimization))
        if html:
            run_files.write_text(optimize.page(optimization), Path(html))
        return
    if csv and len(paths) > 1:
        raise ConfigError([f"csv: holds one run; {len(paths)} were given"])
    runs = _read(paths)
    run = runs[0].run
    console.print(bench_table.shown(run) if len(runs) == 1 else compare.shown(runs))
    if csv:
        run_files.write_text(run_files.csv_text(run), Path(csv))
    if html:
        run_files.write_text(bench.page(run) if len(runs) == 1 else compare.page(runs), Path(html))


def _read(paths: Sequence[Path]) -> list[Named]:
    """Read all runs; ConfigError lists the problems of all files."""
    from penstock.benchmark import run_files
    from penstock.benchmark.comparison import Named

    found: list[Named] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(Named(str(path), run_files.read_run(path)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found
