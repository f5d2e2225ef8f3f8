"""Converts `model_warmup` of config.pbtxt to `Warmup` values; `serving.warmups` makes tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from penstock.config import Warmup, WarmupInput
from penstock.errors import ConfigError
from penstock.repository.pbtxt_fields import Proto, datatype_name
from penstock.types import TensorSpec, shape_fits

# Next to the version folders, as in Triton.
FOLDER = "warmup"
MAX_COUNT = 10_000
# Sources of a tensor, by the field that is set.
SOURCES: Mapping[str, Literal["zero", "random", "file"]]
SOURCES = {"random_data": "random", "input_data_file": "file"}


def read(
    messages: Sequence[Proto],
    inputs: Sequence[TensorSpec],
    max_batch: int,
    model_folder: Path,
    problem: Callable[[str, str], None],
) -> tuple[Warmup, ...]:
    """Return the warm-ups; report those that do not fit the model to `problem`. Files are not
    opened here."""
    folder = model_folder / FOLDER
    warmups: list[Warmup] = []
    for index, message in enumerate(messages):
        tensors = _inputs(message)
        for path, text in _problems(message, max_batch, tensors, inputs, folder):
            problem(f"model_warmup[{index}].{path}", text)
        num_rows, count = max(1, message.batch_size), max(1, message.count)
        warmups.append(Warmup(message.name, num_rows, tensors, count, str(folder)))
    return tuple(warmups)


def fits(message: Proto, inputs: Sequence[TensorSpec], max_batch: int, *, has_files: bool) -> bool:
    """Whether a warm-up suits a model with these inputs, whose folder has its files or has none."""
    tensors = _inputs(message)
    if not has_files and any(tensor.source == "file" for tensor in tensors):
        return False
    return not [*_problems(message, max_batch, tensors, inputs, Path(FOLDER))]


def check_files(warmups: Sequence[Warmup]) -> None:
    """ConfigError for files that are missing."""
    wanted = [
        (index, each.folder, tensor)
        for index, each in enumerate(warmups)
        for tensor in each.inputs
        if tensor.source == "file"
    ]
    problems = [
        f"model_warmup[{index}].inputs.{tensor.name}.input_data_file: no file '{tensor.file}' in "
        f"the folder {FOLDER} beside the versions"
        for index, folder, tensor in wanted
        if not (Path(folder) / tensor.file).is_file()
    ]
    if problems:
        raise ConfigError(problems)


def _problems(
    message: Proto,
    max_batch: int,
    tensors: Sequence[WarmupInput],
    inputs: Sequence[TensorSpec],
    folder: Path,
) -> Iterator[tuple[str, str]]:
    """Yield what does not fit the model, as path and text."""
    if message.batch_size > max(1, max_batch):
        most = f"at most max_batch_size {max_batch}" if max_batch else "1 without a batch dimension"
        yield "batch_size", f"{message.batch_size}; expected {most}"
    if message.count > MAX_COUNT:
        yield "count", f"{message.count}; expected at most {MAX_COUNT}"
    given = {tensor.name for tensor in tensors}
    if missing := [s.name for s in inputs if s.name not in given and not s.is_optional]:
        yield "inputs", f"expected every input, {', '.join(missing)} too"
    for tensor in tensors:
        yield from _input_problems(tensor, inputs, folder)


def _inputs(message: Proto) -> tuple[WarmupInput, ...]:
    return tuple(_input(name, message.inputs[name]) for name in sorted(message.inputs))


def _input(name: str, message: Proto) -> WarmupInput:
    source = SOURCES.get(message.WhichOneof("input_data_type"), "zero")
    datatype = datatype_name(message) or "INVALID"
    return WarmupInput(name, datatype, tuple(message.dims), source, message.input_data_file)


def _input_problems(
    tensor: WarmupInput, inputs: Sequence[TensorSpec], folder: Path
) -> Iterator[tuple[str, str]]:
    where = f"inputs.{tensor.name}"
    specs = {spec.name: spec for spec in inputs}
    spec = specs.get(tensor.name)
    if spec is None:
        yield where, f"no such input; expected one of {', '.join(specs)}"
        return
    if tensor.datatype != spec.datatype:
        yield f"{where}.data_type", f"{tensor.datatype}; expected {spec.datatype}"
    if min(tensor.shape, default=1) <= 0 or not shape_fits(tensor.shape, spec.shape):
        expected = f"expected a shape that fits {list(spec.shape)}"
        yield f"{where}.dims", f"{list(tensor.shape)}; {expected}"
    if tensor.source == "file" and (problem := _file_problem(folder, tensor.file)):
        yield f"{where}.input_data_file", problem


def _file_problem(folder: Path, file: str) -> str:
    try:
        path = (folder / file).resolve()
        if not path.is_relative_to(folder.resolve()):
            return f"'{file}' leaves the folder {FOLDER}"
        path.exists()
    except (OSError, ValueError, RuntimeError):
        return f"'{file}' is not the name of a file"
    return ""
