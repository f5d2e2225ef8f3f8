"""The `bench` command: flags to a plan, runs to files and terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.api.bench_options import BenchOptions
from penstock.cli.commands import coloured, fail, typed_command
from penstock.cli.options import Command, add_options, from_environment
from penstock.cli.outputs import STDOUT, TableOutputs, files, print_json
from penstock.errors import ConfigError
from penstock.system.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.api.bench import BenchResult
    from penstock.benchmark.plan import BenchPlan
    from penstock.benchmark.results import BenchRun


@click.command(
    cls=Command,
    short_help="Measure a model or a server under load.",
    examples=[
        "penstock bench model.onnx -b 1:32",
        "penstock bench http://127.0.0.1:8000/v2/models/digits --concurrency 1:64",
        "penstock bench grpc://127.0.0.1:8001/digits --rate 100:1600 --data data.npz",
        "penstock bench models/digits --slo 'p99 < 20 ms at 200/s' --gate",
        "penstock bench openai+http://127.0.0.1:8000/v1 --rate 2 --lengths 512",
    ],
)
@click.argument("source", metavar="MODEL")
@add_options(BenchOptions, "options")
@add_options(TableOutputs, "outputs")
@click.pass_context
def bench(ctx: click.Context, source: str, options: BenchOptions, outputs: TableOutputs) -> None:
    """Measure MODEL under load: throughput and latency with confidence intervals.

    \b
    MODEL is one of
      model.onnx, models/NAME                        a model's file or folder: in this process
      http://host:port/v2/models/NAME[/versions/V]   v2 over HTTP: Penstock, Triton, MLServer
      grpc://host:port/NAME[/V]                      v2 over gRPC
      openai+http://host:port/v1                     completions or chat, streamed
      http://…                                       any other URL, with --body
    """
    from penstock.api.bench_plan import make_plans
    from penstock.benchmark import run_files

    try:
        ambient = from_environment(ctx, BenchOptions)
        plans = make_plans(source, options, command=typed_command(), ambient=ambient)
        run_files.check_outputs(files(outputs.json, outputs.html, outputs.csv))
        result = _measure(plans, options, outputs)
        _show(result, outputs)
    except ConfigError as error:
        fail(error)
    sys.exit(_conclude(result, options, outputs))


def _measure(
    plans: Sequence[BenchPlan], options: BenchOptions, outputs: TableOutputs
) -> BenchResult:
    from penstock.api import bench as api
    from penstock.report.live import BenchDisplay

    def keep(run: BenchRun) -> None:
        """Save the run so far, so that it survives a crash. A full disk does not stop the
        measurement; `_show` tries again and reports it."""
        with contextlib.suppress(ConfigError):
            if len(plans) == 1 and outputs.json not in ("", STDOUT):
                api.write_json([run], Path(outputs.json))

    with contextlib.nullcontext() if outputs.quiet else BenchDisplay() as live:
        watch = (lambda progress: None) if live is None else live.update
        return api.measure(plans, options, watch, keep)


def _show(result: BenchResult, outputs: TableOutputs) -> None:
    from penstock.api import bench as api
    from penstock.api import terminal

    if outputs.json == STDOUT:
        print_json(result.to_json())
    elif outputs.quiet:
        click.echo(result.headline)
    else:
        terminal.console().print(result)
    if outputs.html:
        api.write_html(result.runs, Path(outputs.html))
    if outputs.csv:
        api.write_csv(result.runs, Path(outputs.csv))
    for name in files(outputs.json):
        api.write_json(result.runs, Path(name))


def _conclude(result: BenchResult, options: BenchOptions, outputs: TableOutputs) -> int:
    """Print the checks of the gate and return the exit code."""
    from penstock.benchmark.run import INTERRUPTED

    if any(run.problem == INTERRUPTED for run in result.runs):
        return ExitCode.INTERRUPTED
    if options.gate or options.baseline:
        for check in result.checks:
            mark = coloured("pass", "green") if check.is_passed else coloured("FAIL", "red")
            click.echo(f"{mark}  {check.text}", err=outputs.json == STDOUT)
    if any(run.is_partial for run in result.runs):
        return ExitCode.FAILED
    return ExitCode.MISSED if options.gate and not result.is_passed else ExitCode.OK
