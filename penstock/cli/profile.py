"""The `profile` command: flags to a batch, a profile to files and terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.api.profile_options import ProfileOptions
from penstock.cli.commands import fail, typed_command
from penstock.cli.options import Command, add_options
from penstock.cli.outputs import STDOUT, PageOutputs, files, write_json
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.profiling.results import Profile


@click.command(
    cls=Command,
    short_help="Show where the time of a batch goes.",
    examples=[
        "penstock profile model.onnx -b 8",
        "penstock profile models/bert --lengths 128 --html profile.html",
    ],
)
@click.argument("source", metavar="MODEL")
@add_options(ProfileOptions, "options")
@add_options(PageOutputs, "outputs")
def profile(source: str, options: ProfileOptions, outputs: PageOutputs) -> None:
    """Show where the time of a batch goes, the bottleneck, and what to do next.

    MODEL is a file (model.onnx, model.pt2, model.xml, model.py), a Hugging Face folder, a model's
    folder, or a repository with --model.
    """
    from penstock.api import profile as api
    from penstock.benchmark import run_files

    try:
        run_files.check_outputs(files(outputs.html, options.chrome_trace, outputs.json))
        found = api.profile(source, options).profile
        _show(found, source, options, outputs)
    except PenstockError as error:
        fail(error)


def _show(found: Profile, source: str, options: ProfileOptions, outputs: PageOutputs) -> None:
    from penstock.api import profile as api
    from penstock.api import terminal
    from penstock.report import profile_table

    if outputs.json == STDOUT:
        write_json(found, STDOUT)
    elif outputs.quiet:
        click.echo(found.recommendation)
    else:
        terminal.console().print(profile_table.shown(found))
        if found.gpu is not None:
            click.echo("\nWith NVIDIA's tools, where they are installed:")
            for line in profile_table.tool_commands(source, options.model, options.batch_size):
                click.echo(f"  {line}")
    if outputs.html:
        api.write_html(found, Path(outputs.html), typed_command())
    for name in files(outputs.json):
        write_json(found, name)
