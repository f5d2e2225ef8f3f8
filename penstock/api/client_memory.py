"""Tensors of `Client` in memory that it shares with a server on the same machine.

Used when the server is local and says that it takes such memory; a server or key that refuses is
asked once, and everything goes in the body from then on. The memory is a pool of sealed memfds
(`processes.shared_memfd`), registered when they are made. Thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock import errors
from penstock.api.endpoint import Endpoint
from penstock.errors import InvalidRequest, PenstockError
from penstock.processes.shared_memfd import SharedMemfd, aligned, is_local
from penstock.types import (
    REGION,
    REGION_BYTES,
    REGION_OFFSET,
    Array,
    Parameter,
    RegionPlace,
    RequestedOutput,
    Tensor,
)
from penstock.wire.region_keys import EXTENSION

# Smaller requests and answers go in the body: below this, that takes no more CPU time.
MIN_BYTES = 64 << 10
MIN_BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 32
MAX_POOL_BYTES = 1 << 30
# Output sizes that are remembered, by model and shapes.
MAX_SIZES = 1024
# Errors of requests that the server has finished: it uses their memory no more.
FINISHED = (
    InvalidRequest,
    errors.NotFound,
    errors.NotAllowed,
    errors.Overloaded,
    errors.Quarantined,
)
# What the server says of a region that it does not have, and of one that is too small.
UNKNOWN, TOO_SMALL = "Unable to find shared memory region", "to hold the results"


class RegionCalls(Protocol):
    """The server, over HTTP or gRPC."""

    def extensions(self) -> Sequence[str]: ...

    def register(self, name: str, key: str, nbytes: int) -> None: ...

    def unregister(self, name: str) -> None: ...

    def infer(
        self,
        model: str,
        version: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[RequestedOutput] = (),
        places: Mapping[str, memoryview] | None = None,
    ) -> dict[str, Array]: ...


class SharedBlock:
    """One memfd, mapped and registered."""

    def __init__(self, calls: RegionCalls, nbytes: int) -> None:
        """OSError without memory; PenstockError if the server does not take it."""
        self._memfd = SharedMemfd()
        self.name, self.nbytes = self._memfd.name, nbytes
        try:
            self.view = self._memfd.grow(nbytes)
            self._memfd.seal()
            calls.register(self.name, self._memfd.key, nbytes)
        except BaseException:
            self._memfd.close()
            raise

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped with the last array on it."""
        self._memfd.close()


class SharedPool:
    """Blocks that no request uses. A process that forks has none of its parent's: both would write
    to them."""

    def __init__(self, calls: RegionCalls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._free: list[SharedBlock] = []
        self._num_blocks = self._num_bytes = 0

    def take(self, nbytes: int) -> SharedBlock | None:
        """Return a block of at least this size; None if the pool may not grow. Raises what
        `SharedBlock` does."""
        size = max(MIN_BLOCK_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._free = os.getpid(), []
                self._num_blocks = self._num_bytes = 0
            for index, block in enumerate(self._free):
                if nbytes <= block.nbytes <= 4 * size:
                    return self._free.pop(index)
            unused = []
            while self._free and not self._has_room(size):
                unused.append(self._free.pop(0))
                self._count(-1, unused[-1].nbytes)
            has_room = self._has_room(size)
            if has_room:
                self._count(1, size)
        for block in unused:
            self._close(block)
        if not has_room:
            return None
        try:
            return SharedBlock(self._calls, size)
        except BaseException:
            with self._lock:
                self._count(-1, size)
            raise

    def give_back(self, block: SharedBlock) -> None:
        with self._lock:
            self._free.append(block)

    def discard(self, block: SharedBlock) -> None:
        """Drop a block that the server may still write to."""
        with self._lock:
            self._count(-1, block.nbytes)
        self._close(block)

    def close(self) -> None:
        with self._lock:
            blocks, self._free = self._free, []
            is_own = self._pid == os.getpid()
        for block in blocks if is_own else ():
            self._close(block)

    def _close(self, block: SharedBlock) -> None:
        with contextlib.suppress(PenstockError):
            self._calls.unregister(block.name)
        block.close()

    def _has_room(self, nbytes: int) -> bool:
        return self._num_blocks < MAX_BLOCKS and self._num_bytes + nbytes <= MAX_POOL_BYTES

    def _count(self, blocks: int, nbytes: int) -> None:
        self._num_blocks += blocks
        self._num_bytes += blocks * nbytes


class SharedCalls:
    """Inferences by shared memory. Sizes of outputs are learned from earlier answers to the same
    shapes; outputs of unknown size come in the body."""

    def __init__(self, calls: RegionCalls, endpoint: Endpoint) -> None:
        self._calls = calls
        self._endpoint = endpoint
        # None: not asked yet.
        self._is_usable: bool | None = None
        self._pool = SharedPool(calls)
        self._sizes: dict[object, dict[str, int]] = {}
        # Models whose outputs have other sizes for the same shapes.
        self._varying: set[tuple[str, str]] = set()

    def close(self) -> None:
        self._pool.close()

    def infer(self, model: str, version: str, tensors: Sequence[Tensor]) -> dict[str, Array] | None:
        """Return the outputs, which belong to the caller; None: send the request in a body."""
        sizes = self._sizes.get(_key(model, version, tensors), {})
        large = {name: size for name, size in sizes.items() if size >= MIN_BYTES}
        num_bytes = sum(len(each.data) for each in tensors)
        if max(num_bytes, sum(large.values())) < MIN_BYTES or not self._may_use():
            return None
        needed = [*(len(each.data) for each in tensors), *large.values()]
        block = self._take(sum(map(aligned, needed)))
        if block is None:
            return None
        is_finished = False
        try:
            found = self._infer(block, (model, version), tensors, (sizes, large))
            is_finished = True
            return found
        except InvalidRequest as error:
            is_finished = UNKNOWN not in str(error)
            if TOO_SMALL in str(error):
                self._varying.add((model, version))
                self._sizes.pop(_key(model, version, tensors), None)
            elif is_finished:
                raise
            return None
        except FINISHED:
            is_finished = True
            raise
        finally:
            (self._pool.give_back if is_finished else self._pool.discard)(block)

    def learn(
        self, model: str, version: str, tensors: Sequence[Tensor], found: Mapping[str, Array]
    ) -> None:
        """Remember the sizes of an answer's outputs; 0: those of texts vary."""
        if self._is_usable is False or (model, version) in self._varying:
            return
        if len(self._sizes) >= MAX_SIZES:
            self._sizes.clear()
        self._sizes[_key(model, version, tensors)] = {
            name: 0 if array.dtype == np.object_ else array.nbytes for name, array in found.items()
        }

    def _infer(
        self,
        block: SharedBlock,
        named: tuple[str, str],
        tensors: Sequence[Tensor],
        outputs: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> dict[str, Array]:
        sizes, large = outputs
        sent: list[Tensor] = []
        position = 0
        for each in tensors:
            nbytes = len(each.data)
            block.view[position : position + nbytes] = each.data
            place = RegionPlace(block.name, position, nbytes)
            sent.append(Tensor(each.name, each.datatype, each.shape, b"", place))
            position += aligned(nbytes)
        asked: list[RequestedOutput] = []
        places: dict[str, memoryview] = {}
        for name in sizes if large else ():
            if name not in large:
                asked.append(RequestedOutput(name))
                continue
            where: dict[str, Parameter]
            where = {REGION: block.name, REGION_BYTES: large[name], REGION_OFFSET: position}
            asked.append(RequestedOutput(name, where))
            places[name] = block.view[position : position + large[name]]
            position += aligned(large[name])
        found = self._calls.infer(*named, sent, asked, places)
        if not sizes:
            self.learn(*named, tensors, found)
        # The block is for the next request.
        return {name: array.copy() for name, array in found.items()}

    def _may_use(self) -> bool:
        """Whether the server is on this machine and takes shared memory, as far as is known."""
        if self._is_usable is None:
            is_possible = hasattr(os, "memfd_create") and is_local(
                self._endpoint.host, self._endpoint.port
            )
            try:
                self._is_usable = is_possible and EXTENSION in self._calls.extensions()
            except PenstockError:
                return False  # Ask again: it may not have started.
        return self._is_usable

    def _take(self, nbytes: int) -> SharedBlock | None:
        try:
            return self._pool.take(nbytes)
        except (errors.NotReady, errors.Overloaded, errors.DeadlineExceeded, OSError):
            return None
        except PenstockError:
            # The key may not register memory, or the server is in another container.
            self._is_usable = False
            return None


def _key(model: str, version: str, tensors: Sequence[Tensor]) -> object:
    return model, version, tuple((each.name, each.shape) for each in tensors)
