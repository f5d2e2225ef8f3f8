"""The `export ray` command: files for Ray Serve."""

from __future__ import annotations

import click

from penstock.api.ray_options import RayOptions
from penstock.cli.commands import fail
from penstock.cli.options import Command, add_options
from penstock.errors import PenstockError


@click.command(
    cls=Command,
    short_help="Write an application for Ray Serve.",
    examples=[
        "penstock export ray models/ --out ray",
        "penstock export ray models/ --out ray --max-replicas 8 --ingress-replicas 2",
    ],
)
@click.argument("source", metavar="MODEL", type=click.Path())
@click.option(
    "--out",
    metavar="FOLDER",
    default="ray",
    help="Folder for app.py and serve_config.yaml. Default: ray. Change it to keep several.",
)
@add_options(RayOptions, "options")
def ray(source: str, out: str, options: RayOptions) -> None:
    """Write app.py and serve_config.yaml, which serve MODEL with Ray Serve.

    Each model is a deployment. MODEL has to be at the same path on all nodes. Run the command
    again after a promotion: the new file makes a rolling update.
    """
    from penstock.ray.export_files import export_ray

    try:
        done = export_ray(source, out, options)
    except PenstockError as error:
        fail(error)
    for path in done.paths:
        click.echo(path)
    for note in done.notes:
        click.echo(f"  {note}")
    click.echo(f"Next:\n  {done.next_command}")
