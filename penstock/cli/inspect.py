"""The `inspect` command: what a MODEL resolves to."""

from __future__ import annotations

import click

from penstock.cli.commands import fail
from penstock.cli.options import Command
from penstock.cli.outputs import STDOUT, write_json
from penstock.errors import ConfigError


@click.command(
    cls=Command,
    short_help="Show how a model would be served, without loading it.",
    examples=["penstock inspect model.onnx", "penstock inspect models/ --json -"],
)
@click.argument("source", metavar="MODEL", type=click.Path())
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    default="",
    help="Write the result as JSON to FILE. Default: none. - writes to stdout, and nothing else "
    "there. Use it in scripts.",
)
def inspect(source: str, json_path: str) -> None:
    """Show how MODEL would be served, as config.pbtxt with every default.

    MODEL is a file, a Hugging Face folder, a model's folder, or a repository.
    """
    from penstock.api.inspect import inspect as run
    from penstock.repository.layout import flat

    try:
        found = run(source)
        if json_path:
            write_json(found, json_path)
    except ConfigError as error:
        fail(error)
    if json_path != STDOUT:
        for model in found.models:
            click.echo(str(model))
    if found.problems:
        fail(ConfigError(flat(found.problems)))
