"""A worker as a shard sees it: whether it takes batches, and those that it has.

The dispatcher owns it and sends through it. Knows no process: the core starts, stops and kills it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from penstock.serving.batches import RunningBatch
from penstock.serving.slab import Segment

Send = Callable[[bytes, tuple[int, ...]], None]


@dataclass(slots=True, eq=False)
class WorkerLink:
    """The worker in the place `index`. `batches` are in flight, in the order they were sent; at
    most `num_slots`, one for each model instance that the worker runs."""

    index: int
    num_slots: int = 1
    # Number of the worker; 0 while there is none.
    life: int = 0
    # None while it has no worker: frames to a dead worker are dropped.
    _send: Send | None = None
    output_spill: Segment | None = None
    # It is to be replaced: it gets no more batches.
    is_leaving: bool = False
    batches: list[RunningBatch] = field(default_factory=list)
    # When it last answered a batch, by the model's clock.
    answered_at: float = 0.0

    def open(self, life: int, send: Send, output_spill: Segment) -> None:
        """Use a new worker, which is ready."""
        self.life, self._send, self.output_spill = life, send, output_spill
        self.is_leaving = False

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send now, or when the socket has room."""
        if self._send is not None:
            self._send(data, fds)

    def close(self) -> None:
        self._send = None
        if self.output_spill is not None:
            self.output_spill.close()
            self.output_spill = None

    @property
    def is_ready(self) -> bool:
        return self._send is not None

    @property
    def is_idle(self) -> bool:
        """Whether it can take another batch."""
        return self._send is not None and not self.is_leaving and len(self.batches) < self.num_slots

    @property
    def state(self) -> Literal["idle", "busy", "not ready"]:
        if self.is_idle:
            return "idle"
        return "busy" if self.is_ready else "not ready"
