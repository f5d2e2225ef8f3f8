"""Shards without requests: what a worker sees of them, in real slabs and sockets.

`WorkerAlone` is a worker with no core, in this thread or in one of its own; `FakeShard` gives it
rows and reads the answers. `LentLife` lets two models have the same worker.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np

from penstock.config import ModelConfig
from penstock.processes.channel import Channel, socket_pair
from penstock.processes.child import Life
from penstock.serving.plan import column_bytes
from penstock.serving.slab import Layout, Segment
from penstock.serving.worker import Worker
from penstock.types import DATATYPES, Array, Tensor, from_array, to_array
from penstock.wire import frames

SPILL_BYTES = 1 << 16


class FakeShard:
    """One shard: two slabs of `capacity` rows, and the spill. Rows are handed out round robin."""

    def __init__(
        self,
        config: ModelConfig,
        sock: socket.socket,
        capacity: int = 8,
        hears_starts: bool = False,
    ) -> None:
        self._config = config
        self._sock = sock
        self._capacity = capacity
        self._num_batches = 0
        self.spills = Segment(SPILL_BYTES), Segment(SPILL_BYTES)
        hello = frames.encode(frames.Hello(frames.VERSION, SPILL_BYTES, hears_starts))
        socket.send_fds(sock, [hello], [each.fd for each in self.spills])
        self._slabs: list[Segment] = []
        self.outputs: dict[int, tuple[frames.RowRange, ...]] = {}

    @property
    def _row_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(spec.shape for spec in self._config.inputs)

    def add_slab(self) -> int:
        layout = Layout.of(column_bytes(self._config, self._row_shapes), self._capacity)
        segment = Segment(layout.nbytes)
        self._slabs.append(segment)
        number = len(self._slabs) - 1
        frame = frames.encode(frames.MapSlab(number, segment.nbytes))
        socket.send_fds(self._sock, [frame], [segment.fd])
        return number

    def column(self, slab: int, index: int) -> Array:
        """All rows of a column: inputs come first."""
        layout = Layout.of(column_bytes(self._config, self._row_shapes), self._capacity)
        spec = (*self._config.inputs, *self._config.outputs)[index]
        start = layout.offsets[index]
        raw = self._slabs[slab].view[start : start + layout.row_bytes[index] * self._capacity]
        view = np.frombuffer(raw, DATATYPES[spec.datatype].numpy)
        return view.reshape(self._capacity, *spec.shape)

    def dispatch(
        self, runs: Sequence[tuple[int, int, int]], *, geometry: str = "g", **fields: object
    ) -> int:
        """Send rows of slabs as a batch; return its number."""
        self._num_batches += 1
        ranges = tuple(frames.RowRange(*run) for run in runs)
        self.outputs[self._num_batches] = ranges
        frame = frames.Dispatch(
            self._num_batches, ranges, self._row_shapes, self._capacity, geometry=geometry
        )
        for name, value in fields.items():
            setattr(frame, name, value)
        self.send(frame)
        return self._num_batches

    def spill(self, arrays: Sequence[Array], *, geometry: str = "g", **fields: object) -> int:
        """Send requests of one array each, without rows, as a batch; return its number."""
        self._num_batches += 1
        (spec,) = self._config.inputs
        parts, offset = [], 0
        for array in arrays:
            data = from_array(spec.name, spec.datatype, array).data
            self.spills[0].view[offset : offset + len(data)] = data
            extent = frames.Extent(spec.name, spec.datatype, array.shape, offset, len(data))
            parts.append(frames.RequestPart("", len(array), (extent,)))
            offset += -(-len(data) // 64) * 64
        frame = frames.Dispatch(self._num_batches, (), requests=tuple(parts), geometry=geometry)
        for name, value in fields.items():
            setattr(frame, name, value)
        self.send(frame)
        return self._num_batches

    def send(self, frame: frames.ShardToWorker) -> None:
        self._sock.send(frames.encode(frame))

    def receive(self) -> list[frames.WorkerToShard]:
        """Return the frames that have arrived."""
        received: list[frames.WorkerToShard] = []
        buffer = bytearray(frames.MAX_FRAME_BYTES)
        while True:
            try:
                size = self._sock.recv_into(buffer)
            except BlockingIOError:
                return received
            if size == 0:
                return received
            received.append(frames.decode_worker_to_shard(memoryview(buffer)[:size]))

    def rows(self, batch: int, index: int = -1) -> Array:
        """The rows of a batch in one column; by default the last output's."""
        index = index if index >= 0 else len(self._row_shapes) + len(self._config.outputs) - 1
        pieces = [
            self.column(run.slab, index)[run.row : run.row + run.count]
            for run in self.outputs[batch]
        ]
        return np.concatenate(pieces)

    def spilled(self, done: frames.Done) -> list[list[Array]]:
        """The outputs of each request that are in the spill."""
        view = self.spills[1].view
        return [
            [
                to_array(
                    Tensor(e.name, e.datatype, e.shape, view[e.offset : e.offset + e.nbytes])
                ).copy()
                for e in extents
            ]
            for extents in done.outputs
        ]

    def close(self) -> None:
        """Die: the worker sees the end of the socket."""
        if self._sock.fileno() >= 0:
            self._sock.close()
            for segment in (*self.spills, *self._slabs):
                segment.close()


class WorkerAlone:
    """A worker with a loaded model and shards that come and go."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        in_thread: bool = False,
        die: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self.core, theirs = socket_pair()
        self._theirs = theirs
        self.worker = Worker(Channel(theirs), die=die)
        self._thread: threading.Thread | None = None
        self.core.send(frames.encode(frames.LoadModel(frames.VERSION, config)))
        self._num_shards = 0
        self.shards: list[FakeShard] = []
        self.step()
        if in_thread:
            self._thread = threading.Thread(target=self.worker.serve, daemon=True)
            self._thread.start()

    def attach(self, capacity: int = 8, hears_starts: bool = False) -> FakeShard:
        ours, theirs = socket_pair()
        attach = frames.encode(frames.Attach(self._num_shards))
        self._num_shards += 1
        socket.send_fds(self.core, [attach], [theirs.fileno()])
        theirs.close()
        shard = FakeShard(self._config, ours, capacity, hears_starts)
        self.shards.append(shard)
        return shard

    def step(self) -> None:
        """Let the worker handle all that lies in its sockets; not if it has a thread."""
        while self.worker.has_work:
            assert self.worker.step()

    def close(self) -> None:
        if self._thread is not None:
            self.core.send(frames.encode(frames.Stop()))
            self._thread.join()
        self.worker.close()
        self.core.close()
        self._theirs.close()
        for shard in self.shards:
            shard.close()


class LentLife:
    """Pass this as `start_life` of a second model, to run its batches in another one's worker. It
    does the core's part: it attaches the shard to that worker, which it says is ready."""

    pid = 0
    was_killed_outside = False

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[str], None],
        lender: Life,
        ready: frames.WorkerReady,
    ) -> None:
        self.sock, self._theirs = socket_pair()
        self._loop = loop
        self._on_death = on_death
        self._lender = lender
        self._ready = ready
        self._is_dead = False
        loop.add_reader(self._theirs.fileno(), self._read)

    def _read(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._theirs, frames.MAX_FRAME_BYTES, 1)
        frame = frames.decode_to_worker(data) if data else frames.Stop()
        if isinstance(frame, frames.LoadModel):
            self._theirs.send(frames.encode(self._ready))
        elif isinstance(frame, frames.Attach):
            socket.send_fds(self._lender.sock, [data], fds)
            os.close(fds[0])
        elif isinstance(frame, frames.Stop):
            self.kill("exited with status 0")

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        if not self._is_dead:
            self._is_dead = True
            self._loop.remove_reader(self._theirs.fileno())
            self._theirs.close()
            self._loop.call_soon(self._on_death, reason)

    def socket_closed(self) -> None:
        self.kill()

    def has_room_for_another(self) -> bool:
        return False
