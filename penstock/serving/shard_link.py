"""A worker's end of the socket to one shard, with that shard's memory as the worker sees it.

Each shard has slabs and spill segments of its own and sends their descriptors itself. They stay
mapped until the shard is gone and the last batch with rows of it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.config import ModelConfig
from penstock.processes.channel import Channel
from penstock.serving.plan import column_bytes, fixed_outputs
from penstock.serving.slab import Layout, Segment
from penstock.serving.worker_spill import WorkerSpill
from penstock.types import DATATYPES, Array
from penstock.wire import frames

MAX_VIEWS = 256


class ShardMemory:
    """Slab columns, and the spill."""

    def __init__(self, config: ModelConfig, spill_bytes: int, fds: Sequence[int]) -> None:
        self._config = config
        self.spill = WorkerSpill(spill_bytes, fds)
        self._slabs: dict[int, Segment] = {}
        self._views: dict[object, list[Array]] = {}
        self._columns = [*config.inputs, *fixed_outputs(config)]

    @property
    def inputs(self) -> list[memoryview]:
        """All memory that holds inputs."""
        return [self.spill.input.view, *(segment.view for segment in self._slabs.values())]

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

    def input_rows(self, rows: frames.RowRange, frame: frames.Dispatch, index: int) -> memoryview:
        """Return the memory of an input's rows, to write to."""
        layout = Layout.of(column_bytes(self._config, frame.row_shapes), frame.capacity)
        size = layout.row_bytes[index]
        start = layout.offsets[index] + rows.row * size
        return self._slabs[rows.slab].view[start : start + rows.count * size]

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


class ShardLink:
    """`number` is unique among all links that the worker has ever had; a `shard` that is started
    again has the same number in the server."""

    def __init__(self, number: int, channel: Channel, shard: int = 0) -> None:
        self.number = number
        self.shard = shard
        self.channel = channel
        # None until its Hello.
        self.memory: ShardMemory | None = None
        self.is_spill_pinned = False
        # Its socket has closed: nothing is received or answered any more.
        self.is_gone = False
        # Batches in flight with rows of it.
        self.num_running = 0
        # Whether it is told when its batches start.
        self.hears_starts = False

    def send(self, frame: frames.WorkerToShard) -> None:
        """Send a frame, unless the shard is gone. OSError if it is too large."""
        if self.is_gone:
            return
        try:
            self.channel.send(frames.encode(frame))
        except (BrokenPipeError, ConnectionResetError):
            return  # The end of its socket tells the worker, if it has not yet.

    def close(self) -> None:
        self.channel.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None
