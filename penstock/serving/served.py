"""What the catalog and the protocols know of a loaded version, whatever computes its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.metrics import ModelMetrics
from penstock.serving.explain import Explanation
from penstock.types import Servable


class Place(Protocol):
    """A process that computes."""

    @property
    def index(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def pid(self) -> int:
        """0: there is none now."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def gpu_memory_bytes(self) -> int:
        """0: nothing is known."""

    @property
    def built(self) -> str:
        """What it was built with, for the log."""


class Served(Servable, Protocol):
    """Started once, then asked until it is closed. On the core's event loop."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def metrics(self) -> ModelMetrics: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def shown_state(self) -> str:
        """As the repository index shows it."""

    @property
    def reason(self) -> str:
        """Why it is not ready."""

    @property
    def mode(self) -> str:
        """How requests share batches, in a word."""

    @property
    def instances(self) -> Sequence[Place]: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def labels(self) -> dict[str, str]:
        """What a line of the log says about whom it concerns."""

    async def start(self) -> None:
        """Until it is ready. ConfigError where it cannot be."""

    async def drain(self) -> None:
        """Until everything admitted has been answered."""

    async def close(self) -> None: ...

    def explain(self) -> Explanation: ...

    def refused(self, error: PenstockError, received: float) -> None:
        """Count a request that a protocol could not read."""
