"""One place for a worker of a model, and what is known of the worker that has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.processes.child import ChildProcess
from penstock.processes.restarts import CrashLoop
from penstock.serving.batches import RunningBatch
from penstock.serving.served import ModelProcess
from penstock.serving.worker_link import WorkerLink
from penstock.wire import frames


@dataclass(slots=True, eq=False)
class Instance:
    """A slot for one worker, on a device. `batches` are in flight, in the order they were sent (the
    dispatcher sets them); at most `num_slots`, one for each model instance that the worker runs.
    The supervisor sets the rest."""

    index: int
    device: str
    num_slots: int = 1
    # None while no process runs.
    child: ChildProcess | None = None
    # The socket for batches, as long as there is a process.
    link: WorkerLink | None = None
    # A worker of several shards knows that this one has something to claim.
    is_wanting: bool = False
    is_ready: bool = False
    # Its current worker is being killed because it hung.
    is_hung: bool = False
    # Its last worker was killed from outside, so a request may not have caused it.
    was_killed_outside: bool = False
    # It is to be replaced: it gets no more batches and stops after its last answer.
    is_leaving: bool = False
    batches: list[RunningBatch] = field(default_factory=list)
    ready: frames.WorkerReady | None = None
    ready_at: float = 0.0
    started_at: float = 0.0
    # When it last answered a batch, by the model's clock.
    answered_at: float = 0.0
    # These two belong to the instance, not the worker: a spare that takes over inherits them.
    crashes: CrashLoop = field(default_factory=CrashLoop)
    num_restarts: int = 0
    # Loaded in advance; serves no requests yet.
    is_spare: bool = False
    # Why the current worker could not load.
    load_error: str = ""

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a frame of the core. Frames to a dead worker are dropped."""
        if self.child is not None:
            self.child.send(data, fds)

    def send_on_link(self, frame: frames.ShardToWorker) -> None:
        """Send a frame of the shard. Frames to a dead worker are dropped."""
        if self.link is not None:
            self.link.send(frames.encode(frame))

    def close_link(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    @property
    def pid(self) -> int:
        return self.child.life.pid if self.child is not None else 0

    @property
    def start_s(self) -> float:
        """How long its current worker took to become ready."""
        return self.ready_at - self.started_at

    @property
    def process(self) -> ModelProcess:
        built = self.ready.built if self.ready is not None else {}
        return ModelProcess(self.index, self.device, self.pid, self.is_ready, built)

    @property
    def is_idle(self) -> bool:
        """Whether it can take another batch."""
        return self.is_ready and not self.is_leaving and len(self.batches) < self.num_slots

    @property
    def state(self) -> Literal["idle", "busy", "not ready"]:
        if self.is_idle:
            return "idle"
        return "busy" if self.is_ready else "not ready"
