"""Profile a model folder with a batch, in a child process: a library that crashes under its
profiler raises an error here and harms nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock import units
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer.simulate import fitted
from penstock.optimizer.trials import shape_groups, stacked
from penstock.processes.tool import ToolProcess
from penstock.profiling.results import Profile
from penstock.repository import layout
from penstock.system import devices
from penstock.types import Array
from penstock.wire.v2_client import Values

CHILD = "penstock.profiling.child"
TIMEOUT_S = 900.0
SAY_WHICH = "say which by --model"


class ProfileJob(msgspec.Struct):
    """The child's job. Its output files are given by path."""

    folder: str
    tensors: list[Values]
    num_rows: int
    batch: str
    num_runs: int
    # Folder where peaks are cached; empty: the user's cache.
    cache: str
    profile_path: str
    trace_path: str


class ProfileFailed(msgspec.Struct):
    """The child's answer if it failed."""

    problems: list[str]


def profile_build(
    folder: Path,
    rows: Sequence[Mapping[str, Array]],
    *,
    num_runs: int = 20,
    trace: Path | None = None,
    cache: Path | None = None,
) -> Profile:
    """Profile the model in `folder`, with so many runs per measurement, repeated under the
    profiler. `rows` are examples without a batch dimension; those that share the most common shapes
    run as one batch. `trace` is the Chrome trace to write. ConfigError if the model or the rows do
    not fit, BackendFailed if the child crashes."""
    config = read_config(folder)
    tensors, num_rows, text = make_batch(config, fitted(rows, config))
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as made:
        job = ProfileJob(
            folder=str(folder),
            tensors=tensors,
            num_rows=num_rows,
            batch=text,
            num_runs=num_runs,
            cache=str(cache or ""),
            profile_path=str(Path(made) / "profile.json"),
            trace_path=str(trace or ""),
        )
        return _run(job, Path(made))


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of the newest version of the one model there."""
    return layout.read(folder).only(folder, "", SAY_WHICH)


def make_batch(
    config: ModelConfig, rows: Sequence[Mapping[str, Array]]
) -> tuple[list[Values], int, str]:
    """Return one request made of the rows: its tensors, the number of rows, and a description."""
    if not rows:
        raise ConfigError(["nothing to profile with: expected at least one example"])
    if config.max_batch_size == 0:
        chosen = list(rows[:1])
    else:
        alike = max(shape_groups(config, rows, len(rows)), key=len)
        chosen = [rows[index] for index in alike[: config.max_batch_size]]
    tensors = stacked(config, chosen)
    return tensors, len(chosen), _described(tensors, len(chosen), config)


def _described(tensors: Sequence[Values], num_rows: int, config: ModelConfig) -> str:
    start = 1 if config.max_batch_size else 0
    sizes = ["x".join(map(str, each.shape[start:])) or "scalar" for each in tensors]
    shapes = [f"{each.name} {size}" for each, size in zip(tensors, sizes, strict=True)]
    rows = f"{units.count(num_rows, 'row')} of " if config.max_batch_size else ""
    return rows + ", ".join(shapes)


def _run(job: ProfileJob, made: Path) -> Profile:
    path = made / "job"
    path.write_bytes(msgspec.msgpack.encode(job))
    result = Path(job.profile_path)
    with ToolProcess(CHILD, [str(path)], environment=devices.worker_environment()) as process:
        try:
            status = process.wait(TIMEOUT_S)
        except TimeoutError:
            raise BackendFailed(f"profiling took longer than {TIMEOUT_S:g} s") from None
        if status == 0 and result.is_file():
            return msgspec.json.decode(result.read_bytes(), type=Profile)
        if result.is_file():
            raise ConfigError(msgspec.json.decode(result.read_bytes(), type=ProfileFailed).problems)
        raise BackendFailed(f"the profiler {process.describe_end()}")
