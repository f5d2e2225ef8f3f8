"""Shared by all commands: one way to print errors, one exit code for each kind of outcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from penstock.errors import CommandLineError, ConfigError, PenstockError
from penstock.exit_codes import ExitCode


class Commands(click.Group):
    """A group whose commands end with Penstock's exit codes instead of click's."""

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
        except click.UsageError as error:
            error.show()
            sys.exit(ExitCode.USAGE)
        except click.ClickException as error:
            error.show()
            sys.exit(ExitCode.FAILED)
        except click.Abort:
            # click's name for Ctrl-C.
            click.echo("interrupted", err=True)
            sys.exit(ExitCode.INTERRUPTED)
        # --help and --version return their exit code.
        sys.exit(result if isinstance(result, int) else ExitCode.OK)


def fail(error: PenstockError) -> NoReturn:
    """Print each problem on its own line and exit: 64 for invalid flags, 1 otherwise."""
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    for problem in problems:
        click.echo(coloured(f"error: {problem}", "red"), err=True)
    is_usage = isinstance(error, CommandLineError)
    sys.exit(ExitCode.USAGE if is_usage else ExitCode.FAILED)


def coloured(text: str, colour: str) -> str:
    """Colour text for terminals. click drops colours elsewhere, but does not know NO_COLOR."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour)
