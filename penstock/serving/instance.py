"""One place for a worker of a model, and what is known of the worker that has it."""

from __future__ import annotations

from typing import Literal

from penstock.backends import GPU_MEMORY
from penstock.processes.child import ChildProcess
from penstock.processes.restarts import CrashLoop
from penstock.serving.batches import RunningBatch
from penstock.serving.slab import Segment
from penstock.wire import frames


class Instance:
    """A slot for one worker, on a device. `batches` are in flight, in the order they were sent (the
    dispatcher sets them); at most `num_slots`, one for each model instance that the worker runs.
    The supervisor sets the rest."""

    def __init__(self, index: int, device: str, num_slots: int = 1) -> None:
        self.index = index
        self.device = device
        self.num_slots = num_slots
        # None while no process runs.
        self.child: ChildProcess | None = None
        self.output_spill: Segment | None = None
        self.is_ready = False
        # Its current worker is being killed because it hung.
        self.is_hung = False
        # Its last worker was killed from outside, so a request may not have caused it.
        self.was_killed_outside = False
        # It is to be replaced: it gets no more batches and stops after its last answer.
        self.is_leaving = False
        self.batches: list[RunningBatch] = []
        self.ready: frames.WorkerReady | None = None
        self.ready_at = 0.0
        self.started_at = 0.0
        # When it last answered a batch, by the model's clock.
        self.answered_at = 0.0
        # These two belong to the instance, not the worker: a spare that takes over inherits them.
        self.crashes = CrashLoop()
        self.num_restarts = 0
        # Loaded in advance; serves no requests yet.
        self.is_spare = False
        # Why the current worker could not load.
        self.load_error = ""

    @property
    def pid(self) -> int:
        return self.child.life.pid if self.child is not None else 0

    @property
    def start_s(self) -> float:
        """How long its current worker took to become ready."""
        return self.ready_at - self.started_at

    @property
    def gpu_memory_bytes(self) -> int:
        """GPU memory that its worker measured after the warm-up; 0: not measured."""
        text = self.ready.built.get(GPU_MEMORY, "") if self.ready is not None else ""
        return int(text) if text.isdigit() else 0

    @property
    def built(self) -> str:
        """Build details of its worker, for the log."""
        built = self.ready.built if self.ready is not None else {}
        return ", ".join(f"{key}={value}" for key, value in built.items())

    @property
    def is_idle(self) -> bool:
        """Whether it can take another batch."""
        return self.is_ready and not self.is_leaving and len(self.batches) < self.num_slots

    @property
    def state(self) -> Literal["idle", "busy", "not ready"]:
        if self.is_idle:
            return "idle"
        return "busy" if self.is_ready else "not ready"

    def __repr__(self) -> str:
        return f"<Instance {self.index} pid={self.pid} {self.state}>"
