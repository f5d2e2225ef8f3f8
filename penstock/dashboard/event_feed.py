"""Server-sent events of the dashboard: one sampler, any number of listeners up to a limit.

Each event is encoded once. A listener that does not take its events is dropped. Belongs to the
core's event loop; knows neither sockets nor shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import msgspec

from penstock.dashboard.live_sampler import LiveSampler
from penstock.errors import SHUTTING_DOWN, NotReady, Overloaded
from penstock.operate.monitor import Monitor
from penstock.serving.lifecycle import Lifecycle
from penstock.system.devices import Watch
from penstock.wire.live import LiveStart

MAX_LISTENERS = 32
# Events that a listener may not have taken yet.
MAX_PENDING = 4
# Use of GPUs is read as often, while someone listens.
GPU_S = 2.0


class FeedListener:
    """Events that wait for one client."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_PENDING + 1)
        self.is_over = False

    def offer(self, event: bytes) -> bool:
        """Queue an event; False if too many wait: the listener is over then."""
        if self._queue.qsize() >= MAX_PENDING:
            self.end()
        if not self.is_over:
            self._queue.put_nowait(event)
        return not self.is_over

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            # Leaves room for this one.
            self._queue.put_nowait(None)

    async def events(self) -> AsyncGenerator[bytes]:
        while (event := await self._queue.get()) is not None:
            yield event


class EventFeed:
    """Samples at each tick of the monitor and tells all listeners."""

    def __init__(
        self,
        sampler: LiveSampler,
        monitor: Monitor,
        lifecycle: Lifecycle,
        gpus: Watch,
    ) -> None:
        self._sampler = sampler
        self._lifecycle = lifecycle
        self._gpus = gpus
        self._listeners: set[FeedListener] = set()
        self._gpus_read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        # The last event, for those that come between two ticks.
        self._last = b""
        monitor.on_tick.append(self.tick)

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def tick(self, now: float) -> None:
        self._last = encode_event("tick", self._sampler.sample(now))
        for each in list(self._listeners):
            if not each.offer(self._last):
                self._listeners.discard(each)
        if self._lifecycle.is_draining:
            # Streams have no end of their own; the server waits for them.
            self.drop_all()
        elif self._listeners and now - self._gpus_read_at >= GPU_S and self._reading is None:
            self._gpus_read_at = now
            self._reading = asyncio.get_running_loop().create_task(self._read_gpus())

    def drop_all(self) -> None:
        """End all streams; clients may connect again."""
        for each in self._listeners:
            each.end()
        self._listeners.clear()

    def open(
        self, start: Callable[[], LiveStart], is_allowed: Callable[[], bool]
    ) -> AsyncGenerator[bytes]:
        """Return the events of one client, that of `start` first, until it closes them, is too
        slow, or `is_allowed` says that its key is not valid any more. Raises Overloaded if there
        are too many clients."""
        if self._lifecycle.is_draining:
            raise NotReady(SHUTTING_DOWN)
        if len(self._listeners) >= MAX_LISTENERS:
            text = f"{MAX_LISTENERS} dashboards are open; close one"
            raise Overloaded(text, retry_after_s=5.0)
        listener = FeedListener()
        self._listeners.add(listener)
        first = encode_event("start", start()) + self._last
        return self._stream(listener, first, is_allowed)

    async def _stream(
        self, listener: FeedListener, first: bytes, is_allowed: Callable[[], bool]
    ) -> AsyncGenerator[bytes]:
        try:
            yield first
            async for event in listener.events():
                if not is_allowed():
                    return
                yield event
        finally:
            listener.is_over = True
            self._listeners.discard(listener)

    async def _read_gpus(self) -> None:
        try:
            self._sampler.gpus = await asyncio.to_thread(self._gpus.uses)
        finally:
            self._reading = None


def encode_event(name: str, data: msgspec.Struct) -> bytes:
    """Encode one server-sent event; JSON has no line breaks of its own."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
