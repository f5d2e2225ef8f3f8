"""Converts `model_warmup` of config.pbtxt to `Warmup` values; `serving.warmups` makes tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from penstock.config import Warmup, WarmupInput
from penstock.repository.pbtxt_fields import Proto, datatype_name
from penstock.types import TensorSpec, shape_fits

# Next to the version folders, as in Triton.
FOLDER = "warmup"
MAX_COUNT = 10_000
# Sources of a tensor, by the field that is set.
SOURCES: Mapping[str, Literal["zero", "random", "file"]]
SOURCES = {"random_data": "random", "input_data_file": "file"}


def read(
    messages: Sequence[Proto], inputs: Sequence[TensorSpec], max_batch: int, model_folder: Path
) -> tuple[tuple[Warmup, ...], list[str]]:
    """Return the warm-ups that fit the model, and why others are skipped: a model whose inputs have
    changed is still served."""
    folder = model_folder / FOLDER
    warmups: list[Warmup] = []
    skipped: list[str] = []
    for index, message in enumerate(messages):
        path = f"model_warmup[{index}]"
        tensors = tuple(_input(name, message.inputs[name]) for name in sorted(message.inputs))
        problems = [*_problems(message, max_batch, tensors, inputs)]
        problems += [text for each in tensors for text in _input_problems(each, inputs, folder)]
        skipped += [f"{path}.{problem}; this warm-up is skipped" for problem in problems]
        if not problems:
            num_rows, count = max(1, message.batch_size), max(1, message.count)
            warmups.append(Warmup(message.name, num_rows, tensors, count, str(folder)))
    return tuple(warmups), skipped


def _problems(
    message: Proto, max_batch: int, tensors: Sequence[WarmupInput], inputs: Sequence[TensorSpec]
) -> Iterator[str]:
    if message.batch_size > max(1, max_batch):
        yield f"batch_size: {message.batch_size}; expected at most max_batch_size {max_batch}"
    if message.count > MAX_COUNT:
        yield f"count: {message.count}; expected at most {MAX_COUNT}"
    given = {tensor.name for tensor in tensors}
    if missing := [s.name for s in inputs if s.name not in given and not s.is_optional]:
        yield f"inputs: expected every input, {', '.join(missing)} too"


def _input(name: str, message: Proto) -> WarmupInput:
    source = SOURCES.get(message.WhichOneof("input_data_type"), "zero")
    datatype = datatype_name(message) or "INVALID"
    return WarmupInput(name, datatype, tuple(message.dims), source, message.input_data_file)


def _input_problems(
    tensor: WarmupInput, inputs: Sequence[TensorSpec], folder: Path
) -> Iterator[str]:
    where = f"inputs.{tensor.name}"
    specs = {spec.name: spec for spec in inputs}
    spec = specs.get(tensor.name)
    if spec is None:
        yield f"{where}: no such input; expected one of {', '.join(specs)}"
        return
    if tensor.datatype != spec.datatype:
        yield f"{where}.data_type: {tensor.datatype}; expected {spec.datatype}"
    if min(tensor.shape, default=1) <= 0 or not shape_fits(tensor.shape, spec.shape):
        expected = f"expected a shape that fits {list(spec.shape)}"
        yield f"{where}.dims: {list(tensor.shape)}; {expected}"
    if tensor.source == "file" and (problem := _file_problem(folder, tensor.file)):
        yield f"{where}.input_data_file: {problem}"


def _file_problem(folder: Path, file: str) -> str:
    try:
        path = (folder / file).resolve()
        if not path.is_relative_to(folder.resolve()):
            return f"'{file}' leaves the folder {FOLDER}"
        if not path.is_file():
            return f"no file '{file}' in the folder {FOLDER} beside the versions"
    except (OSError, ValueError, RuntimeError):
        return f"'{file}' is not the name of a file"
    return ""
