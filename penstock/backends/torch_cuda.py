"""GPU pipeline of batches: H2D copies, computation and D2H copies overlap.

A batch takes a *slot*: device memory for its inputs and outputs, and pinned host memory for the
answers. Copies and computation each have a stream (a *lane*), so one slot's batch is copied while
another's is computed. Instances of a model on one GPU are slots of one worker, which share its
weights. Recurring shapes are captured as CUDA graphs; what cannot be captured is reported. Only
`Cuda` needs a device, so the rest is tested without one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from penstock.backends import Outputs
from penstock.backends.gpu_memory import Guard, Use, tells_of_no_memory
from penstock.errors import first_line
from penstock.types import Array

log = logging.getLogger("penstock.gpu")
Tensors = Mapping[str, torch.Tensor]
Compute = Callable[[Tensors], Tensors]
Lane = Literal["in", "compute", "out"]
# Alignment of tensors in an arena: kernels read whole vectors.
ALIGNMENT = 256
# Limit of graphs of one model; each holds memory.
MAX_GRAPHS = 256
# Batches between two memory checks, which take about as long as a launch.
LOOK_EVERY = 256
CUDA_SUCCESS = 0
PORTABLE = 1


class Cuda:
    """One GPU, used by the calling thread; tests have one that is not real."""

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)
        # The streams do not wait for the stream that prepared the weights.
        torch.cuda.synchronize(self._device)
        self._streams: dict[Lane, torch.cuda.Stream] = {
            "in": torch.cuda.Stream(self._device),
            "compute": torch.cuda.Stream(self._device),
            # Higher priority: a client waits for the output.
            "out": torch.cuda.Stream(self._device, priority=-1),
        }
        # Graphs run one after the other, so they can share a memory pool.
        self._pool = torch.cuda.graph_pool_handle()

    def lane(self, lane: Lane) -> contextlib.AbstractContextManager[object]:
        """Enqueue work launched inside the context on this stream."""
        entered: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._streams[lane])
        return entered

    def mark(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[lane])
        return event

    def follow(self, lane: Lane, mark: torch.cuda.Event) -> None:
        """Make the stream wait for the mark."""
        self._streams[lane].wait_event(mark)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: memoryview) -> bool:
        """Pin this memory; return False if that is refused."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        status = torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, PORTABLE)
        if int(status) == CUDA_SUCCESS:
            return True
        # Clear the runtime's last error, which the next kernel launch would take for its own.
        # Reading it clears it, and torch does that after every launch.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        return False

    def is_lost(self) -> bool:
        """Return whether an error has made the device unusable for this process."""
        try:
            torch.cuda.synchronize(self._device)
        except Exception:  # The type depends on torch's version.
            return True
        return False

    def capture(self, run: Callable[[], Tensors]) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        """Capture without torch.cuda.graph, which first returns all cached memory: that takes
        longer than everything else here, for each of a hundred graphs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._streams["compute"]):
            # Other threads wait for events meanwhile, which would break a global capture.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
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
    # Seconds of the H2D and D2H copies, once it has ended.
    prepare_s: float = 0.0
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs]:
        began, copied, _, computed, ended = self.marks
        ended.synchronize()
        self.prepare_s = began.elapsed_time(copied) / 1e3
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
    # Why shapes run without a graph, by shape.
    problems: dict[object, str] = field(default_factory=dict)
    # Shapes whose capture ran out of memory, and the batch number of the next try.
    postponed: dict[object, int] = field(default_factory=dict)
    _graphs: dict[object, Graph] = field(default_factory=dict)
    _slots: list[Slot] = field(default_factory=list)
    _turn: int = 0
    _is_pinned: bool | None = None
    guard: Guard = field(default_factory=Guard)
    # Why a new worker should replace this one.
    restart_reason: str = ""
    num_shrinks: int = 0

    def start(
        self, inputs: Tensors | DeviceInputs, num_rows: int | None, num_run: int, variant: int = 0
    ) -> Running:
        """Launch a batch of `num_rows` rows from host memory, padded to `num_run` (None: no batch
        dimension, no padding). Computations that differ for the same shapes are variants, each with
        its own graphs. Out of memory, a batch is retried once, after unused memory is freed."""
        slot = self._next_slot()
        try:
            try:
                running = self._start(slot, inputs, (num_rows, num_run), variant)
            except RuntimeError as error:
                if not self._is_no_memory(error):
                    raise
                self._shrink()
                running = self._start(slot, inputs, (num_rows, num_run), variant)
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

    def _start(
        self,
        slot: Slot,
        inputs: Tensors | DeviceInputs,
        counts: tuple[int | None, int],
        variant: int,
    ) -> Running:
        num_rows, num_run = counts
        device = self.device
        began = device.mark("in")
        with device.lane("in"):
            if isinstance(inputs, Mapping):
                there = self._copy_in(slot, inputs, num_rows, num_run)
            else:
                there = inputs.write(slot.inputs, num_run)
        copied = device.mark("in")
        device.follow("compute", copied)
        begun = device.mark("compute")
        with device.lane("compute"):
            values = self._run(there, variant)
            if num_rows is not None:
                values = {name: each[:num_rows] for name, each in values.items()}
            # Copy: the next batch overwrites the outputs before they are copied to the host.
            kept = slot.outputs.take(_forms(values))
            for name, each in values.items():
                kept[name].copy_(each)
        computed = device.mark("compute")
        device.follow("out", computed)
        with device.lane("out"):
            answers = slot.answers.take(_forms(values))
            for name, each in kept.items():
                answers[name].copy_(each, non_blocking=True)
        ended = device.mark("out")
        marks = began, copied, begun, computed, ended
        return Running({name: to_array(each) for name, each in answers.items()}, marks)

    def run(self, inputs: Tensors, variant: int = 0) -> Tensors:
        """Run inputs on the device, without waiting; outputs are valid until the next batch."""
        with self.device.lane("compute"):
            return self._run(inputs, variant)

    def pin(self, memory: memoryview) -> None:
        self._is_pinned = self.device.pin(memory)

    def facts(self) -> dict[str, str]:
        facts = {"slots": str(self.num_slots)}
        if self._is_pinned is not None:
            facts["copies"] = "from shared memory" if self._is_pinned else "by way of pinned memory"
        facts["cuda_graphs"] = str(len(self._graphs)) if self.is_captured else "off"
        if self.num_shrinks:
            facts["memory_given_back"] = f"{self.num_shrinks} times"
        if self.problems:
            first = next(iter(self.problems.values()))
            facts["without_cuda_graph"] = f"{len(self.problems)} shapes: {first}"
        if self.postponed:
            facts["cuda_graphs_postponed"] = f"{len(self.postponed)} shapes: no memory"
        return facts

    def _next_slot(self) -> Slot:
        if not self._slots:
            places = self.device.empty, self.device.pinned
            self._slots = [Slot(*map(Arena, places * 2)) for _ in range(self.num_slots)]
        self._turn += 1
        return self._slots[self._turn % self.num_slots]

    def _copy_in(self, slot: Slot, inputs: Tensors, num_rows: int | None, num_run: int) -> Tensors:
        if num_rows is None or num_rows == num_run:
            num_rows = None
            forms = _forms(inputs)
        else:
            forms = {n: (each.dtype, (num_run, *each.shape[1:])) for n, each in inputs.items()}
        there = slot.inputs.take(forms)
        for name, each in self._pinned(slot, inputs).items():
            there[name][:num_rows].copy_(each, non_blocking=True)
            if num_rows is not None:
                there[name][num_rows:] = 0 if self.has_empty_rows else there[name][num_rows - 1]
        return there

    def _pinned(self, slot: Slot, inputs: Tensors) -> Tensors:
        """Return the inputs if they are pinned; else copies in the slot's pinned memory."""
        if all(each.is_pinned() for each in inputs.values()):
            return inputs
        staged = slot.staged.take(_forms(inputs))
        for name, each in inputs.items():
            staged[name].copy_(each)
        return staged

    def _run(self, inputs: Tensors, variant: int) -> Tensors:
        if not self.is_captured:
            return self.compute(inputs)
        shapes = variant, *((name, tuple(each.shape)) for name, each in inputs.items())
        graph = self._graphs.get(shapes)
        if graph is None:
            return self._capture(shapes, inputs)
        for name, each in inputs.items():
            graph.inputs[name].copy_(each)
        graph.replayable.replay()
        return graph.outputs

    def _capture(self, shapes: object, inputs: Tensors) -> Tensors:
        """Run without a graph, which initialises libraries, then capture for the next batch."""
        values = self.compute(inputs)
        if shapes in self.problems or len(self._graphs) >= MAX_GRAPHS:
            return values
        if self._turn < self.postponed.get(shapes, 0):
            return values
        self.postponed.pop(shapes, None)
        try:
            self._graphs[shapes] = self._captured(inputs)
        except Exception as error:  # Models and libraries raise many types.
            if self._is_no_memory(error):
                self.postponed[shapes] = self._turn + LOOK_EVERY
            else:
                self.problems[shapes] = first_line(error)
        return values

    def _captured(self, inputs: Tensors) -> Graph:
        """Capture a graph. That cannot use cached memory, so on failure free it and retry."""
        fixed = {name: each.clone() for name, each in inputs.items()}
        try:
            replayable, outputs = self.device.capture(lambda: self.compute(fixed))
        except Exception as error:
            if not self._is_no_memory(error):
                raise
            self._shrink()
            replayable, outputs = self.device.capture(lambda: self.compute(fixed))
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


def _forms(tensors: Tensors) -> dict[str, tuple[torch.dtype, Sequence[int]]]:
    return {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}


def to_array(tensor: torch.Tensor) -> Array:
    """Return a tensor as an array, on its memory if that is the host's; BF16 as its bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    array: Array = bits.numpy(force=True)
    return array
