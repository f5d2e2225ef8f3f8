"""User inputs as the data shows them: rows before anything is known of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from penstock.data.datasets import LABEL_NAMES, existing
from penstock.data.files import ARRAY_SUFFIXES, read_arrays, read_rows
from penstock.data.recordings import example_rows, is_recording, open_recording
from penstock.errors import ConfigError
from penstock.optimizer.plan import Plan
from penstock.types import DATATYPES, Array, TensorSpec

Row = dict[str, Array]
# Maximum number of rows that are read.
MAX_ROWS = 256
# Array of an `.npz` with the lengths of rows before padding.
LENGTHS_NAME = "lengths"
# Numbers of JSON and Python have no datatype size.
DEFAULTS: dict[str, np.dtype[np.generic]] = {"f": np.dtype(np.float32), "i": np.dtype(np.int64)}


def read_sent(plan: Plan) -> list[Row]:
    """Read some rows of the plan's data, without the labels it names; none without data."""
    if not plan.data:
        return []
    path = existing(plan.data)
    if is_recording(path):
        rows = example_rows(open_recording(path), has_batch=True, latest=MAX_ROWS).rows
        return [{name: _element(array) for name, array in row.items()} for row in rows]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file())[:MAX_ROWS]
        name = plan.data_name or "image"
        return [{name: np.array([each.read_bytes()], object)} for each in files]
    if path.suffix in ARRAY_SUFFIXES:
        arrays = {n: a for n, a in read_arrays(path).items() if n != plan.labels or not n}
        if not arrays:
            raise ConfigError([f"{path}: holds only the labels; expected the model's inputs too"])
        num_rows = min(MAX_ROWS, *(len(array) for array in arrays.values()))
        named = {name or plan.data_name or "input": array for name, array in arrays.items()}
        return [{name: _element(a[n]) for name, a in named.items()} for n in range(num_rows)]
    rows = read_rows(path).rows[:MAX_ROWS]
    return [{n: _element(value) for n, value in row.items() if n != plan.labels} for row in rows]


def without_labels(rows: Sequence[Row], taken: Collection[str] = ()) -> list[Row]:
    """Remove the default label, unless the model takes an input of that name."""
    label = next((n for n in LABEL_NAMES if rows and n in rows[0] and n not in taken), None)
    return [{name: array for name, array in row.items() if name != label} for row in rows]


def as_long_as_told(rows: Sequence[Row], taken: Collection[str]) -> list[Row]:
    """Cut padded rows to their `lengths` along the first axis, where it is long enough, unless
    `lengths` is an input of the model."""
    if not rows or LENGTHS_NAME not in rows[0] or LENGTHS_NAME in taken:
        return list(rows)
    lengths = [int(row[LENGTHS_NAME][0]) for row in rows]
    is_cut = {name: len(array) >= max(1, *lengths) > 1 for name, array in rows[0].items()}
    return [
        {
            name: array[:length] if is_cut[name] else array
            for name, array in row.items()
            if name != LENGTHS_NAME
        }
        for row, length in zip(rows, lengths, strict=True)
    ]


def specs_of(rows: Sequence[Mapping[str, Array]], kind: str = "input") -> tuple[TensorSpec, ...]:
    """Return tensor specs that fit all rows: sizes that differ or are 0 are variable. ConfigError
    if rows do not agree."""
    problems: list[str] = []
    specs: list[TensorSpec] = []
    for name, first in rows[0].items():
        if any(name not in row for row in rows):
            problems.append(f"{kind} '{name}': not every example has it")
            continue
        shapes = {row[name].shape for row in rows}
        kinds = {row[name].dtype for row in rows}
        if len({len(shape) for shape in shapes}) > 1 or len(kinds) > 1:
            problems.append(f"{kind} '{name}': examples differ in datatype or number of axes")
            continue
        sizes = [set(each) for each in zip(*shapes, strict=True)]
        shape = tuple(each.pop() if len(each) == 1 and 0 not in each else -1 for each in sizes)
        specs.append(TensorSpec(name, _datatype(f"{kind} '{name}'", first, problems), shape))
    if problems:
        raise ConfigError(problems)
    return tuple(specs)


def _element(value: object) -> Array:
    """Convert one example's value; strings and scalars become tensors of one element."""
    if isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        return np.array([text], object)
    array = np.asarray(value)
    if array.dtype.kind in "US":
        texts = array if array.dtype.kind == "S" else np.char.encode(array, "utf-8")
        array = texts.astype(object)
    elif not isinstance(value, np.ndarray | np.generic) or array.dtype == np.float64:
        array = array.astype(DEFAULTS.get(array.dtype.kind, array.dtype))
    return array.reshape(1) if array.ndim == 0 else array


def _datatype(what: str, array: Array, problems: list[str]) -> str:
    if array.dtype.kind == "O":
        return "BYTES"
    for datatype in DATATYPES.values():
        if datatype.numpy == array.dtype and datatype.name != "BF16":
            return datatype.name
    problems.append(f"{what}: {array.dtype} is no datatype of the protocol")
    return "INVALID"
