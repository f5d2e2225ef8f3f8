"""The `profile` command: flags to a batch, a profile to files and terminal."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.commands import fail
from penstock.errors import CommandLineError, PenstockError

if TYPE_CHECKING:
    from penstock.benchmark.inputs import Source
    from penstock.config import ModelConfig
    from penstock.optimizer.profile.results import Profile


@click.command()
@click.argument("model")
@click.option(
    "--model",
    "name",
    metavar="NAME",
    default="",
    help="Model to profile. Needed when MODEL is a repository that holds several.",
)
@click.option(
    "--data",
    metavar="PATH",
    default="",
    help="Representative inputs, as in bench: .npz, .npy, .jsonl, .json, .parquet or a folder of "
    "images. Random values of the signature are used unless it is given: give it when time depends "
    "on values or on lengths.",
)
@click.option(
    "--data-name",
    metavar="INPUT",
    default="",
    help="Which input .npy files and images are for. Needed when the model has several.",
)
@click.option(
    "--lengths",
    metavar="LAW",
    default="",
    help="Size of variable dimensions without --data, such as 128. Default: 1. Give it for text "
    "models: one token says nothing about fifty.",
)
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Rows in the batch that is profiled. Raise it to what the server really batches "
    "(`penstock explain` shows it): small and large batches have different bottlenecks.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    default=None,
    help="Threads of the instance. Default: as configured. Change it to see what one of several "
    "smaller instances would do.",
)
@click.option(
    "--runs",
    type=click.IntRange(3, 10_000),
    default=20,
    show_default=True,
    help="Runs whose medians are shown. Raise it where the machine is not quiet.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    show_default=True,
    help="Of random inputs, and of which examples are taken. Change it to see whether the answer "
    "depends on them.",
)
@click.option(
    "--html",
    "html_path",
    metavar="FILE",
    default="",
    help="Write a self-contained HTML page with the roofline. Use it to share the results.",
)
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    default="",
    help="Write a trace for chrome://tracing or ui.perfetto.dev. Use it to see the order and the "
    "gaps between operators.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    default="",
    help="Write the profile. Use it where scripts read it.",
)
def profile(model: str, **flags: Any) -> None:
    """Show where the milliseconds of MODEL go, what binds them, and what to do next.

    \b
    MODEL is one of
      models/NAME     a model's folder
      models/         a repository, with --model
      model.onnx      an ONNX file
    """
    try:
        _check_outputs(flags)
        found = _profiled(model, flags)
        _show(found, model, flags)
    except PenstockError as error:
        fail(error)


def _check_outputs(flags: dict[str, Any]) -> None:
    """Check the output files before measuring."""
    from penstock.benchmark import run_files

    run_files.check_outputs(flags[key] for key in ("html_path", "trace_path", "json_path"))


def _profiled(model: str, flags: dict[str, Any]) -> Profile:
    from penstock.optimizer.profile import profiler
    from penstock.optimizer.profile.opened import opened

    with opened(model, flags["name"], flags["threads"]) as folder:
        config = profiler.read_config(folder)
        source = _source(config, flags)
        settings = profiler.Settings(
            num_runs=flags["runs"],
            trace=Path(flags["trace_path"]).absolute() if flags["trace_path"] else None,
        )
        _, sample = source.next()
        rows: list[dict[str, Any]]
        if config.max_batch_size:
            rows = [
                {name: array[index] for name, array in sample.tensors.items()}
                for index in range(flags["batch_size"])
            ]
        else:
            rows = [dict(sample.tensors)]
        found = profiler.profile_build(folder, rows, settings)
    found.inputs = source.origin.text
    return found


def _source(config: ModelConfig, flags: dict[str, Any]) -> Source:
    from penstock.benchmark.inputs import InputSpec, RequestForm, lengths, open_source

    has_batch = config.max_batch_size > 0
    if flags["batch_size"] > max(1, config.max_batch_size):
        limit = config.max_batch_size or "one row, without a batch dimension"
        raise CommandLineError(
            [f"--batch-size {flags['batch_size']}: the model takes at most {limit}"]
        )
    spec = InputSpec(
        path=flags["data"],
        name=flags["data_name"],
        lengths=lengths.parse(flags["lengths"]) if flags["lengths"] else None,
        batch_size=flags["batch_size"],
        seed=flags["seed"],
    )
    form = RequestForm(kind="tensors", inputs=tuple(config.inputs), has_batch=has_batch)
    return open_source(spec, form, 0, 1)


def _show(found: Profile, model: str, flags: dict[str, Any]) -> None:
    import msgspec

    from penstock import terminal
    from penstock.benchmark import run_files
    from penstock.report import profile, profile_table

    terminal.console().print(profile_table.shown(found))
    if found.gpu is not None:
        click.echo("\nWith NVIDIA's tools, where they are installed:")
        for line in profile_table.tool_commands(model, flags["name"], flags["batch_size"]):
            click.echo(f"  {line}")
    if flags["html_path"]:
        command = shlex.join(["penstock", *sys.argv[1:]])
        run_files.write_text(profile.page(found, command), Path(flags["html_path"]))
    if flags["json_path"]:
        text = msgspec.json.format(msgspec.json.encode(found)).decode()
        run_files.write_text(text, Path(flags["json_path"]))
