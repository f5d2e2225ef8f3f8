"""Runs the batches of one model in place in shared memory: rows of slabs in, rows of slabs out.

The worker's part that knows Runner and memory but neither frames' order nor the sockets. A batch
has a part of each shard that it is made of (`shard_link`). Tensors without rows are in the spill
(`worker_spill`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.backends import Batch, Execution, Outputs, PerRequest, Runner
from penstock.backends.heads import Headed
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, PenstockError, describe_error, error_text
from penstock.serving.held_rows import HeldBatch, find, private
from penstock.serving.shard_link import ShardLink, ShardMemory
from penstock.serving.worker_spill import Spilled, Values, split
from penstock.types import DATATYPES, Array, TensorSpec, shape_fits
from penstock.wire import frames

# Limit on the text of one error, to fit a frame.
MAX_ERROR_CHARS = 4096
log = logging.getLogger("penstock.worker")


@dataclass(slots=True, eq=False)
class Part:
    """What one shard gives to a batch."""

    link: ShardLink
    frame: frames.Dispatch
    num_rows: int
    # Inputs and outputs that are not in shared memory.
    held: HeldBatch | None = None

    @classmethod
    def of(cls, link: ShardLink, frame: frames.Dispatch) -> Part:
        held = find(frame.held) if frame.held else None
        if frame.runs:
            return cls(link, frame, sum([run.count for run in frame.runs]), held)
        return cls(link, frame, sum([request.num_rows for request in frame.requests]), held)

    @property
    def memory(self) -> ShardMemory:
        assert self.link.memory is not None, "a shard says Hello first"
        return self.link.memory


@dataclass(slots=True, eq=False)
class Begun:
    """A batch that the runner has started."""

    parts: Sequence[Part]
    batch: Batch
    execution: Execution
    # When the frame was received, and when the inputs were gathered.
    began: float
    gathered: float


class Stored(NamedTuple):
    """What a Done says of a part whose answers are in its shard's memory."""

    outputs: Spilled = ()
    errors: dict[int, str] = {}
    invalid: tuple[int, ...] = ()


ALL_IN_ROWS = Stored()


class BatchExecutor:
    """Runs batches of one model in place in shared memory."""

    def __init__(self, config: ModelConfig, runner: Runner, proof: frames.Proof) -> None:
        self._config = config
        self.runner = runner
        self._proof = proof
        self._names = [spec.name for spec in config.inputs]

    @property
    def pinning_runner(self) -> Runner:
        """The runner that copies to the device."""
        return self.runner.inner if isinstance(self.runner, Headed) else self.runner

    def begin(self, parts: Sequence[Part]) -> Begun:
        began = time.perf_counter()
        batch = self._gather(parts)
        gathered = time.perf_counter()
        return Begun(parts, batch, self.runner.start(batch), began, gathered)

    def finish(self, begun: Begun) -> list[frames.Done | BaseException]:
        """Wait for a batch; return for each of its parts the answer, or why there is none."""
        parts, batch, execution = begun.parts, begun.batch, begun.execution
        answers = list(execution.wait())
        if len(answers) != 1:
            raise BackendFailed(f"expected one answer to the batch, the model gave {len(answers)}")
        ran = time.perf_counter()
        gathered = begun.gathered + execution.prepare_s
        ran -= execution.finish_s
        (answer,) = answers
        stored = self._store_parts(parts, batch, answer)
        input_s, infer_s = gathered - begun.began, ran - gathered
        output_s = time.perf_counter() - ran
        found: list[frames.Done | BaseException] = []
        num_rows = num_tokens = 0
        if len(parts) > 1:
            num_rows, num_tokens = batch.num_rows, sum(part.frame.num_tokens for part in parts)
        is_first = True
        for part, each in zip(parts, stored, strict=True):
            if isinstance(each, BaseException):
                found.append(each)
                continue
            times = input_s, infer_s, output_s
            totals = num_rows, num_tokens
            found.append(frames.Done(part.frame.batch, *times, *each, *totals, is_first))
            # A shard that is gone counts nothing.
            is_first = is_first and part.link.is_gone
        return found

    def _gather(self, parts: Sequence[Part]) -> Batch:
        pieces: list[Mapping[str, Array]] = []
        for part in parts:
            pieces += self._pieces(part)
        if len(parts) == 1:
            (part,) = parts
            room = self._room(part) if len(pieces) > 1 else None
            return Batch.of(pieces, part.num_rows, part.frame.requests, room)
        requests = [request for part in parts for request in part.frame.requests]
        return Batch.of(pieces, sum(part.num_rows for part in parts), requests)

    def _room(self, part: Part) -> Mapping[str, Array] | None:
        """Return the rows that wait for inputs which are elsewhere; None if they are apart. New
        memory for each batch would cost more than the copy."""
        frame = part.frame
        if part.held is None or not part.held.pieces or len(frame.runs) != 1:
            return None
        (run,) = frame.runs
        room: dict[str, Array] = {}
        for name, column in zip(self._names, part.memory.columns(run.slab, frame), strict=False):
            room[name] = column[run.row : run.row + run.count]
            room[name].flags.writeable = True
        return room

    def _pieces(self, part: Part) -> Sequence[Mapping[str, Array]]:
        """Return the inputs of each run of rows, or of each request without rows."""
        frame, memory = part.frame, part.memory
        if not frame.runs:
            return memory.spill.read(frame.requests)
        if part.held is not None and part.held.pieces:
            return part.held.pieces
        pieces: list[dict[str, Array]] = []
        for run in frame.runs:
            rows = slice(run.row, run.row + run.count)
            # Columns of outputs come after those of inputs.
            columns = zip(self._names, memory.columns(run.slab, frame), strict=False)
            pieces.append({name: column[rows] for name, column in columns})
        return pieces

    def _store_parts(
        self, parts: Sequence[Part], batch: Batch, answer: Outputs | PerRequest
    ) -> list[Stored | BaseException]:
        """Store each part's answers in its shard's memory. A part that cannot be stored, for lack
        of spill, does not affect the others."""
        if isinstance(answer, PerRequest):
            self._check_count(answer, batch)
        else:
            answer = {
                spec.name: checked(self._config, spec, answer, batch.num_rows)
                for spec in self._config.outputs
            }
        found: list[Stored | BaseException] = []
        row = index = 0
        for part in parts:
            num_requests = len(part.frame.requests)
            try:
                if part.link.is_gone:
                    found.append(ALL_IN_ROWS)
                elif isinstance(answer, PerRequest):
                    own = answer.answers[index : index + num_requests]
                    found.append(self._store_each(part, own))
                else:
                    found.append(self._store_rows(part, self._own_rows(part, answer, row, batch)))
            except BaseException as error:  # Any exception of the model is answered.
                found.append(error)
            row += part.num_rows
            index += num_requests
        return found

    def _own_rows(self, part: Part, outputs: Outputs, row: int, batch: Batch) -> Outputs:
        if part.num_rows == batch.num_rows:
            return outputs
        return {name: values[row : row + part.num_rows] for name, values in outputs.items()}

    def _store_rows(self, part: Part, outputs: Outputs) -> Stored:
        frame = part.frame
        if part.held is not None:
            self._hold(part.held, frame, outputs)
            return ALL_IN_ROWS
        left = self._store(part, frame.runs, outputs)
        if not left:
            return ALL_IN_ROWS
        in_spill: list[Values]
        if self._config.max_batch_size > 0:
            in_spill = split(frame, left, self._proof.crops)
        else:
            in_spill = [left] * len(frame.requests)
        return Stored(part.memory.spill.write(in_spill) if any(in_spill) else ())

    def _hold(self, held: HeldBatch, frame: frames.Dispatch, outputs: Outputs) -> None:
        """Give each request of a caller in this process its outputs."""
        answers: list[dict[str, Array]] = [{} for _ in held.counts]
        for spec in self._config.outputs:
            values = outputs[spec.name]
            if self._config.max_batch_size <= 0:
                own = [private(spec, values) for _ in answers]
            elif spec.is_fixed:
                own = held.split(values)
            else:
                parts = split(frame, [(spec, values)], self._proof.crops)
                own = [private(spec, each) for ((_, each),) in parts]
            for answer, each in zip(answers, own, strict=True):
                answer[spec.name] = each
        held.answers = answers

    def _store(
        self,
        part: Part,
        runs: Sequence[frames.RowRange],
        outputs: Outputs,
        wanted: Collection[str] = (),
    ) -> Values:
        """Store fixed outputs in these rows of slabs; return those without a column there. Without
        `wanted`, all outputs are. Invariant: the outputs are checked."""
        left: list[tuple[TensorSpec, Array]] = []
        column = len(self._names)
        for spec in self._config.outputs:
            has_column = spec.is_fixed and bool(runs)
            if not wanted or spec.name in wanted:
                values = outputs[spec.name]
                row = 0
                for run in runs if has_column else ():
                    target = part.memory.columns(run.slab, part.frame)[column]
                    target[run.row : run.row + run.count] = values[row : row + run.count]
                    row += run.count
                if not has_column:
                    left.append((spec, values))
            column += has_column
        return left

    def _check_count(self, answer: PerRequest, batch: Batch) -> None:
        if len(answer.answers) != len(batch.requests):
            text = f"the model gave {len(answer.answers)} answers to {len(batch.requests)} requests"
            raise BackendFailed(text)

    def _store_each(self, part: Part, answers: Sequence[Outputs | Exception]) -> Stored:
        """Like `_store_rows`, for models that answer each request separately. A request's error
        does not affect the others."""
        errors: dict[int, str] = {}
        in_spill: list[Values] = []
        held: list[dict[str, Array]] = []
        pairs = zip(part.frame.requests, answers, strict=True)
        for index, ((request, outputs), rows) in enumerate(
            zip(pairs, _rows(part.frame), strict=True)
        ):
            try:
                if isinstance(outputs, Exception):
                    raise outputs
                good = {
                    spec.name: checked(self._config, spec, outputs, request.num_rows)
                    for spec in self._config.outputs
                    if not request.outputs or spec.name in request.outputs
                }
                if part.held is None:
                    in_spill.append(self._store(part, rows, good, request.outputs))
                else:
                    specs = [spec for spec in self._config.outputs if spec.name in good]
                    held.append({spec.name: private(spec, good[spec.name]) for spec in specs})
            except BaseException as error:  # Any exception of the model is answered.
                errors[index] = explain_error(error)
                in_spill.append(())
                held.append({})
        if part.held is not None:
            part.held.answers = held
        # Requests that cannot be run, through their clients' fault.
        each = enumerate(answers)
        invalid = tuple(index for index, its in each if isinstance(its, InvalidRequest))
        spilled = part.memory.spill.write(in_spill) if any(in_spill) else ()
        return Stored(spilled, errors, invalid)


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
