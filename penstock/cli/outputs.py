"""Where results go: options that several commands share, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass

import click

from penstock.api.options import Flag, option

OUTPUT = "Output"
STDOUT = "-"

HTML = Flag(
    OUTPUT,
    "Write a self-contained HTML page to FILE",
    "Use it to share the results.",
    metavar="FILE",
    default="none",
)
JSON = Flag(
    OUTPUT,
    "Write the results as JSON to FILE",
    "- writes to stdout, and nothing else there. Use it in scripts, or to show the results again "
    "with penstock report.",
    metavar="FILE",
    default="none",
)
CSV = Flag(
    OUTPUT,
    "Write a row per level as CSV to FILE",
    "perf_analyzer's columns come first. Use it where scripts read those.",
    metavar="FILE",
    default="none",
)
QUIET = Flag(
    OUTPUT,
    "Print the verdict only",
    "Without progress and tables. Use it in scripts and in CI.",
    short="-q",
)


@dataclass(frozen=True, slots=True)
class PageOutputs:
    """Outputs of commands with a page: empty names are not written."""

    html: str = option("", HTML)
    json: str = option("", JSON)
    quiet: bool = option(False, QUIET)


@dataclass(frozen=True, slots=True)
class TableOutputs:
    """Outputs of load tests: empty names are not written."""

    html: str = option("", HTML)
    json: str = option("", JSON)
    csv: str = option("", CSV)
    quiet: bool = option(False, QUIET)


def files(*names: str) -> list[str]:
    """Return the names of files: neither empty nor stdout."""
    return [name for name in names if name not in ("", STDOUT)]


def print_json(text: str) -> None:
    click.echo(text.rstrip("\n"))
