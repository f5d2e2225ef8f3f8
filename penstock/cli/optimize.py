"""The `optimize` command: flags and a plan file to a plan, the results to files and terminal."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.api.optimize_options import OptimizeOptions
from penstock.cli.commands import fail, typed_command
from penstock.cli.options import Command, add_options
from penstock.cli.outputs import STDOUT, PageOutputs, files, print_json
from penstock.errors import ConfigError, PenstockError
from penstock.repository import staging
from penstock.system.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.optimizer.plan import Plan
    from penstock.optimizer.results import Optimization


@click.command(
    cls=Command,
    short_help="Find the cheapest configuration that meets an SLO.",
    examples=[
        "penstock optimize model.onnx --data data.npz --slo 'p99 < 20 ms at 200/s' --out models",
        "penstock optimize bert/ --data texts.jsonl --slo 'p99 < 50 ms' --out models --budget 10m",
        "penstock optimize models/ensemble --data rows.npz --slo 'p99 < 50 ms at 50/s' --out new",
        "penstock optimize --plan plan.toml",
    ],
)
@click.argument("source", metavar="MODEL", required=False, default="")
@add_options(OptimizeOptions, "options")
@add_options(PageOutputs, "outputs")
def optimize(source: str, options: OptimizeOptions, outputs: PageOutputs) -> None:
    """Find the cheapest configuration of MODEL that meets an SLO.

    The version found is measured through a real server, checked for accuracy, and added to a
    repository with the evidence. The report is written beside it.

    \b
    MODEL is one of
      model.onnx                 weights in other files must be beside it
      package.module:factory     a function that returns an nn.Module
      model.pt2                  written by torch.export.save
      folder/                    Hugging Face: config.json and model.safetensors
      model.gguf                 a language model; so are Hugging Face folders of one
      models/NAME[/VERSION]      a version in a repository, to optimise it again;
                                 of an ensemble, the member that is its bottleneck

    Interrupted runs resume: run the same command again. Exit codes: 0 SLO kept, 1 failed, 2 SLO
    missed (the best version is saved), 3 refused by the accuracy gate, 4 disturbed measurements,
    64 wrong usage, 130 interrupted.
    """
    from penstock.api.optimize import make_plan
    from penstock.benchmark import run_files
    from penstock.optimizer import workspace
    from penstock.optimizer.first_line import exit_code

    try:
        plan = make_plan(source, options)
        run_files.check_outputs(files(outputs.html, outputs.json))
        found, is_interrupted = run_plan(plan, is_quiet=outputs.quiet)
        _show(found, plan, outputs)
    except PenstockError as error:
        fail(error)
    except workspace.WriteFailed as error:
        fail(ConfigError([str(error)]))
    except OSError as error:
        if not staging.is_full(error):
            raise
        place = f"{error.filename}: " if error.filename else ""
        hint = "free some space and run the same command again: it resumes"
        fail(ConfigError([f"{place}{error.strerror}; {hint}"]))
    except KeyboardInterrupt:
        click.echo("interrupted; run the same command again to resume", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    if found.uncommitted:
        sys.exit(ExitCode.FAILED)
    # An interrupted script must stop, even if the SLO happens to be kept.
    sys.exit(ExitCode.INTERRUPTED if is_interrupted else exit_code(found))


def run_plan(plan: Plan, *, is_quiet: bool = False) -> tuple[Optimization, bool]:
    """Return the results, and whether Ctrl-C ended the run early."""
    from penstock.optimizer.interruption import Interruption
    from penstock.optimizer.run import optimize as run
    from penstock.report.optimize_live import OptimizeDisplay

    command = typed_command()
    if is_quiet:
        with Interruption(lambda count: None) as interruption:
            found = run(plan, lambda progress: None, command)
    else:
        with OptimizeDisplay() as live, Interruption(live.acknowledge) as interruption:
            found = run(plan, live.update, command)
    return found, interruption.count > 0


def _show(found: Optimization, plan: Plan, outputs: PageOutputs) -> None:
    from penstock.api import optimize as api
    from penstock.api import terminal
    from penstock.optimizer.optimization_files import to_json, write_optimization
    from penstock.optimizer.workspace import report_path
    from penstock.report import optimize_table

    console = terminal.console()
    if outputs.json == STDOUT:
        print_json(to_json(found))
    elif outputs.quiet:
        click.echo(found.headline)
    else:
        console.print(optimize_table.shown(found))
    html = Path(outputs.html) if outputs.html else report_path(plan)
    html = _write(html, found.name, lambda path: api.write_html(found, path))
    json = Path(outputs.json) if files(outputs.json) else None
    if json is None and not found.version:
        # Nothing else keeps the verdict.
        json = html.with_suffix(".json")
    if json is not None:
        json = _write(json, found.name, lambda path: write_optimization(found, path))
    if not found.version:
        _explain(found, html, json)
    elif outputs.json != STDOUT and not outputs.quiet:
        console.print(f"version {found.version} of {found.name} in {plan.out}; report: {html}")


def _write(path: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Write a file, or to a temporary folder if that fails; return its path."""
    try:
        write(path)
    except ConfigError as error:
        other = Path(tempfile.mkdtemp(prefix=f"penstock-{name}-")) / path.name
        write(other)
        click.echo(f"penstock optimize: {error}; written to {other} instead", err=True)
        return other
    return path


def _explain(found: Optimization, html: Path, json: Path | None) -> None:
    reason, again = found.uncommitted, "run the same command again"
    advice = f"free some space and {again}: it resumes from the journal and commits"
    if found.proof_failure:
        advice = f"{again}: it resumes from the journal and repeats the proof"
    if found.kept_version:
        served = f"version {found.kept_version} of {found.name} keeps its SLO and stays served"
        reason, advice = f"{served}; this result is not proven", f"{again} on a quiet machine"
    kept = f"report {html}, JSON {json}; the build is in {found.build_folder}"
    for each in (f"no version was committed: {reason}", f"the verdict is kept: {kept}", advice):
        click.echo(f"penstock optimize: {each}", err=True)
