"""Examples from a file as a source: fitted to the target's inputs, cycled endlessly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.data.files import FileRows
from penstock.data.fitting import DataMismatch, example, examples
from penstock.data.non_finite import NonFinite, find_non_finite
from penstock.data.samples import Origin, RequestForm, Sample
from penstock.errors import ConfigError
from penstock.types import Array, TensorSpec
from penstock.units import listed

# Problems listed per input; the rest is counted.
MAX_SHOWN = 3
# Usual names of a column of texts.
TEXT_NAMES = ("text", "sentence", "content", "review", "prompt", "image")
# The name that numpy.savez gives an unnamed array.
UNNAMED = "arr_0"

# All examples of an input: one array if they share a shape, else one each (None: it is omitted).
Column = Array | list[Array | None]


@dataclass(frozen=True, slots=True)
class Columns:
    """Examples by input name, the same number of each; `notes` are for the report."""

    by_name: Mapping[str, Column]
    num_examples: int
    notes: tuple[str, ...] = ()
    non_finite: tuple[NonFinite, ...] = ()

    def row(self, index: int) -> dict[str, Array]:
        """Return one example, without the batch dimension."""
        return {
            name: column[index, ...] if isinstance(column, np.ndarray) else row
            for name, column in self.by_name.items()
            if (row := column[index]) is not None
        }


def from_arrays(
    form: RequestForm, arrays: Mapping[str, Array], label: str, others: Collection[str] = ()
) -> Columns:
    """Fit arrays to the inputs of their names; ConfigError lists everything that does not fit.
    `others` names arrays of the file with another purpose, such as labels."""
    required = [spec.name for spec in form.required]
    arrays = {name: array for name, array in arrays.items() if name not in others}
    if arrays.keys() == {UNNAMED} and len(required) == 1 and UNNAMED not in form.names:
        arrays = {required[0]: arrays[UNNAMED]}
    names = _renamed(form, list(arrays))
    arrays = {names.get(name, name): array for name, array in arrays.items()}
    missing = [name for name in required if name not in arrays]
    problems = _mismatch(form, [*arrays], others, label) if missing else []
    columns: dict[str, Column] = {}
    for spec in form.inputs:
        if spec.name not in arrays:
            continue
        try:
            array = arrays[spec.name]
            if not form.has_batch and spec.shape[:1] == (1,) and array.shape[1:] == spec.shape[1:]:
                # Users omit the leading 1 of models with a fixed batch of 1.
                array = array[:, None]
            columns[spec.name] = examples(spec, array)
        except DataMismatch as misfit:
            problems.append(f"{label}: {misfit}")
    return _columns(form, columns, problems, _ignored(form, arrays), label)


def from_rows(
    form: RequestForm, rows: FileRows, label: str, others: Collection[str] = ()
) -> Columns:
    """Fit rows to the inputs; problems name their place in the file."""
    names = list(dict.fromkeys(name for row in rows.rows for name in row if name not in others))
    if given := _renamed(form, names):
        renamed = [{given.get(key, key): value for key, value in row.items()} for row in rows.rows]
        rows = FileRows(renamed, rows.numbers, rows.word)
        names = [given.get(name, name) for name in names]
    missing = {spec.name for spec in form.required} - set(names)
    problems = _mismatch(form, names, others, label) if missing else []
    columns: dict[str, Column] = {}
    for spec in form.inputs:
        if spec.name in missing:
            continue
        column, misfits = _fitted(spec, rows)
        problems += [f"{label}, {misfit}" for misfit in misfits[:MAX_SHOWN]]
        if len(misfits) > MAX_SHOWN:
            num_more = len(misfits) - MAX_SHOWN
            problems.append(f"{label}: input '{spec.name}': {num_more:,} more such examples")
        if any(array is not None for array in column):
            columns[spec.name] = _joined(column)
    return _columns(form, columns, problems, _ignored(form, names), label, rows.place)


def from_list(form: RequestForm, name: str, arrays: Sequence[Array], label: str) -> Columns:
    """Make columns from examples of one input that are known to fit."""
    others = [spec.name for spec in form.required if spec.name != name]
    problems = [f"{label}: input '{each}' is missing" for each in others]
    return _columns(form, {name: _joined(arrays)}, problems, (), label)


def check_batches(columns: Columns, batch_size: int, label: str) -> None:
    """Raise ConfigError if examples that may share a request cannot be stacked."""
    if batch_size == 1:
        return
    problems: list[str] = []
    for name, column in columns.by_name.items():
        if isinstance(column, np.ndarray):
            continue
        shapes = sorted({"none" if a is None else str(list(a.shape)) for a in column})
        shown = ", ".join(shapes[:4]) + (", …" if len(shapes) > 4 else "")
        problem = f"examples of different shapes ({shown}) cannot share a request"
        expected = f"expected one shape, or batch_size 1 instead of {batch_size}"
        problems.append(f"{label}: input '{name}': {problem}; {expected}")
    if problems:
        raise ConfigError(problems)


@dataclass(slots=True)
class TensorExamples:
    """A source of tensors. Samples of single examples are cached; batches are stacked each time."""

    columns: Columns
    has_batch: bool
    order: Iterator[list[int]]
    origin: Origin
    _samples: dict[int, Sample] = field(default_factory=dict)

    def next(self) -> tuple[int | None, Sample]:
        indices = next(self.order)
        if len(indices) > 1:
            # `check_batches` ensured that these columns are arrays.
            columns = self.columns.by_name.items()
            return None, Sample({n: c[indices] for n, c in columns if isinstance(c, np.ndarray)})
        index = indices[0]
        sample = self._samples.get(index)
        if sample is None:
            row = self.columns.row(index)
            batch = {name: array[None] for name, array in row.items()} if self.has_batch else row
            sample = self._samples[index] = Sample(batch)
        return index, sample


@dataclass(slots=True)
class TextExamples:
    """A source of fields: prompts, messages or a template's fields. The answer's length comes from
    `answers`, else from the example, else from the server."""

    samples: Sequence[Sample]
    answers: Iterator[int] | None
    order: Iterator[list[int]]
    origin: Origin

    def next(self) -> tuple[int | None, Sample]:
        index = next(self.order)[0]
        sample = self.samples[index]
        if self.answers is None:
            return index, sample
        max_tokens = next(self.answers)
        fields = sample.fields
        if "max_tokens" in fields:
            fields = {**fields, "max_tokens": max_tokens}
        return None, Sample(fields=fields, max_tokens=max_tokens)


def _renamed(form: RequestForm, names: Sequence[str]) -> dict[str, str]:
    """Return which column is the text of a model that takes only one."""
    return rename(form.required[0], names) if len(form.required) == 1 else {}


def rename(spec: TensorSpec, names: Sequence[str]) -> dict[str, str]:
    """Return the column meant by an input of one text whose name no column has, if any."""
    if not spec.is_text or spec.name in names:
        return {}
    usual = (spec.name.lower(), *TEXT_NAMES)
    found = next((name for each in usual for name in names if name.lower() == each), None)
    return {} if found is None else {found: spec.name}


def _mismatch(
    form: RequestForm, names: Sequence[str], others: Collection[str], label: str
) -> list[str]:
    """Describe the names of the file and of the model, side by side."""
    inputs = [_described(spec, form.has_batch) for spec in form.inputs]
    theirs = f"inputs are {listed(inputs)}" if len(inputs) > 1 else f"input is {inputs[0]}"
    there = [f"'{name}'" for name in (*names, *others)]
    ours = listed(there) if there else "no values"
    unknown = [name for name in names if name not in form.names]
    missing = [spec.name for spec in form.required if spec.name not in names]
    advice = "add " + listed([f"'{name}'" for name in missing])
    advice += ", or rename what is meant to be that" if unknown else ""
    if len(unknown) == len(missing) == 1:
        advice = f"rename '{unknown[0]}' to '{missing[0]}'"
    return [f"{label} has {ours}; the model's {theirs}; {advice}"]


def _described(spec: TensorSpec, has_batch: bool) -> str:
    shape = [-1, *spec.shape] if has_batch else list(spec.shape)
    optional = ", optional" if spec.is_optional else ""
    return f"'{spec.name}' ({spec.datatype} {shape}{optional})"


def _ignored(form: RequestForm, names: Collection[str]) -> tuple[str, ...]:
    """Note what is not sent; data sets often have extra columns such as ids."""
    unknown = [f"'{name}'" for name in names if name not in form.names]
    return (f"ignored: {listed(unknown)}",) if unknown else ()


def _fitted(spec: TensorSpec, rows: FileRows) -> tuple[list[Array | None], list[str]]:
    column: list[Array | None] = []
    misfits: list[str] = []
    for position, row in enumerate(rows.rows):
        array: Array | None = None
        if row.get(spec.name) is not None:
            try:
                array = example(spec, row[spec.name])
            except DataMismatch as misfit:
                misfits.append(f"{rows.place(position)}: {misfit}")
        elif not spec.is_optional:
            misfits.append(f"{rows.place(position)}: input '{spec.name}' is missing")
        column.append(array)
    return column, misfits


def _joined(column: Sequence[Array | None]) -> Column:
    arrays = [array for array in column if array is not None]
    if len(arrays) == len(column) and len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return list(column)


def _columns(
    form: RequestForm,
    columns: dict[str, Column],
    problems: list[str],
    notes: tuple[str, ...],
    label: str,
    place: Callable[[int], str] = "row {}".format,
) -> Columns:
    if not columns and not problems:
        problems.append("the model takes no inputs, and data was given")
    if problems:
        raise ConfigError(problems)
    non_finite: list[NonFinite] = []
    for spec in (spec for spec in form.inputs if spec.name in columns):
        non_finite += find_non_finite(spec, columns[spec.name], label, place)
    count = len(next(iter(columns.values())))
    return Columns(columns, count, notes, tuple(non_finite))
