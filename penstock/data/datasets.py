"""Opens a data set by its path: chooses the reader and writes the notes for the report."""

from __future__ import annotations

import base64
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import penstock.data.example_sets as example_sets
import penstock.data.files as files
from penstock.data.cycling import shares
from penstock.data.example_sets import Columns
from penstock.data.files import FileRows
from penstock.data.images import Images, read_images
from penstock.data.lengths import Sizes
from penstock.data.non_finite import describe
from penstock.data.prompts import samples_from_rows
from penstock.data.samples import InputSpec, Origin, RequestForm, Source
from penstock.errors import ConfigError
from penstock.types import TensorSpec

# Default names of labels: `penstock optimize` evaluates with them, a load omits them.
LABEL_NAMES = ("label", "labels", "y")


@dataclass(slots=True)
class DatasetSummary:
    """A data set in the report: its files, and how they were processed."""

    files: Sequence[Path]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def open_data(spec: InputSpec, form: RequestForm, sizes: Sizes, place: tuple[int, int]) -> Source:
    """Open data for process i of n (`place`); ConfigError when the data does not fit."""
    path = existing(spec)
    account = DatasetSummary([path])
    if form.kind == "tensors":
        columns = _columns(spec, form, path, account)
        example_sets.check_batches(columns, spec.batch_size, path.name)
        order = shares(columns.num_examples, spec.seed, *place, spec.batch_size)
        account.notes += columns.notes
        account.warnings += [
            f"{text}; the model may answer such rows with NaN."
            for text in describe(columns.non_finite)
        ]
        origin = _origin(spec, columns.num_examples, account)
        return example_sets.TensorExamples(columns, form.has_batch, order, origin)
    rows = _rows(spec, form, path, account)
    if sizes.answers is not None and form.kind == "fields":
        # A placeholder: each request gets its own limit.
        rows = replace(rows, rows=[{"max_tokens": 1, **row} for row in rows.rows])
    samples = samples_from_rows(form, rows, path.name)
    _note_left_out(account, len(samples), len(rows.rows), "the others have no question")
    if sizes.answers is not None:
        account.notes.append(f"answer tokens (at most): {sizes.answers_text}")
    origin = _origin(spec, len(samples), account)
    order = shares(len(samples), spec.seed, *place)
    return example_sets.TextExamples(samples, sizes.answers, order, origin)


def read_columns(spec: InputSpec, form: RequestForm) -> Columns:
    """Return all examples of a data set in its own order; ConfigError when it does not fit."""
    path = existing(spec)
    return _columns(spec, form, path, DatasetSummary([path]))


def existing(spec: InputSpec) -> Path:
    """Return a file or folder that has a reader; ConfigError says what was expected."""
    path = Path(spec.path)
    if not path.exists():
        raise ConfigError([f"{path}: there is no such file or folder"])
    known = files.ARRAY_SUFFIXES + files.ROW_SUFFIXES
    if not path.is_dir() and path.suffix not in known:
        raise ConfigError(
            [f"{path}: expected a file that ends in {', '.join(known)}, or a folder of images"]
        )
    return path


def _columns(spec: InputSpec, form: RequestForm, path: Path, account: DatasetSummary) -> Columns:
    required = [tensor.name for tensor in form.required]
    if path.is_dir():
        name = one_name(spec, required, form.names)
        tensor = next(tensor for tensor in form.inputs if tensor.name == name)
        images = _images(path, tensor, spec.seed, account)
        return example_sets.from_list(form, name, images.examples, path.name)
    if path.suffix in files.ROW_SUFFIXES:
        rows, label = _without_labels(form, files.read_rows(path, as_arrays=True))
        return example_sets.from_rows(form, rows, path.name, [label] if label else [])
    arrays = files.read_arrays(path)
    if "" in arrays:
        arrays = {one_name(spec, required, form.names): arrays[""]}
    label = label_name(form, arrays.keys())
    rest = {name: array for name, array in arrays.items() if name != label}
    return example_sets.from_arrays(form, rest, path.name, [label] if label else [])


def label_name(form: RequestForm, names: Set[str]) -> str:
    """Guess which array or field holds the labels; empty if none does."""
    return next((name for name in LABEL_NAMES if name in names and name not in form.names), "")


def _without_labels(form: RequestForm, table: FileRows) -> tuple[FileRows, str]:
    """Return the rows without their labels, and the labels' name; empty without labels."""
    label = label_name(form, {key for row in table.rows for key in row})
    rows = [{key: value for key, value in row.items() if key != label} for row in table.rows]
    return FileRows(rows, table.numbers, table.word), label


def _rows(spec: InputSpec, form: RequestForm, path: Path, account: DatasetSummary) -> FileRows:
    if not path.is_dir() and path.suffix in files.ROW_SUFFIXES:
        return files.read_rows(path)
    if form.kind != "fields":
        listed = ", ".join(files.ROW_SUFFIXES)
        raise ConfigError([f"{path}: prompts are read from files that end in {listed}"])
    if path.is_dir():
        name = one_name(spec, form.fields, form.fields)
        images = _images(path, TensorSpec(name, "BYTES", (1,)), spec.seed, account)
        texts = [base64.b64encode(array.item()).decode() for array in images.examples]
        account.notes.append("files as base64")
        return FileRows([{name: text} for text in texts], range(1, len(texts) + 1), "image")
    arrays = files.read_arrays(path)
    if "" in arrays:
        arrays = {one_name(spec, form.fields, form.fields): arrays[""]}
    columns = [array.tolist() for array in arrays.values()]
    rows = [dict(zip(arrays, values, strict=True)) for values in zip(*columns, strict=True)]
    return FileRows(rows, range(1, len(rows) + 1), "example")


def _images(path: Path, tensor: TensorSpec, seed: int, account: DatasetSummary) -> Images:
    images = read_images(path, tensor, seed)
    account.files = images.paths
    if images.treatment:
        account.notes.append(images.treatment)
    _note_left_out(account, len(images.paths), images.num_found, "as many as memory is kept for")
    return images


def one_name(spec: InputSpec, required: Sequence[str], names: Sequence[str]) -> str:
    """Return the input that a file without names is for: the given one, or else the only one."""
    taken = ", ".join(f"'{name}'" for name in names)
    if spec.name:
        if spec.name not in names:
            raise ConfigError([f"unknown input '{spec.name}'; the target takes {taken or 'none'}"])
        return spec.name
    if len(required) != 1:
        raise ConfigError([f"{spec.path}: say which input it is for; the target takes {taken}"])
    return required[0]


def _note_left_out(account: DatasetSummary, num_used: int, num_found: int, reason: str) -> None:
    if num_used < num_found:
        account.notes.append(f"{num_used:,} of {num_found:,} are used: {reason}")


def _origin(spec: InputSpec, num_examples: int, account: DatasetSummary) -> Origin:
    name = Path(spec.path).name
    if num_examples == 1:
        text = f"1 example of {name}, the same for every request"
    else:
        text = f"{num_examples:,} examples of {name}, shuffled anew each time round"
    if spec.batch_size > 1:
        text += f", {spec.batch_size} a request"
    return Origin(
        "; ".join([text, *account.notes]),
        is_random=False,
        num_examples=num_examples,
        digest=files.digest(account.files),
        warnings=tuple(account.warnings),
    )
