"""A shard's end of the socket to one worker, with the spill for that worker's outputs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence

from penstock.processes.channel import Datagrams
from penstock.serving.called_models import CallLink
from penstock.serving.regions import Region
from penstock.serving.slab import Segment, Slab
from penstock.wire import frames


class WorkerLink(Datagrams):
    """Sends the worker this shard's memory: the spill first, and slabs as they are made. That the
    worker has closed its end is no news: its death is told by the supervisor."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        received: Callable[[memoryview], object],
        input_spill: Segment,
        hears_starts: bool = False,
        calls: CallLink | None = None,
    ) -> None:
        """`hears_starts`: other shards have the worker, too. `calls` are those of its model's code.
        OSError if there is no memory; then the sockets are closed."""
        self._calls = calls
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            if calls is not None:
                undo.callback(calls.close)
            self.output_spill = Segment(input_spill.nbytes)
            undo.callback(self.output_spill.close)
            super().__init__(loop, sock, received, lambda: None)
            undo.callback(super().close)
            has_calls = calls is not None
            hello = frames.Hello(frames.VERSION, input_spill.nbytes, hears_starts, has_calls)
            fds: tuple[int, ...] = (input_spill.fd, self.output_spill.fd)
            if calls is not None:
                fds = (*fds, calls.theirs.fileno())
            self.send(frames.encode(hello), fds)
            if calls is not None:
                calls.theirs.close()
            undo.pop_all()
        self._num_slabs = 0
        # Those that the worker has mapped for this shard.
        self._regions: set[Region] = set()

    def map_slabs(self, slabs: Sequence[Slab]) -> None:
        """Map those that are new, of all slabs there are."""
        for slab in slabs[self._num_slabs :]:
            self.send(frames.encode(frames.MapSlab(slab.id, slab.seg.nbytes)), (slab.seg.fd,))
        self._num_slabs = len(slabs)

    def map_regions(self, regions: Iterable[Region]) -> None:
        """Map clients' memory that the worker does not have yet, before a batch that uses it."""
        for region in regions:
            if region not in self._regions:
                self._regions.add(region)
                region.users.add(self)
                self.send(frames.encode(region.memory), () if region.fd is None else (region.fd,))

    def unmap_region(self, region: Region) -> None:
        self._regions.discard(region)
        self.send(frames.encode(frames.UnmapRegion(region.number)))

    def close(self) -> None:
        for region in self._regions:
            region.users.discard(self)
        super().close()
        self._sock.close()
        if self._calls is not None:
            self._calls.close()
        self.output_spill.close()
