"""Runs the batches of one model in place in shared memory: rows of slabs in, rows of slabs out.

The worker's part that knows Runner and memory but neither frames' order nor the sockets. A batch
has a part of each shard that it is made of (`shard_link`). Tensors without rows are in the spill
(`worker_spill`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.backends import (
    Batch,
    Execution,
    Outputs,
    PerRequest,
    PinnedTensor,
    PlacedPieces,
    Runner,
)
from penstock.backends.heads import Headed
from penstock.config import ModelConfig
from penstock.errors import (
    AlreadyExists,
    BackendFailed,
    Cancelled,
    InvalidRequest,
    NotFound,
    NotReady,
    PenstockError,
    UnknownFailure,
    Unsupported,
    describe_error,
    error_text,
)
from penstock.serving.held_rows import HeldBatch, find, private
from penstock.serving.shard_link import ShardLink, ShardMemory
from penstock.serving.worker_regions import WorkerRegions
from penstock.serving.worker_spill import Spilled, Values, split
from penstock.types import DATATYPES, Array, Parameter, TensorSpec, from_array, shape_fits
from penstock.wire import frames

# Classes that a model may answer with beside BackendFailed.
CHOSEN_ERRORS = (
    AlreadyExists,
    Cancelled,
    InvalidRequest,
    NotFound,
    NotReady,
    UnknownFailure,
    Unsupported,
)
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
    # Requests whose inputs could not be read, by the index of their part and their own.
    faults: Mapping[tuple[int, int], InvalidRequest]


class Stored(NamedTuple):
    """What a Done says of a part whose answers are in its shard's memory."""

    outputs: Spilled = ()
    errors: dict[int, str] = {}
    invalid: tuple[int, ...] = ()
    kinds: dict[int, str] = {}
    parameters: dict[int, dict[str, Parameter]] = {}


ALL_IN_ROWS = Stored()


class BatchExecutor:
    """Runs batches of one model in place in shared memory."""

    def __init__(
        self, config: ModelConfig, runner: Runner, proof: frames.Proof, *, may_pin: bool = False
    ) -> None:
        """`may_pin`: clients' memory may be pinned, because the process ends with the worker."""
        self._config = config
        self.runner = runner
        self._proof = proof
        self.regions = WorkerRegions(
            runner.pin_foreign if may_pin else lambda memory: False,
            runner.unpin,
            gpu_number(config.device),
        )
        self._names = [spec.name for spec in config.inputs]
        # Memory that merged batches are joined in, by input. One batch runs at a time, unless the
        # runner runs ahead.
        self._joining: dict[str, Array] | None = None if runner.runs_ahead else {}

    @property
    def pinning_runner(self) -> Runner:
        """The runner that copies to the device."""
        return self.runner.inner if isinstance(self.runner, Headed) else self.runner

    def begin(self, parts: Sequence[Part]) -> Begun:
        began = time.perf_counter()
        faults: dict[tuple[int, int], InvalidRequest] = {}
        batch = self._gather(parts, faults)
        gathered = time.perf_counter()
        return Begun(parts, batch, self.runner.start(batch), began, gathered, faults)

    def gather_one(self, part: Part) -> tuple[Batch, dict[int, InvalidRequest]]:
        """Return the inputs of a part that runs alone, and by index its requests whose inputs
        could not be read; those run on zeros."""
        faults: dict[tuple[int, int], InvalidRequest] = {}
        batch = self._gather([part], faults)
        return batch, {index: error for (_, index), error in faults.items()}

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
        stored = self._store_parts(parts, batch, answer, begun.faults)
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
            kept = each.outputs, each.errors, each.invalid
            counts, more = (*totals, is_first), (each.kinds, each.parameters)
            found.append(frames.Done(part.frame.batch, *times, *kept, *counts, *more))
            # A shard that is gone counts nothing.
            is_first = is_first and part.link.is_gone
        return found

    def _gather(
        self, parts: Sequence[Part], faults: dict[tuple[int, int], InvalidRequest]
    ) -> Batch:
        if (placed := self._placed(parts)) is not None:
            requests = [request for part in parts for request in part.frame.requests]
            return Batch.of(placed, sum(placed.counts), requests)
        pieces: list[Mapping[str, Array]] = []
        for number, part in enumerate(parts):
            if part.frame.has_regions:
                pieces += self._region_pieces(part, number, faults)
            else:
                pieces += self._pieces(part)
        if len(parts) == 1:
            (part,) = parts
            room = self._room(part) if len(pieces) > 1 else None
            return Batch.of(pieces, part.num_rows, part.frame.requests, room)
        # Parts with regions have requests, others only if the runner needs them.
        has_all = all(part.frame.requests for part in parts)
        requests = [request for part in parts for request in part.frame.requests if has_all]
        num_rows = sum(part.num_rows for part in parts)
        return Batch.of(pieces, num_rows, requests, self._joining_room(pieces))

    def _placed(self, parts: Sequence[Part]) -> PlacedPieces | None:
        """Return the inputs where clients have them, if the device can copy all of them from there;
        else None."""
        shapes = parts[0].frame.row_shapes
        if not all(
            part.frame.has_regions and part.frame.runs and part.frame.row_shapes == shapes
            for part in parts
        ):
            return None
        forms = {
            spec.name: (DATATYPES[spec.datatype].numpy, tuple(shape))
            for spec, shape in zip(self._config.inputs, shapes, strict=True)
        }
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in forms.items()}
        places: dict[str, list[PinnedTensor]] = {name: [] for name in forms}
        counts: list[int] = []
        for request in (each for part in parts for each in part.frame.requests):
            if len(request.reads) != len(places):
                return None
            counts.append(request.num_rows)
            for span in request.reads:
                place = self.regions.place(span)
                if place is None or span.nbytes != request.num_rows * sizes[span.name]:
                    return None
                places[span.name].append(place)
        return PlacedPieces(places, counts, forms)

    def _joining_room(self, pieces: Sequence[Mapping[str, Array]]) -> Mapping[str, Array] | None:
        """Return memory for the joined rows of a merged batch, that of the last one if it fits: the
        pages of new memory cost more than the copy."""
        if self._joining is None:
            return None
        room: dict[str, Array] = {}
        for name, first in pieces[0].items():
            count, shape = sum(len(piece[name]) for piece in pieces), first.shape[1:]
            if first.dtype == np.object_:
                continue
            kept = self._joining.get(name)
            if kept is None or kept.shape[1:] != shape or len(kept) < count:
                most = max(count, self._config.max_batch_size)
                kept = self._joining[name] = np.empty((most, *shape), first.dtype)
            room[name] = kept[:count]
        return room

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

    def _region_pieces(
        self, part: Part, number: int, faults: dict[tuple[int, int], InvalidRequest]
    ) -> Sequence[Mapping[str, Array]]:
        """Like `_pieces`, for requests with inputs in clients' memory. What the device can copy
        from there stays; the rest is read into the rows or extents of its request. A request whose
        memory is gone runs on zeros, so that the others are answered."""
        frame, in_place = part.frame, dict[int, dict[str, Array]]()
        for index, (request, rows) in enumerate(zip(frame.requests, _rows(frame), strict=True)):
            for span in request.reads:
                column = self._names.index(span.name)
                extent = next((each for each in request.inputs if each.name == span.name), None)
                if extent is not None:
                    shape, target = extent.shape, part.memory.spill.input_of(extent)
                else:
                    shape = (request.num_rows, *frame.row_shapes[column])
                    target = part.memory.input_rows(rows[0], frame, column)
                dtype = DATATYPES[self._config.inputs[column].datatype].numpy
                values = self.regions.pinned(span, dtype)
                if values is not None:
                    in_place.setdefault(index, {})[span.name] = values.reshape(shape)
                    continue
                try:
                    self.regions.read(span, target)
                except InvalidRequest as error:
                    target[:] = bytes(len(target))
                    faults[number, index] = error
        if not in_place:
            return self._pieces(part)
        return self._pieces_beside(part, in_place)

    def _pieces_beside(
        self, part: Part, in_place: Mapping[int, Mapping[str, Array]]
    ) -> Sequence[Mapping[str, Array]]:
        """Return the inputs of each request; those without any `in_place`, together if their rows
        are adjacent."""
        frame, memory = part.frame, part.memory
        if not frame.runs:
            pieces = memory.spill.read(frame.requests)
            return [{**piece, **in_place.get(n, {})} for n, piece in enumerate(pieces)]
        found: list[tuple[frames.RowRange, Mapping[str, Array]]] = []
        for index, (rows,) in enumerate(_rows(frame)):
            last, others = found[-1] if found else (None, {})
            is_next = last is not None and last.slab == rows.slab
            is_next = is_next and last is not None and last.row + last.count == rows.row
            if index in in_place or others or not is_next or last is None:
                found.append((rows, in_place.get(index, {})))
            else:
                joined = frames.RowRange(last.slab, last.row, last.count + rows.count)
                found[-1] = joined, {}
        return [
            {
                name: others.get(name, column[rows.row : rows.row + rows.count])
                for name, column in zip(self._names, memory.columns(rows.slab, frame), strict=False)
            }
            for rows, others in found
        ]

    def _store_parts(
        self,
        parts: Sequence[Part],
        batch: Batch,
        answer: Outputs | PerRequest,
        faults: Mapping[tuple[int, int], InvalidRequest],
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
        for number, part in enumerate(parts):
            num_requests = len(part.frame.requests)
            try:
                if part.link.is_gone:
                    found.append(ALL_IN_ROWS)
                elif isinstance(answer, PerRequest) or self._stores_apart(part, number, faults):
                    own: Sequence[Outputs | Exception]
                    parameters: Mapping[int, Mapping[str, Parameter]] = {}
                    if isinstance(answer, PerRequest):
                        own = answer.answers[index : index + num_requests]
                        given = answer.parameters.items()
                        parameters = {at - index: each for at, each in given if at >= index}
                    else:
                        own = self._split(part, self._own_rows(part, answer, row, batch))
                    each = enumerate(own)
                    told = [faults.get((number, at), its) for at, its in each] if faults else own
                    found.append(self._store_each(part, told, parameters))
                else:
                    found.append(self._store_rows(part, self._own_rows(part, answer, row, batch)))
            except BaseException as error:  # Any exception of the model is answered.
                found.append(error)
            row += part.num_rows
            index += num_requests
        return found

    def _stores_apart(
        self, part: Part, number: int, faults: Mapping[tuple[int, int], InvalidRequest]
    ) -> bool:
        """Return whether outputs of a part have to be stored request by request: where some go to
        clients' memory and others have no rows, or a request has failed."""
        frame = part.frame
        if not frame.has_regions:
            return False
        if not frame.runs or any(of == number for of, _ in faults):
            return True
        has_writes = any(request.writes for request in frame.requests)
        return has_writes and not all(spec.is_fixed for spec in self._config.outputs)

    def _own_rows(self, part: Part, outputs: Outputs, row: int, batch: Batch) -> Outputs:
        if part.num_rows == batch.num_rows:
            return outputs
        return {name: values[row : row + part.num_rows] for name, values in outputs.items()}

    def _split(self, part: Part, outputs: Outputs) -> list[Outputs]:
        """Return the outputs of each request, without padding."""
        specs = self._config.outputs
        if self._config.max_batch_size == 0:
            return [outputs] * len(part.frame.requests)
        values = [(spec, outputs[spec.name]) for spec in specs]
        by_request = split(part.frame, values, self._proof.crops)
        return [{spec.name: each for spec, each in own} for own in by_request]

    def _store_rows(self, part: Part, outputs: Outputs) -> Stored:
        frame = part.frame
        if part.held is not None:
            self._hold(part.held, frame, outputs)
            return ALL_IN_ROWS
        stored = ALL_IN_ROWS
        if frame.has_regions:
            stored = self._write_rows(part, outputs)
        left = self._store(part, frame.runs, outputs)
        if not left:
            return stored
        in_spill: list[Values]
        if self._config.max_batch_size > 0:
            in_spill = split(frame, left, self._proof.crops)
        else:
            in_spill = [left] * len(frame.requests)
        return Stored(part.memory.spill.write(in_spill) if any(in_spill) else ())

    def _write_rows(self, part: Part, outputs: Outputs) -> Stored:
        """Write the fixed outputs that belong in clients' memory, row by row of one array; return
        the errors of requests whose memory does not take them."""
        errors: dict[int, str] = {}
        columns: dict[str, memoryview] = {}
        row = 0
        for index, request in enumerate(part.frame.requests):
            for span in request.writes:
                data = columns.get(span.name)
                if data is None:
                    values: Array = np.ascontiguousarray(outputs[span.name])
                    data = columns[span.name] = memoryview(values.data).cast("B")
                size = len(data) // part.num_rows
                try:
                    self.regions.write(span, data[row * size : (row + request.num_rows) * size])
                except InvalidRequest as error:
                    errors[index] = explain_error(error)
            row += request.num_rows
        return Stored((), errors, tuple(errors), {})

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

    def _store_each(
        self,
        part: Part,
        answers: Sequence[Outputs | Exception],
        parameters: Mapping[int, Mapping[str, Parameter]],
    ) -> Stored:
        """Like `_store_rows`, for models that answer each request separately, and for outputs in
        clients' memory. A request's error does not affect the others."""
        errors: dict[int, str] = {}
        # Requests that cannot be run, through their clients' fault.
        invalid: list[int] = []
        kinds: dict[int, str] = {}
        in_spill: list[Values] = []
        held: list[dict[str, Array]] = []
        in_regions: list[tuple[frames.Extent, ...]] = []
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
                if part.held is not None:
                    specs = [spec for spec in self._config.outputs if spec.name in good]
                    held.append({spec.name: private(spec, good[spec.name]) for spec in specs})
                    continue
                written = self._write_regions(request, good)
                kept = [name for name in good if all(name != each.name for each in written)]
                in_spill.append(self._store(part, rows, good, kept) if kept else ())
                # The shard knows the shapes of outputs that have rows.
                fixed = {spec.name for spec in self._config.outputs if spec.is_fixed and rows}
                in_regions.append(tuple(each for each in written if each.name not in fixed))
            except BaseException as error:  # Any exception of the model is answered.
                errors[index] = explain_error(error)
                if isinstance(error, InvalidRequest):
                    invalid.append(index)
                elif kind := kind_of(error):
                    kinds[index] = kind
                in_spill.append(())
                in_regions.append(())
                held.append({})
        if part.held is not None:
            part.held.answers = held
        spilled = part.memory.spill.write(in_spill) if any(in_spill) else ()
        if any(in_regions):
            pairs_of = zip(spilled or [()] * len(in_regions), in_regions, strict=True)
            spilled = tuple((*some, *others) for some, others in pairs_of)
        kept_parameters = {
            index: dict(each)
            for index, each in parameters.items()
            if index < len(answers) and index not in errors
        }
        return Stored(spilled, errors, tuple(invalid), kinds, kept_parameters)

    def _write_regions(self, request: frames.RequestPart, outputs: Outputs) -> list[frames.Extent]:
        """Write the outputs that belong in clients' memory."""
        written: list[frames.Extent] = []
        for span in request.writes:
            spec = next(spec for spec in self._config.outputs if spec.name == span.name)
            tensor = from_array(spec.name, spec.datatype, outputs[span.name])
            self.regions.write(span, tensor.data)
            described = spec.name, spec.datatype, tuple(tensor.shape)
            nbytes = memoryview(tensor.data).nbytes
            written.append(frames.Extent(*described, span.offset, nbytes, span.region))
        return written


def checked(config: ModelConfig, spec: TensorSpec, outputs: Outputs, num_rows: int) -> Array:
    """Return an output that matches its configuration; BackendFailed says what is wrong."""
    values = outputs.get(spec.name)
    if values is None:
        raise BackendFailed(f"the model gave no output '{spec.name}'; it gave {sorted(outputs)}")
    expected = (num_rows, *spec.shape) if config.max_batch_size > 0 else spec.shape
    if values.shape != expected and not shape_fits(values.shape, expected):
        text = f"output '{spec.name}': shape {list(values.shape)}, expected {list(expected)}"
        raise BackendFailed(text)
    return _of_type(spec, values)


def checked_type(spec: TensorSpec, values: Array, has_batch: bool) -> Array:
    """Return an output of a response that matches its configuration; it may have any number of
    rows."""
    expected = (-1, *spec.shape) if has_batch else spec.shape
    if not shape_fits(values.shape, expected):
        text = f"output '{spec.name}': shape {list(values.shape)}, expected {list(expected)}"
        raise BackendFailed(text)
    return _of_type(spec, values)


def _of_type(spec: TensorSpec, values: Array) -> Array:
    dtype = DATATYPES[spec.datatype].numpy
    if values.dtype != dtype and (spec.datatype != "BYTES" or values.dtype.kind not in "SU"):
        if values.dtype == np.int64 and dtype.kind == "i":
            # What numpy makes of Python's integers. Triton passes it on with its own datatype.
            narrow = values.astype(dtype)
            if np.array_equal(narrow, values):
                return narrow
        text = f"output '{spec.name}': numpy {values.dtype}, expected {dtype} for {spec.datatype}"
        raise BackendFailed(text)
    return values


def gpu_number(device: str) -> int | None:
    """Return the number of a GPU by its name; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    return int(device.partition(":")[2] or 0)


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


def kind_of(error: BaseException) -> str:
    """Name the class of an error that a model may answer with; empty: it failed."""
    return next((each.__name__ for each in type(error).__mro__ if each in CHOSEN_ERRORS), "")


def explain_error(error: BaseException) -> str:
    if isinstance(error, PenstockError):
        return error_text(error)[:MAX_ERROR_CHARS]
    # A model may have closed or replaced stderr, and then logging itself fails.
    with contextlib.suppress(BaseException):
        log.error("the model raised %s", type(error).__name__, exc_info=error)
    return describe_error(error)[:MAX_ERROR_CHARS]
