"""The `explain` command: why a running server's batches are as they are."""

from __future__ import annotations

import click

from penstock.cli.commands import fail
from penstock.cli.options import Command
from penstock.cli.outputs import STDOUT, write_json
from penstock.errors import ConfigError


@click.command(
    cls=Command,
    short_help="Ask a running server why batches are as they are.",
    examples=[
        "penstock explain digits",
        "penstock explain http://127.0.0.1:8000/v2/models/digits --watch",
    ],
)
@click.argument("model", metavar="MODEL")
@click.option(
    "--url",
    default="",
    metavar="URL",
    help="HTTP address of the server. Default: http://127.0.0.1:8000. Change it when the server "
    "runs elsewhere.",
)
@click.option(
    "--version",
    default="",
    metavar="V",
    help="Version of the model. Default: the highest. Give it when several are loaded.",
)
@click.option(
    "--api-key",
    default="",
    envvar="PENSTOCK_API_KEY",
    metavar="KEY",
    help="API key with the scope 'metrics'. Default: none. Needed when the server asks for one. "
    "Prefer PENSTOCK_API_KEY: other users of the machine can see flags.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Ask every second until Ctrl-C. Default: off. Use it to see the batcher at work "
    "under load; a terminal shows what fits, the most important first.",
)
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value=STDOUT,
    default="",
    metavar="[FILE]",
    help="Write the answer as JSON. FILE - is stdout. Default: none; without FILE, stdout. Use it "
    "in scripts.",
)
def explain(model: str, url: str, version: str, api_key: str, watch: bool, json_path: str) -> None:
    """Explain what the batcher does with MODEL on a running server, and why batches are small.

    MODEL is a model's name on the server at --url, or its URL, http://host:port/v2/models/NAME.
    """
    from penstock.api import terminal
    from penstock.api.explain import locate

    if watch and json_path:
        raise click.UsageError("--watch and --json contradict each other; leave one of them out")
    try:
        located = locate(model, url, version, api_key)
        answer = located.ask()
        if json_path:
            write_json(answer.explanation, json_path)
        elif watch:
            terminal.watch(lambda: located.ask().explanation)
        else:
            terminal.console().print(answer)
    except ConfigError as error:
        fail(error)
