"""The `optimize` command: flags and a plan file to a Plan, the results to files and terminal."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock import staging
from penstock.commands import fail
from penstock.errors import ConfigError, PenstockError
from penstock.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.optimizer.plan import Plan
    from penstock.optimizer.results import Optimization


@click.command()
@click.argument("model", required=False)
@click.option(
    "--data",
    metavar="PATH",
    help="Representative inputs. Default: random inputs, without steps that may change answers. "
    "Files as for bench: .npz, .npy, .jsonl, .json, .parquet, .txt (prompts) or a folder of "
    "images. Give it whenever you can; language models need it.",
)
@click.option(
    "--data-name",
    metavar="INPUT",
    help="Input that .npy files and images are for. Default: the only input. Needed when the "
    "model has several.",
)
@click.option(
    "--labels",
    metavar="NAME",
    help="Array or field of --data with the labels. Default: label, labels or y. Needed when it "
    "has another name.",
)
@click.option(
    "--eval",
    "eval",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Evaluator: takes outputs and labels, returns scores. One score per example; default: "
    "top1 for class labels. Give it when labels are not class numbers.",
)
@click.option(
    "--calibration",
    metavar="PATH",
    help="Inputs for calibration only. Default: a part of --data. Give it when INT8 ranges should "
    "come from other data.",
)
@click.option(
    "--slo",
    metavar="SLO",
    help="Latency target, e.g. 'p99 < 20 ms at 200/s'. Language models: 'ttft p99 < 500 ms, tpot "
    "p99 < 100 ms at 2/s'. Needed here or in --plan.",
)
@click.option(
    "--accuracy",
    metavar="BUDGET",
    help="Accuracy budget, e.g. 'top1 drop <= 0.5 %'. Default: 1 %, for language models 'kl rise "
    "<= 0.02'. Also 'score rise <= 2 % relative' and 'agreement drop <= 3 %'. Lower it when errors "
    "are expensive; a tighter budget needs more examples.",
)
@click.option(
    "--preprocess",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Function from requests to model inputs: tokenise, resize. Default: none. Give it to "
    "serve it with the model, covered by the SLO. Needs --data.",
)
@click.option(
    "--postprocess",
    metavar="PACKAGE.MODULE:FUNCTION",
    help="Function from model outputs to responses: softmax, NMS. Default: none. Give it to serve "
    "it with the model, covered by the SLO and judged by labels or --eval. Needs --data.",
)
@click.option(
    "--out",
    metavar="REPOSITORY",
    help="Model repository for the new version, created if missing. Needed here or in --plan.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the model in the repository. Default: the file's or folder's name. Give it when "
    "that name is taken or unclear.",
)
@click.option(
    "--price",
    type=click.FloatRange(0, min_open=True),
    help="Price of the machine per hour, in any currency. Default: none. Give it to see the cost "
    "of a million inferences, or when the SLO limits it.",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="Time limit for the whole run, e.g. 10m. Default: none. Give it when you cannot wait for "
    "all steps; the best version found in time is saved.",
)
@click.option(
    "--duration",
    metavar="TIME",
    help="Time limit per measurement of one candidate. Default: 10s. Raise it when the report "
    "calls candidates equal and the difference matters to you.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Device: auto, cpu, cuda (each GPU) or cuda:N. Default: auto, which runs PyTorch models "
    "on the GPUs if there are any and all others on the CPU. Choose cpu to optimise for servers "
    "without a GPU, cuda:N to keep the other GPUs free.",
)
@click.option(
    "--exhaustive",
    is_flag=True,
    default=None,
    help="Try every step, even after the SLO is met. Default: stop at the first stage that is "
    "enough, and skip steps that this hardware should not profit from. Choose it to see the "
    "fastest this model can be.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    help="Random seed for the data split and the arrival times. Default: 0. Change it to check "
    "that the choice does not depend on it.",
)
@click.option(
    "--outputs",
    metavar="NAME,NAME",
    help="Outputs whose answers matter. Default: all. Name them when others may change, such as "
    "intermediate tensors that no client reads.",
)
@click.option(
    "--fresh",
    is_flag=True,
    default=None,
    help="Measure everything again. Default: resume an earlier run of the same command. Use it "
    "when the machine or its load has changed.",
)
@click.option(
    "--plan",
    "plan_path",
    metavar="FILE",
    help="TOML file with these options, keys named as the flags. Flags override the file. Use it "
    "to keep the options in version control.",
)
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    help="File for the HTML report. Default: report.html beside the journal in --out. Give it to "
    "choose another place.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="File for the results as JSON. Default: none. Give it for scripts, or to show the report "
    "again with penstock report.",
)
def optimize(
    model: str | None,
    plan_path: str | None,
    html_path: str | None,
    json_path: str | None,
    **flags: Any,
) -> None:
    """Find the cheapest configuration of MODEL that meets an SLO.

    The version found is measured through a real server, checked for accuracy, and added to a
    repository with the evidence.

    \b
    MODEL is one of
      model.onnx                 weights in other files must be beside it
      package.module:factory     a function that returns an nn.Module
      model.pt2                  written by torch.export.save
      folder/                    Hugging Face: config.json and model.safetensors
      model.gguf                 a language model; so are Hugging Face folders of one
      models/NAME[/VERSION]      a version in a repository, to optimise it again

    Interrupted runs resume: run the same command again. Exit codes: 0 SLO kept, 1 failed, 2 SLO
    missed (the best version is saved), 3 refused by the accuracy gate, 4 disturbed measurements,
    64 wrong usage, 130 interrupted.
    """
    from penstock.benchmark import run_files
    from penstock.optimizer import disk
    from penstock.optimizer.first_line import exit_code

    try:
        plan = make_plan(model, plan_path, flags)
        run_files.check_outputs([html_path, json_path])
        found, is_interrupted = _optimize(plan)
        _show(found, plan, html_path, json_path)
    except PenstockError as error:
        fail(error)
    except disk.WriteFailed as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        if not staging.is_full(error):
            raise
        place = f"{error.filename}: " if error.filename else ""
        hint = "free some space and run the same command again: it resumes"
        click.echo(f"error: {place}{error.strerror}; {hint}", err=True)
        sys.exit(ExitCode.FAILED)
    except KeyboardInterrupt:
        click.echo("interrupted; run the same command again to resume", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    if found.uncommitted:
        sys.exit(ExitCode.FAILED)
    # An interrupted script must stop, even if the SLO happens to be kept.
    sys.exit(ExitCode.INTERRUPTED if is_interrupted else exit_code(found))


def make_plan(model: str | None, plan_path: str | None, flags: dict[str, Any]) -> Plan:
    """Combine flags and plan file; the problems of both are reported together."""
    from penstock.optimizer import plan_file

    file = plan_file.read(Path(plan_path)) if plan_path else None
    given = {"model": model, **flags}
    return plan_file.make_plan(
        {key: value for key, value in given.items() if value is not None}, file
    )


def _optimize(plan: Plan) -> tuple[Optimization, bool]:
    """Return the results, and whether Ctrl-C ended the run early."""
    from penstock.optimizer.interruption import Interruption
    from penstock.optimizer.llm.recognise import is_language_model
    from penstock.report.optimize_live import Live

    if is_language_model(plan.model):
        from penstock.optimizer.llm.text_run import optimize as run
    else:
        from penstock.optimizer.run import optimize as run

    command = shlex.join(["penstock", *sys.argv[1:]])
    with Live() as live, Interruption(live.acknowledge) as interruption:
        found = run(plan, live.update, command)
    return found, interruption.count > 0


def _show(found: Optimization, plan: Plan, html_path: str | None, json_path: str | None) -> None:
    from penstock import terminal
    from penstock.benchmark.run_files import write_text
    from penstock.optimizer import optimization_files
    from penstock.optimizer.run import report_path
    from penstock.report import optimize as optimize_report
    from penstock.report import optimize_table

    console = terminal.console()
    console.print(optimize_table.shown(found))
    page = optimize_report.page(found)
    html = Path(html_path) if html_path else report_path(plan)
    html = _write(html, found.name, lambda path: write_text(page, path))
    if not json_path and not found.version:
        # Nothing else keeps the verdict.
        json_path = str(html.with_suffix(".json"))
    json = None
    if json_path:
        json = _write(
            Path(json_path),
            found.name,
            lambda path: optimization_files.write_optimization(found, path),
        )
    if not found.version:
        _explain(found, html, json)
        return
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
    reason, advice = found.uncommitted, "free some space and run the same command again: it resumes"
    advice += " from the journal and commits"
    if found.proof_failure:
        advice = "run the same command again: it resumes from the journal and repeats the proof"
    if found.kept_version:
        reason = f"version {found.kept_version} of {found.name} keeps its SLO and stays served; "
        reason += "this result is not proven"
        advice = "run the same command again on a quiet machine"
    lines = [
        f"no version was committed: {reason}",
        f"the verdict is kept: report {html}, JSON {json}; the build is in {found.build_folder}",
        advice,
    ]
    click.echo("\n".join(f"penstock optimize: {each}" for each in lines), err=True)
