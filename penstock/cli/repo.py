"""The `repo` commands: versions of models in a repository, or on a running server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.api.repo_options import PromoteOptions
from penstock.cli.commands import Commands, fail
from penstock.cli.options import Command, add_options
from penstock.cli.outputs import STDOUT, write_json
from penstock.errors import PenstockError
from penstock.system.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.api.repo import RepoResult

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


@click.group(
    cls=Commands,
    short_help="List, compare, promote and remove versions.",
    examples=["penstock repo list models", "penstock repo promote models digits 2"],
)
def repo() -> None:
    """Manage the versions of models.

    REPOSITORY is a folder of models, or the URL of a running server: http://host:port, or
    http://host:port/PREFIX in a web application. A server serves a promoted version at once; a
    folder is read at the next start or load.
    """


def _json_flag(function: Function) -> Function:
    help_text = (
        "Write the answer as JSON to FILE. Default: none. - writes to stdout, and nothing else "
        "there. Use it in scripts."
    )
    option = click.option("--json", "json_path", metavar="FILE", default="", help=help_text)
    return option(function)


def _key_flag(function: Function) -> Function:
    help_text = (
        "API key with the scope 'admin'. Default: none. Needed when the server asks for one. "
        "Prefer PENSTOCK_API_KEY: other users of the machine can see flags."
    )
    option = click.option(
        "--api-key", default="", envvar="PENSTOCK_API_KEY", metavar="KEY", help=help_text
    )
    return option(function)


def _tell(ask: Callable[[], RepoResult[Value]], json_path: str) -> Value:
    """Print the answer, or write it as JSON; exit with its error."""
    from penstock.api import terminal

    try:
        result = ask()
        if json_path:
            write_json(result.value, json_path)
    except PenstockError as error:
        fail(error)
    if json_path != STDOUT:
        terminal.console().print(result)
    return result.value


@repo.command(
    "list",
    cls=Command,
    short_help="List versions and their evidence.",
    examples=["penstock repo list models", "penstock repo list http://127.0.0.1:8000"],
)
@click.argument("repository", metavar="[REPOSITORY]", default=".")
@_key_flag
@_json_flag
def list_versions(repository: str, api_key: str, json_path: str) -> None:
    """List the versions of all models of REPOSITORY, by default the current folder."""
    from penstock.api import repo as api

    _tell(lambda: api.list(repository, api_key=api_key), json_path)


@repo.command(
    cls=Command,
    short_help="Show promotions, rollbacks and removals.",
    examples=["penstock repo history models digits"],
)
@click.argument("repository", metavar="REPOSITORY")
@click.argument("model", metavar="MODEL")
@_key_flag
@_json_flag
def history(repository: str, model: str, api_key: str, json_path: str) -> None:
    """Show what was done to the versions of MODEL, by whom and why."""
    from penstock.api import repo as api

    _tell(lambda: api.history(repository, model, api_key=api_key), json_path)


@repo.command(
    cls=Command,
    short_help="Compare two versions.",
    examples=["penstock repo diff models digits 1 2"],
)
@click.argument("repository", metavar="REPOSITORY")
@click.argument("model", metavar="MODEL")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@_key_flag
@_json_flag
def diff(repository: str, model: str, a: str, b: str, api_key: str, json_path: str) -> None:
    """Compare versions A and B of MODEL: evidence, files and configuration."""
    from penstock.api import repo as api

    _tell(lambda: api.diff(repository, model, a, b, api_key=api_key), json_path)


@repo.command(
    cls=Command,
    short_help="Serve a version whose evidence is good.",
    examples=[
        "penstock repo promote models digits 2",
        "penstock repo promote http://127.0.0.1:8000 digits 2 --canary 5%",
        "penstock repo promote http://127.0.0.1:8000 digits 2 --shadow",
        "penstock repo promote models digits 2 --force 'same CPU, other name'",
    ],
)
@click.argument("repository", metavar="REPOSITORY")
@click.argument("model", metavar="MODEL")
@click.argument("version", metavar="VERSION")
@add_options(PromoteOptions, "options")
@_json_flag
def promote(
    repository: str, model: str, version: str, options: PromoteOptions, json_path: str
) -> None:
    """Serve VERSION of MODEL instead of the version that is served.

    It is refused if the evidence of the version is missing, did not keep the SLO, or is from other
    hardware than this machine or server: another CPU, fewer cores, other GPUs.
    """
    from penstock.api import repo as api

    _tell(lambda: api.promote_version(repository, model, version, options), json_path)


@repo.command(
    cls=Command,
    short_help="Serve the version from before.",
    examples=["penstock repo rollback models digits --reason 'p99 doubled'"],
)
@click.argument("repository", metavar="REPOSITORY")
@click.argument("model", metavar="MODEL")
@click.option(
    "--reason",
    default="",
    metavar="TEXT",
    help="Why the version is rolled back. Default: none. The history records it.",
)
@click.option(
    "--rollout-only",
    is_flag=True,
    help="Stop a running canary or shadow, and nothing else. Default: off. Give it when the "
    "rollout may have ended by itself: the stable version is then left alone.",
)
@_key_flag
@_json_flag
def rollback(
    repository: str, model: str, reason: str, rollout_only: bool, api_key: str, json_path: str
) -> None:
    """Serve the version of MODEL from before the last promotion that was not rolled back yet. If a
    rollout is running, stop that instead.

    A second rollback goes further back. A rollback needs no evidence.
    """
    from penstock.api import repo as api

    told = partial(api.rollback, repository, model, reason=reason, rollout_only=rollout_only)
    _tell(lambda: told(api_key=api_key), json_path)


@repo.command(
    cls=Command,
    short_help="Show how a canary or shadow stands.",
    examples=["penstock repo rollout http://127.0.0.1:8000 digits"],
)
@click.argument("repository", metavar="REPOSITORY")
@click.argument("model", metavar="MODEL")
@_key_flag
@_json_flag
def rollout(repository: str, model: str, api_key: str, json_path: str) -> None:
    """Show how the rollout of MODEL on a running server stands: its share of the requests, and
    each check with its figures. Afterwards, show how it ended."""
    from penstock.api import repo as api

    _tell(lambda: api.rollout(repository, model, api_key=api_key), json_path)


@repo.command(
    cls=Command,
    short_help="Compare files with their digests.",
    examples=["penstock repo verify models", "penstock repo verify models digits"],
)
@click.argument("repository", metavar="REPOSITORY")
@click.argument("model", metavar="[MODEL]", default="")
@_key_flag
@_json_flag
def verify(repository: str, model: str, api_key: str, json_path: str) -> None:
    """Read every file of every committed version of MODEL, or of all models, and compare it with
    its digest. The exit code is 1 if a version is damaged."""
    from penstock.api import repo as api

    rows = _tell(lambda: api.verify(repository, model, api_key=api_key), json_path)
    if any(row.state == "damaged" for row in rows):
        sys.exit(ExitCode.FAILED)


@repo.command(
    cls=Command,
    short_help="Remove old versions.",
    examples=["penstock repo prune models digits --keep 3 --dry-run"],
)
@click.argument("repository", metavar="REPOSITORY")
@click.argument("model", metavar="MODEL")
@click.option(
    "--keep",
    type=click.IntRange(1),
    required=True,
    metavar="N",
    help="Number of the newest versions to keep. Required. Others stay if they are in use.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only show what would be removed. Default: off. Use it first.",
)
@_key_flag
@_json_flag
def prune(
    repository: str, model: str, keep: int, dry_run: bool, api_key: str, json_path: str
) -> None:
    """Remove old versions of MODEL.

    The N newest versions stay, and those that are served, loaded by a server, or needed for a
    rollback.
    """
    from penstock.api import repo as api

    _tell(lambda: api.prune(repository, model, keep, dry_run=dry_run, api_key=api_key), json_path)
