"""The `report` command: saved results, shown again."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.commands import fail
from penstock.cli.options import Command
from penstock.errors import ConfigError


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
    from penstock.report import saved

    paths = [Path(each) for each in runs]
    outputs = Path(html) if html else None, Path(csv) if csv else None
    try:
        saved.show(paths, *outputs, terminal.console())
    except ConfigError as error:
        fail(error)
