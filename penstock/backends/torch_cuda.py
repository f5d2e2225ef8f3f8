"""GPU pipeline of batches: H2D copies, computation and D2H copies overlap.

A batch takes a *slot*: device memory for its inputs and outputs, and pinned host memory for the
answers. Copies and computation each have a stream (a *lane*), so one slot's batch is copied while
another's is computed. Instances of a model on one GPU are slots of one worker, which share its
weights. Several compute lanes run batches at the same time, for models whose kernels leave the GPU
idle. Recurring shapes are captured as CUDA graphs; what cannot be captured is reported. Only `Cuda`
needs a device, so the rest is tested without one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends import Outputs, PlacedPieces
from penstock.backends.cuda_copies import copy_together
from penstock.backends.gpu_memory import Guard, Use, tells_of_no_memory
from penstock.errors import first_line
from penstock.types import Array

log = logging.getLogger("penstock.gpu")
Tensors = Mapping[str, torch.Tensor]
Compute = Callable[[Tensors], Tensors]
Lane = Literal["in", "compute", "out"]
Priority = Literal["high", "normal", "low"]
# torch's numbers, lower is first. 0 is the lowest that CUDA has, so "normal" lies above it; torch
# has four levels.
PRIORITIES: Mapping[Priority, int] = {"high": -3, "normal": -1, "low": 0}
FIRST = -3
# Set by tools that read NVTX ranges: NVTX's own variable, and that of Nsight Systems.
WATCHERS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
# Alignment of tensors in an arena: kernels read whole vectors.
ALIGNMENT = 256
# Limit of graphs of one model; each holds memory.
MAX_GRAPHS = 256
# Batches between two memory checks, which take about as long as a launch.
LOOK_EVERY = 256
CUDA_SUCCESS = 0
PORTABLE = 1
NOT_WATCHED = contextlib.nullcontext()
# Pieces of inputs that are smaller than this are joined in pinned memory: the copies there take
# less time than as many launches.
MIN_PIECE_BYTES = 64 << 10


class Cuda:
    """One GPU, used by the calling thread; tests have one that is not real."""

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)
        # The streams do not wait for the stream that prepared the weights.
        torch.cuda.synchronize(self._device)
        self.arrange("normal", 1)

    def arrange(self, priority: Priority, num_streams: int) -> None:
        """Set the priority of the streams, and how many of them compute. Nothing runs yet."""
        level = PRIORITIES[priority]

        def stream(level: int) -> torch.cuda.Stream:
            return torch.cuda.Stream(self._device, priority=level)

        self._streams: dict[Lane, list[torch.cuda.Stream]] = {
            "in": [stream(level)],
            "compute": [stream(level) for _ in range(num_streams)],
            # Higher priority: a client waits for the output.
            "out": [stream(max(FIRST, level - 1))],
        }
        # Graphs of one stream run one after the other, so they can share a memory pool.
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(num_streams)]

    @property
    def priority(self) -> str:
        """The priority of computation, read back from CUDA."""
        level = self._streams["compute"][0].priority
        named = {number: name for name, number in PRIORITIES.items()}
        return named.get(level, str(level))

    def lane(self, lane: Lane, number: int = 0) -> contextlib.AbstractContextManager[object]:
        """Enqueue work launched inside the context on this stream."""
        stream = self._streams[lane][number]
        entered: contextlib.AbstractContextManager[object] = torch.cuda.stream(stream)
        return entered

    def mark(self, lane: Lane, number: int = 0) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[lane][number])
        return event

    def follow(self, lane: Lane, mark: torch.cuda.Event, number: int = 0) -> None:
        """Make the stream wait for the mark."""
        self._streams[lane][number].wait_event(mark)

    def note(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Show what is launched inside the context as a range in Nsight."""
        entered: contextlib.AbstractContextManager[object] = torch.cuda.nvtx.range(text)
        return entered

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: memoryview) -> bool:
        """Pin this memory; return False if that is refused."""
        status = torch.cuda.cudart().cudaHostRegister(address_of(memory), memory.nbytes, PORTABLE)
        if int(status) == CUDA_SUCCESS:
            return True
        # Clear the runtime's last error, which the next kernel launch would take for its own.
        # Reading it clears it, and torch does that after every launch.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        return False

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`; nothing on the device reads the memory any more."""
        torch.cuda.cudart().cudaHostUnregister(address_of(memory))

    def gather(
        self, target: torch.Tensor, sources: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> None:
        """Copy pinned memory at these addresses to the target, one behind the other, on the current
        stream."""
        ends = np.cumsum(sizes)
        assert len(sizes) and ends[-1] <= target.nbytes
        stream = torch.cuda.current_stream(self._device).cuda_stream
        copy_together(target.data_ptr() + ends - sizes, sources, sizes, stream)

    def is_lost(self) -> bool:
        """Return whether an error has made the device unusable for this process."""
        try:
            torch.cuda.synchronize(self._device)
        except Exception:  # The type depends on torch's version.
            return True
        return False

    def capture(
        self, run: Callable[[], Tensors], number: int = 0
    ) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        """Capture without torch.cuda.graph, which first returns all cached memory: that takes
        longer than everything else here, for each of a hundred graphs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._streams["compute"][number]):
            # Other threads wait for events meanwhile, which would break a global capture.
            graph.capture_begin(self._pools[number], capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return graph, outputs

    def memory(self) -> Use:
        allocated = torch.cuda.memory_allocated(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        return Use(allocated, torch.cuda.memory_reserved(self._device), free)

    def shrink(self) -> None:
        """Return unused memory to the driver."""
        # Streams read each other's memory, and freeing waits only for the owner's stream.
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


def open_device(name: str) -> Cuda | None:
    """Return the GPU; None for the CPU, which needs no pipeline."""
    return Cuda(name) if name.startswith("cuda") else None


def has_ranges(option: str) -> bool:
    """Return whether batches show as NVTX ranges: if that is `on`, or not `off` and a tool that
    shows them watches this process."""
    return option == "on" or (option != "off" and any(name in os.environ for name in WATCHERS))


class PinnedRanges:
    """Addresses of the memory that is pinned; looked up for every batch, without the driver."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        # Starts of memory that the CPU must not read.
        self._foreign: set[int] = set()

    def add(self, memory: memoryview, *, is_foreign: bool = False) -> None:
        start = address_of(memory)
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self._ends.insert(index, start + memory.nbytes)
        if is_foreign:
            self._foreign.add(start)

    def remove(self, memory: memoryview) -> bool:
        """Forget the memory; return whether it was pinned."""
        start = address_of(memory)
        if start not in self._starts:
            return False
        index = self._starts.index(start)
        del self._starts[index], self._ends[index]
        self._foreign.discard(start)
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._find(tensor) is not None

    def is_foreign(self, piece: Tensors) -> bool:
        """Whether the CPU must not read any tensor of the piece."""
        return bool(self._foreign) and any(
            self._find(each) in self._foreign for each in piece.values()
        )

    def _find(self, tensor: torch.Tensor) -> int | None:
        """Return the start of the pinned memory that a tensor lies in."""
        start = tensor.data_ptr()
        index = bisect_right(self._starts, start) - 1
        is_inside = index >= 0 and start + tensor.nbytes <= self._ends[index]
        return self._starts[index] if is_inside else None


class Arena:
    """Memory reused by one batch after the other; grows to the largest."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._memory: torch.Tensor | None = None

    def take(self, wanted: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Tensors:
        offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in wanted.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            offsets[name] = end, end + num_bytes
            end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if self._memory is None or self._memory.numel() < end:
            self._memory = self._allocate(max(end, ALIGNMENT))
        memory = self._memory
        return {
            name: memory[slice(*offsets[name])].view(dtype).view(tuple(shape))
            for name, (dtype, shape) in wanted.items()
        }


class DeviceInputs(Protocol):
    """Inputs that are made on the device, instead of copied there."""

    def write(self, arena: Arena, num_run: int) -> Tensors:
        """Make the inputs of a batch padded to `num_run` rows, in memory of the arena and on the
        stream that is current."""


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Rows that lie apart in pinned memory, copied there by one call for each input. `forms` are
    those of one row."""

    device: Cuda
    pieces: PlacedPieces
    forms: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    has_empty_rows: bool

    def write(self, arena: Arena, num_run: int) -> Tensors:
        there = arena.take(
            {name: (dtype, (num_run, *shape)) for name, (dtype, shape) in self.forms.items()}
        )
        for name, places in self.pieces.places.items():
            sources = np.fromiter((each.address for each in places), np.int64, len(places))
            sizes = np.fromiter((each.nbytes for each in places), np.int64, len(places))
            self.device.gather(there[name], sources, sizes)
        pad(there, sum(self.pieces.counts), self.has_empty_rows)
        return there


@dataclass(slots=True)
class Slot:
    inputs: Arena
    staged: Arena
    outputs: Arena
    answers: Arena


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph; replays read `inputs` and write `outputs`, at fixed addresses."""

    replayable: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Tensors


@dataclass(slots=True)
class Running:
    """A batch in flight. Its answers are views of the slot, which is reused only by a batch that is
    started later."""

    answers: Mapping[str, Array]
    # Start of the H2D copy, its end, start and end of computation, end of the D2H copy.
    marks: tuple[torch.cuda.Event, ...]
    # Seconds of the H2D copy, of computation and of the D2H copy, once it has ended.
    prepare_s: float = 0.0
    compute_s: float = 0.0
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs]:
        began, copied, begun, computed, ended = self.marks
        ended.synchronize()
        self.prepare_s = began.elapsed_time(copied) / 1e3
        self.compute_s = begun.elapsed_time(computed) / 1e3
        self.finish_s = computed.elapsed_time(ended) / 1e3
        return (self.answers,)


@dataclass(slots=True)
class Pipeline:
    """Batches in flight on the device. `compute` maps input tensors to output tensors there."""

    device: Cuda
    compute: Compute
    num_slots: int
    is_captured: bool
    # Padding rows are zeros instead of copies of the last row.
    has_empty_rows: bool = False
    # Compute streams; slots take turns on them. Each has its own graphs.
    num_streams: int = 1
    # Name of the model in NVTX ranges; empty: there are none.
    label: str = ""
    # Why shapes run without a graph, by shape.
    problems: dict[object, str] = field(default_factory=dict)
    # Shapes whose capture ran out of memory, and the batch number of the next try.
    postponed: dict[object, int] = field(default_factory=dict)
    # By stream and shapes.
    _graphs: dict[tuple[int, object], Graph] = field(default_factory=dict)
    _slots: list[Slot] = field(default_factory=list)
    _turn: int = 0
    _is_pinned: bool | None = None
    _pinned_ranges: PinnedRanges = field(default_factory=PinnedRanges)
    guard: Guard = field(default_factory=Guard)
    # Why a new worker should replace this one.
    restart_reason: str = ""
    num_shrinks: int = 0

    def start(
        self,
        inputs: Sequence[Tensors] | DeviceInputs,
        num_rows: int | None,
        num_run: int,
        variant: int = 0,
    ) -> Running:
        """Launch a batch of `num_rows` rows from host memory, in one or more pieces, padded to
        `num_run` (None: no batch dimension, one piece, no padding). Computations that differ for
        the same shapes are variants, each with its own graphs. Out of memory, a batch is retried
        once, after unused memory is freed."""
        slot, stream = self._next_slot()
        try:
            with self._range(f"batch of {num_run} on slot {self._turn % self.num_slots}"):
                try:
                    running = self._start(slot, stream, inputs, (num_rows, num_run), variant)
                except RuntimeError as error:
                    if not self._is_no_memory(error):
                        raise
                    self._shrink()
                    running = self._start(slot, stream, inputs, (num_rows, num_run), variant)
        except BaseException:
            # The slot is free again; the next one may still be in use.
            self._turn -= 1
            raise
        if self._turn % LOOK_EVERY == 0:
            try:
                self._look()
            except Exception:  # A failed memory check must not fail a batch.
                log.exception("cannot look at the GPU's memory")
        return running

    def settle(self) -> None:
        """Free memory of the warm-up and set the baseline. Graphs keep their memory; without
        graphs, the cached memory is needed."""
        if self.is_captured:
            self.device.shrink()
        self.guard.settle(self.device.memory())

    def _look(self) -> None:
        use = self.device.memory()
        verdict = self.guard.look(use)
        if verdict == "shrink":
            self._shrink()
        elif verdict == "restart":
            held, free = (f"{each >> 20} MiB" for each in (use.reserved_bytes, use.free_bytes))
            self.restart_reason = f"it holds {held} of GPU memory, and {free} are left"

    def _shrink(self) -> None:
        self.num_shrinks += 1
        self.device.shrink()

    def _range(self, text: str) -> contextlib.AbstractContextManager[object]:
        """Return a range for Nsight; ranges cost some microseconds, so most models have none."""
        return self.device.note(f"{self.label}: {text}") if self.label else NOT_WATCHED

    def _start(
        self,
        slot: Slot,
        stream: int,
        inputs: Sequence[Tensors] | DeviceInputs,
        counts: tuple[int | None, int],
        variant: int,
    ) -> Running:
        num_rows, num_run = counts
        device = self.device
        began = device.mark("in")
        with device.lane("in"), self._range("copy in"):
            if isinstance(inputs, Sequence):
                there = self._copy_in(slot, inputs, num_rows, num_run)
            else:
                there = inputs.write(slot.inputs, num_run)
        copied = device.mark("in")
        device.follow("compute", copied, stream)
        begun = device.mark("compute", stream)
        with device.lane("compute", stream), self._range("compute"):
            values = self._run(there, variant, stream)
            if num_rows is not None:
                values = {name: each[:num_rows] for name, each in values.items()}
            # Copy: the next batch overwrites the outputs before they are copied to the host.
            kept = slot.outputs.take(_forms(values))
            for name, each in values.items():
                kept[name].copy_(each)
        computed = device.mark("compute", stream)
        device.follow("out", computed)
        with device.lane("out"), self._range("copy out"):
            answers = slot.answers.take(_forms(values))
            for name, each in kept.items():
                answers[name].copy_(each, non_blocking=True)
        ended = device.mark("out")
        marks = began, copied, begun, computed, ended
        return Running({name: to_array(each) for name, each in answers.items()}, marks)

    def run(self, inputs: Tensors, variant: int = 0) -> Tensors:
        """Run inputs on the device, without waiting; outputs are valid until the next batch."""
        with self.device.lane("compute"):
            return self._run(inputs, variant, 0)

    def resident(self, inputs: Tensors, variant: int = 0) -> Tensors:
        """Return inputs where `run` reads them without a copy: in the memory of their graph, if
        there is one."""
        graph = self._graphs.get((0, _shapes(inputs, variant)))
        if graph is None:
            return inputs
        with self.device.lane("compute"):
            for name, each in inputs.items():
                graph.inputs[name].copy_(each)
        return graph.inputs

    def pin(self, memory: memoryview) -> None:
        self._is_pinned = self.device.pin(memory)
        if self._is_pinned:
            self._pinned_ranges.add(memory)

    def pin_foreign(self, memory: memoryview) -> bool:
        """Pin memory that only the device may read; False if that is refused."""
        is_pinned = self.device.pin(memory)
        if is_pinned:
            self._pinned_ranges.add(memory, is_foreign=True)
        return is_pinned

    def unpin(self, memory: memoryview) -> None:
        if self._pinned_ranges.remove(memory):
            self.device.unpin(memory)

    def facts(self) -> dict[str, str]:
        facts = {"slots": str(self.num_slots), "stream_priority": self.device.priority}
        if self.num_streams > 1:
            facts["streams"] = str(self.num_streams)
        if self.label:
            facts["nvtx"] = self.label
        if self._is_pinned is not None:
            facts["copies"] = "from shared memory" if self._is_pinned else "by way of pinned memory"
        num_graphs = len({shapes for _, shapes in self._graphs})
        facts["cuda_graphs"] = str(num_graphs) if self.is_captured else "off"
        if self.num_shrinks:
            facts["memory_given_back"] = f"{self.num_shrinks} times"
        if self.problems:
            first = next(iter(self.problems.values()))
            facts["without_cuda_graph"] = f"{len(self.problems)} shapes: {first}"
        if self.postponed:
            facts["cuda_graphs_postponed"] = f"{len(self.postponed)} shapes: no memory"
        return facts

    def _next_slot(self) -> tuple[Slot, int]:
        """Return the next slot and its compute stream."""
        if not self._slots:
            places = self.device.empty, self.device.pinned
            self._slots = [Slot(*map(Arena, places * 2)) for _ in range(self.num_slots)]
        self._turn += 1
        place = self._turn % self.num_slots
        return self._slots[place], place % self.num_streams

    def _copy_in(
        self, slot: Slot, pieces: Sequence[Tensors], num_rows: int | None, num_run: int
    ) -> Tensors:
        there = slot.inputs.take(_forms(pieces[0], None if num_rows is None else num_run))
        for target, source in _targets(there, self._pinned(slot, pieces, num_rows)):
            target.copy_(source, non_blocking=True)
        if num_rows is not None:
            pad(there, num_rows, self.has_empty_rows)
        return there

    def _pinned(
        self, slot: Slot, pieces: Sequence[Tensors], num_rows: int | None
    ) -> Sequence[Tensors]:
        """Return the pieces if they are pinned, and not many small ones; else copies in the slot's
        pinned memory, except of those that the CPU must not read."""
        holds = self._pinned_ranges.holds
        is_worth = len(pieces) == 1 or _nbytes(pieces) >= MIN_PIECE_BYTES * len(pieces)
        if is_worth and all(holds(each) for piece in pieces for each in piece.values()):
            return pieces
        staged = slot.staged.take(_forms(pieces[0], num_rows))
        is_foreign = [self._pinned_ranges.is_foreign(piece) for piece in pieces]
        if not any(is_foreign):
            for target, source in _targets(staged, pieces):
                target.copy_(source)
            return (staged,)
        if num_rows is None:
            return (self._staged_beside(staged, pieces[0]),)
        found: list[Tensors] = []
        row = 0
        for piece in pieces:
            end = row + len(next(iter(piece.values())))
            rows = {name: each[row:end] for name, each in staged.items()}
            found.append(self._staged_beside(rows, piece))
            row = end
        return found

    def _staged_beside(self, staged: Tensors, piece: Tensors) -> Tensors:
        """Copy the tensors of a piece to pinned memory, except those that are pinned already."""
        found = {}
        for name, each in piece.items():
            found[name] = each
            if not self._pinned_ranges.holds(each):
                found[name] = staged[name]
                staged[name].copy_(each)
        return found

    def _run(self, inputs: Tensors, variant: int, stream: int) -> Tensors:
        if not self.is_captured:
            return self.compute(inputs)
        shapes = _shapes(inputs, variant)
        graph = self._graphs.get((stream, shapes))
        if graph is None:
            return self._capture(shapes, inputs, stream)
        for name, each in inputs.items():
            if each is not graph.inputs[name]:
                graph.inputs[name].copy_(each)
        graph.replayable.replay()
        return graph.outputs

    def _capture(self, shapes: object, inputs: Tensors, current: int) -> Tensors:
        """Run without a graph, which initialises libraries, then capture for the next batch, on
        every stream: a shape is warmed up once."""
        values = self.compute(inputs)
        if shapes in self.problems or len(self._graphs) >= MAX_GRAPHS:
            return values
        if self._turn < self.postponed.get(shapes, 0):
            return values
        self.postponed.pop(shapes, None)
        try:
            for stream in range(self.num_streams):
                if (stream, shapes) not in self._graphs:
                    # Copied, they could arrive after a first replay on another stream.
                    copy = torch.clone if stream == current else torch.empty_like
                    fixed = {name: copy(each) for name, each in inputs.items()}
                    self._graphs[stream, shapes] = self._captured(fixed, stream)
        except Exception as error:  # Models and libraries raise many types.
            if self._is_no_memory(error):
                self.postponed[shapes] = self._turn + LOOK_EVERY
            else:
                self.problems[shapes] = first_line(error)
        return values

    def _captured(self, fixed: Tensors, stream: int) -> Graph:
        """Capture a graph on these inputs. That cannot use cached memory, so on failure free it and
        retry."""
        try:
            replayable, outputs = self.device.capture(lambda: self.compute(fixed), stream)
        except Exception as error:
            if not self._is_no_memory(error):
                raise
            self._shrink()
            replayable, outputs = self.device.capture(lambda: self.compute(fixed), stream)
        return Graph(replayable, fixed, outputs)

    def _is_no_memory(self, error: BaseException) -> bool:
        """Return whether memory ran out, also if a failed capture raised another error on top."""
        use = None
        # Fails on a lost device.
        with contextlib.suppress(Exception):
            use = self.device.memory()
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, torch.OutOfMemoryError) or tells_of_no_memory(str(cause), use):
                return True
            cause = cause.__cause__ or cause.__context__
        return False


def pad(there: Tensors, num_rows: int, has_empty_rows: bool) -> None:
    """Fill the rows behind these: with zeros, or with copies of the last one."""
    for each in there.values():
        if num_rows < len(each):
            each[num_rows:] = 0 if has_empty_rows else each[num_rows - 1]


def alias(array: Array) -> torch.Tensor:
    """Return a read-only tensor on the array's memory. torch warns about read-only arrays, so it is
    made from the address."""
    array = np.ascontiguousarray(array)
    if not array.size:
        return torch.from_numpy(array.copy())
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    # The tensor keeps the array alive.
    memory.array = array  # type: ignore[attr-defined]
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)


def _shapes(inputs: Tensors, variant: int) -> tuple[object, ...]:
    return variant, *((name, tuple(each.shape)) for name, each in inputs.items())


def _forms(
    tensors: Tensors, num_rows: int | None = None
) -> dict[str, tuple[torch.dtype, Sequence[int]]]:
    """Return types and shapes; with this number of rows, if it is given."""
    if num_rows is None:
        return {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    return {name: (each.dtype, (num_rows, *each.shape[1:])) for name, each in tensors.items()}


def _targets(
    whole: Tensors, pieces: Sequence[Tensors]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of each piece after its place in `whole`."""
    for name, each in whole.items():
        if len(pieces) == 1 and pieces[0][name].shape == each.shape:
            yield each, pieces[0][name]
            continue
        row = 0
        for piece in pieces:
            end = row + len(piece[name])
            yield each[row:end], piece[name]
            row = end


def _nbytes(pieces: Sequence[Tensors]) -> int:
    return sum(each.nbytes for piece in pieces for each in piece.values())


def address_of(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def to_array(tensor: torch.Tensor) -> Array:
    """Return a tensor as an array, on its memory if that is the host's; BF16 as its bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    array: Array = bits.numpy(force=True)
    return array
