"""The `export triton` and `import triton` commands: repositories for NVIDIA Triton, and from it."""

from __future__ import annotations

import click

from penstock.cli.commands import Commands, fail
from penstock.cli.options import Command
from penstock.cli.outputs import STDOUT, write_json
from penstock.errors import ConfigError, PenstockError


@click.command(
    cls=Command,
    short_help="Write a model repository for NVIDIA Triton.",
    examples=["penstock export triton models/ --out triton"],
)
@click.argument("source", metavar="MODEL", type=click.Path())
@click.option(
    "--out",
    "--to",
    metavar="FOLDER",
    default="triton",
    help="Folder of the new repository. Default: triton. Models of an earlier export are replaced.",
)
def triton(source: str, out: str) -> None:
    """Write MODEL as a repository that NVIDIA Triton reads.

    Python models are exported as they are, functions with a TritonPythonModel that calls them. What
    differs is printed, and noted in each config.pbtxt.
    """
    from penstock.api.export_triton import export_triton

    try:
        done = export_triton(source, out)
    except PenstockError as error:
        fail(error)
    for model in done.models:
        for path in model.files:
            click.echo(f"{out.rstrip('/')}/{path}")
        for note in model.notes:
            click.echo(f"  {model.name}: {note}")
    if any(model.files for model in done.models):
        click.echo(f"Next:\n  tritonserver --model-repository={out}")
    if done.problems:
        fail(ConfigError(done.problems))


@click.group(
    name="import",
    cls=Commands,
    short_help="Read repositories of other servers.",
    examples=["penstock import triton models/"],
)
def import_() -> None:
    """Report what the models of another server become here."""


@import_.command(
    name="triton",
    cls=Command,
    short_help="Report what is served of a Triton repository.",
    examples=["penstock import triton models/", "penstock import triton models/ --json -"],
)
@click.argument("source", metavar="REPOSITORY", type=click.Path())
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    default="",
    help="Write the report as JSON to FILE. Default: none. - writes to stdout, and nothing else "
    "there. Use it in scripts.",
)
def from_triton(source: str, json_path: str) -> None:
    """Report what of REPOSITORY is served, what differs from Triton, and what is refused.

    Nothing is written or loaded: `penstock serve REPOSITORY` serves it as it is.
    """
    from penstock.api.import_triton import import_triton

    try:
        found = import_triton(source)
        if json_path:
            write_json(found, json_path)
    except ConfigError as error:
        fail(error)
    if json_path != STDOUT:
        click.echo(str(found))
    if found.num_refused:
        fail(ConfigError(f"{source}: {found.num_refused} of {len(found.models)} models refused"))
