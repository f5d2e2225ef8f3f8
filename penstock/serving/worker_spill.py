"""Tensors of any size between a worker and a shard: the input and output spill of one link.

Requests whose rows have no fixed size, and outputs of variable shapes, are extents of these
segments instead of slab rows.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

from penstock.errors import BackendFailed
from penstock.serving.padding import Crop, cropped
from penstock.serving.slab import Extents, Segment
from penstock.types import Array, Tensor, TensorSpec, from_array, to_array
from penstock.wire import frames

Values = Sequence[tuple[TensorSpec, Array]]
Spilled = tuple[tuple[frames.Extent, ...], ...]


class WorkerSpill:
    def __init__(self, nbytes: int, fds: Sequence[int]) -> None:
        self.input = Segment(nbytes, fds[0])
        self._output = Segment(nbytes, fds[1])
        self._extents = Extents(nbytes)
        # If the runner runs ahead, one thread writes answers and another releases them.
        self._lock = threading.Lock()

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
