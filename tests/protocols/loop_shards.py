"""A shard on the event loop of the test: the same code, without the process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

from penstock.config import HttpLimits
from penstock.processes.channel import socket_pair
from penstock.protocols import core_client, shard_main
from penstock.protocols.gate import Gate
from penstock.protocols.line import reserve
from penstock.protocols.shard_processes import CoreApi, ShardProcess, shard_spec
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
        data, fds, _, _ = socket.recv_fds(
            self._theirs, frames.MAX_FRAME_BYTES, core_client.MAX_OPENING_FDS
        )
        opened = frames.decode_to_shard(data)
        assert isinstance(opened, frames.OpenShard)
        self._theirs.setblocking(False)
        await core_client.run(shard_main.serve, self._theirs, opened, fds)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._theirs.close()
        self._on_death("was killed" if task.cancelled() else "ended")


@asynccontextmanager
async def shard_on_loop(
    core: CoreApi,
    limits: HttpLimits | None = None,
    gate: Gate | None = None,
    logs_requests: bool = False,
) -> AsyncIterator[SimpleNamespace]:
    """A shard that listens on `port`; `core.http` answers what it does not."""
    with contextlib.closing(reserve("127.0.0.1", 0)) as listener:
        listener.listen()
        listener.setblocking(False)
        opening = frames.OpenShard(
            frames.VERSION, 0, limits=limits or HttpLimits(), logs_requests=logs_requests
        )
        spec = shard_spec(opening, (listener,), gate or Gate())
        process = ShardProcess(core, replace(spec, start_life=LoopLife))
        process.start()
        await process.listening()
        try:
            yield SimpleNamespace(port=listener.getsockname()[1], process=process)
        finally:
            await process.close()
