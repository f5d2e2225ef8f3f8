"""The command `penstock report`: show a saved run or optimisation again, or compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.benchmark import run_files
from penstock.benchmark.comparison import Named
from penstock.errors import ConfigError
from penstock.optimizer import optimization_files
from penstock.report import bench, bench_table, compare, optimize, optimize_table


def show(paths: Sequence[Path], html: Path | None, csv: Path | None, console: Console) -> None:
    """Write to the console and the requested files; ConfigError for files that cannot be read."""
    if not paths:
        raise ConfigError(["nothing to report: expected files that penstock bench --json wrote"])
    if len(paths) == 1 and optimization_files.is_optimization(paths[0]):
        if csv is not None:
            raise ConfigError([f"csv: holds a bench run; {paths[0]} is an optimisation"])
        optimization = optimization_files.read_optimization(paths[0])
        console.print(optimize_table.shown(optimization))
        if html is not None:
            run_files.write_text(optimize.page(optimization), html)
        return
    if csv is not None and len(paths) > 1:
        raise ConfigError([f"csv: holds one run; {len(paths)} were given"])
    runs = _read(paths)
    if len(runs) == 1:
        run = runs[0].run
        console.print(bench_table.shown(run))
        if csv is not None:
            run_files.write_text(run_files.csv_text(run), csv)
    else:
        console.print(compare.shown(runs))
    if html is not None:
        run_files.write_text(bench.page(run) if len(runs) == 1 else compare.page(runs), html)


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
