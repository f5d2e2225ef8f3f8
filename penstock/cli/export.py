"""The `export` commands: files for other systems, one command for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.api.export_options import HelmOptions, KserveOptions, KubernetesOptions
from penstock.cli.commands import Commands, fail
from penstock.cli.export_ray import ray
from penstock.cli.export_triton import triton
from penstock.cli.options import Command, add_options
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.api.export import Exported


@click.group(
    cls=Commands,
    short_help="Write files for Kubernetes, KServe, Ray or Triton.",
    examples=[
        "penstock export kubernetes models/ --image registry.example.com/penstock:0.1.0",
        "penstock export helm models/ --image registry.example.com/penstock:0.1.0",
    ],
)
def export() -> None:
    """Write files that run a model or a repository in another system.

    Sizes and thresholds come from the evidence that penstock optimize committed with the models.
    Nothing secret is written.
    """


@export.command(
    cls=Command,
    short_help="Write a Deployment and what belongs to it.",
    examples=[
        "penstock export kubernetes models/ --image registry.example.com/penstock:0.1.0",
        "penstock export kubernetes models/ --image penstock:cuda --gpu-resource "
        "nvidia.com/mig-1g.10gb --gpus 1",
    ],
)
@click.argument("source", metavar="MODEL", type=click.Path())
@add_options(KubernetesOptions, "options")
def kubernetes(source: str, options: KubernetesOptions) -> None:
    """Write the resources that serve MODEL in a Kubernetes cluster.

    Deployment, Service, probes, PodDisruptionBudget, ScaledObject (KEDA) or HPA, NetworkPolicy and
    ServiceMonitor. MODEL is a model or a repository as `penstock serve` takes it.
    """
    from penstock.api.export import export_kubernetes

    try:
        tell(export_kubernetes(source, options))
    except PenstockError as error:
        fail(error)


@export.command(
    cls=Command,
    short_help="Write the same as a Helm chart.",
    examples=["penstock export helm models/ --image registry.example.com/penstock:0.1.0"],
)
@click.argument("source", metavar="MODEL", type=click.Path())
@add_options(HelmOptions, "options")
def helm(source: str, options: HelmOptions) -> None:
    """Write a Helm chart that serves MODEL.

    With its default values it renders to what `penstock export kubernetes` writes.
    """
    from penstock.api.export import export_helm

    try:
        tell(export_helm(source, options))
    except PenstockError as error:
        fail(error)


@export.command(
    cls=Command,
    short_help="Write a ServingRuntime and an InferenceService.",
    examples=[
        "penstock export kserve models/ --image registry.example.com/penstock:0.1.0 "
        "--storage-uri s3://bucket/models"
    ],
)
@click.argument("source", metavar="MODEL", type=click.Path())
@add_options(KserveOptions, "options")
def kserve(source: str, options: KserveOptions) -> None:
    """Write the resources that serve MODEL with KServe.

    The folder at --storage-uri holds the models as MODEL does.
    """
    from penstock.api.export import export_kserve

    try:
        tell(export_kserve(source, options))
    except PenstockError as error:
        fail(error)


export.add_command(ray)
export.add_command(triton)


def tell(exported: Exported) -> None:
    """Print what was written; documents for stdout go there, and everything else to stderr."""
    from penstock.api.export import STDOUT

    is_piped = exported.folder == STDOUT
    if is_piped:
        click.echo("---\n".join(exported.files.values()), nl=False)
    else:
        for name in exported.files:
            click.echo(f"{exported.folder.rstrip('/')}/{name}")
        for name in exported.removed:
            click.echo(f"removed {exported.folder.rstrip('/')}/{name}, of an earlier export")
    lines = [f"  {note}" for note in exported.sizing.notes]
    if exported.extras:
        extras = ",".join(exported.extras)
        lines.append(f"  image: built with --build-arg EXTRAS={extras}, or VARIANT=cuda")
    lines += ["Next:", *(f"  {command}" for command in exported.next_commands)]
    for line in lines:
        click.echo(line, err=is_piped)
