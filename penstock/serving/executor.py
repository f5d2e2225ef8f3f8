"""Runs the batches of one model in place in shared memory: rows of slabs in, rows of slabs out.

The worker's part that knows Runner and memory but neither frames' order nor the socket. Tensors
without rows are in the spill (`worker_spill`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.backends import Batch, Execution, Outputs, PerRequest, Runner
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, PenstockError, describe_error, error_text
from penstock.serving.plan import column_bytes, fixed_outputs
from penstock.serving.slab import Layout, Segment
from penstock.serving.worker_spill import Values, WorkerSpill, split
from penstock.types import DATATYPES, Array, TensorSpec, shape_fits
from penstock.wire import frames

MAX_VIEWS = 256
# Limit on the text of one error, to fit a frame.
MAX_ERROR_CHARS = 4096
log = logging.getLogger("penstock.worker")


class WorkerMemory:
    """The worker's view of shared memory: slab columns, and the spill."""

    def __init__(self, config: ModelConfig, spill_bytes: int, fds: Sequence[int]) -> None:
        self._config = config
        self.spill = WorkerSpill(spill_bytes, fds)
        self._slabs: dict[int, Segment] = {}
        self._views: dict[object, list[Array]] = {}
        self._columns = [*config.inputs, *fixed_outputs(config)]

    def map_slab(self, slab: int, nbytes: int, fd: int) -> memoryview:
        self._slabs[slab] = segment = Segment(nbytes, fd)
        return segment.view

    def columns(self, slab: int, frame: frames.Dispatch) -> list[Array]:
        """Return each column as an array of all its rows; inputs first, then fixed outputs."""
        key = (slab, frame.row_shapes, frame.capacity)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            views = self._views[key] = self._make_views(slab, frame)
        return views

    def _make_views(self, slab: int, frame: frames.Dispatch) -> list[Array]:
        row_shapes = [*frame.row_shapes, *(spec.shape for spec in fixed_outputs(self._config))]
        layout = Layout.of(column_bytes(self._config, frame.row_shapes), frame.capacity)
        views: list[Array] = []
        num_inputs = len(frame.row_shapes)
        for index, (spec, shape) in enumerate(zip(self._columns, row_shapes, strict=True)):
            start = layout.offsets[index]
            raw = self._slabs[slab].view[start : start + layout.row_bytes[index] * frame.capacity]
            view = np.frombuffer(raw, dtype=DATATYPES[spec.datatype].numpy)
            view = view.reshape(frame.capacity, *shape)
            if index < num_inputs:
                # Inputs are read-only: the batch may have to run again after a crash.
                view.flags.writeable = False
            views.append(view)
        return views

    def close(self) -> None:
        self._views.clear()
        self.spill.close()
        for segment in self._slabs.values():
            segment.close()


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch that the runner has started."""

    frame: frames.Dispatch
    batch: Batch
    execution: Execution
    # When the frame was received, and when the inputs were gathered.
    began: float
    gathered: float


class BatchExecutor:
    """Runs batches of one model in place in shared memory."""

    def __init__(
        self, config: ModelConfig, runner: Runner, memory: WorkerMemory, proof: frames.Proof
    ) -> None:
        self._config = config
        self.runner = runner
        self.memory = memory
        self._proof = proof
        self._names = [spec.name for spec in config.inputs]

    def begin(self, frame: frames.Dispatch) -> Begun:
        began = time.perf_counter()
        batch = self._batch_of_rows(frame) if frame.runs else self.memory.spill.gather(frame)
        gathered = time.perf_counter()
        return Begun(frame, batch, self.runner.start(batch), began, gathered)

    def finish(self, begun: Begun) -> frames.Done:
        frame, execution = begun.frame, begun.execution
        answers = list(execution.wait())
        if len(answers) != 1:
            raise BackendFailed(f"expected one answer to the batch, the model gave {len(answers)}")
        ran = time.perf_counter()
        gathered = begun.gathered + execution.prepare_s
        ran -= execution.finish_s
        (answer,) = answers
        errors: dict[int, str] = {}
        invalid: tuple[int, ...] = ()
        if isinstance(answer, PerRequest):
            in_spill = self._store_each(frame, answer, errors)
            # Requests that cannot be run, through their clients' fault.
            each = enumerate(answer.answers)
            invalid = tuple(index for index, its in each if isinstance(its, InvalidRequest))
        else:
            left = self._store(frame, frame.runs, answer, begun.batch.num_rows)
            in_spill = []
            if left and self._config.max_batch_size > 0:
                in_spill = split(frame, left, self._proof.crops)
            elif left:
                in_spill = [left] * len(frame.requests)
        outputs = self.memory.spill.write(in_spill) if any(in_spill) else ()
        stored = time.perf_counter()
        times = gathered - begun.began, ran - gathered, stored - ran
        return frames.Done(frame.batch, *times, outputs, errors, invalid)

    def _batch_of_rows(self, frame: frames.Dispatch) -> Batch:
        pieces: list[dict[str, Array]] = []
        num_rows = 0
        for run in frame.runs:
            columns = self.memory.columns(run.slab, frame)
            rows = slice(run.row, run.row + run.count)
            # Columns of outputs come after those of inputs.
            inputs = zip(self._names, columns, strict=False)
            pieces.append({name: column[rows] for name, column in inputs})
            num_rows += run.count
        return Batch.of(pieces, num_rows, frame.requests)

    def _store(
        self,
        frame: frames.Dispatch,
        runs: Sequence[frames.RowRange],
        outputs: Outputs,
        num_rows: int,
        wanted: Collection[str] = (),
    ) -> Values:
        """Store fixed outputs in these rows of slabs; return those without a column there. Without
        `wanted`, all outputs are."""
        left: list[tuple[TensorSpec, Array]] = []
        column = len(self._names)
        for spec in self._config.outputs:
            has_column = spec.is_fixed and bool(runs)
            if not wanted or spec.name in wanted:
                values = checked(self._config, spec, outputs, num_rows)
                row = 0
                for run in runs if has_column else ():
                    target = self.memory.columns(run.slab, frame)[column]
                    target[run.row : run.row + run.count] = values[row : row + run.count]
                    row += run.count
                if not has_column:
                    left.append((spec, values))
            column += has_column
        return left

    def _store_each(
        self, frame: frames.Dispatch, answer: PerRequest, errors: dict[int, str]
    ) -> list[Values]:
        """Like `_store`, for models that answer each request separately. A request's error goes to
        `errors` under its index and does not affect the others."""
        if len(answer.answers) != len(frame.requests):
            text = f"the model gave {len(answer.answers)} answers to {len(frame.requests)} requests"
            raise BackendFailed(text)
        in_spill: list[Values] = []
        pairs = zip(frame.requests, answer.answers, strict=True)
        for index, ((part, outputs), rows) in enumerate(zip(pairs, _rows(frame), strict=True)):
            try:
                if isinstance(outputs, Exception):
                    raise outputs
                in_spill.append(self._store(frame, rows, outputs, part.num_rows, part.outputs))
            except BaseException as error:  # Any exception of the model is answered.
                errors[index] = explain_error(error)
                in_spill.append(())
        return in_spill


def checked(config: ModelConfig, spec: TensorSpec, outputs: Outputs, num_rows: int) -> Array:
    """Return an output that matches its configuration; BackendFailed says what is wrong."""
    values = outputs.get(spec.name)
    if values is None:
        raise BackendFailed(f"the model gave no output '{spec.name}'; it gave {sorted(outputs)}")
    expected = (num_rows, *spec.shape) if config.max_batch_size > 0 else spec.shape
    if values.shape != expected and not shape_fits(values.shape, expected):
        text = f"output '{spec.name}': shape {list(values.shape)}, expected {list(expected)}"
        raise BackendFailed(text)
    dtype = DATATYPES[spec.datatype].numpy
    if values.dtype != dtype and (spec.datatype != "BYTES" or values.dtype.kind not in "SU"):
        text = f"output '{spec.name}': numpy {values.dtype}, expected {dtype} for {spec.datatype}"
        raise BackendFailed(text)
    return values


def _rows(frame: frames.Dispatch) -> Iterator[Sequence[frames.RowRange]]:
    """Yield the rows of each request, always in one run; none if the batch is not in slabs."""
    runs = iter(frame.runs)
    slab = row = left = 0
    for part in frame.requests:
        if not frame.runs:
            yield ()
            continue
        if left == 0:
            run = next(runs)
            slab, row, left = run.slab, run.row, run.count
        yield (frames.RowRange(slab, row, part.num_rows),)
        row += part.num_rows
        left -= part.num_rows


def explain_error(error: BaseException) -> str:
    if isinstance(error, PenstockError):
        return error_text(error)[:MAX_ERROR_CHARS]
    # A model may have closed or replaced stderr, and then logging itself fails.
    with contextlib.suppress(BaseException):
        log.error("the model raised %s", type(error).__name__, exc_info=error)
    return describe_error(error)[:MAX_ERROR_CHARS]
