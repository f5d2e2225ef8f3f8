"""Ray's handles of deployments: calls that survive the death of a replica, and Ray's errors as
Penstock's. Needs Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn

from ray import exceptions as ray_errors
from ray.serve import exceptions as serve_errors

from penstock.errors import BackendFailed, Cancelled, NotReady, Overloaded

log = logging.getLogger("penstock.ray")
# The replica, its node, or what it has answered is gone. Inference changes nothing, so another
# replica may answer.
LOST = (
    ray_errors.RayActorError,
    ray_errors.ObjectLostError,
    ray_errors.NodeDiedError,
    ray_errors.WorkerCrashedError,
    serve_errors.ReplicaUnavailableError,
)
# Waits before calls are repeated: a router needs a moment to hear of a death.
PAUSES_S = (0.0, 0.1, 0.5, 1.0)
FIGURES_TIMEOUT_S = 5.0


class RayHandle:
    """The replicas of one deployment. A call whose replica dies is repeated up to `retries` times,
    as long as nothing of its answer has been passed on."""

    def __init__(self, handle: Any, model: str, retries: int) -> None:
        self._call = handle.call
        self._stream = handle.options(stream=True).stream
        self._handle = handle
        self._model = model
        self._retries = retries

    async def call(self, data: bytes, prefix: Sequence[int] = ()) -> bytes:
        for attempt in range(self._retries + 1):
            response = self._call.remote(data, prefix=prefix)
            try:
                answer: bytes = await response
                return answer
            except LOST as error:
                await self._pause(attempt, error)
            except asyncio.CancelledError:
                response.cancel()
                raise
            except Exception as error:
                self._translate(error)
        raise self._gone()

    async def stream(self, data: bytes, prefix: Sequence[int] = ()) -> AsyncIterator[bytes]:
        for attempt in range(self._retries + 1):
            parts = self._stream.remote(data, prefix=prefix)
            has_begun = False
            try:
                async for part in parts:
                    has_begun = True
                    yield part
                return
            except LOST as error:
                if has_begun:
                    raise self._gone() from error
                await self._pause(attempt, error)
            except (asyncio.CancelledError, GeneratorExit):
                parts.cancel()
                raise
            except Exception as error:
                self._translate(error)
        raise self._gone()

    async def figures(self) -> Mapping[str, tuple[bytes, bytes]]:
        """Ask all replicas."""
        response = self._handle.broadcast("figures")
        try:
            found = await asyncio.wait_for(response.results_async(), FIGURES_TIMEOUT_S)
        except (*LOST, TimeoutError) as error:
            log.warning("%s: figures of its replicas are missing: %s", self._model, error)
            return {}
        return {name: (metrics, statistics) for name, metrics, statistics in found}

    async def _pause(self, attempt: int, error: Exception) -> None:
        log.warning("%s: a replica is gone, call %d: %s", self._model, attempt + 1, error)
        await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])

    def _gone(self) -> NotReady:
        return NotReady(f"model '{self._model}': its replica is gone; try again", 1.0)

    def _translate(self, error: Exception) -> NoReturn:
        match error:
            case serve_errors.BackPressureError():
                raise Overloaded(f"model '{self._model}': too many requests wait") from None
            case serve_errors.DeploymentUnavailableError():
                raise NotReady(f"model '{self._model}' could not be deployed") from None
            case ray_errors.TaskCancelledError():
                raise Cancelled("the request was cancelled") from None
        log.error("%s: a replica raised", self._model, exc_info=error)
        raise BackendFailed("internal error") from None
