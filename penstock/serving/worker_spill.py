"""Tensors of any size between a worker and a shard: the input and output spill of one link.

Requests whose rows have no fixed size, and outputs of variable shapes, are extents of these
segments instead of slab rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.errors import BackendFailed
from penstock.serving.padding import Crop, cropped
from penstock.serving.slab import Extents, Segment, aligned
from penstock.types import Array, Tensor, TensorSpec, from_array, to_array
from penstock.wire import frames

Values = Sequence[tuple[TensorSpec, Array]]
Spilled = tuple[tuple[frames.Extent, ...], ...]


class WorkerSpill:
    def __init__(self, nbytes: int, fds: Sequence[int]) -> None:
        self.input = Segment(nbytes, fds[0])
        self._output = Segment(nbytes, fds[1])
        self._extents = Extents(nbytes)
        # One thread may write answers and another release them.
        self._lock = threading.Condition()

    def read(self, requests: Sequence[frames.RequestPart]) -> list[dict[str, Array]]:
        """Return the inputs of each request."""
        return [
            {extent.name: self._read(extent) for extent in request.inputs} for request in requests
        ]

    def input_of(self, extent: frames.Extent) -> memoryview:
        """Return the memory of an input, to write to."""
        return self.input.view[extent.offset : extent.offset + extent.nbytes]

    def _read(self, extent: frames.Extent) -> Array:
        data = self.input_of(extent)
        values = to_array(Tensor(extent.name, extent.datatype, extent.shape, data))
        if extent.datatype != "BYTES":
            values.flags.writeable = False
        return values

    def write(self, answers: Sequence[Values]) -> Spilled:
        """Write each request's outputs; all or none. If the batch does not fit, it fails and each
        of its requests runs again alone."""
        spilled: list[list[frames.Extent]] = []
        try:
            for values in answers:
                spilled.append([])
                for spec, each in values:
                    spilled[-1].append(self._write(spec.name, spec.datatype, each))
        except BaseException:
            self.release(extent.offset for extents in spilled for extent in extents)
            raise
        return tuple(map(tuple, spilled))

    def write_when_free(
        self, values: Values, is_gone: Callable[[], bool]
    ) -> tuple[frames.Extent, ...]:
        """Write the outputs of one response; wait while others fill the segment, until its shard
        `is_gone`. BackendFailed if they never fit."""
        tensors = [from_array(spec.name, spec.datatype, each) for spec, each in values]
        sizes = [len(tensor.data) for tensor in tensors]
        if (needed := sum(aligned(max(1, size)) for size in sizes)) > self._extents.capacity:
            text = f"a response of {needed} bytes does not fit the spill segment"
            most = f"of {self._extents.capacity} bytes (parameters.penstock.spill_bytes)"
            raise BackendFailed(f"{text} {most}")
        with self._lock:
            while (offsets := self._allocate(sizes)) is None and not is_gone():
                self._lock.wait()
        written: list[frames.Extent] = []
        for tensor, offset, size in zip(tensors, offsets or (), sizes, strict=False):
            self._output.view[offset : offset + size] = tensor.data
            shape = tuple(tensor.shape)
            written.append(frames.Extent(tensor.name, tensor.datatype, shape, offset, size))
        return tuple(written)

    def _allocate(self, sizes: Sequence[int]) -> list[int] | None:
        """Return room for all, or None. The lock is held."""
        offsets: list[int] = []
        for size in sizes:
            offset = self._extents.allocate(size)
            if offset is None:
                for each in offsets:
                    self._extents.release(each)
                return None
            offsets.append(offset)
        return offsets

    def wake(self) -> None:
        """Let `write_when_free` look whether its shard is gone."""
        with self._lock:
            self._lock.notify_all()

    def _write(self, name: str, datatype: str, values: Array) -> frames.Extent:
        tensor = from_array(name, datatype, values)
        nbytes = len(tensor.data)
        with self._lock:
            offset = self._extents.allocate(nbytes)
        if offset is None:
            raise BackendFailed(
                f"output '{name}': {nbytes} bytes do not fit the spill segment "
                f"({self._extents.free_bytes} of {self._extents.capacity} bytes free)"
            )
        self._output.view[offset : offset + nbytes] = tensor.data
        return frames.Extent(name, datatype, tuple(values.shape), offset, nbytes)

    def release(self, offsets: Iterable[int]) -> None:
        with self._lock:
            for offset in offsets:
                self._extents.release(offset)
            self._lock.notify_all()

    def close(self) -> None:
        self.input.close()
        self._output.close()


def split(frame: frames.Dispatch, values: Values, crops: Collection[Crop]) -> list[Values]:
    """Split batched outputs by request, without padding."""
    parts: list[Values] = []
    row = 0
    for part in frame.requests:
        end = row + part.num_rows
        own = [(spec, each[row:end]) for spec, each in values]
        if part.length:
            own = [(spec, cropped(spec.name, each, crops, part.length)) for spec, each in own]
        parts.append(own)
        row = end
    return parts
