"""Interface of a loaded version for the catalog and the protocols, whatever its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.serving.explain import Explanation
from penstock.serving.metrics import ModelMetrics
from penstock.types import Servable


class ModelProcess(Protocol):
    """A process that runs the model."""

    @property
    def index(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def pid(self) -> int:
        """Process id; 0 while no process runs."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def gpu_memory_bytes(self) -> int:
        """GPU memory in use; 0 if unknown."""

    @property
    def built(self) -> str:
        """Build details, for the log."""


class Served(Servable, Protocol):
    """A loaded version: started once, serves until closed. Runs on the core's event loop."""

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
    def instances(self) -> Sequence[ModelProcess]: ...
    @property
    def num_waiting(self) -> int: ...

    async def start(self) -> None:
        """Load and wait until it is ready. ConfigError if it cannot be loaded."""

    async def drain(self) -> None:
        """Wait until everything admitted has been answered."""

    async def close(self) -> None: ...

    def explain(self) -> Explanation: ...

    def refused(self, error: PenstockError, received: float) -> None:
        """Count a request that a protocol could not read."""
