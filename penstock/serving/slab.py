"""Shared memory between the core and the workers of one model: slabs of rows, and spill segments.

A slab is laid out as rows x tensors: one column per fixed input and output, each column contiguous,
so that adjacent rows are a batch without a copy. A spill segment holds extents of any size.
`Extents` and `Layout` only compute and are pure; `Segment` is the memory; `SlabPool` belongs to the
core's loop.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Extents:
    """First-fit allocation with coalescing over `capacity` bytes. Offsets are aligned.

    Invariant: `_starts`/`_sizes` are the holes in ascending order and no two of them touch.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._starts = [0]
        self._sizes = [capacity]
        self._held: dict[int, int] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes)

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a new extent, or None when no hole is large enough."""
        wanted = max(aligned(nbytes), ALIGNMENT)
        for index, size in enumerate(self._sizes):
            if size < wanted:
                continue
            offset = self._starts[index]
            if size == wanted:
                del self._starts[index], self._sizes[index]
            else:
                self._starts[index] += wanted
                self._sizes[index] -= wanted
            self._held[offset] = wanted
            return offset
        return None

    def release(self, offset: int) -> None:
        size = self._held.pop(offset)
        index = bisect.bisect_left(self._starts, offset)
        if index < len(self._starts) and offset + size == self._starts[index]:
            size += self._sizes.pop(index)
            del self._starts[index]
        if index > 0 and self._starts[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
        else:
            self._starts.insert(index, offset)
            self._sizes.insert(index, size)


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of each column's rows in a slab of `capacity` rows."""

    capacity: int
    row_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, row_bytes: Sequence[int], capacity: int) -> Layout:
        offsets: list[int] = []
        position = 0
        for size in row_bytes:
            offsets.append(position)
            position += aligned(size * capacity)
        return cls(capacity, tuple(row_bytes), tuple(offsets), position)

    @classmethod
    def fitting(cls, row_bytes: Sequence[int], nbytes: int, max_rows: int) -> Layout | None:
        """Return the layout with the most rows, up to `max_rows`, that fits; None if none does."""
        rows = min(max_rows, nbytes // max(1, sum(row_bytes)))
        while rows > 0:
            layout = cls.of(row_bytes, rows)
            if layout.nbytes <= nbytes:
                return layout
            rows -= 1
        return None


class Segment:
    """Anonymous shared memory: a mapped memfd. It can be opened only through its descriptor."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = max(nbytes, ALIGNMENT)
        is_new = fd is None
        self.fd = os.memfd_create("penstock", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if is_new:
                os.ftruncate(self.fd, self.nbytes)
            self.map = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self.view = memoryview(self.map)

    def close(self) -> None:
        os.close(self.fd)
        try:
            self.view.release()
            self.map.close()
        except BufferError:
            pass  # A numpy view is still alive; the map is freed with it.


@dataclass(slots=True, eq=False)
class Slab:
    """One segment and its rows. Rows are handed out in ascending order and returned in any order;
    the slab restarts at row 0 when none is held."""

    id: int
    seg: Segment
    geometry: object = None
    layout: Layout | None = None
    is_open: bool = False
    next_row: int = 0
    num_held: int = 0
    # Rows taken but not yet dispatched.
    num_waiting: int = 0
    # Rows whose request is not complete yet; they count as waiting too.
    num_reserved: int = 0


class SlabPool:
    """The slabs of one model, shared by all its shapes; one slab is open per shape in use.

    `max_slabs` limits what queued requests may fill. A batch that is dispatched while all are full
    of other queued requests gets one more, so a dispatch never waits for itself; there is at most
    one such slab per batch in flight.
    """

    def __init__(self, slab_bytes: int, max_slabs: int) -> None:
        self.slab_bytes = slab_bytes
        self.allow(max_slabs)
        self._num_reserving = 0
        self._free: list[Slab] = []
        self._open: dict[object, Slab] = {}
        self.slabs: list[Slab] = []

    def allow(self, max_slabs: int) -> None:
        """Limit the slabs that queued requests may fill."""
        self._max_slabs = max_slabs
        # Slow clients must not hold all slabs: few may have reserved rows at a time.
        self._max_reserving = max(1, max_slabs // 4)

    @property
    def num_in_use(self) -> int:
        return len(self.slabs) - len(self._free)

    def place(
        self, geometry: object, layout: Layout, count: int, *, is_needed: bool = False
    ) -> Slab | None:
        """Take `count` rows for one request and return their slab, in which they are the last
        before `next_row`; None when all slabs are taken, unless the rows `is_needed`."""
        slab = self._open.get(geometry)
        if slab is None or slab.next_row + count > layout.capacity:
            if slab is not None:
                self._close(slab)
            if not is_needed and self.num_in_use >= self._max_slabs:
                return None
            if not self._free:
                self.prepare(1)
            slab = self._free.pop()
            slab.geometry, slab.layout = geometry, layout
            slab.is_open = True
            self._open[geometry] = slab
        slab.next_row += count
        slab.num_held += count
        slab.num_waiting += count
        return slab

    def prepare(self, count: int) -> None:
        """Create slabs until `count` are free."""
        while len(self._free) < count:
            slab = Slab(len(self.slabs), Segment(self.slab_bytes))
            self.slabs.append(slab)
            self._free.append(slab)

    def reserve(self, geometry: object, layout: Layout, count: int) -> Slab | None:
        """Take rows as `place` does, for a request that is still being received. None if slabs
        with such rows are too many."""
        slab = self._open.get(geometry)
        has_room = slab is not None and slab.next_row + count <= layout.capacity
        is_reserving = has_room and slab is not None and slab.num_reserved > 0
        if not is_reserving and self._num_reserving >= self._max_reserving:
            return None
        slab = self.place(geometry, layout, count)
        if slab is not None:
            self._num_reserving += slab.num_reserved == 0
            slab.num_reserved += count
        return slab

    def received(self, slab: Slab, count: int) -> None:
        """Record that the request of reserved rows is complete, or gives them up."""
        slab.num_reserved -= count
        if slab.num_reserved == 0:
            self._num_reserving -= 1

    def dispatched(self, slab: Slab, count: int) -> None:
        """Record that the rows are with a worker. A slab without other queued rows is closed, so
        that the next requests start a fresh one at row 0 and stay adjacent."""
        slab.num_waiting -= count
        if slab.num_waiting == 0 and slab.is_open and self.num_in_use != self._max_slabs:
            self._close(slab)

    def requeued(self, slab: Slab, count: int) -> None:
        slab.num_waiting += count

    def release(self, slab: Slab, count: int, was_dispatched: bool = True) -> None:
        slab.num_held -= count
        if not was_dispatched:
            slab.num_waiting -= count
        if slab.num_held == 0:
            self._close(slab)

    def close(self) -> None:
        for slab in self.slabs:
            # Answers that are being sent, and bodies that are being received, still hold rows.
            slab.is_open = False
            slab.seg.close()
        self.slabs.clear()
        self._free.clear()
        self._open.clear()

    def _close(self, slab: Slab) -> None:
        if slab.is_open:
            slab.is_open = False
            del self._open[slab.geometry]
        if slab.num_held == 0:
            slab.geometry = slab.layout = None
            slab.next_row = 0
            self._free.append(slab)
