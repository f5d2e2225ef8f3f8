"""A GPU that is none: its lanes do at once what they are told, its graphs run a function again."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping

import numpy as np
import torch

from penstock.backends.gpu_memory import Use
from penstock.backends.torch_cuda import Lane


class FakeMark:
    def __init__(self, gpu: "FakeGpu", at: int) -> None:
        self._gpu = gpu
        self.at = at

    def synchronize(self) -> None:
        self._gpu.waited.append(self.at)

    def elapsed_time(self, end: "FakeMark") -> float:
        return float(end.at - self.at)


class FakeGraph:
    """Writes to the outputs that it had when it was captured."""

    def __init__(self, gpu: "FakeGpu", run: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._gpu = gpu
        self._run = run
        self.outputs = dict(run())

    def replay(self) -> None:
        self._gpu.num_replays += 1
        for name, value in self._run().items():
            self.outputs[name].copy_(value)


class FakeGpu:
    """Says what was asked of it, in order; every mark is a millisecond after the one before."""

    def __init__(self, may_pin: bool = True, may_capture: bool = True) -> None:
        self.may_pin = may_pin
        self.may_capture = may_capture
        self.did: list[str] = []
        self.waited: list[int] = []
        self.pinned_bytes: list[int] = []
        self.allocated: list[int] = []
        # Pinned buffers that were made, for answers and for inputs that are not pinned.
        self.num_pinned = 0
        # Of the worker, and of the GPU; what a look at its memory says.
        self.use = Use(0, 0, 1 << 40)
        self.num_shrinks = 0
        self.num_gathers = 0
        self.num_replays = 0
        self.num_captures = 0
        # What the next captures end with.
        self.capture_errors: list[Exception] = []
        self.was_lost = False
        self.priority = "normal"
        self.num_streams = 1
        # Texts of the ranges that are entered, with how deep each is in others.
        self.notes: list[tuple[int, str]] = []
        self._depth = 0
        self._lane: Lane | None = None
        self._num_marks = 0

    def arrange(self, priority: str, num_streams: int) -> None:
        self.priority, self.num_streams = priority, num_streams

    @contextlib.contextmanager
    def lane(self, lane: Lane, number: int = 0):
        assert self._lane is None, "one lane at a time"
        self._lane = lane
        self.did.append(named(lane, number))
        try:
            yield
        finally:
            self._lane = None

    @contextlib.contextmanager
    def note(self, text: str):
        self.notes.append((self._depth, text))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def mark(self, lane: Lane, number: int = 0) -> FakeMark:
        self._num_marks += 1
        return FakeMark(self, self._num_marks)

    def follow(self, lane: Lane, mark: FakeMark, number: int = 0) -> None:
        self.did.append(f"{named(lane, number)} after {mark.at}")

    def empty(self, num_bytes: int) -> torch.Tensor:
        self.allocated.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.num_pinned += 1
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def pin(self, memory: memoryview) -> bool:
        self.pinned_bytes.append(memory.nbytes)
        return self.may_pin

    def unpin(self, memory: memoryview) -> None:
        self.pinned_bytes.remove(memory.nbytes)

    def gather(self, target: torch.Tensor, sources: np.ndarray, sizes: np.ndarray) -> None:
        self.num_gathers += 1
        place = target.data_ptr()
        for source, size in zip(sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(place, source, size)
            place += size

    def memory(self) -> Use:
        return self.use

    def shrink(self) -> None:
        self.num_shrinks += 1

    def is_lost(self) -> bool:
        return self.was_lost

    def capture(self, run, number: int = 0):
        if not self.may_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.capture_errors:
            raise self.capture_errors.pop(0)
        self.num_captures += 1
        graph = FakeGraph(self, run)
        return graph, graph.outputs


def named(lane: Lane, number: int) -> str:
    return f"{lane} {number}" if number else lane
