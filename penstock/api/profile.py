"""Profiles: where the time of a batch goes. Used by `penstock.profile` and `penstock profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.api import shown
from penstock.api.profile_options import ProfileOptions
from penstock.benchmark import run_files
from penstock.data import InputSpec, RequestForm, Source, lengths, open_source
from penstock.errors import CommandLineError
from penstock.profiling import profiler
from penstock.profiling.opened import opened
from penstock.profiling.results import Profile
from penstock.types import Array

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Where the time of one batch goes. `profile` has every operator with its time and bound."""

    profile: Profile

    @property
    def recommendation(self) -> str:
        return self.profile.recommendation

    @property
    def total_s(self) -> float:
        """Seconds of one run, without the profiler."""
        return self.profile.total_s

    def save(self, path: str | Path) -> None:
        """Write a .json or .html file, by the name's ending."""
        writers = {".html": write_html, ".json": write_json}
        shown.writer_for(Path(path), writers)(self.profile, Path(path))

    def __rich__(self) -> RenderableType:
        from penstock.report import profile_table

        return profile_table.shown(self.profile)

    def __str__(self) -> str:
        return shown.to_text(self.__rich__())

    def _repr_html_(self) -> str:
        from penstock.report import profile

        return profile.fragment(self.profile)


def profile(model: str, options: ProfileOptions) -> ProfileResult:
    """Profile one batch in a child process; ConfigError if model or inputs do not fit."""
    with opened(model, options.model, options.threads) as folder:
        config = profiler.read_config(folder)
        source = _source(config, options)
        trace = Path(options.chrome_trace).absolute() if options.chrome_trace else None
        _, sample = source.next()
        tensors = sample.tensors
        rows: list[dict[str, Array]] = [dict(tensors)]
        if config.max_batch_size:
            indices = range(options.batch_size)
            rows = [{name: array[n] for name, array in tensors.items()} for n in indices]
        found = profiler.profile_build(folder, rows, num_runs=options.runs, trace=trace)
    found.inputs = source.origin.text
    return ProfileResult(found)


def write_html(profile: Profile, path: Path, command: str = "") -> None:
    from penstock.report import profile as report

    run_files.write_text(report.page(profile, command), path)


def write_json(profile: Profile, path: Path) -> None:
    run_files.write_text(msgspec.json.format(msgspec.json.encode(profile)).decode(), path)


def _source(config: ModelConfig, options: ProfileOptions) -> Source:
    has_batch = config.max_batch_size > 0
    if options.batch_size > max(1, config.max_batch_size):
        limit = config.max_batch_size or "one row, without a batch dimension"
        problem = f"--batch-size {options.batch_size}: the model takes at most {limit}"
        raise CommandLineError([problem])
    spec = InputSpec(
        path=options.data,
        name=options.data_name,
        lengths=lengths.parse(options.lengths) if options.lengths else None,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    form = RequestForm(kind="tensors", inputs=tuple(config.inputs), has_batch=has_batch)
    return open_source(spec, form, 0, 1)
