"""The command `penstock report`: show one run again, or compare several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from penstock.benchmark.report import compare, page, run_files, table
from penstock.benchmark.report.compare import Named
from penstock.benchmark.results import Run
from penstock.errors import ConfigError


def show(paths: Sequence[Path], html: Path | None, csv: Path | None, console: Console) -> None:
    """Write to the console and the requested files; ConfigError for files that cannot be read."""
    if not paths:
        raise ConfigError(["nothing to report: expected files that penstock bench --json wrote"])
    if csv is not None and len(paths) > 1:
        raise ConfigError([f"csv: holds one run; {len(paths)} were given"])
    runs = _read(paths)
    if len(runs) == 1:
        show_run(runs[0].run, html, csv, console)
        return
    console.print(compare.shown(runs))
    if html is not None:
        run_files.write_text(compare.page(runs), html)


def show_run(run: Run, html: Path | None, csv: Path | None, console: Console) -> None:
    console.print(table.shown(run))
    if html is not None:
        run_files.write_text(page.page(run), html)
    if csv is not None:
        run_files.write_text(run_files.csv_text(run), csv)


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
