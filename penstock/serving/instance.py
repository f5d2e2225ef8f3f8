"""One place for a worker of a model, and what the core knows of the worker that has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.processes.child import ChildProcess
from penstock.processes.restarts import CrashLoop
from penstock.serving.served import ModelProcess
from penstock.wire import frames


@dataclass(slots=True, eq=False)
class Instance:
    """A slot for one worker, on a device; the worker runs `num_slots` model instances. Belongs to
    the supervisor."""

    index: int
    device: str
    num_slots: int = 1
    # None while no process runs.
    child: ChildProcess | None = None
    # Number of its current or last worker.
    life: int = 0
    is_ready: bool = False
    # Its current worker is being killed because it hung.
    is_hung: bool = False
    # Its last worker was killed from outside, so a request may not have caused it.
    was_killed_outside: bool = False
    # It is to be replaced: it gets no more batches and stops after its last answer.
    is_leaving: bool = False
    # Its current worker was told to end because the load needed fewer; more may be needed again.
    is_dismissed: bool = False
    ready: frames.WorkerReady | None = None
    ready_at: float = 0.0
    started_at: float = 0.0
    # These two belong to the instance, not the worker: a spare that takes over inherits them.
    crashes: CrashLoop = field(default_factory=CrashLoop)
    num_restarts: int = 0
    # Loaded in advance; serves no requests yet.
    is_spare: bool = False
    # It has a worker, or should have one; a model that is scaled has more places than it uses.
    is_wanted: bool = True
    # Memory is being sought for its worker, which is started then.
    waits_for_room: bool = False
    # Why the current worker could not load.
    load_error: str = ""

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send now, or when the socket has room. Frames to a dead worker are dropped."""
        if self.child is not None:
            self.child.send(data, fds)

    @property
    def pid(self) -> int:
        return self.child.life.pid if self.child is not None else 0

    @property
    def needs_worker(self) -> bool:
        return self.is_wanted and self.child is None and not self.waits_for_room

    @property
    def start_s(self) -> float:
        """How long its current worker took to become ready."""
        return self.ready_at - self.started_at

    @property
    def process(self) -> ModelProcess:
        built = self.ready.built if self.ready is not None else {}
        state = (self.is_ready, built, self.is_leaving)
        return ModelProcess(self.index, self.device, self.pid, *state)
