"""A store of bytes in another process, such as Redis, that may be slow, full or gone at any time.

Whoever asks hears of its value, or that there is none, within LOOK_S whatever happens there. After
a failure nothing is asked until the store answers a ping, so that a dead one delays no request.
Runs on the event loop. Knows neither what the bytes are nor the protocol of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger("penstock.cache")

# Keys of one question, and how many may wait for one. Those beyond are not looked up.
MAX_KEYS, MAX_LOOKUPS = 16, 1024
# Larger values are neither written nor expected: they would not come within LOOK_S.
MAX_VALUE_BYTES = 1 << 20
# Values that wait to be written; those beyond are dropped.
MAX_UNWRITTEN_BYTES = 64 << 20
# Limits of a connection and of a write.
CONNECT_S = WRITE_S = 1.0
# The pause after a failure doubles with each further one.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0


class StoreClient(Protocol):
    """A connection. Its methods raise OSError, TimeoutError among them, when it fails."""

    async def ping(self) -> None: ...
    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...
    async def set(self, key: bytes, value: bytes) -> None: ...
    async def close(self) -> None: ...


def pause_s(num_failures: int) -> float:
    """Return how long to wait before the store is tried again."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 30))


@dataclass(slots=True, eq=False)
class Lookup:
    key: bytes
    due: float
    # Gets the value; None: there is none. Must not raise.
    hear: Callable[[bytes | None], None]


class RemoteStore:
    """Invariant: each lookup that was taken is answered once, in the order in which they came."""

    def __init__(
        self,
        connect: Callable[[], StoreClient],
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._look_s = look_s
        self._clock = clock
        # None while the store is not to be asked.
        self._client: StoreClient | None = None
        self._lookups: deque[Lookup] = deque()
        self._values: deque[tuple[bytes, bytes]] = deque()
        self._num_unwritten = 0
        self._num_failures = 0
        self._is_closed = False
        self._reading: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    def open(self) -> None:
        """Connect in the background, unless it does already."""
        if self._connecting is None and self._client is None and not self._is_closed:
            self._connecting = asyncio.create_task(self._keep_connecting())

    async def close(self) -> None:
        self._is_closed = True
        client, self._client = self._client, None
        for task in (self._connecting, self._writing, self._reading):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        while self._lookups:
            self._lookups.popleft().hear(None)
        if client is not None:
            await self._drop(client)

    def look(self, key: bytes, hear: Callable[[bytes | None], None]) -> bool:
        """Ask for a value, later. False if the store is not to be asked now."""
        if self._client is None or len(self._lookups) >= MAX_LOOKUPS:
            return False
        self._lookups.append(Lookup(key, self._clock() + self._look_s, hear))
        if self._reading is None:
            # It starts in the next turn of the loop, so what comes in this one is one question.
            self._reading = asyncio.create_task(self._read())
        return True

    def put(self, key: bytes, value: bytes) -> bool:
        """Write a value, later. False if it is dropped."""
        if self._client is None or len(value) > MAX_VALUE_BYTES:
            return False
        if self._num_unwritten + len(value) > MAX_UNWRITTEN_BYTES:
            return False
        self._num_unwritten += len(value)
        self._values.append((key, value))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return True

    async def _read(self) -> None:
        batch: list[Lookup] = []
        try:
            while self._lookups:
                batch = [self._lookups.popleft() for _ in range(min(MAX_KEYS, len(self._lookups)))]
                values = await self._ask(batch)
                while batch:
                    batch.pop(0).hear(values.pop(0))
        finally:
            self._reading = None
            # It was cancelled.
            for each in batch:
                each.hear(None)

    async def _ask(self, batch: Sequence[Lookup]) -> list[bytes | None]:
        client, left_s = self._client, batch[0].due - self._clock()
        nothing: list[bytes | None] = [None] * len(batch)
        if client is None or left_s <= 0:
            return nothing
        try:
            async with asyncio.timeout(left_s):
                values = await client.get([each.key for each in batch])
        except OSError as error:
            self._failed(client, error)
            return nothing
        self._num_failures = 0
        return values if len(values) == len(batch) else nothing

    async def _write(self) -> None:
        try:
            while self._values:
                key, value = self._values.popleft()
                self._num_unwritten -= len(value)
                if (client := self._client) is None:
                    continue
                try:
                    async with asyncio.timeout(WRITE_S):
                        await client.set(key, value)
                except OSError as error:
                    self._failed(client, error)
        finally:
            self._writing = None

    def _failed(self, client: StoreClient, error: OSError) -> None:
        """Ask no more until a new connection answers."""
        if client is not self._client:
            return
        self._client = None
        self._num_failures += 1
        if self._num_failures == 1:
            text = "the response cache does not answer; requests are computed until it does: %s"
            log.warning(text, describe(error))
        self._connecting = asyncio.create_task(self._keep_connecting(client))

    async def _keep_connecting(self, old: StoreClient | None = None) -> None:
        if old is not None:
            await self._drop(old)
        while True:
            if self._num_failures:
                await asyncio.sleep(pause_s(self._num_failures))
            client = self._connect()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await client.ping()
            except OSError as error:
                if not self._num_failures:
                    text = "the response cache cannot be reached; requests are computed: %s"
                    log.warning(text, describe(error))
                self._num_failures += 1
                await self._drop(client)
                continue
            if self._num_failures:
                log.info("the response cache answers again")
            self._client, self._connecting = client, None
            return

    @staticmethod
    async def _drop(client: StoreClient) -> None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CONNECT_S):
                await client.close()


def describe(error: OSError) -> str:
    return str(error) or type(error).__name__
