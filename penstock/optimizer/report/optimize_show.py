"""Show a finished or saved optimisation in the terminal, or write its page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from penstock.benchmark.report import run_files
from penstock.errors import ConfigError
from penstock.optimizer.report import optimization_files, optimize_page, optimize_table
from penstock.optimizer.results import Optimization


def show_optimization(optimization: Optimization, html: Path | None, console: Console) -> None:
    console.print(optimize_table.shown(optimization))
    if html is not None:
        run_files.write_text(optimize_page.page(optimization), html)


def show_saved(path: Path, html: Path | None, csv: Path | None, console: Console) -> None:
    """Show a saved optimisation, for `penstock report`; ConfigError if it cannot be read."""
    if csv is not None:
        raise ConfigError([f"csv: holds a bench run; {path} is an optimisation"])
    show_optimization(optimization_files.read_optimization(path), html, console)
