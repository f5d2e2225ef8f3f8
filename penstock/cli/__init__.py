"""The command line: a thin layer over `penstock.api`. Each command has a module of its own, which
turns flags into options and results into text; this one is their group."""

from __future__ import annotations

import click

import penstock
from penstock.cli.bench import bench
from penstock.cli.capacity import capacity
from penstock.cli.commands import Commands
from penstock.cli.completion import completion
from penstock.cli.explain import explain
from penstock.cli.export import export
from penstock.cli.export_triton import import_
from penstock.cli.inspect import inspect
from penstock.cli.optimize import optimize
from penstock.cli.profile import profile
from penstock.cli.repo import repo
from penstock.cli.report import report
from penstock.cli.serve import serve
from penstock.system import logs

__all__ = ["main"]

EXAMPLES = """
\b
Start here:
  penstock serve model.onnx                serve a model file
  penstock bench model.onnx -b 1:32        measure it
  penstock optimize model.onnx --slo 'p99 < 20 ms at 200/s' --out models
                                           make it meet a latency target
"""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXAMPLES,
)
@click.version_option(penstock.__version__, prog_name="penstock")
def main() -> None:
    """Optimise and serve models under a latency target.

    Give Penstock a model, sample data and a latency target (SLO). It finds the cheapest
    configuration that meets the target, proves it, and serves it.
    """
    try:
        logs.configure(logs.from_environment())
    except ValueError as error:
        raise click.UsageError(str(error)) from None


COMMANDS = (serve, bench, optimize, profile, inspect, explain, capacity, report, repo, export)
for _each in (*COMMANDS, import_, completion):
    main.add_command(_each)
