"""Requests of the core itself to a model whose requests are in the shards.

The core has such requests only for the code of its own models (`owned_model`), which may call any
model. Each goes to one of the shards, in turn, with the same frames as requests that shards hand
over to the core. Belongs to the core's event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, NotReady
from penstock.serving.handed_over import HandedOver
from penstock.serving.parcels import Parcels
from penstock.types import Request
from penstock.wire import frames

SHARD_GONE = "the shard that had the request has ended"


class CoreRequests:
    """Invariant: a request is open in at most one shard. `number` is the model's, which no part
    has."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        self.number = number
        self._config = config
        # By shard, the one that is next first.
        self._shards: dict[int, HandedOver] = {}
        self._is_closed = False

    def join(self, shard: int, parcels: Parcels, send: Callable[[frames.ToPart], None]) -> None:
        """Use a shard that has the model."""

        def tell(message: frames.HandOver | frames.TakeBack) -> None:
            send(frames.ToPart(self.number, message))

        self._shards[shard] = HandedOver(self._config, parcels, tell)

    def leave(self, shard: int) -> None:
        """Fail what a shard had that has ended."""
        if (handed := self._shards.pop(shard, None)) is not None:
            handed.fail_all(BackendFailed(SHARD_GONE))

    def receive(self, shard: int, message: frames.FromPartMessage) -> None:
        handed = self._shards.get(shard)
        if handed is not None and isinstance(message, frames.HandBack):
            handed.hear(message)

    def submit(self, request: Request) -> None:
        if self._is_closed or not self._shards:
            why = "is being unloaded" if self._is_closed else "is not open in any shard"
            request.respond(NotReady(f"model '{self._config.name}' {why}"))
            return
        shard = next(iter(self._shards))
        # The last one from now on.
        handed = self._shards[shard] = self._shards.pop(shard)
        handed.submit(request)

    def cancel(self, request: Request) -> None:
        for handed in self._shards.values():
            handed.cancel(request)

    def close(self) -> None:
        self._is_closed = True
        error = NotReady(f"model '{self._config.name}' is being unloaded")
        for handed in self._shards.values():
            handed.fail_all(error)
