"""The command line: flags to values, results to the terminal. No logic of its own."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click

import penstock
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import ServerConfig
    from penstock.repository import Found


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(penstock.__version__, prog_name="penstock")
def main() -> None:
    """Model, data and SLO in; a served endpoint that keeps the SLO out."""
    level = os.environ.get("PENSTOCK_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        known = "DEBUG, INFO, WARNING, ERROR"
        raise click.UsageError(f"PENSTOCK_LOG: '{level}' is not one of {known}")
    logging.basicConfig(
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


@main.command()
@click.argument("path", type=click.Path())
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Change it to be reached from other machines; needs --insecure.",
)
@click.option(
    "--http-port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="HTTP port; 0 takes a free one and prints it.",
)
@click.option(
    "--grpc-port",
    default=8001,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="gRPC port; 0 takes a free one and prints it.",
)
@click.option(
    "--grpc/--no-grpc",
    default=True,
    show_default=True,
    help="Answer gRPC too, from a process of its own. Switch it off where nobody uses it.",
)
@click.option(
    "--grpc-max-message-bytes",
    default=64 << 20,
    show_default=True,
    type=click.IntRange(1 << 10, 1 << 30),
    help="Largest gRPC request. Raise it for large tensors.",
)
@click.option(
    "--metrics-port",
    default=8002,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port for scrapes and health alone; 0 takes a free one and prints it.",
)
@click.option(
    "--metrics/--no-metrics",
    default=True,
    show_default=True,
    help="Open the metrics port. /metrics is on the HTTP port as well; switch this off where that "
    "is enough.",
)
@click.option(
    "--drain-s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long accepted requests may take after SIGTERM. Raise it for slow models.",
)
@click.option(
    "--insecure", is_flag=True, help="Allow a --host that others can reach, without keys."
)
@click.option(
    "--api-keys",
    default="",
    metavar="FILE",
    help="TOML file of API keys with scopes (infer, metrics, admin). Give it when others can "
    "reach the server.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Accept this Host too while listening on the loopback address, behind a proxy for "
    "instance. Repeatable.",
)
@click.option(
    "--model-control-mode",
    type=click.Choice(["none", "explicit"]),
    default="none",
    show_default=True,
    help="explicit loads only what --load-model names and allows load and unload over the API.",
)
@click.option(
    "--load-model",
    multiple=True,
    metavar="NAME",
    help="In explicit mode: load this model at start; '*' is all. Repeatable.",
)
@click.option(
    "--exit-on-error/--no-exit-on-error",
    default=True,
    show_default=True,
    help="Stop when a model cannot be loaded; --no-exit-on-error serves the others.",
)
def serve(
    path: str,
    host: str,
    http_port: int,
    grpc_port: int,
    grpc: bool,
    grpc_max_message_bytes: int,
    metrics_port: int,
    metrics: bool,
    drain_s: float,
    insecure: bool,
    api_keys: str,
    allow_host: tuple[str, ...],
    model_control_mode: str,
    load_model: tuple[str, ...],
    exit_on_error: bool,
) -> None:
    """Serve PATH, a model repository or the folder of one model, over the v2 protocol."""
    import uvloop

    from penstock import server
    from penstock.config import GrpcConfig, ServerConfig

    config = ServerConfig(
        host=host,
        http_port=http_port,
        grpc=GrpcConfig(grpc_port, grpc_max_message_bytes) if grpc else None,
        metrics_port=metrics_port if metrics else None,
        drain_s=drain_s,
        is_explicit=model_control_mode == "explicit",
        load=load_model,
        api_keys=api_keys,
        allow_hosts=allow_host,
    )

    def started(running: server.Server) -> None:
        failures = _flat({f.name: list(f.problems) for f in running.catalog.failures})
        if failures and exit_on_error:
            raise ConfigError(failures)
        _print_problems(failures)
        _print_table(running, host)

    try:
        server.check_host(config, insecure)
        found = _found(path, config)
        if found.problems and exit_on_error:
            raise ConfigError(_flat(found.problems))
        uvloop.run(server.serve(path, found, config, started))
    except ConfigError as error:
        _fail(error)


def _found(path: str, config: ServerConfig) -> Found:
    """What to load at start."""
    from penstock import repository
    from penstock.errors import NotFound

    if not config.is_explicit:
        if config.load:
            raise ConfigError(["--load-model needs --model-control-mode explicit"])
        return repository.read(path)
    if "*" in config.load:
        return repository.read(path)
    repository.names(path)
    found = repository.Found()
    for name in config.load:
        try:
            one = repository.read_one(path, name)
        except NotFound as error:
            found.problems[name] = [str(error)]
            continue
        found.configs += one.configs
        found.problems.update(one.problems)
    return found


@main.command()
@click.argument("path", type=click.Path())
def inspect(path: str) -> None:
    """Show what PATH, a repository or a model, resolves to, as config.pbtxt."""
    from penstock import pbtxt, repository

    try:
        found = repository.read(path)
    except ConfigError as error:
        _fail(error)
    for config in found.configs:
        click.echo(f"# {config.name}, version {config.version}: {os.path.relpath(config.artifact)}")
        click.echo(pbtxt.describe(config))
    if found.problems:
        _fail(ConfigError(_flat(found.problems)))


def _flat(problems: dict[str, list[str]]) -> list[str]:
    return [f"{model}: {problem}" for model, items in problems.items() for problem in items]


def _print_problems(problems: list[str]) -> None:
    for problem in problems:
        click.secho(f"error: {problem}", fg="red", err=True)


def _fail(error: ConfigError) -> NoReturn:
    _print_problems(list(error.problems))
    sys.exit(1)


def _print_table(running: object, host: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from penstock.server import Server

    assert isinstance(running, Server)
    table = Table(title=f"Penstock {penstock.__version__}")
    for column in ("model", "version", "state", "backend", "instances", "max batch", "loaded in"):
        table.add_column(column, overflow="fold")
    for model in running.catalog:
        config = model.config
        table.add_row(
            escape(config.name),
            config.version,
            model.state,
            config.backend,
            str(config.num_instances),
            str(config.max_batch_size),
            f"{model.metrics.load_s:.2f} s",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 1000  # A file is as wide as its lines: no name is broken.
    console.print(table)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{running.http_port}/v2"
    console.print(f"HTTP  {url}", highlight=False, markup=False)
    if running.grpc is not None:
        console.print(f"gRPC  {address}:{running.grpc.port}", highlight=False, markup=False)
    if running.metrics_port is not None:
        url = f"http://{address}:{running.metrics_port}/metrics"
        console.print(f"Metrics  {url}", highlight=False, markup=False)
