"""Shared memory for the inputs of a request that is still being received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.serving.plan import Fit
from penstock.serving.slab import Slab


class ReservedMemory(Protocol):
    def give_back(self, reservation: Reservation) -> None: ...


@dataclass(slots=True, eq=False)
class Reservation:
    """Rows of a slab, or extents of the input spill. `views` are writable, one for each tensor in
    the order of the request; they stay valid if the memory is given back to another request, so
    whoever writes must ask for them each time."""

    fit: Fit
    views: list[memoryview]
    # None: given back, or adopted by the request.
    memory: ReservedMemory | None
    slab: Slab | None = None
    row: int = 0
    offsets: tuple[int, ...] = ()

    def drop(self) -> None:
        """Give the memory back; do nothing if it has been, or if the request has adopted it."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.give_back(self)

    def move_out(self) -> None:
        """Copy what was received to private memory and give the shared memory back."""
        if self.memory is not None:
            self.views = [private_copy(view) for view in self.views]
            self.drop()


def private_memory(num_bytes: int) -> memoryview:
    """Return memory that takes no pages before it is written to: a client that announces a long
    body has not sent it yet."""
    return np.empty(num_bytes, dtype=np.uint8).data


def private_copy(view: memoryview) -> memoryview:
    copy = private_memory(len(view))
    copy[:] = view
    return copy
