"""Representative examples: inputs, labels, and their split into disjoint parts.

`calibration` is for ranges, `choice` for judging candidates, and `held_out` for the final choice
only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.data.datasets import read_dataset
from penstock.data.files import digest
from penstock.data.lengths import Lengths, Sizes, drawn
from penstock.data.non_finite import NonFinite, is_finite
from penstock.data.random_tensors import RandomTensors
from penstock.data.samples import InputSpec, RequestForm
from penstock.errors import ConfigError
from penstock.optimizer.plan import Plan
from penstock.optimizer.sent import LENGTHS_NAME
from penstock.types import Array, TensorSpec
from penstock.units import quoted

# More rows do not improve ranges, but they do improve judging.
MAX_CALIBRATION = 300
CALIBRATION_SHARE = 0.2
# Limit for a separate calibration set, which its owner may have chosen with care.
MAX_SEPARATE = 1_000
MIN_EXAMPLES = 10
# Sizes of variable dimensions in random inputs: a sequence; sides of an image.
SEQUENCE_LENGTHS = Lengths("uniform", (16, 128))
SIDE_LENGTHS = Lengths("fixed", (224,))
# Rows of live traffic: as many as the gate of a small accuracy budget needs.
LIVE_ROWS = 5_000
# Label of calibration rows that have none.
NO_CLASS = -1


@dataclass(frozen=True, slots=True)
class Split:
    """Indices into the examples, each part in a fixed order that depends on the seed."""

    calibration: tuple[int, ...]
    choice: tuple[int, ...]
    held_out: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Examples:
    """`rows[i]` is the input of one request: tensors by name, without the batch dimension."""

    rows: Sequence[Mapping[str, Array]]
    # One per row: class numbers, or anything the evaluator understands; None without labels.
    labels: Array | None
    split: Split
    # Digest of every byte that was read.
    digest: str
    # As the report shows it: "3,000 examples of reviews.npz, labelled".
    text: str
    # Rows with NaN or infinity; `index` is an index of `rows`.
    non_finite: tuple[NonFinite, ...] = ()
    # Arrival of a recording's first and last request, ISO 8601; empty for other data.
    span: tuple[str, ...] = ()


def open_examples(
    plan: Plan, inputs: Sequence[TensorSpec], has_batch: bool, classes: Sequence[str] = ()
) -> Examples:
    """Read `plan.data` and `plan.calibration`; ConfigError lists everything that is wrong. Labels
    may be names of `classes`, which become their numbers."""
    assert plan.data, "nothing to open"
    form = RequestForm("tensors", tuple(inputs), has_batch)
    main = _opened(plan, plan.data, form)
    main.labels = _numbered(main.labels, classes)
    _check_labels(main, plan)
    bad = main.non_finite
    if not plan.calibration:
        split = _without_non_finite(split_examples(len(main.rows), plan.seed), bad)
        text, rows = _text(main, split), main.rows
        return Examples(rows, main.labels, split, main.digest, text, tuple(bad), main.span)
    extra = _opened(plan, plan.calibration, form)
    num = len(main.rows)
    bad = [*bad, *(replace(each, index=num + each.index) for each in extra.non_finite)]
    split = _without_non_finite(split_examples(num, plan.seed, len(extra.rows)), bad)
    both = hashlib.sha256(f"{main.digest} {extra.digest}".encode()).hexdigest()
    text = f"{_text(main, split)}; calibrated with {len(split.calibration):,} of {extra.name}"
    rows = [*main.rows, *extra.rows]
    return Examples(rows, _joined(main, extra), split, both, text, tuple(bad), main.span)


def signature_examples(
    inputs: Sequence[TensorSpec], has_batch: bool, seed: int, num: int
) -> Examples:
    """Draw random rows from the signature: none for calibration, no labels."""
    form = RequestForm("tensors", tuple(inputs), has_batch)
    is_image = any(spec.shape.count(-1) > 1 for spec in inputs)
    lengths = SIDE_LENGTHS if is_image else SEQUENCE_LENGTHS
    sizes = Sizes(requests=drawn(lengths, (seed, 1)), requests_text=str(lengths))
    source = RandomTensors(form, 1, (seed, 0), sizes)
    drawn_rows = (source.next()[1].tensors.items() for _ in range(num))
    rows = [{name: a[0] if has_batch else a for name, a in tensors} for tensors in drawn_rows]
    split = Split((), tuple(range(num)), ())
    named = hashlib.sha256(f"{inputs} {has_batch} {seed} {num}".encode()).hexdigest()
    return Examples(rows, None, split, named, source.origin.text)


def split_examples(num_examples: int, seed: int, num_separate: int | None = None) -> Split:
    """Split: a fifth, at most 300, for calibration; equal halves to choose by and held out.
    Separate calibration rows follow the data, all of which is then for judging."""
    random = np.random.default_rng(seed)
    rest = random.permutation(num_examples).tolist()
    if num_separate is None:
        num_calibration = min(MAX_CALIBRATION, int(num_examples * CALIBRATION_SHARE))
        calibration, rest = rest[:num_calibration], rest[num_calibration:]
    else:
        calibration = (num_examples + random.permutation(num_separate)).tolist()[:MAX_SEPARATE]
    half = (len(rest) + 1) // 2
    return Split(tuple(calibration), tuple(rest[:half]), tuple(rest[half:]))


def _without_non_finite(split: Split, bad: Sequence[NonFinite]) -> Split:
    """Drop non-finite rows from calibration if enough are left: no range holds NaN."""
    indices = {each.index for each in bad}
    finite = tuple(index for index in split.calibration if index not in indices)
    return replace(split, calibration=finite) if len(finite) >= MIN_EXAMPLES else split


def num_to_bring(num_needed: int, has_own_calibration: bool) -> int:
    """Return the total number of examples for `num_needed` in each judged part."""
    judged = 2 * num_needed
    if has_own_calibration:
        return judged
    return min(round(judged / (1 - CALIBRATION_SHARE)), judged + MAX_CALIBRATION)


@dataclass(slots=True)
class _Opened:
    name: str
    rows: list[dict[str, Array]]
    labels: Array | None
    digest: str
    notes: list[str]
    non_finite: list[NonFinite]
    span: tuple[str, ...] = ()


def _opened(plan: Plan, path: str, form: RequestForm) -> _Opened:
    if plan.labels in form.names:
        raise ConfigError([f"labels '{plan.labels}': is an input of the model"])
    is_live = bool(plan.from_live) and path == plan.data
    latest = LIVE_ROWS if is_live else 0
    spec = InputSpec(path, plan.data_name, seed=plan.seed, latest=latest)
    found = read_dataset(spec, form, plan.labels, [LENGTHS_NAME])
    if found.redacted:
        listed = quoted(found.redacted)
        raise ConfigError([f"{path}: redacted inputs have no values to optimise with: {listed}"])
    name, columns, notes = Path(path).name, found.columns, found.summary.notes
    # Calibration data needs no labels, but each row must have one if others do.
    if found.label_problem and (path == plan.data or found.labels is not None):
        raise ConfigError([f"{name}: {found.label_problem}"])
    hashed = digest(found.summary.files)
    if Path(path).is_dir():
        # Digests of files do not cover the names of their folders.
        labels = b"" if found.labels is None else found.labels.tobytes()
        hashed = hashlib.sha256(f"{hashed}{labels.hex()}".encode()).hexdigest()
        if found.labels is not None:
            notes.append("classes are the sub-folders in the order of their names")
    rows = [columns.row(index) for index in range(columns.num_examples)]
    if is_live:
        notes.insert(0, "live traffic, the latest different rows")
    bad = list(columns.non_finite)
    opened = _Opened(name, rows, found.labels, hashed, notes, bad, found.span)
    if LENGTHS_NAME in found.beside:
        opened.rows = rows = _cut(rows, found.beside[LENGTHS_NAME], form, name)
        datatypes = {tensor.name: tensor.datatype for tensor in form.inputs}
        # Padding may contain anything.
        arrays = [(each, rows[each.index][each.input]) for each in columns.non_finite]
        bad = [each for each, row in arrays if not is_finite(datatypes[each.input], row).all()]
        opened.non_finite = bad
    return opened


def _cut(
    rows: list[dict[str, Array]], lengths: Array, form: RequestForm, name: str
) -> list[dict[str, Array]]:
    """Cut padded rows to their original lengths."""
    specs = {tensor.name: tensor for tensor in form.inputs if tensor.shape.count(-1) == 1}
    label = f"{name}, array '{LENGTHS_NAME}'"
    if not specs:
        raise ConfigError([f"{label}: no input has one variable dimension"])
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ConfigError([f"{label}: expected one whole number per example, got {_form(lengths)}"])
    axes = {name: spec.shape.index(-1) for name, spec in specs.items()}
    longest = min(rows[0][name].shape[axis] for name, axis in axes.items() if name in rows[0])
    if int(lengths.min()) < 1 or int(lengths.max()) > longest:
        raise ConfigError([f"{label}: expected lengths from 1 to {longest}"])
    cut = []
    for row, length in zip(rows, lengths.tolist(), strict=True):
        shorter = {name: row[name].take(range(length), axes[name]) for name in axes if name in row}
        cut.append(row | shorter)
    return cut


def _numbered(labels: Array | None, classes: Sequence[str]) -> Array | None:
    """Return the numbers of labels that are all names of classes; others unchanged."""
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "OUS":
        return labels
    numbers = {name: number for number, name in enumerate(classes)}
    names = [each.decode(errors="replace") if isinstance(each, bytes) else each for each in labels]
    if not all(isinstance(name, str) and name in numbers for name in names):
        return labels
    return np.array([numbers[name] for name in names], np.int64)


def _check_labels(opened: _Opened, plan: Plan) -> None:
    """Check the labels. An evaluator may take any; without one, a label is a number."""
    labels = opened.labels
    if labels is None:
        return
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = opened.labels = labels[:, 0]
    if len(labels) != len(opened.rows):
        count = f"{len(labels):,} labels for {len(opened.rows):,} examples"
        raise ConfigError([f"{opened.name}: {count}"])
    if plan.evaluator:
        return
    if labels.ndim != 1 or labels.dtype.kind not in "biuf":
        got = f"expected a class number or a value per example, got {_form(labels)}"
        raise ConfigError([f"{opened.name}: labels: {got}; an evaluator may take others"])
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ConfigError([f"{opened.name}: labels: some are not finite"])
    if labels.dtype.kind in "bu":
        opened.labels = labels.astype(np.int64)


def _form(array: Array) -> str:
    kind = "other things" if array.dtype.kind == "O" else str(array.dtype)
    return f"{kind} of shape {list(array.shape)}"


def _joined(main: _Opened, extra: _Opened) -> Array | None:
    if main.labels is None:
        return None
    more = extra.labels
    if more is None or more.shape[1:] != main.labels.shape[1:]:
        nothing = NO_CLASS if main.labels.dtype.kind in "if" else None
        more = np.full((len(extra.rows), *main.labels.shape[1:]), nothing)
    return np.concatenate([main.labels, more])


def _text(opened: _Opened, split: Split) -> str:
    count = len(opened.rows)
    kind = "labelled" if opened.labels is not None else "without labels"
    parts = f"{len(split.choice):,} to choose by, {len(split.held_out):,} held out"
    last = parts if count >= MIN_EXAMPLES else "too few to show anything about accuracy"
    word = "example" if count == 1 else "examples"
    return "; ".join([f"{count:,} {word} of {opened.name}, {kind}", *opened.notes, last])
