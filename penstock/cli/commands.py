"""Shared by all commands: one way to print errors, one exit code for each kind of outcome, and
answers to half-right input that name the next command."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from penstock.errors import CommandLineError, ConfigError, PenstockError
from penstock.repository.model_source import FACTORY, FILE_KINDS, URL
from penstock.system.exit_codes import ExitCode


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    if examples:
        with formatter.section("Examples"):
            formatter.write("".join(f"  {example}\n" for example in examples))


class Commands(click.Group):
    """A group whose commands end with Penstock's exit codes instead of click's, and whose help ends
    with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)
        super().format_epilog(ctx, formatter)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        try:
            result = super().main(args, prog_name, complete_var, False, **extra)
        except click.ClickException as error:
            if isinstance(error, click.MissingParameter):
                _tell_missing(error)
            else:
                error.show()
            is_usage = isinstance(error, click.UsageError)
            sys.exit(ExitCode.USAGE if is_usage else ExitCode.FAILED)
        except click.Abort:
            # click's name for Ctrl-C.
            click.echo("interrupted", err=True)
            sys.exit(ExitCode.INTERRUPTED)
        # --help and --version return their exit code.
        sys.exit(result if isinstance(result, int) else ExitCode.OK)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            raise click.UsageError(unknown_command(name, known, _typed_path(ctx)), ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which they are used."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their whole first lines."""
        listed = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.short_help or "") for name, each in listed if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


PROGRAM = "penstock"


def _typed_path(ctx: click.Context) -> str:
    """Return the commands that were typed so far: `penstock repo`."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    return " ".join([PROGRAM, *names])


def unknown_command(name: str, known: Sequence[str], typed: str = PROGRAM) -> str:
    """Say which command was probably meant after those that were `typed`."""
    is_url = bool(URL.match(name))
    is_model = os.path.splitext(name)[1].lower() in FILE_KINDS or bool(FACTORY.fullmatch(name))
    is_model = is_model or (os.path.exists(name) and name not in known)
    if typed != PROGRAM and (is_url or is_model):
        return f"'{name}' is not a command; put one before it, such as: {typed} {known[0]} {name}"
    if is_url:
        return f"'{name}' is not a command; to measure this server: penstock bench {name}"
    if is_model:
        return f"'{name}' is not a command; to serve it: penstock serve {name}"
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"'{name}' is not a command; did you mean: {typed} {near[0]}"
    return f"'{name}' is not a command; expected one of {', '.join(known)}"


def _tell_missing(error: click.MissingParameter) -> None:
    """Say what a missing argument would look like."""
    context, parameter = error.ctx, error.param
    if context is None or parameter is None or not isinstance(parameter, click.Argument):
        error.show()
        return
    examples = getattr(context.command, "examples", ())
    # Not `make_metavar`, which takes the context from click 8.2 on only.
    name = (parameter.metavar or parameter.human_readable_name).strip("[].")
    example = f", e.g. {examples[0]}" if examples else ""
    click.echo(coloured(f"error: {name} is required{example}", "red"), err=True)
    click.echo(f"{context.command_path} --help shows all options", err=True)


def fail(error: PenstockError) -> NoReturn:
    """Print each problem on its own line and exit: 64 for invalid flags, 1 otherwise."""
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    for problem in problems:
        click.echo(coloured(f"error: {problem}", "red"), err=True)
    is_usage = isinstance(error, CommandLineError)
    sys.exit(ExitCode.USAGE if is_usage else ExitCode.FAILED)


def typed_command() -> str:
    return shlex.join(["penstock", *sys.argv[1:]])


def coloured(text: str, colour: str) -> str:
    """Colour text for terminals. click drops colours elsewhere, but does not know NO_COLOR."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour)
