"""The response cache of one process, which all of its models share."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from penstock.config import CacheConfig, ModelConfig
from penstock.repository import fingerprint
from penstock.serving.answer_store import AnswerStore
from penstock.serving.context import log_about
from penstock.serving.metrics import ModelMetrics
from penstock.serving.redis_client import RedisClient
from penstock.serving.remote_cache import SharedCache
from penstock.serving.remote_store import RemoteStore
from penstock.serving.response_cache import AnswerCache, ModelCache

log = logging.getLogger("penstock.cache")

NO_CACHE = (
    "response_cache: every request is computed, as the server has no response cache; start it "
    "with --cache-config local,size=BYTES"
)


@dataclass(slots=True, eq=False)
class Caches:
    """`store` has the answers of this process, `remote` those that servers share; without both the
    operator wants none."""

    store: AnswerStore | None = None
    remote: RemoteStore | None = None

    def divide(self, config: CacheConfig, num_shards: int) -> None:
        """Set the cache up in one of so many processes that divide its bytes."""
        self.store = AnswerStore(config.max_bytes // num_shards) if config.max_bytes else None
        if config.redis is not None:
            self.remote = RemoteStore(partial(RedisClient, config.redis), config.redis.timeout_s)

    def open(self, config: ModelConfig, metrics: ModelMetrics) -> AnswerCache | None:
        """Return the cache of a version that is being loaded; None if its answers are not kept."""
        if not config.is_cached:
            return None
        if self.remote is not None and config.fingerprint:
            metrics.num_caches = 1
            self.remote.open()
            return SharedCache(config, metrics, self.remote)
        if self.store is not None:
            metrics.num_caches = 1
            return ModelCache(config, metrics, self.store)
        return None

    async def read(self, config: ModelConfig) -> fingerprint.Fingerprint | None:
        """Return the fingerprint of a version that is about to be loaded, if servers share its
        answers. Say so if it wants a cache and there is none. ConfigError if its files cannot be
        read."""
        if config.is_cached and self.remote is not None:
            return await asyncio.to_thread(fingerprint.take, config)
        if config.is_cached and self.store is None:
            log_about(log, logging.WARNING, config, ": %s", NO_CACHE)
        return None

    async def close(self) -> None:
        if self.remote is not None:
            await self.remote.close()
