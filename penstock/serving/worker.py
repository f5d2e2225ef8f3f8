"""The worker process: owns the device and one loaded Runner, and nothing else.

Started by the supervisor as `python -m penstock.serving.worker FD PARENT`; reads frames from that
socket, runs batches in place in shared memory, answers with frames, and exits when the socket
closes. Knows no protocol and no queue. In-process use runs the same loop in a thread.
"""

from __future__ import annotations

import array
import contextlib
import errno
import io
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.backends import Batch, Execution, LoadRunner, Outputs, PerRequest, Runner, backend
from penstock.backends.heads import Headed
from penstock.backends.processing import Processed, model_in
from penstock.config import ModelConfig, ladder
from penstock.errors import (
    BackendFailed,
    ConfigError,
    InvalidRequest,
    PenstockError,
    describe_error,
    error_text,
)
from penstock.processes.start import begin_life, take_part
from penstock.repository import manifest
from penstock.serving import warmups
from penstock.serving.memory_limit import OUT_OF_MEMORY, MemoryLimit
from penstock.serving.padding import Pads, cropped
from penstock.serving.plan import column_bytes, fixed_outputs, matches
from penstock.serving.proof import apply_proof, prove
from penstock.serving.slab import Extents, Layout, Segment
from penstock.system import logs
from penstock.types import DATATYPES, Array, Tensor, TensorSpec, from_array, to_array
from penstock.wire import frames

MAX_VIEWS = 256
# Limit on the descriptors of one frame.
MAX_FDS = 3
# Limits on the problems that a failed load reports, and on their total length, to fit a frame.
MAX_PROBLEMS, MAX_PROBLEM_CHARS = 100, 65536
LONG_WARM_UP_S = 0.25
# Limit on the text of one error, to fit a frame.
MAX_ERROR_CHARS = 4096
Values = Sequence[tuple[TensorSpec, Array]]
Spilled = tuple[tuple[frames.Extent, ...], ...]
log = logging.getLogger("penstock.worker")


class Channel:
    """The worker's end of the socket: blocking, one frame per datagram."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(frames.MAX_FRAME_BYTES)
        self._view = memoryview(self._buffer)
        self._fd_space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

    def receive(self) -> tuple[frames.ToWorker, list[int]] | None:
        """Return the next frame and its descriptors; None when the core has exited."""
        size, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], self._fd_space)
        if size == 0:
            return None
        fds: list[int] = []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                fds.extend(received)
        frame = frames.decode_to_worker(self._view[:size])
        if isinstance(frame, frames.Enclosed):
            frame = frames.decode_to_worker(_read_enclosed(frame, fds.pop()))
        return frame, fds

    def send(self, frame: frames.FromWorker) -> None:
        """Send a frame; OSError if it is too large."""
        data = frames.encode(frame)
        if len(data) > frames.MAX_FRAME_BYTES:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        self._sock.send(data)

    def close(self) -> None:
        self._sock.close()


def _read_enclosed(frame: frames.Enclosed, fd: int) -> bytes:
    segment = Segment(frame.nbytes, fd)
    data = bytes(segment.view[: frame.nbytes])
    segment.close()
    return data


class WorkerMemory:
    """The worker's view of shared memory: slab columns, and the input and output spills."""

    def __init__(self, config: ModelConfig, spill_bytes: int, fds: Sequence[int]) -> None:
        self._config = config
        self._input_spill = Segment(spill_bytes, fds[0])
        self._output_spill = Segment(spill_bytes, fds[1])
        self._extents = Extents(spill_bytes)
        # If the runner runs ahead, one thread writes answers and another releases them.
        self._extents_lock = threading.Lock()
        self._slabs: dict[int, Segment] = {}
        self._views: dict[object, list[Array]] = {}
        self._columns = [*config.inputs, *fixed_outputs(config)]

    @property
    def input_spill(self) -> memoryview:
        return self._input_spill.view

    def map_slab(self, slab: int, nbytes: int, fd: int) -> memoryview:
        self._slabs[slab] = segment = Segment(nbytes, fd)
        return segment.view

    def columns(self, slab: int, frame: frames.Dispatch) -> list[Array]:
        """Return each column of a slab as an array of all its rows; inputs first, then fixed
        outputs."""
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

    def read(self, extent: frames.Extent) -> Array:
        data = self._input_spill.view[extent.offset : extent.offset + extent.nbytes]
        array_ = to_array(Tensor(extent.name, extent.datatype, extent.shape, data))
        if extent.datatype != "BYTES":
            array_.flags.writeable = False
        return array_

    def write(self, name: str, datatype: str, values: Array) -> frames.Extent:
        tensor = from_array(name, datatype, values)
        nbytes = len(tensor.data)
        with self._extents_lock:
            offset = self._extents.allocate(nbytes)
        if offset is None:
            raise BackendFailed(
                f"output '{name}': {nbytes} bytes do not fit the spill segment "
                f"({self._extents.free_bytes} of {self._extents.capacity} bytes free)"
            )
        self._output_spill.view[offset : offset + nbytes] = tensor.data
        return frames.Extent(name, datatype, tuple(values.shape), offset, nbytes)

    def close(self) -> None:
        self._views.clear()
        for segment in (self._input_spill, self._output_spill, *self._slabs.values()):
            segment.close()

    def release(self, offsets: Sequence[int]) -> None:
        with self._extents_lock:
            for offset in offsets:
                self._extents.release(offset)


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
        batch = self._batch_of_rows(frame) if frame.runs else self._batch_of_extents(frame)
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
            in_spill = self._split(frame, left) if left else []
        outputs = self._spill(in_spill) if any(in_spill) else ()
        stored = time.perf_counter()
        times = gathered - begun.began, ran - gathered, stored - ran
        return frames.Done(frame.batch, *times, outputs, errors, invalid)

    def _batch_of_rows(self, frame: frames.Dispatch) -> Batch:
        names = self._names
        parts: list[list[Array]] = []
        num_rows = 0
        for run in frame.runs:
            columns = self.memory.columns(run.slab, frame)
            parts.append(
                [column[run.row : run.row + run.count] for column in columns[: len(names)]]
            )
            num_rows += run.count
        if len(parts) == 1:
            inputs = dict(zip(names, parts[0], strict=True))
        else:
            inputs = {name: np.concatenate([p[i] for p in parts]) for i, name in enumerate(names)}
        return Batch(inputs, num_rows, frame.requests)

    def _batch_of_extents(self, frame: frames.Dispatch) -> Batch:
        num_rows = sum(part.num_rows for part in frame.requests)
        stacked: dict[str, list[Array]] = {}
        for part in frame.requests:
            for extent in part.inputs:
                stacked.setdefault(extent.name, []).append(self.memory.read(extent))
        inputs = {
            name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            for name, arrays in stacked.items()
        }
        return Batch(inputs, num_rows, frame.requests)

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

    def _split(self, frame: frames.Dispatch, values: Values) -> list[Values]:
        """Split batched outputs by request, without padding."""
        if self._config.max_batch_size == 0:
            return [values] * len(frame.requests)
        parts: list[Values] = []
        row = 0
        for part in frame.requests:
            end = row + part.num_rows
            own = [(spec, array_[row:end]) for spec, array_ in values]
            if part.length:
                crops, length = self._proof.crops, part.length
                own = [(spec, cropped(spec.name, each, crops, length)) for spec, each in own]
            parts.append(own)
            row = end
        return parts

    def _store_each(
        self, frame: frames.Dispatch, answer: PerRequest, errors: dict[int, str]
    ) -> list[Values]:
        """Like `_store`, for models that answer each request separately. A request's error goes to
        `errors` under its index and does not affect the others."""
        if len(answer.answers) != len(frame.requests):
            raise BackendFailed(
                f"the model gave {len(answer.answers)} answers to {len(frame.requests)} requests"
            )
        in_spill: list[Values] = []
        pairs = zip(frame.requests, answer.answers, strict=True)
        for index, ((part, outputs), rows) in enumerate(zip(pairs, _rows(frame), strict=True)):
            try:
                if isinstance(outputs, Exception):
                    raise outputs
                in_spill.append(self._store(frame, rows, outputs, part.num_rows, part.outputs))
            except BaseException as error:  # Any exception of the model is answered.
                errors[index] = _explain(error)
                in_spill.append(())
        return in_spill

    def _spill(self, answers: Sequence[Values]) -> Spilled:
        """Write each request's outputs to the spill; all or none. If the batch does not fit, it
        fails and each of its requests runs again alone."""
        spilled: list[list[frames.Extent]] = []
        try:
            for values in answers:
                spilled.append([])
                for spec, array_ in values:
                    spilled[-1].append(self.memory.write(spec.name, spec.datatype, array_))
        except BaseException:
            self.memory.release([extent.offset for extents in spilled for extent in extents])
            raise
        return tuple(tuple(extents) for extents in spilled)


class Worker:
    """One model on one device. One thread receives, runs and answers. If the runner runs ahead, a
    second thread waits for results and sends the answers, in the order of the batches."""

    def __init__(
        self,
        channel: Channel,
        on_load: Callable[[frames.LoadModel], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        die: Callable[[], None] | None = None,
    ) -> None:
        self._channel = channel
        self._on_load = on_load
        self._on_ready = on_ready
        # Exits the process; None if the worker runs in a thread.
        self._die = die
        self._memory: WorkerMemory | None = None
        self._loaded: BatchExecutor | None = None
        # The runner, if it monitors its device's memory.
        self._watched: Runner | None = None
        # None without a limit, in a thread, or once the worker has asked to be replaced.
        self._memory_limit: MemoryLimit | None = None
        self._begun: queue.SimpleQueue[Begun | None] = queue.SimpleQueue()
        self._answerer: threading.Thread | None = None

    def serve(self) -> None:
        """Handle frames until the core closes the socket or sends Stop."""
        while self.step():
            pass

    def step(self) -> bool:
        """Receive and handle one frame; False when it was the last."""
        received = self._channel.receive()
        if received is None:
            return False
        frame, fds = received
        if isinstance(frame, frames.Dispatch):
            self._run(frame)
        elif isinstance(frame, frames.Release):
            assert self._memory is not None
            self._memory.release(frame.offsets)
        elif isinstance(frame, frames.MapSlab):
            assert self._memory is not None
            self._pin(self._memory.map_slab(frame.slab, frame.nbytes, fds[0]))
        elif isinstance(frame, frames.LoadModel):
            return self._load(frame, fds)
        elif isinstance(frame, frames.Stop):
            self._end_answers()
            if self._loaded is not None:
                self._loaded.runner.close()
            return False
        return True

    def close(self) -> None:
        """Unmap the shared memory; only needed for workers in a thread."""
        self._end_answers()
        if self._memory is not None:
            self._memory.close()

    def _load(self, frame: frames.LoadModel, fds: Sequence[int]) -> bool:
        if frame.version != frames.VERSION:
            text = f"the core speaks frames version {frame.version}, this worker {frames.VERSION}"
            self._channel.send(frames.StartFailed((text,)))
            return False
        began = time.perf_counter()
        try:
            config = frame.model
            if self._on_load is not None:
                self._on_load(frame)
            self._memory = memory = WorkerMemory(config, frame.spill_bytes, fds)
            runner = _checked_backend(config)(config)
            proof = frame.proof or prove(config, runner)
            self._loaded = BatchExecutor(config, runner, memory, proof)
            apply_proof(runner, proof)
            timings, bucket_timings = warm_up_all(config, runner, proof)
            warm_up_as_asked(config, runner)
        except BaseException as error:  # Any exception of the model's code is the answer to Load.
            self._channel.send(frames.StartFailed(_load_problems(error, frame.model)))
            return False
        if self._on_ready is not None:
            self._on_ready()
        self._watched = model_in(runner)
        self._watched.settle()
        if self._die is not None and config.memory_bytes is not None:
            self._memory_limit = MemoryLimit(config.memory_bytes)
        self._pin(memory.input_spill)
        if runner.runs_ahead:
            self._answerer = threading.Thread(target=self._answer_all, daemon=True)
            self._answerer.start()
        self._channel.send(
            frames.WorkerReady(
                frames.VERSION,
                time.perf_counter() - began,
                dict(runner.built()),
                timings,
                runner.needs_requests,
                proof,
                bucket_timings,
            )
        )
        return True

    def _pin(self, memory: memoryview) -> None:
        """Pin shared memory for the GPU. Only in the worker's own process: a thread unmaps the
        memory while the process lives, and the GPU could still read it."""
        assert self._loaded is not None
        runner = self._loaded.runner
        if self._die is not None:
            (runner.inner if isinstance(runner, Headed) else runner).pin(memory)

    def _failed(self, batch: int, error: BaseException) -> frames.BatchFailed:
        """Return the answer for a batch that failed. If the error lost the GPU, exit instead: the
        core then finds the culprit by running the requests again, each alone."""
        answer = frames.BatchFailed(batch, _explain(error))
        assert self._loaded is not None
        if self._die is not None and model_in(self._loaded.runner).is_lost():
            log.error("the GPU is lost to this worker: %s", answer.error)
            self._die()
        return answer

    def _run(self, frame: frames.Dispatch) -> None:
        assert self._loaded is not None
        try:
            begun = self._loaded.begin(frame)
        except BaseException as error:  # Any exception of the model is answered.
            failed = self._failed(frame.batch, error)
        else:
            if self._answerer is None:
                self._answer(begun)
            else:
                self._begun.put(begun)
            self._leave_if_asked()
            return
        self._leave_if_full(failed)
        self._send(failed)

    def _leave_if_asked(self) -> None:
        """Ask once to be replaced, if the runner wants it: the core then sends no more batches and
        stops this worker."""
        reason = "" if self._watched is None else self._watched.restart_reason
        if reason:
            self._watched = None
            self._channel.send(frames.Leaving(reason))

    def _leave_if_full(self, answer: frames.Done | frames.BatchFailed) -> None:
        """Ask to be replaced if memory is exhausted; before the answer is sent, so that no batch
        follows it. Invariant: the exceptions of the batch are gone."""
        if self._memory_limit is None:
            return
        errors = (
            (answer.error,) if isinstance(answer, frames.BatchFailed) else answer.errors.values()
        )
        reason = self._memory_limit.restart_reason(errors)
        if reason:
            self._memory_limit = None
            self._channel.send(frames.Leaving(reason))

    def _answer_all(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                self._answer(begun)
            except OSError:
                return  # The core has exited; the other thread notices too.

    def _end_answers(self) -> None:
        """Stop the answering thread after it has answered all started batches."""
        if self._answerer is not None:
            self._begun.put(None)
            self._answerer.join()
            self._answerer = None

    def _answer(self, begun: Begun) -> None:
        assert self._loaded is not None
        try:
            answer: frames.Done | frames.BatchFailed = self._loaded.finish(begun)
        except BaseException as error:  # Any exception of the model is answered.
            answer = self._failed(begun.frame.batch, error)
        self._leave_if_full(answer)
        self._send(answer)

    def _send(self, answer: frames.Done | frames.BatchFailed) -> None:
        try:
            self._channel.send(answer)
        except OSError as error:
            if not isinstance(answer, frames.Done):
                raise
            assert self._memory is not None
            self._memory.release([extent.offset for part in answer.outputs for extent in part])
            text = f"the answer's description does not fit a frame: {error.strerror}"
            self._channel.send(frames.BatchFailed(answer.batch, text))


def checked(config: ModelConfig, spec: TensorSpec, outputs: Outputs, num_rows: int) -> Array:
    """Return an output that matches its configuration; BackendFailed says what is wrong."""
    values = outputs.get(spec.name)
    if values is None:
        raise BackendFailed(f"the model gave no output '{spec.name}'; it gave {sorted(outputs)}")
    expected = (num_rows, *spec.shape) if config.max_batch_size > 0 else spec.shape
    if values.shape != expected and not matches(values.shape, expected):
        raise BackendFailed(
            f"output '{spec.name}': shape {list(values.shape)}, expected {list(expected)}"
        )
    dtype = DATATYPES[spec.datatype].numpy
    if values.dtype != dtype and (spec.datatype != "BYTES" or values.dtype.kind not in "SU"):
        raise BackendFailed(
            f"output '{spec.name}': numpy {values.dtype}, expected {dtype} for {spec.datatype}"
        )
    return values


def _rows(frame: frames.Dispatch) -> Iterator[Sequence[frames.RowRange]]:
    """Yield the slab rows of each request, which are always in one run; none if the batch is not in
    slabs."""
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


def _checked_backend(config: ModelConfig) -> LoadRunner:
    """Import the backend while a thread checks the version's files against their digests; both take
    seconds. No code of the version runs before the check passes."""
    with ThreadPoolExecutor(1) as pool:
        checked: Future[None] | None = None
        if config.manifest:
            checked = pool.submit(manifest.check_digests, Path(config.manifest).parent)
        found = backend(config.backend)
        if checked is not None:
            checked.result()
    return found


def warm_up_all(
    config: ModelConfig, runner: Runner, proof: frames.Proof
) -> tuple[dict[int, float], dict[int, dict[int, float]]]:
    """Warm up; return the times by batch size, and by bucket and batch size. Pre- and
    postprocessing functions are skipped: zeros mean nothing to them."""
    if isinstance(runner, Processed | Headed):
        config, runner = config.model, runner.inner
    timings = warm_up(config, runner)
    is_padded = config.padding is not None and not proof.unpadded
    return timings, warm_up_buckets(config, runner) if is_padded else {}


def warm_up_as_asked(config: ModelConfig, runner: Runner) -> None:
    """Run the requests of `model_warmup`; their errors are raised."""
    for warmup in config.warmups:
        batch = warmups.make_batch(config, warmup)
        for _ in range(warmup.count):
            for answer in runner.start(batch).wait():
                if isinstance(answer, PerRequest):
                    for each in answer.answers:
                        if isinstance(each, Exception):
                            raise each


def warm_up(config: ModelConfig, runner: Runner) -> dict[int, float]:
    """Run zeros at every size of the batch ladder, twice; return the time of each second run.
    Errors of the model are raised. Empty for models with variable shapes, which have no shape to
    warm up with, and for models that see single requests, which only get real ones."""
    if runner.needs_requests or not all(spec.is_fixed for spec in config.inputs):
        return {}
    shapes = [spec.shape for spec in config.inputs]
    # Without inputs each request is a batch of one row.
    return _warm_up_rungs(config, runner, shapes, config.max_batch_size if shapes else 1)


def warm_up_buckets(config: ModelConfig, runner: Runner) -> dict[int, dict[int, float]]:
    """Like `warm_up`, for every bucket of a padded model; empty if other axes vary too."""
    pads = Pads(config)
    timings: dict[int, dict[int, float]] = {}
    for bucket in pads.buckets:
        shapes = pads.shapes(tuple(spec.shape for spec in config.inputs), bucket)
        if any(size < 0 for shape in shapes for size in shape):
            return {}
        timings[bucket] = _warm_up_rungs(config, runner, shapes, config.max_rows(bucket))
    return timings


def _warm_up_rungs(
    config: ModelConfig, runner: Runner, row_shapes: Sequence[tuple[int, ...]], max_rows: int
) -> dict[int, float]:
    timings: dict[int, float] = {}
    for rung in ladder(max_rows):
        inputs = {
            spec.name: np.zeros(
                (rung, *shape) if config.max_batch_size else shape,
                dtype=DATATYPES[spec.datatype].numpy,
            )
            for spec, shape in zip(config.inputs, row_shapes, strict=True)
        }
        for values in inputs.values():
            values.flags.writeable = False  # As those of requests.
        batch = Batch(inputs, rung, [frames.RequestPart("", rung)])
        for each in runner.rehearsals(batch):
            timings[rung] = _warm_up_batch(config, runner, each)
    return timings


def _warm_up_batch(config: ModelConfig, runner: Runner, batch: Batch) -> float:
    """Run a batch twice; return the seconds of the second run."""
    took_s = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for answer in runner.start(batch).wait():
            if not isinstance(answer, PerRequest):
                for spec in config.outputs:
                    checked(config, spec, answer, batch.num_rows)
        took_s = time.perf_counter() - began
        # In so long a run, one-time work hardly counts, so one run will do; not on a GPU, where it
        # may be nearly all of the time.
        if took_s > LONG_WARM_UP_S and not runner.runs_ahead:
            break
    return took_s


def _load_problems(error: BaseException, config: ModelConfig) -> tuple[str, ...]:
    problems = error.problems if isinstance(error, ConfigError) else (_explain(error),)
    problems = _shorten(problems)
    if config.memory_bytes is None or not OUT_OF_MEMORY.search("; ".join(problems)):
        return problems
    limit = f"parameters.penstock.memory_bytes limits it to {config.memory_bytes} bytes"
    return (*problems, limit)


def _shorten(problems: Sequence[str]) -> tuple[str, ...]:
    """Keep what fits a frame, and say how many problems were left out."""
    kept = [problem[:MAX_ERROR_CHARS] for problem in problems[:MAX_PROBLEMS]]
    while sum(map(len, kept)) > MAX_PROBLEM_CHARS:
        kept.pop()
    num_left = len(problems) - len(kept)
    return (*kept, *([f"{num_left} more problems"] if num_left else []))


def _explain(error: BaseException) -> str:
    if isinstance(error, PenstockError):
        return error_text(error)[:MAX_ERROR_CHARS]
    # A model may have closed or replaced stderr, and then logging itself fails.
    with contextlib.suppress(BaseException):
        log.error("the model raised %s", type(error).__name__, exc_info=error)
    return describe_error(error)[:MAX_ERROR_CHARS]


def _prepare(load: frames.LoadModel) -> None:
    """Set up logging and environment for the model, before any of its code runs."""
    logs.describe(load.model.name, load.model.version)
    os.environ.update(load.environment)


def main() -> None:
    sock = begin_life()
    if sock is None:
        return
    logging.getLogger("penstock.model_code").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model's prints appear at once, also if stdout is a pipe.
        sys.stdout.reconfigure(line_buffering=True)
    # Never write to a model's folder.
    sys.dont_write_bytecode = True
    channel = Channel(sock)
    try:
        Worker(channel, _prepare, take_part, lambda: os._exit(1)).serve()
    except BaseException as error:  # Errors outside of batches end the worker.
        log.error("the worker failed", exc_info=error)
        with contextlib.suppress(OSError):
            channel.send(frames.StartFailed((f"the worker failed: {describe_error(error)}",)))
        os._exit(1)
    channel.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
