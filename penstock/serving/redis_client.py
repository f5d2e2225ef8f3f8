"""A connection to Redis for the response cache, by the package `redis`. Knows no answers."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from penstock.config import RedisConfig
from penstock.serving.remote_store import CONNECT_S, WRITE_S

log = logging.getLogger("penstock.cache")
PACKAGE = "redis"
MISSING = "needs the package redis: pip install 'penstock[redis]'"
# A lookup, a write and a ping at a time.
MAX_CONNECTIONS = 4
T = TypeVar("T")


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


class RedisClient:
    """Errors of the package become OSError, as `StoreClient` wants it."""

    def __init__(self, config: RedisConfig) -> None:
        import redis
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._errors, self._refusals = redis.RedisError, redis.ResponseError
        self._is_refused = False
        self._redis = redis.asyncio.Redis(
            host=config.host,
            port=config.port,
            username=config.username or None,
            password=config.password or None,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=WRITE_S,
            # The store tries again, with a new connection.
            retry=Retry(NoBackoff(), 0),
            max_connections=MAX_CONNECTIONS,
        )

    async def ping(self) -> None:
        await self._call(self._redis.execute_command("PING"))

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(await self._call(self._redis.mget(keys)))

    async def set(self, key: bytes, value: bytes) -> None:
        try:
            await self._call(self._redis.set(key, value))
        except OSError as error:
            # Redis may be full, and still answer.
            if not isinstance(error.__cause__, self._refusals):
                raise
            if not self._is_refused:
                self._is_refused = True
                text = "Redis keeps no more answers (set its maxmemory-policy to allkeys-lru): %s"
                log.warning(text, error)

    async def close(self) -> None:
        await self._call(self._redis.aclose())

    async def _call(self, command: Awaitable[T]) -> T:
        try:
            return await command
        except self._errors as error:
            raise OSError(f"Redis: {str(error) or type(error).__name__}") from error
