"""Pre- and postprocessing: Python functions around any Runner.

`penstock.preprocess` names a function in a file of the version folder. It gets one row, arrays by
name without the batch dimension, and returns the model's inputs the same way. Rows of different
lengths are padded (`penstock.pad`) and computed by bucket, and their answers are cropped, once
`serving.proof` has found that harmless. `penstock.postprocess` is the same for the model's outputs.
"""

from __future__ import annotations

import importlib
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.backends import Batch, Execution, LoadRunner, Outputs, PerRequest, Runner, split_rows
from penstock.backends.finished import finish, good_rows
from penstock.backends.heads import Headed, open_head
from penstock.backends.preprocess import BatchedStep, open_step
from penstock.backends.python_code import Code
from penstock.config import STAGES, ModelConfig, Padding
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, Array, TensorSpec, shape_fits

Row = Mapping[str, Array]
# Output name, and an axis (without batch) that is as long as the padded axes.
Crop = tuple[str, int]


class Processed(Runner):
    """A Runner with a function before it, after it, or both. The functions see real requests only;
    warm-up and tests at load run the model between them."""

    needs_requests = True

    def __init__(self, config: ModelConfig, inner: Runner, functions: Functions) -> None:
        self.inner = inner
        self.keeps_rows_apart = inner.keeps_rows_apart
        self._config = config
        self._functions = functions
        self._has_batch = config.max_batch_size > 0
        # None: no padding; rows of different lengths are computed apart.
        self._crops: frozenset[Crop] | None = None

    def allow_padding(self, crops: Collection[Crop]) -> None:
        """Pad rows to their buckets from now on, here if there is preprocessing, else in the
        server, and crop these axes of outputs."""
        self._crops = frozenset(crops)

    def built(self) -> Mapping[str, str]:
        return {**self.inner.built(), **self._functions.names}

    def start(self, batch: Batch) -> Execution:
        """Run a batch. Without `batch.requests` it counts as one request with one answer."""
        before, after = self._functions.before, self._functions.after
        began = prepared = time.perf_counter()
        if before is None:
            answers = self._answers_as_sent(batch)
        else:
            rows = before.tried_all(self._rows(batch.inputs, batch.num_rows))
            prepared = time.perf_counter()
            answers = self._answers(rows)
        ended = time.perf_counter()
        if after is not None:
            good = [each for each in answers if not isinstance(each, Exception)]
            made = iter(after.tried_all(good))
            answers = [each if isinstance(each, Exception) else next(made) for each in answers]
        parts = batch.by_request(answers) if self._has_batch else [answers]
        outputs = [stacked(each, self._has_batch) for each in parts]
        times = prepared - began, 0.0 if after is None else time.perf_counter() - ended
        return finish(batch, outputs, *times)

    def close(self) -> None:
        self.inner.close()
        self._functions.close()

    def _answers_as_sent(self, batch: Batch) -> list[Outputs | Exception]:
        """Return an answer per row without preprocessing; the server may have padded the rows."""
        answers = self._run(batch.inputs, batch.num_rows)
        lengths = [part.length for part in batch.requests for _ in range(part.num_rows)]
        if not self._has_batch or not lengths:
            return list(answers)
        return [self._cut(each, length) for each, length in zip(answers, lengths, strict=True)]

    def _answers(self, rows: Sequence[Row | Exception]) -> list[Outputs | Exception]:
        """Return an answer per row, computed in batches of equal shapes."""
        padding = self._config.model.padding if self._crops is not None else None
        # By row number: the padded row, and its length before.
        padded = {n: pad(padding, row) for n, row in enumerate(rows) if isinstance(row, Mapping)}
        answers: list[Outputs | Exception] = list(rows)
        for numbers in _by_shape({number: row for number, (row, _) in padded.items()}):
            outputs = self._run_apart([padded[number][0] for number in numbers])
            for number, answer in zip(numbers, outputs, strict=True):
                if not isinstance(answer, Exception):
                    answer = self._cut(answer, padded[number][1])
                answers[number] = answer
        return answers

    def _run_apart(self, rows: Sequence[Row]) -> list[Outputs | Exception]:
        """Run rows of equal shapes together, or one by one if the model refuses them, so that a
        text that is too long or has an unknown token fails only its own request."""
        try:
            return list(self._run(stack(rows) if self._has_batch else rows[0], len(rows)))
        except Exception as error:  # An error of the model's library, on clients' data.
            if len(rows) == 1:
                return [error]
        return [answer for row in rows for answer in self._run_apart([row])]

    def _run(self, inputs: Row, num_rows: int) -> list[dict[str, Array]]:
        (answer,) = self.inner.start(Batch(inputs, num_rows)).wait()
        # `load` refuses models that see requests.
        assert not isinstance(answer, PerRequest)
        if self.inner.runs_ahead:
            # The next run writes to the same memory, and there may be several for one batch.
            answer = {name: values.copy() for name, values in answer.items()}
        return self._rows(answer, num_rows)

    def _rows(self, stacked: Row, num_rows: int) -> list[dict[str, Array]]:
        return split_rows(stacked, num_rows) if self._has_batch else [dict(stacked)]

    def _cut(self, answer: Outputs, length: int | None) -> Outputs:
        if not length or not self._crops:
            return answer
        cut = dict(answer)
        for name, axis in self._crops:
            cut[name] = cut[name].take(range(length), axis)
        return cut


class Function:
    """A function in a file of the version, whose results are checked against `specs`."""

    def __init__(self, config: ModelConfig, function: str, specs: Sequence[TensorSpec]) -> None:
        self._name = function
        self._specs = specs
        file, _, name = function.rpartition(":")
        self._code = Code(replace(config, artifact=str(config.folder / file), file=file))
        try:
            found = getattr(self._code.load(), name, None)
            if not callable(found):
                raise self._code.problem(f"no function {name}")
        except BaseException:
            self._code.close()
            raise
        self._call: Callable[[dict[str, Array]], object] = found

    def tried_all(self, rows: Sequence[Row]) -> list[Row | Exception]:
        made: list[Row | Exception] = []
        for row in rows:
            try:
                made.append(checked(self._name, self._call(dict(row)), self._specs))
            except Exception as error:  # Users' code on clients' data: only this request fails.
                made.append(error)
        return made

    def close(self) -> None:
        self._code.close()


class RowHead:
    """A built-in head on answers without padding: those of one shape together."""

    def __init__(self, config: ModelConfig) -> None:
        self._head = open_head(config)

    def tried_all(self, answers: Sequence[Row]) -> list[Row | Exception]:
        made: list[Row | Exception] = list(answers)
        for numbers in _by_shape(dict(enumerate(answers))):
            outputs = self._head(stack([answers[number] for number in numbers]), {})
            for number, output in zip(numbers, split_rows(outputs, len(numbers)), strict=True):
                made[number] = output
        return made

    def close(self) -> None:
        """Nothing to do."""


class Functions:
    def __init__(self, config: ModelConfig) -> None:
        self.before: Function | BatchedStep | None = None
        self.after: Function | RowHead | None = None
        steps = {"preprocess": config.preprocess, "postprocess": config.postprocess}
        self.names = {key: step.function for key, step in steps.items() if step is not None}
        try:
            if config.preprocess is not None:
                opened = open_step if config.preprocess.function in STAGES else Function
                self.before = opened(config, config.preprocess.function, config.preprocess.inputs)
            if config.has_head:
                self.after = RowHead(config)
            elif config.postprocess is not None:
                self.after = Function(config, config.postprocess.function, config.outputs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for each in (self.before, self.after):
            if each is not None:
                each.close()


def model_in(runner: Runner) -> Runner:
    """Return the model's own runner, without the functions around it."""
    return runner.inner if isinstance(runner, Processed | Headed) else runner


def load(config: ModelConfig, load_model: LoadRunner) -> Processed | Headed:
    inner = load_model(config.model)
    try:
        if inner.needs_requests:
            key = "postprocess" if config.preprocess is None else "preprocess"
            problem = "not for code that sees requests; it can do the same itself"
            raise ConfigError(f"parameters.penstock.{key}: {problem}")
        if config.has_head and config.preprocess is None:
            return Headed(config, inner)
        functions = Functions(config)
        try:
            # A model that its GPU's engine cannot read runs on the CPU instead.
            if config.decodes_on_gpu and inner.runs_ahead:
                module = importlib.import_module("penstock.backends.torch_images")
                runner: Processed = module.ImageRunner(config, inner, functions)
                return runner
            return Processed(config, inner, functions)
        except BaseException:
            functions.close()
            raise
    except BaseException:
        inner.close()
        raise


def apply(config: ModelConfig, rows: Sequence[Row]) -> list[dict[str, Array]]:
    """Preprocess rows; unchanged if there is no preprocessing."""
    return _applied(Functions(replace(config, postprocess=None)), rows)


def apply_after(config: ModelConfig, answers: Sequence[Row]) -> list[dict[str, Array]]:
    """Postprocess answers of the model; unchanged if there is no postprocessing."""
    return _applied(Functions(replace(config, preprocess=None)), answers)


def _applied(functions: Functions, rows: Sequence[Row]) -> list[dict[str, Array]]:
    """Apply the only function that is set."""
    function = functions.before or functions.after
    try:
        made = list(rows) if function is None else function.tried_all(rows)
        for each in made:
            if isinstance(each, Exception):
                raise each
        return [dict(each) for each in made if not isinstance(each, Exception)]
    finally:
        functions.close()


def checked(name: str, made: object, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return one row with the arrays of `specs`; raise BackendFailed if it does not match them."""
    if not isinstance(made, Mapping):
        raise BackendFailed(f"{name}: expected arrays by name, got {type(made).__name__}")
    row: dict[str, Array] = {}
    for spec in specs:
        if spec.name not in made:
            raise BackendFailed(f"{name}: gave no '{spec.name}'; it gave {sorted(made)}")
        values = np.asarray(made[spec.name])
        dtype = DATATYPES[spec.datatype].numpy
        if values.dtype != dtype and not (spec.datatype == "BYTES" and values.dtype.kind in "SU"):
            raise BackendFailed(f"{name}: '{spec.name}' is {values.dtype}, expected {dtype}")
        if not shape_fits(values.shape, spec.shape):
            raise BackendFailed(
                f"{name}: '{spec.name}' has shape {list(values.shape)}, expected {list(spec.shape)}"
            )
        row[spec.name] = values
    return row


def pad(padding: Padding | None, row: Row) -> tuple[Row, int | None]:
    """Return a row padded to its bucket, and its length before; None if it is unchanged."""
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


def _by_shape(rows: Mapping[int, Row]) -> Collection[list[int]]:
    """Return the numbers of rows with equal shapes, together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, row in rows.items():
        shapes = tuple((name, values.shape) for name, values in row.items())
        groups.setdefault(shapes, []).append(number)
    return groups.values()


def stack(rows: Sequence[Row]) -> dict[str, Array]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def stacked(rows: Sequence[Outputs | Exception], has_batch: bool) -> Outputs | Exception:
    answers = good_rows(rows)
    if isinstance(answers, Exception):
        return answers
    if not has_batch:
        return answers[0]
    try:
        return stack(answers)
    except ValueError:
        problem = "rows of one request have answers of different shapes; send them apart"
        return BackendFailed(problem)
