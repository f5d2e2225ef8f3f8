"""The command line: flags to values, results to the terminal. No logic of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

import penstock
from penstock import bench_cli, logs, optimize_cli, profile_cli
from penstock.commands import Commands, fail
from penstock.errors import CommandLineError, ConfigError
from penstock.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.config import ServerConfig
    from penstock.repository import Found

log = logging.getLogger("penstock")


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(penstock.__version__, prog_name="penstock")
def main() -> None:
    """Model, data and SLO in; a served endpoint that keeps the SLO out."""
    try:
        logs.configure(logs.from_environment())
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@click.argument("path", type=click.Path())
@click.option(
    "--id",
    "server_id",
    default="penstock",
    show_default=True,
    metavar="NAME",
    help="Name of this server in its metadata. Change it where clients tell servers apart by it.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Change it to be reached from other machines; that needs "
    "--api-keys or --insecure.",
)
@click.option(
    "--http-port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="HTTP port. Change it when it is taken; 0 takes a free one and prints it.",
)
@click.option(
    "--fronts",
    default=0,
    show_default=True,
    type=click.IntRange(0, 64),
    metavar="N",
    help="Answer HTTP from N processes that share the port; 0: the core does it itself. Raise it "
    "when the core's event loop is the limit and cores are free: penstock explain says so, or its "
    "penstock_process_cpu_seconds grows by 1 a second while instances are idle. Otherwise fronts "
    "only cost latency. Not with language models, which they slow down.",
)
@click.option(
    "--grpc-port",
    default=8001,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="gRPC port. Change it when it is taken; 0 takes a free one and prints it.",
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
    help="Largest gRPC request. Raise it when tensors are larger; memory is reserved for it.",
)
@click.option(
    "--max-body-bytes",
    default=64 << 20,
    show_default=True,
    type=click.IntRange(1 << 10, 1 << 30),
    help="Largest body of an HTTP request, inflated. Raise it when tensors are larger; each "
    "connection may hold so much.",
)
@click.option(
    "--max-json-bytes",
    default=8 << 20,
    show_default=True,
    type=click.IntRange(1 << 10, 1 << 30),
    help="Largest JSON part of an HTTP inference. Raise it only where clients cannot send binary "
    "tensors: while JSON is decoded everybody else waits.",
)
@click.option(
    "--metrics-port",
    default=8002,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port for /metrics and health alone. Change it when it is taken; 0 takes a free one and "
    "prints it.",
)
@click.option(
    "--metrics/--no-metrics",
    default=True,
    show_default=True,
    help="Open the metrics port. Switch it off where /metrics on the HTTP port is enough.",
)
@click.option(
    "--grpc-compression",
    default="none",
    show_default=True,
    type=click.Choice(["none", "deflate", "gzip"]),
    help="Compress gRPC answers (requests may be compressed anyway). For slow networks only: it "
    "costs CPU time on both sides.",
)
@click.option(
    "--drain-s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long accepted requests may take after SIGTERM. Raise it for slow models, and keep it "
    "below the time your orchestrator waits before it kills.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow a --host that others can reach, without keys. Give it only where a proxy or the "
    "network keeps strangers out.",
)
@click.option(
    "--api-keys",
    default="",
    metavar="FILE",
    help="TOML file of API keys with scopes (infer, metrics, admin). Give it when others can "
    "reach the server.",
)
@click.option(
    "--tls-cert",
    default="",
    metavar="FILE",
    help="PEM certificate chain: HTTP, gRPC and metrics then speak TLS only. Give it when clients "
    "come over a network that others can read. Needs --tls-key; changes are picked up.",
)
@click.option(
    "--tls-key",
    default="",
    metavar="FILE",
    help="PEM private key of --tls-cert. Give it whenever --tls-cert is given. It must not be "
    "encrypted, because no one is there to type a password when the server restarts.",
)
@click.option(
    "--tls-client-ca",
    default="",
    metavar="FILE",
    help="PEM certificates of the issuers of client certificates, which every client then needs. "
    "Give it to identify clients without API keys, or beside them.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Accept this Host too while listening on the loopback address. Needed behind a proxy that "
    "passes the client's Host on. Repeatable.",
)
@click.option(
    "--model-control-mode",
    type=click.Choice(["none", "explicit"]),
    default="none",
    show_default=True,
    help="none loads everything at start. Choose explicit to load only what --load-model names "
    "and to load and unload over the API.",
)
@click.option(
    "--load-model",
    multiple=True,
    metavar="NAME",
    help="In explicit mode: load this model at start; '*' is all. Leave it out to start empty. "
    "Repeatable.",
)
@click.option(
    "--allow-hard-links",
    is_flag=True,
    help="Accept files of models that have further hard links. Give it where storage is "
    "deduplicated by hard links and only trusted people write to the repository.",
)
@click.option(
    "--gpu-memory-reserve",
    default=0.05,
    show_default=True,
    metavar="SHARE",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of each GPU's memory that the plan at start keeps back. Raise it where models run "
    "out of memory under load, lower it where the plan refuses what is known to fit.",
)
@click.option(
    "--random-weights",
    is_flag=True,
    help="PATH is the config.json of a language model; its weights are drawn. Use it to see how "
    "fast a model would be that is not here; what it says is nonsense.",
)
@click.option(
    "--reload",
    is_flag=True,
    help="Reload Python models when their files change. For development: a change that cannot be "
    "loaded leaves the old code in place.",
)
@click.option(
    "--exit-on-error/--no-exit-on-error",
    default=True,
    show_default=True,
    help="Stop when a model cannot be loaded. --no-exit-on-error serves the others, and the server "
    "does not become ready.",
)
@click.option(
    "--log-level",
    type=click.Choice(logs.LEVELS, case_sensitive=False),
    default=None,
    help="Least important lines to write; INFO unless PENSTOCK_LOG says otherwise. Choose WARNING "
    "where logs are paid by the line, DEBUG to look for a fault.",
)
@click.option(
    "--log-format",
    type=click.Choice(logs.FORMATS, case_sensitive=False),
    default=None,
    help="text unless PENSTOCK_LOG_FORMAT says otherwise. Choose json (one object a line) when "
    "logs are collected.",
)
@click.option(
    "--log-requests",
    is_flag=True,
    help="Write a line for every inference: status, model, id, where the time went. Costs some "
    "throughput; switch it on to look into single requests.",
)
def serve(
    path: str,
    server_id: str,
    host: str,
    http_port: int,
    fronts: int,
    grpc_port: int,
    grpc: bool,
    grpc_max_message_bytes: int,
    grpc_compression: str,
    max_body_bytes: int,
    max_json_bytes: int,
    metrics_port: int,
    metrics: bool,
    drain_s: float,
    insecure: bool,
    api_keys: str,
    tls_cert: str,
    tls_key: str,
    tls_client_ca: str,
    allow_host: tuple[str, ...],
    model_control_mode: str,
    load_model: tuple[str, ...],
    allow_hard_links: bool,
    gpu_memory_reserve: float,
    random_weights: bool,
    reload: bool,
    exit_on_error: bool,
    log_level: str | None,
    log_format: str | None,
    log_requests: bool,
) -> None:
    """Serve PATH, a model repository or the folder of one model, over the v2 protocol."""
    from penstock.config import GrpcConfig, HttpLimits, ServerConfig, TlsConfig

    _configure_logs(log_level, log_format)
    config = ServerConfig(
        id=server_id,
        host=host,
        http_port=http_port,
        num_fronts=fronts,
        grpc=GrpcConfig(grpc_port, grpc_max_message_bytes, compression=grpc_compression)
        if grpc
        else None,
        metrics_port=metrics_port if metrics else None,
        drain_s=drain_s,
        is_explicit=model_control_mode == "explicit",
        load=load_model,
        gpu_memory_reserve=gpu_memory_reserve,
        api_keys=api_keys,
        tls=TlsConfig(tls_cert, tls_key, tls_client_ca)
        if tls_cert or tls_key or tls_client_ca
        else None,
        allow_hosts=allow_host,
        allows_hard_links=allow_hard_links,
        logs_requests=log_requests,
        limits=HttpLimits(max_body_bytes, max_json_bytes),
        has_random_weights=random_weights,
        reloads=reload,
    )
    try:
        _run(path, config, insecure, exit_on_error)
    except ConfigError as error:
        fail(error)


def _run(path: str, config: ServerConfig, insecure: bool, exit_on_error: bool) -> None:
    """Run the server until it is stopped."""
    import uvloop

    from penstock import model_source, repository, server, terminal

    loading = terminal.LoadingStatus()

    def started(running: server.Server) -> None:
        loading.end()
        failures = _flat({f.name: list(f.problems) for f in running.catalog.failures})
        if failures and exit_on_error:
            raise ConfigError(failures)
        is_json = logs.from_environment().format == "json"
        tell = terminal.log_start if is_json else terminal.print_start
        is_made_up = config.has_random_weights
        names = list(found.folders) if is_made_up else model_source.resolve(path).names()
        try:
            tell(running, config.host, names)
        except OSError as error:  # stdout is a file on a full disk, or a closed pipe.
            log.warning("the start cannot be shown on stdout: %s", error.strerror)

    try:
        server.check(config, insecure)
        found = _found(path, config)
        if not config.allows_hard_links:
            found = repository.refuse_hard_links(found)
        server.check_models(found, config)
        if found.problems and exit_on_error:
            raise ConfigError(_flat(found.problems))
        _check_gpus(found, config, exit_on_error)
        received = uvloop.run(server.serve(path, found, config, started, loading))
    finally:
        loading.end()
    if received == signal.SIGINT:
        sys.exit(ExitCode.INTERRUPTED)


def _check_gpus(found: Found, config: ServerConfig, exit_on_error: bool) -> None:
    """Show the memory plan of the GPUs, and fail if the models do not fit."""
    from penstock import terminal
    from penstock.serving.fleet import Fleet

    arranged = Fleet(config.gpu_memory_reserve).arrange(found.configs)
    if arranged.plan:
        terminal.tell_memory_plan(arranged.plan)
    if arranged.problems and exit_on_error:
        raise ConfigError(_flat(arranged.problems))


def _configure_logs(level: str | None, form: str | None) -> None:
    settings = logs.from_environment()
    settings = replace(settings, level=level or settings.level, format=form or settings.format)
    logs.configure(settings)
    logs.hand_down(settings)


def _found(path: str, config: ServerConfig) -> Found:
    """Return what to load at start."""
    from penstock import repository
    from penstock.errors import NotFound
    from penstock.model_source import resolve

    if config.has_random_weights:
        return repository.read_made_up(path)
    if not config.is_explicit:
        if config.load:
            raise CommandLineError(["--load-model needs --model-control-mode explicit"])
        return resolve(path).read()
    source = resolve(path)
    if "*" in config.load:
        return source.read()
    source.names()
    found = repository.Found()
    for name in config.load:
        try:
            one = source.read_one(name)
        except NotFound as error:
            found.problems[name] = [str(error)]
            continue
        found.configs += one.configs
        found.problems.update(one.problems)
        found.folders.update(one.folders)
    return found


@main.command()
@click.argument("path", type=click.Path())
def inspect(path: str) -> None:
    """Show what PATH, a repository or a model, resolves to, as config.pbtxt."""
    from penstock import devices, pbtxt, repository
    from penstock.model_source import resolve
    from penstock.serving import placement

    try:
        found = resolve(path).read()
    except ConfigError as error:
        fail(error)
    for config in found.configs:
        click.echo(f"# {config.name}, version {config.version}: {os.path.relpath(config.artifact)}")
        for line in repository.about(found.folders[config.name], config):
            click.echo(f"#   {line}")
        if config.uses_gpu:
            click.echo(f"#   instances: {placement.told(config, devices.read_gpus())}")
        click.echo(pbtxt.describe(config))
    if found.problems:
        fail(ConfigError(_flat(found.problems)))


@main.command()
@click.argument("model")
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="HTTP port of the server. Change it when the server is elsewhere.",
)
@click.option(
    "--version",
    default="",
    metavar="V",
    help="Version of the model. Give it when several are loaded; else the highest is explained.",
)
@click.option(
    "--api-key",
    default="",
    envvar="PENSTOCK_API_KEY",
    metavar="KEY",
    help="Key with the scope 'metrics'. Needed when the server was started with --api-keys; better "
    "given as PENSTOCK_API_KEY, because flags are seen by everybody on the machine.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Ask every second until Ctrl-C. Use it to see the batcher at work under load; a terminal "
    "shows what fits it, the most telling first.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the answer as JSON, unshortened. Use it in scripts.",
)
def explain(model: str, url: str, version: str, api_key: str, watch: bool, as_json: bool) -> None:
    """Say what the batcher of MODEL does on a running server, and why batches are small."""
    import msgspec

    from penstock import ask, terminal

    if watch and as_json:
        raise click.UsageError("--watch and --json do not go together")
    try:
        answer = ask.explanation(url, model, version, api_key)
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
        elif watch:
            terminal.watch(lambda: ask.explanation(url, model, version, api_key))
        else:
            terminal.console().print(terminal.explained(answer))
    except ConfigError as error:
        fail(error)


main.add_command(bench_cli.bench)
main.add_command(bench_cli.report)
main.add_command(optimize_cli.optimize)
main.add_command(profile_cli.profile)


def _flat(problems: dict[str, list[str]]) -> list[str]:
    return [f"{model}: {problem}" for model, items in problems.items() for problem in items]
