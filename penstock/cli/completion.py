"""The `completion` command: the script by which a shell completes commands and flags."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from penstock.cli.options import Command

HOW = {
    "bash": 'add to ~/.bashrc: eval "$(penstock completion bash)"',
    "zsh": 'add to ~/.zshrc: eval "$(penstock completion zsh)"',
    "fish": "run: penstock completion fish > ~/.config/fish/completions/penstock.fish",
}


@click.command(
    cls=Command,
    short_help="Print a script that completes commands and flags.",
    examples=[f"{how}" for how in HOW.values()],
)
@click.argument("shell", metavar="SHELL", type=click.Choice(list(HOW)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a completion script for SHELL: bash, zsh or fish."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "penstock", "_PENSTOCK_COMPLETE").source())
