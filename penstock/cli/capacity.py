"""The `capacity` command: how many replicas a load needs."""

from __future__ import annotations

import click

from penstock.api.capacity_options import CapacityOptions
from penstock.cli.commands import fail
from penstock.cli.options import Command, add_options
from penstock.cli.outputs import STDOUT, write_json
from penstock.errors import PenstockError


@click.command(
    cls=Command,
    short_help="Plan how many replicas a load needs.",
    examples=[
        "penstock capacity models/bert --rate 50000/s --failure-domain 8 --price 2.5",
        "penstock capacity model.onnx --rate 900/s --replica-rate 210/s --slo 'p99 < 50 ms'",
    ],
)
@click.argument("source", metavar="MODEL", type=click.Path())
@add_options(CapacityOptions, "options")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    default="",
    help="Write the plan as JSON to FILE. Default: none. - writes to stdout, and nothing else "
    "there. Use it in scripts.",
)
def capacity(source: str, options: CapacityOptions, json_path: str) -> None:
    """Plan how many replicas of MODEL a load needs, what they cost, and when to add one.

    MODEL is a model's folder in a repository, whose version has evidence from `penstock optimize`;
    any other MODEL needs --replica-rate.
    """
    from penstock.api.capacity import capacity as run

    try:
        found = run(source, options)
        if json_path:
            write_json(found.figures, json_path)
    except PenstockError as error:
        fail(error)
    if json_path != STDOUT:
        click.echo(str(found))
