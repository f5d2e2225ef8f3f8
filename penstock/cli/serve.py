"""The `serve` command: flags to a running server, the start to the terminal or the log."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from penstock.api.serve_options import ServeOptions
from penstock.cli.commands import fail
from penstock.cli.options import Command, add_options
from penstock.errors import PenstockError
from penstock.system import logs
from penstock.system.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.server import Server

log = logging.getLogger("penstock")


def _refuse_fronts(context: click.Context, option: click.Parameter, value: str | None) -> None:
    """Name what replaces a flag of earlier versions."""
    if value is not None:
        text = (
            "--fronts does not exist any more; give --shards N, which shares all work of requests"
        )
        raise click.UsageError(text, context)


@click.command(
    cls=Command,
    short_help="Serve a model or a repository over HTTP and gRPC.",
    examples=[
        "penstock serve model.onnx",
        "penstock serve models/ --http-port 9000",
        "penstock serve models/ --host 0.0.0.0 --api-keys keys.toml",
    ],
)
@click.argument("sources", metavar="MODEL...", nargs=-1, type=click.Path())
@add_options(ServeOptions, "options")
@click.option("--fronts", hidden=True, expose_value=False, callback=_refuse_fronts)
@click.option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Print nothing at start; log warnings only. Default: off. Use it when only problems "
    "matter.",
)
def serve(sources: tuple[str, ...], options: ServeOptions, quiet: bool) -> None:
    """Serve MODEL over the v2 protocol, HTTP and gRPC, until Ctrl-C.

    MODEL is a file (model.onnx, model.pt2, model.xml, model.gguf, model.py), a Hugging Face folder,
    a model's folder, or a repository of several models; several of them are served together.
    """
    from penstock.api import serving, terminal

    sources += options.model_repository
    if not sources:
        context = click.get_current_context()
        [argument] = [each for each in context.command.params if each.name == "sources"]
        raise click.MissingParameter(ctx=context, param=argument)
    source, *others = sources
    options = replace(options, model_repository=tuple(others))

    loading = terminal.LoadingStatus()
    if quiet:
        options = replace(options, log_level=options.log_level or "WARNING")

    def started(running: Server, names: Sequence[str]) -> None:
        loading.end()
        if not quiet:
            _tell_start(running, options.host, names)

    try:
        plan = terminal.tell_memory_plan
        received = serving.run(source, options, serving.Listeners(started, loading, plan))
    except PenstockError as error:
        loading.end()
        fail(error)
    finally:
        loading.end()
    if received == signal.SIGINT:
        sys.exit(ExitCode.INTERRUPTED)


def _tell_start(running: Server, host: str, names: Sequence[str]) -> None:
    from penstock.api import terminal

    is_json = logs.from_environment().format == "json"
    tell = terminal.log_start if is_json else terminal.print_start
    try:
        tell(running, host, names)
    except OSError as error:  # stdout is a file on a full disk, or a closed pipe.
        log.warning("the start cannot be shown on stdout: %s", error.strerror)
