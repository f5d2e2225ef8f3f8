"""Interface of a loaded version for the catalog and the protocols, whatever its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.backends import GPU_MEMORY
from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.serving.drift import InputDrift
from penstock.serving.explain import Explanation
from penstock.serving.metrics import ModelMetrics
from penstock.serving.request_recorder import RequestRecorder
from penstock.types import Servable

InstancePhase = Literal["ready", "starting", "leaving"]
PROCESS_STATES: tuple[InstancePhase, ...] = ("ready", "starting", "leaving")


@dataclass(frozen=True, slots=True)
class ModelProcess:
    """A process of the model; `pid` 0: none runs. `built` is what its runner says of itself."""

    index: int
    device: str
    pid: int
    is_ready: bool
    built: Mapping[str, str]
    # It gets no more batches, and ends soon.
    is_leaving: bool = False

    @property
    def state(self) -> InstancePhase:
        if self.is_leaving:
            return "leaving"
        return "ready" if self.is_ready else "starting"

    @property
    def gpu_memory_bytes(self) -> int:
        """GPU memory that it measured after the warm-up; 0: not measured."""
        text = self.built.get(GPU_MEMORY, "")
        return int(text) if text.isdigit() else 0


class Served(Servable, Protocol):
    """A loaded version: started once, serves until closed. Runs on the core's event loop."""

    # Records requests, if the operator wants that; set once, before requests come.
    recorder: RequestRecorder | None

    @property
    def config(self) -> ModelConfig: ...
    @property
    def metrics(self) -> ModelMetrics: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def shown_state(self) -> str:
        """State in the repository index."""

    @property
    def reason(self) -> str:
        """Why it is not ready."""

    @property
    def mode(self) -> str:
        """How requests are batched, in one word."""

    @property
    def processes(self) -> Sequence[ModelProcess]: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def drift(self) -> Sequence[InputDrift]:
        """How live inputs compare with the version's evidence; empty without any."""

    async def start(self) -> None:
        """Load and wait until it is ready. ConfigError if it cannot be loaded."""

    async def drain(self) -> None:
        """Wait until everything admitted has been answered."""

    async def close(self) -> None: ...

    async def refresh(self) -> None:
        """Bring `metrics`, `num_waiting` and `explain` up to date, if others count for it."""

    def explain(self) -> Explanation: ...

    def refused(self, error: PenstockError, received: float) -> None:
        """Count a request that a protocol could not read."""
