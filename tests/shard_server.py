"""A core and its shards on one event loop: every frame is encoded, workers are on strings."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import numpy as np
from doubles import Puppets, RecordingSink

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.protocols.line import Outbox, ParcelLine
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.owned_model import HandingProcess
from penstock.serving.shard import Shard
from penstock.serving.shards import ShardGone, Shards
from penstock.serving.slab import Segment
from penstock.types import Request, TensorSpec, from_array
from penstock.wire import frames

SEGMENT_BYTES = 1 << 18

ECHO = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16),
)


class Releases:
    """The line on which one side says what it has read."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def send(self, frame: frames.Frame) -> None:
        assert isinstance(frame, frames.Release)
        for offset in frame.offsets:
            asyncio.get_running_loop().call_soon(self._outbox.release, offset)


class Session:
    """A shard whose process is this one. `ends` as a killed process does; while it `is_silent`, it
    hears nothing."""

    def __init__(self, shards: Shards, number: int) -> None:
        self._shards = shards
        self._number = number
        self.is_open = True
        self.is_silent = False
        self.segments = Segment(SEGMENT_BYTES), Segment(SEGMENT_BYTES)
        requests, answers = self.segments
        self.outboxes = of_shard, of_core = Outbox(requests), Outbox(answers)
        self.parcels = ParcelLine(of_core, Releases(of_shard), requests)
        parcels = ParcelLine(of_shard, Releases(of_core), answers)
        self.shard = Shard(
            self._tell, shards.blocks.page, number, parcels=parcels, take_handing=HandingProcess
        )

    def send(self, frame: frames.Frame, fds: tuple[int, ...] = ()) -> None:
        if not self.is_open or self.is_silent:
            return
        (sent,) = frames.decode_all_to_shard(frames.join([frames.encode(frame)]))
        assert isinstance(sent, frames.ToPart)
        sock = socket.socket(fileno=os.dup(fds[0])) if fds else None
        asyncio.get_running_loop().call_soon(self._hear, sent, sock)

    def _hear(self, sent: frames.ToPart, sock: socket.socket | None) -> None:
        if self.is_open:
            self.shard.receive(sent, sock)
        elif sock is not None:
            sock.close()

    def _tell(self, frame: frames.Frame) -> None:
        (sent,) = frames.decode_all_from_shard(frames.join([frames.encode(frame)]))
        assert isinstance(sent, frames.FromPart)
        if self.is_open and not self.is_silent:
            asyncio.get_running_loop().call_soon(self._shards.receive, self._number, sent)

    async def ask(self, question: frames.ShardQuestion) -> bytes:
        await asyncio.sleep(0)  # Frames that were sent before come first.
        if not self.is_open:
            raise ShardGone("it has ended")
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        return await self.shard.answer(frames.decode_shard_question(frames.encode(question)))

    def kill(self) -> None:
        self.is_open = False

    async def end(self) -> None:
        """End as a process does: its sockets close, and the core hears of it."""
        self.is_open = False
        self._shards.lose(self._number)
        await self.shard.close()


class Server:
    """The core with its shards and workers."""

    def __init__(self, num_shards: int = 2) -> None:
        self.puppets = Puppets()
        self.shards = Shards(num_shards)
        self.catalog = Catalog(self.puppets, shards=self.shards)
        self.sessions = [Session(self.shards, number) for number in range(num_shards)]

    async def __aenter__(self) -> "Server":
        for number, session in enumerate(self.sessions):
            await self.shards.open(number, session)
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self.sessions:
            session.is_silent = False
        await self.run(self.catalog.close())
        for session in self.sessions:
            await session.shard.close()
        self.shards.close()

    async def run(self, doing: Awaitable[object]) -> object:
        """Let the workers work until this is done."""
        task = asyncio.ensure_future(doing)
        while not task.done():
            await self.puppets.step_all()
            await asyncio.sleep(0.001)
        return task.result()

    async def load(self, *configs: ModelConfig) -> None:
        await self.run(self.catalog.load(RepositoryScan(list(configs), {})))

    def make(self, number: int) -> Request:
        values = np.arange(4, dtype=np.int64)[None] + 1000 * number
        return Request(RecordingSink(), [from_array("x", "INT64", values)], 0.0)

    def send(self, shard: int, number: int, name: str = "echo", *, key: bytes = b"") -> Request:
        request = self.make(number)
        request.caller = key
        self.sessions[shard].shard.table.find(name).submit(request)
        return request

    async def answers(self, *requests: Request) -> list[object]:
        """The first number of each answer, in thousands, or its error."""
        for _ in range(2000):
            await self.puppets.step_all()
            if all(request.is_done for request in requests):
                break
            await asyncio.sleep(0.001)
        return [
            request.sink.error or int(request.sink.outputs[0]["y"][0, 0]) // 1000
            for request in requests
        ]


def run(scenario: Callable[[Server], Awaitable[None]], num_shards: int = 2) -> None:
    async def main() -> None:
        async with Server(num_shards) as server:
            await scenario(server)

    asyncio.run(main())
