"""An HTTP front on the event loop of the test: the same code, without the process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from penstock.config import HttpLimits
from penstock.processes.channel import socket_pair
from penstock.protocols import http_front, remote
from penstock.protocols.fronts import CoreApi, Front, http_spec
from penstock.protocols.gate import Gate
from penstock.protocols.line import reserve
from penstock.wire import frames


class LoopLife:
    """Ends as a process would: told to stop, or killed."""

    pid = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> None:
        self.sock, self._theirs = socket_pair()
        self._on_death = on_death
        self._task = loop.create_task(self._serve())
        self._task.add_done_callback(self._ended)

    def kill(self) -> None:
        self._task.cancel()

    def socket_closed(self) -> None:
        self.kill()

    async def _serve(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._theirs, frames.MAX_FRAME_BYTES, 2)
        opened = frames.decode_to_front(data)
        assert isinstance(opened, frames.OpenFront)
        self._theirs.setblocking(False)
        await remote.run(http_front.serve, self._theirs, opened, fds)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._theirs.close()
        self._on_death("was killed" if task.cancelled() else "ended")


@asynccontextmanager
async def http_front_of(
    core: CoreApi, limits: HttpLimits | None = None, gate: Gate | None = None
) -> AsyncIterator[Front]:
    """A front that listens; `core.http` answers what it does not."""
    limits = limits or HttpLimits()
    with contextlib.closing(reserve("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
        place = ("127.0.0.1", port)
        spec = http_spec(1, place, limits, gate or Gate(), core.logs_requests)
        front = Front(core, replace(spec, start_life=LoopLife))
        front.start()
        await front.listening()
        try:
            yield front
        finally:
            await front.close()
