"""The command `penstock report`: show a saved run or optimisation again, or compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.benchmark import run_files
from penstock.benchmark.comparison import Named
from penstock.benchmark.results import BenchRun
from penstock.errors import ConfigError
from penstock.optimizer import optimization_files
from penstock.optimizer.results import Optimization
from penstock.report import bench, bench_table, compare, optimize, optimize_table


def show(paths: Sequence[Path], html: Path | None, csv: Path | None, console: Console) -> None:
    """Write to the console and the requested files; ConfigError for files that cannot be read."""
    if not paths:
        raise ConfigError(["nothing to report: expected files that penstock bench --json wrote"])
    if len(paths) == 1 and optimization_files.is_optimization(paths[0]):
        if csv is not None:
            raise ConfigError([f"csv: holds a bench run; {paths[0]} is an optimisation"])
        show_optimization(optimization_files.read_optimization(paths[0]), html, console)
        return
    if csv is not None and len(paths) > 1:
        raise ConfigError([f"csv: holds one run; {len(paths)} were given"])
    runs = _read(paths)
    if len(runs) == 1:
        show_run(runs[0].run, html, csv, console)
        return
    console.print(compare.shown(runs))
    if html is not None:
        run_files.write_text(compare.page(runs), html)


def show_run(run: BenchRun, html: Path | None, csv: Path | None, console: Console) -> None:
    console.print(bench_table.shown(run))
    if html is not None:
        run_files.write_text(bench.page(run), html)
    if csv is not None:
        run_files.write_text(run_files.csv_text(run), csv)


def show_optimization(optimization: Optimization, html: Path | None, console: Console) -> None:
    console.print(optimize_table.shown(optimization))
    if html is not None:
        run_files.write_text(optimize.page(optimization), html)


def _read(paths: Sequence[Path]) -> list[Named]:
    """Read all runs; ConfigError lists the problems of all files."""
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
