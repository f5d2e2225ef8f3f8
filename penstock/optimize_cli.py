"""The `optimize` command: flags and a plan file to a Plan, what was found to files and terminal."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.optimizer.plan import Plan
    from penstock.optimizer.results import Optimization

FAILED = 1
INTERRUPTED = 130


class _WrongFlag(click.UsageError):
    exit_code = FAILED


class _Command(click.Command):
    """A flag that is not known must not look like an SLO that is missed: both would be exit 2."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise _WrongFlag(error.format_message(), error.ctx) from None


@click.command(cls=_Command)
@click.argument("model", required=False)
@click.option(
    "--data",
    metavar="PATH",
    help="Representative inputs, as for bench: .npz, .npy, .jsonl, .json, .parquet, .txt (prompts) "
    "or a folder of images. Give it whenever you can: without it nothing is quantised, and no "
    "language model is optimised.",
)
@click.option(
    "--data-name",
    metavar="INPUT",
    help="Which input .npy files and images are for. Needed when the model has several.",
)
@click.option(
    "--labels",
    metavar="NAME",
    help="The array or field of --data with the right answers. Needed when it is not called label, "
    "labels or y.",
)
@click.option(
    "--eval",
    "eval",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Called with outputs and labels, gives one score per example. Give it when right answers "
    "are not class numbers.",
)
@click.option(
    "--calibration",
    metavar="PATH",
    help="Inputs for calibration alone. Give it when --data is not what INT8 ranges should be "
    "taken from; else a part of --data is used.",
)
@click.option(
    "--slo",
    metavar="SLO",
    help="What must hold when served, as in 'p99 < 20 ms at 200/s' or, of language models, "
    "'ttft p99 < 500 ms, tpot p99 < 100 ms at 2/s'. Needed, here or in --plan.",
)
@click.option(
    "--accuracy",
    metavar="BUDGET",
    help="How much may be lost, as in 'top1 drop <= 0.5 %', 'score rise <= 2 % relative' or, of "
    "language models, 'kl rise <= 0.02' or 'agreement drop <= 3 %'; 1 %, or that kl, unless given. "
    "Lower it where mistakes are dear, and bring more examples.",
)
@click.option(
    "--preprocess",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="From what users send to what the model takes: tokenise, decode, resize. Give it to have "
    "it served, and covered by the SLO. Needs --data.",
)
@click.option(
    "--postprocess",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="From what the model gives to what users get: softmax, names of classes, boxes that are "
    "left. Give it to have it served, covered by the SLO and judged by labels or --eval. Needs "
    "--data.",
)
@click.option(
    "--out",
    metavar="REPOSITORY",
    help="Where the version goes; made if it is not there. Needed, here or in --plan.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="The model's name in the repository. Give it when the file's name will not do.",
)
@click.option(
    "--price",
    type=click.FloatRange(0, min_open=True),
    help="Price of the machine per hour, in any currency. Give it to get the cost of a million "
    "inferences, or to have a limit on it.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Longest time for everything, as in 10m; then the best so far is kept. Give it when you "
    "cannot wait for the end of the sequence.",
)
@click.option(
    "--duration",
    metavar="TIME",
    help="Longest time to measure one load of one candidate; 10s unless given. Raise it when the "
    "report calls differences equal that you care about.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Where the original and all candidates run: auto (PyTorch on the GPUs if there are any, "
    "all else on the CPU), cpu, cuda (on each GPU) or cuda:N. Choose cpu to optimise for servers "
    "without a GPU, cuda:N to keep off the other GPUs.",
)
@click.option(
    "--exhaustive",
    is_flag=True,
    default=None,
    help="Go on after the SLO is kept, and try what the hardware should not profit from. Choose it "
    "to see how far a model can go.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    help="Of the split of the examples and of arrivals. Change it to see whether a choice was "
    "luck.",
)
@click.option(
    "--outputs",
    metavar="NAME,NAME",
    help="Outputs whose answers matter; default: all. Name them when others may change, such as "
    "intermediate tensors that no client reads.",
)
@click.option(
    "--fresh",
    is_flag=True,
    default=None,
    help="Measure everything again instead of resuming an earlier run of the same command. Use it "
    "after the machine or its load has changed.",
)
@click.option(
    "--plan",
    "plan_path",
    metavar="FILE",
    help="All of this as TOML, keys as the flags; flags go before it. Use it to keep wishes with "
    "the model.",
)
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    help="Where the report goes; beside the version's journal unless given. Give it to find it "
    "sooner.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write what was found as JSON. Give it for scripts.",
)
def optimize(
    model: str | None,
    plan_path: str | None,
    html_path: str | None,
    json_path: str | None,
    **flags: Any,
) -> None:
    """Make MODEL keep an SLO without losing accuracy, prove it, and add it to a repository.

    \b
    MODEL is one of
      model.onnx                 with its external data beside it
      package.module:factory     a function that returns an nn.Module
      model.pt2                  what torch.export.save writes
      folder/                    Hugging Face: config.json and model.safetensors
      model.gguf                 a language model, as are folders of such
      models/NAME[/VERSION]      a version of a repository, to be optimised again

    Killed at any moment it goes on where it was when it is run again. Exit codes: 0 the SLO is
    kept, 2 it is not and the best is saved, 3 the accuracy gate allows nothing that would help.
    """
    from penstock.benchmark.report import run_files
    from penstock.optimizer import disk
    from penstock.optimizer.report.first_line import exit_code

    try:
        plan = make_plan(model, plan_path, flags)
        run_files.check_outputs([html_path, json_path])
        found = _optimize(plan)
        _show(found, plan, html_path, json_path)
    except ConfigError as error:
        click.echo("\n".join(f"penstock optimize: {each}" for each in error.problems), err=True)
        sys.exit(FAILED)
    except PenstockError as error:
        click.echo(f"penstock optimize: {error}", err=True)
        sys.exit(FAILED)
    except disk.WriteFailed as error:
        click.echo(f"penstock optimize: {error}", err=True)
        sys.exit(FAILED)
    except OSError as error:
        if not disk.is_full(error):
            raise
        place = f"{error.filename}: " if error.filename else ""
        hint = "free some space and run the same command again: it resumes"
        click.echo(f"penstock optimize: {place}{error.strerror}; {hint}", err=True)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        click.echo("penstock optimize: interrupted; the same command goes on", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(FAILED if found.uncommitted else exit_code(found))


def make_plan(model: str | None, plan_path: str | None, flags: dict[str, Any]) -> Plan:
    """Of flags and file; what is wrong with either is told together."""
    from penstock.optimizer import plan_file

    wishes = plan_file.read(Path(plan_path)) if plan_path else {}
    given = {"model": model, **flags}
    return plan_file.make_plan(
        {**wishes, **{key: value for key, value in given.items() if value is not None}}
    )


def _optimize(plan: Plan) -> Optimization:
    from penstock.optimizer.llm.recognise import is_language_model
    from penstock.optimizer.report.optimize_live import Live

    if is_language_model(plan.model):
        from penstock.optimizer.llm.text_run import optimize as run
    else:
        from penstock.optimizer.run import optimize as run

    command = shlex.join(["penstock", *sys.argv[1:]])
    with Live() as live:
        return run(plan, live.update, command)


def _show(found: Optimization, plan: Plan, html_path: str | None, json_path: str | None) -> None:
    from penstock import terminal
    from penstock.benchmark.report.run_files import write_text
    from penstock.optimizer.report import optimization_files, optimize_page, optimize_table
    from penstock.optimizer.run import report_path

    console = terminal.console()
    console.print(optimize_table.shown(found))
    page = optimize_page.page(found)
    html = Path(html_path) if html_path else report_path(plan)
    html = _write(html, found.name, lambda path: write_text(page, path))
    if not json_path and found.uncommitted:
        # Nothing else keeps the verdict.
        json_path = str(html.with_suffix(".json"))
    json = None
    if json_path:
        json = _write(
            Path(json_path),
            found.name,
            lambda path: optimization_files.write_optimization(found, path),
        )
    if found.uncommitted:
        _explain(found, html, json)
        return
    console.print(f"version {found.version} of {found.name} in {plan.out}; report: {html}")


def _write(path: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Write a file; into the folder for temporary files where its own place does not take it.
    Return where it is."""
    try:
        write(path)
    except ConfigError as error:
        other = Path(tempfile.mkdtemp(prefix=f"penstock-{name}-")) / path.name
        write(other)
        click.echo(f"penstock optimize: {error}; written to {other} instead", err=True)
        return other
    return path


def _explain(found: Optimization, html: Path, json: Path | None) -> None:
    lines = [
        f"no version was committed: {found.uncommitted}",
        f"the verdict is kept: report {html}, JSON {json}; the build is in {found.build_folder}",
        "free some space and run the same command again: it resumes from the journal and commits",
    ]
    click.echo("\n".join(f"penstock optimize: {each}" for each in lines), err=True)
