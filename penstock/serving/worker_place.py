"""One place for a worker of a model, as a shard sees it: the link to it, and the batches it has.

The dispatcher owns it. Knows no process: the core starts, stops and kills workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.serving.batches import RunningBatch
from penstock.serving.worker_link import WorkerLink
from penstock.wire import frames

# Batches with open requests of a decoupled model; a worker with so many gets no more.
MAX_RETURNED = 1024


@dataclass(slots=True, eq=False)
class WorkerPlace:
    """`batches` are in flight, in the order they were sent; at most `num_slots`, one for each model
    instance that the worker runs."""

    index: int
    num_slots: int = 1
    # None while there is no ready worker.
    link: WorkerLink | None = None
    # Number of the worker.
    life: int = 0
    # It is to be replaced: it gets no more batches.
    is_leaving: bool = False
    # It serves other shards too, and knows that this one has something to claim.
    is_wanting: bool = False
    # How many batches it has run for all shards by the page, and when that last changed.
    num_shown: float = 0.0
    shown_at: float = 0.0
    # When it was last told that there is something to claim, or has claimed.
    told_at: float = 0.0
    batches: list[RunningBatch] = field(default_factory=list)
    # Batches of a decoupled model that have returned, with requests that are still answered.
    returned: list[RunningBatch] = field(default_factory=list)
    # When it last answered a batch, by the model's clock.
    answered_at: float = 0.0
    # For how long calls of its model to others were open, in all, and when it said so last.
    waited_s: float = 0.0
    waited_at: float = 0.0

    def open(self, life: int, link: WorkerLink) -> None:
        """Use a new worker, which is ready."""
        self.close()
        self.life, self.link = life, link
        self.is_leaving = self.is_wanting = False
        self.waited_s = 0.0

    def send(self, frame: frames.ShardToWorker) -> None:
        """Frames to a dead worker are dropped."""
        if self.link is not None:
            self.link.send(frames.encode(frame))

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    @property
    def is_ready(self) -> bool:
        return self.link is not None

    @property
    def is_idle(self) -> bool:
        """Whether it can take another batch."""
        if self.link is None or self.is_leaving or len(self.returned) >= MAX_RETURNED:
            return False
        return len(self.batches) < self.num_slots

    @property
    def state(self) -> Literal["idle", "busy", "not ready"]:
        if self.is_idle:
            return "idle"
        return "busy" if self.is_ready else "not ready"
