"""Opens a data set by its path: chooses the reader and writes the notes for the report."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import penstock.data.example_sets as example_sets
import penstock.data.files as files
import penstock.data.recordings as recordings
from penstock.data.cycling import shares
from penstock.data.example_sets import Columns
from penstock.data.files import FileRows
from penstock.data.images import Images, read_images
from penstock.data.lengths import Sizes
from penstock.data.non_finite import describe
from penstock.data.prompts import samples_from_rows
from penstock.data.replays import open_replay
from penstock.data.samples import InputSpec, Origin, RequestForm, Source
from penstock.errors import ConfigError
from penstock.types import Array, TensorSpec
from penstock.units import quoted
from penstock.wire.recording import SUFFIX

# Default names of labels: `penstock optimize` evaluates with them, a load omits them.
LABEL_NAMES = ("label", "labels", "y")


@dataclass(slots=True)
class DatasetSummary:
    """A data set in the report: its files, and how they were processed."""

    files: Sequence[Path]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dataset:
    """All tensors of a data set in its own order, with the labels and arrays beside them."""

    columns: Columns
    summary: DatasetSummary
    labels: Array | None = None
    beside: Mapping[str, Array] = field(default_factory=dict)
    # Why labels are missing, all or some; empty if none were expected.
    label_problem: str = ""
    # Inputs whose values a recording does not have: they are zeros.
    redacted: tuple[str, ...] = ()
    # Arrival of a recording's first and last request, ISO 8601; empty for other data.
    span: tuple[str, ...] = ()


def open_data(spec: InputSpec, form: RequestForm, sizes: Sizes, place: tuple[int, int]) -> Source:
    """Open data for process i of n (`place`); ConfigError when the data does not fit."""
    if spec.num_replayed:
        return open_replay(spec, form, place)
    if form.kind == "tensors":
        return _tensor_examples(spec, form, place)
    path = existing(spec.path)
    summary = DatasetSummary([path])
    rows = _rows(spec, form, path, summary)
    if sizes.answers is not None and form.kind == "fields":
        # A placeholder: each request gets its own limit.
        rows = replace(rows, rows=[{"max_tokens": 1, **row} for row in rows.rows])
    samples = samples_from_rows(form, rows, path.name)
    _note_left_out(summary, len(samples), len(rows.rows), "the others have no question")
    if sizes.answers is not None:
        summary.notes.append(f"answer tokens (at most): {sizes.answers_text}")
    origin = _origin(spec, len(samples), summary)
    order = shares(len(samples), spec.seed, *place)
    return example_sets.TextExamples(samples, sizes.answers, order, origin)


def _tensor_examples(spec: InputSpec, form: RequestForm, place: tuple[int, int]) -> Source:
    dataset = read_dataset(spec, form)
    columns, summary = dataset.columns, dataset.summary
    example_sets.check_batches(columns, spec.batch_size, Path(spec.path).name)
    order = shares(columns.num_examples, spec.seed, *place, spec.batch_size)
    bad = describe(columns.non_finite)
    summary.warnings += [f"{text}; the model may answer such rows with NaN." for text in bad]
    origin = _origin(spec, columns.num_examples, summary)
    return example_sets.TensorExamples(columns, form.has_batch, order, origin)


def read_dataset(
    spec: InputSpec, form: RequestForm, labels: str = "", beside: Sequence[str] = ()
) -> Dataset:
    """Read tensors, their labels (by default those of a usual name), and arrays of the names
    `beside` that no input has. ConfigError when the data does not fit."""
    path = existing(spec.path)
    summary = DatasetSummary([path])
    if recordings.is_recording(path):
        return _recorded(spec, form, path, labels)
    if path.is_dir():
        name = _only_input(spec, form)
        tensor = next(tensor for tensor in form.inputs if tensor.name == name)
        images = _images(path, tensor, spec.seed, summary)
        columns = example_sets.from_list(form, name, images.examples, path.name)
        numbers = _folder_labels(images.paths, path)
        problem = f"labels '{labels}' are no part of it" if labels and numbers is None else ""
        return Dataset(columns, summary, numbers, label_problem=problem)
    if path.suffix in files.ROW_SUFFIXES:
        table = files.read_rows(path, as_arrays=True)
        label, problem = _find_labels(form, {key for row in table.rows for key in row}, labels)
        columns = example_sets.from_rows(form, table, path.name, [label] if label else [])
        summary.notes += columns.notes
        if not label:
            return Dataset(columns, summary, label_problem=problem)
        values = [row.get(label) for row in table.rows]
        places = [table.place(index) for index, value in enumerate(values) if value is None]
        if places:
            shown = ", ".join(places[:3]) + (", …" if len(places) > 3 else "")
            problem = f"{len(places):,} rows have no '{label}': {shown}"
        return Dataset(columns, summary, _label_array(values), label_problem=problem)
    arrays = files.read_arrays(path)
    if "" in arrays:
        arrays = {_only_input(spec, form): arrays[""]}
    label, problem = _find_labels(form, arrays.keys(), labels)
    apart = [name for name in beside if name in arrays and name not in form.names]
    others = [*apart, label] if label else apart
    columns = example_sets.from_arrays(form, arrays, path.name, others)
    summary.notes += columns.notes
    found = {name: arrays[name] for name in apart}
    return Dataset(columns, summary, arrays.get(label), found, problem)


def _recorded(spec: InputSpec, form: RequestForm, path: Path, labels: str) -> Dataset:
    """Read the rows of a recording, which has no labels."""
    recording = recordings.open_recording(path)
    summary = DatasetSummary(recording.files, recordings.notes_of(recording))
    if recording.is_text:
        raise ConfigError([f"{path}: is of a language model; the target takes tensors"])
    table = recordings.example_rows(recording, has_batch=form.has_batch, latest=spec.latest)
    columns = example_sets.from_rows(form, table, path.name)
    summary.notes += columns.notes
    problem = f"labels '{labels}': a recording has none" if labels else ""
    redacted = tuple(recording.redacted)
    span = tuple(each.isoformat(timespec="seconds") for each in recording.span)
    return Dataset(columns, summary, None, {}, problem, redacted, span)


def existing(given: str) -> Path:
    """Return a file or folder that has a reader; ConfigError says what was expected."""
    path = Path(given)
    if not path.exists():
        raise ConfigError([f"{path}: there is no such file or folder"])
    known = (*files.ARRAY_SUFFIXES, *files.ROW_SUFFIXES, SUFFIX)
    if not path.is_dir() and path.suffix not in known:
        expected = f"a file that ends in {', '.join(known)}, a folder of images or a recording"
        raise ConfigError([f"{path}: expected {expected}"])
    return path


def _find_labels(form: RequestForm, names: Set[str], labels: str) -> tuple[str, str]:
    """Return the array or field with the labels, and why it is missing; empty if it need not be."""
    wanted = [labels] if labels else LABEL_NAMES
    found = next((name for name in wanted if name in names and name not in form.names), "")
    there = quoted(sorted(names))
    missing = f"there are no labels '{labels}'; it has {there}" if labels and not found else ""
    return found, missing


def _label_array(values: Sequence[object]) -> Array:
    if all(isinstance(value, bool | int | float) for value in values):
        return np.array(values)
    return np.fromiter(values, np.object_, len(values))


def _folder_labels(paths: Sequence[Path], folder: Path) -> Array | None:
    """Return the sub-folder number of each image; None unless all are in two or more."""
    parents = [path.relative_to(folder).parts[:-1] for path in paths]
    classes = sorted({parts[0] for parts in parents if parts})
    if len(classes) < 2 or not all(parents):
        return None
    return np.array([classes.index(parts[0]) for parts in parents], np.int64)


def _only_input(spec: InputSpec, form: RequestForm) -> str:
    return _one_name(spec, [tensor.name for tensor in form.required], form.names)


def _rows(spec: InputSpec, form: RequestForm, path: Path, summary: DatasetSummary) -> FileRows:
    if recordings.is_recording(path):
        recording = recordings.open_recording(path)
        summary.files, summary.notes = recording.files, recordings.notes_of(recording)
        return recordings.text_rows(recording)
    if not path.is_dir() and path.suffix in files.ROW_SUFFIXES:
        return files.read_rows(path)
    if form.kind != "fields":
        listed = ", ".join(files.ROW_SUFFIXES)
        raise ConfigError([f"{path}: prompts are read from files that end in {listed}"])
    if path.is_dir():
        name = _one_name(spec, form.fields, form.fields)
        images = _images(path, TensorSpec(name, "BYTES", (1,)), spec.seed, summary)
        texts = [base64.b64encode(array.item()).decode() for array in images.examples]
        summary.notes.append("files as base64")
        return FileRows([{name: text} for text in texts], range(1, len(texts) + 1), "image")
    arrays = files.read_arrays(path)
    if "" in arrays:
        arrays = {_one_name(spec, form.fields, form.fields): arrays[""]}
    columns = [array.tolist() for array in arrays.values()]
    rows = [dict(zip(arrays, values, strict=True)) for values in zip(*columns, strict=True)]
    return FileRows(rows, range(1, len(rows) + 1), "example")


def _images(path: Path, tensor: TensorSpec, seed: int, summary: DatasetSummary) -> Images:
    images = read_images(path, tensor, seed)
    summary.files = images.paths
    if images.treatment:
        summary.notes.append(images.treatment)
    _note_left_out(summary, len(images.paths), images.num_found, "as many as memory is kept for")
    return images


def _one_name(spec: InputSpec, required: Sequence[str], names: Sequence[str]) -> str:
    """Return the input that a file without names is for: the given one, or else the only one."""
    taken = quoted(names)
    if spec.name:
        if spec.name not in names:
            raise ConfigError([f"unknown input '{spec.name}'; the target takes {taken or 'none'}"])
        return spec.name
    if len(required) != 1:
        raise ConfigError([f"{spec.path}: say which input it is for; the target takes {taken}"])
    return required[0]


def _note_left_out(summary: DatasetSummary, num_used: int, num_found: int, reason: str) -> None:
    if num_used < num_found:
        summary.notes.append(f"{num_used:,} of {num_found:,} are used: {reason}")


def _origin(spec: InputSpec, num_examples: int, summary: DatasetSummary) -> Origin:
    name = Path(spec.path).name
    if num_examples == 1:
        text = f"1 example of {name}, the same for every request"
    else:
        text = f"{num_examples:,} examples of {name}, shuffled anew each time round"
    if spec.batch_size > 1:
        text += f", {spec.batch_size} a request"
    return Origin(
        "; ".join([text, *summary.notes]),
        is_random=False,
        num_examples=num_examples,
        digest=files.digest(summary.files),
        warnings=tuple(summary.warnings),
    )
