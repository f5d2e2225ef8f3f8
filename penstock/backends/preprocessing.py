"""What happens to a request before the model sees it: a Python function in front of any Runner.

config.pbtxt says `penstock.preprocess = "FILE.py:FUNCTION"`, a file of the version folder, and
`penstock.model_inputs`, what the model takes; its `input` is what users send. The function gets one
row, arrays by name without the batch dimension, and returns the model's inputs the same way. Rows
that come out in different lengths are padded (`penstock.pad`) and computed by bucket, and their
answers cut back; that is allowed once `serving.proof` has found it harmless.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends import Batch, Execution, Finished, LoadRunner, Outputs, PerRequest, Runner
from penstock.backends.python import Code
from penstock.config import ModelConfig, Padding
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, Array, TensorSpec

Row = Mapping[str, Array]
# An axis of an output, counted without the batch, that is as long as the padded axes.
Crop = tuple[str, int]


class Preprocessed:
    """A Runner behind a function. It is code that sees real requests only; the model behind it is
    what is warmed up and tried out."""

    needs_requests = True
    runs_ahead = False
    inputs: Sequence[TensorSpec] = ()

    def __init__(self, config: ModelConfig, function: Function, inner: Runner) -> None:
        self.inner = inner
        self.outputs: Sequence[TensorSpec] = inner.outputs
        self._config = config
        self._function = function
        self._has_batch = config.max_batch_size > 0
        # None: rows of different lengths are kept apart.
        self._crops: frozenset[Crop] | None = None

    @property
    def keeps_rows_apart(self) -> bool:
        return self.inner.keeps_rows_apart

    def allow_padding(self, crops: Collection[Crop]) -> None:
        """From now on rows are filled up to their buckets; these axes of outputs are cut back."""
        self._crops = frozenset(crops)

    def built(self) -> Mapping[str, str]:
        return {**self.inner.built(), "preprocess": self._function.name}

    def start(self, batch: Batch) -> Execution:
        """Without `batch.requests` the batch is one request, and its answer that of the batch."""
        began = time.perf_counter()
        counts = [part.num_rows for part in batch.requests] or [batch.num_rows]
        rows = [self._prepared(row) for row in self._rows(batch)]
        prepare_s = time.perf_counter() - began
        answers = self._answers(rows)
        outputs: list[Outputs | Exception] = []
        first = 0
        for count in counts if self._has_batch else [1]:
            outputs.append(_stacked(answers[first : first + count], self._has_batch))
            first += count
        if batch.requests:
            return Finished(PerRequest(outputs), prepare_s)
        (answer,) = outputs
        if isinstance(answer, Exception):
            raise answer
        return Finished(answer, prepare_s)

    def close(self) -> None:
        self.inner.close()
        self._function.close()

    def _rows(self, batch: Batch) -> list[dict[str, Array]]:
        if not self._has_batch:
            return [dict(batch.inputs)]
        numbers = range(batch.num_rows)
        return [{name: rows[number] for name, rows in batch.inputs.items()} for number in numbers]

    def _prepared(self, row: Row) -> Row | Exception:
        try:
            return self._function(row)
        except Exception as error:  # Users' code, on users' texts: only this request fails.
            return error

    def _answers(self, rows: Sequence[Row | Exception]) -> list[Outputs | Exception]:
        """One per row, computed in batches of equal shapes."""
        padding = self._config.model.padding if self._crops is not None else None
        # By number of the row: filled up, and how long it was.
        padded = {n: pad(padding, row) for n, row in enumerate(rows) if isinstance(row, Mapping)}
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, (row, _) in padded.items():
            groups.setdefault(shapes_of(row), []).append(number)
        answers: list[Outputs | Exception] = list(rows)
        for numbers in groups.values():
            outputs = self._run_apart([padded[number][0] for number in numbers])
            for number, answer in zip(numbers, outputs, strict=True):
                if not isinstance(answer, Exception):
                    answer = self._cut(answer, padded[number][1])
                answers[number] = answer
        return answers

    def _run_apart(self, rows: Sequence[Row]) -> list[Outputs | Exception]:
        """Rows of equal shapes together; each alone where the model does not take them, so that a
        text that is too long, or has a token it does not know, fails nobody else's request."""
        try:
            return list(self._run(rows))
        except Exception as error:  # Of the model's library, on what users sent.
            if len(rows) == 1:
                return [error]
        return [answer for row in rows for answer in self._run_apart([row])]

    def _run(self, rows: Sequence[Row]) -> list[Outputs]:
        """Rows of equal shapes in one batch."""
        stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        batch = Batch(stacked if self._has_batch else rows[0], len(rows))
        (answer,) = self.inner.start(batch).wait()
        # `load` has seen to it that the model does not see requests.
        assert not isinstance(answer, PerRequest)
        if not self._has_batch:
            return [answer]
        return [{name: values[n] for name, values in answer.items()} for n in range(len(rows))]

    def _cut(self, answer: Outputs, length: int | None) -> Outputs:
        if length is None or not self._crops:
            return answer
        cut = dict(answer)
        for name, axis in self._crops:
            cut[name] = cut[name].take(range(length), axis)
        return cut


class Function:
    """The function of a version's file, its answers checked against what the model takes."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.preprocess is not None
        self.name = config.preprocess.function
        self._specs = config.preprocess.inputs
        file, _, name = self.name.rpartition(":")
        version_folder = Path(config.artifact).parents[max(1, len(Path(config.file).parts)) - 1]
        self._code = Code(replace(config, artifact=str(version_folder / file), file=file))
        try:
            found: Any = getattr(self._code.load(), name, None)
            if not callable(found):
                raise self._code.problem(f"no function {name}(inputs)")
        except BaseException:
            self._code.close()
            raise
        self._call: Callable[[dict[str, Array]], Any] = found

    def __call__(self, row: Row) -> dict[str, Array]:
        return checked(self.name, self._call(dict(row)), self._specs)

    def close(self) -> None:
        self._code.close()


def load(config: ModelConfig, load_model: LoadRunner) -> Preprocessed:
    inner = load_model(config.model)
    try:
        if inner.needs_requests:
            raise ConfigError(
                [
                    "parameters.penstock.preprocess: not for code that sees requests; "
                    "it can do the same itself"
                ]
            )
        return Preprocessed(config, Function(config), inner)
    except BaseException:
        inner.close()
        raise


def apply(config: ModelConfig, rows: Sequence[Row]) -> list[dict[str, Array]]:
    """What the model sees of each row; as it is, where nothing is preprocessed."""
    if config.preprocess is None:
        return [dict(row) for row in rows]
    function = Function(config)
    try:
        return [function(row) for row in rows]
    finally:
        function.close()


def checked(name: str, made: Any, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """One row as the model takes it; BackendFailed with what is wrong with it."""
    if not isinstance(made, Mapping):
        raise BackendFailed(f"{name}: expected arrays by name, got {type(made).__name__}")
    row: dict[str, Array] = {}
    for spec in specs:
        if spec.name not in made:
            raise BackendFailed(f"{name}: gave no '{spec.name}'; it gave {sorted(made)}")
        values = np.asarray(made[spec.name])
        dtype = DATATYPES[spec.datatype].numpy
        if values.dtype != dtype and not (spec.datatype == "BYTES" and values.dtype.kind in "SU"):
            raise BackendFailed(f"{name}: '{spec.name}' is {values.dtype}, the model takes {dtype}")
        if len(values.shape) != len(spec.shape) or any(
            limit not in (-1, size) for size, limit in zip(values.shape, spec.shape, strict=True)
        ):
            raise BackendFailed(
                f"{name}: '{spec.name}' has shape {list(values.shape)}, the model takes "
                f"{list(spec.shape)}"
            )
        row[spec.name] = values
    return row


def pad(padding: Padding | None, row: Row) -> tuple[Row, int | None]:
    """A row filled up to its bucket, and how long it was; None: it stays as it is."""
    if padding is None:
        return row, None
    lengths = {row[each.input].shape[each.axis] for each in padding.axes}
    length = lengths.pop()
    index = bisect_left(padding.buckets, length)
    if lengths or length == 0 or index == len(padding.buckets):
        return row, None
    filled = dict(row)
    for each in padding.axes:
        values = filled[each.input]
        widths = [(0, 0)] * values.ndim
        widths[each.axis] = (0, padding.buckets[index] - length)
        value = np.array(each.value).astype(values.dtype)
        filled[each.input] = np.pad(values, widths, constant_values=value)
    return filled, length


def shapes_of(row: Row) -> tuple[object, ...]:
    return tuple((name, values.shape) for name, values in row.items())


def _stacked(rows: Sequence[Outputs | Exception], has_batch: bool) -> Outputs | Exception:
    """The rows of one request."""
    answers: list[Outputs] = []
    for row in rows:
        if isinstance(row, Exception):
            return row
        answers.append(row)
    if not has_batch:
        return answers[0]
    try:
        return {name: np.stack([answer[name] for answer in answers]) for name in answers[0]}
    except ValueError:
        return BackendFailed(
            "rows of one request have answers of different shapes; send them apart"
        )
