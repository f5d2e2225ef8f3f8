"""Where results go: options that several commands share, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from penstock.api.options import flags_of

output_flag = flags_of("Output")
STDOUT = "-"


def quiet_flag() -> Any:
    text = "Without progress and tables. Use it in scripts and in CI."
    return output_flag("Print the verdict only", text, value=False, short="-q")


@dataclass(frozen=True, slots=True)
class FileOutputs:
    """Files that every command with a page can write; empty names are not written."""

    html: str = output_flag(
        "Write a self-contained HTML page to FILE", "Use it to share the results.", metavar="FILE"
    )
    json: str = output_flag(
        "Write the results as JSON to FILE",
        "- writes to stdout, and nothing else there. Use it in scripts, or to show the results "
        "again with penstock report.",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class PageOutputs(FileOutputs):
    quiet: bool = quiet_flag()


@dataclass(frozen=True, slots=True)
class TableOutputs(FileOutputs):
    """Outputs of load tests."""

    csv: str = output_flag(
        "Write a row per level as CSV to FILE",
        "perf_analyzer's columns come first. Use it where scripts read those.",
        metavar="FILE",
    )
    quiet: bool = quiet_flag()


def files(*names: str) -> list[str]:
    """Return the names of files: neither empty nor stdout."""
    return [name for name in names if name not in ("", STDOUT)]


def print_json(text: str) -> None:
    click.echo(text.rstrip("\n"))


def write_json(value: object, name: str) -> None:
    """Write a value as JSON to a file, or to stdout if its name is `-`."""
    from penstock.benchmark import run_files

    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    if name == STDOUT:
        click.echo(text)
    else:
        run_files.write_text(text, Path(name))
