"""A shard's process and the core on one event loop: messages, answers, deaths, drains."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from doubles import FakeClock

from penstock.errors import ConfigError, NotFound, TooLarge
from penstock.processes.channel import socket_pair
from penstock.protocols import shard_processes
from penstock.protocols.core_client import CoreClient
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.http import Exchange
from penstock.protocols.line import INLINE_BYTES, MAX_SENT_BYTES
from penstock.protocols.shard_processes import (
    PING_S,
    CoreApi,
    ShardProcess,
    ShardSpec,
    Silence,
    shard_spec,
)
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.serving.shards import Shards
from penstock.serving.shared_page import SharedPage
from penstock.serving.slab import Segment
from penstock.wire import frames


@dataclass(frozen=True)
class Size:
    segment_bytes: int
    hang_s: float = 10.0


SMALL = Size(256 * 1024)


def spec(size: Size, gate: Gate, start_life: Callable[..., "ShardLife"]) -> ShardSpec:
    """A shard with less memory than it really has."""
    made = shard_spec(frames.OpenShard(frames.VERSION, 0), (), gate)
    opening = msgspec.structs.replace(made.opening, segment_bytes=size.segment_bytes)
    return replace(made, opening=opening, hang_s=size.hang_s, start_life=start_life)


class ShardLife:
    """A shard in this process; its socket is served by the test."""

    pid = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> None:
        self.sock, self._theirs = socket_pair()
        self._loop = loop
        self._on_death = on_death
        self._is_alive = True
        self._segments: list[Segment] = []
        self.client: CoreClient | None = None

    def connect(self) -> CoreClient:
        data, fds, _, _ = socket.recv_fds(self._theirs, frames.MAX_FRAME_BYTES, 3)
        self.opened = frames.decode_to_shard(data)
        assert isinstance(self.opened, frames.OpenShard)
        self._theirs.setblocking(False)
        *segments, page = fds
        self._segments = [Segment(self.opened.segment_bytes, fd) for fd in segments]
        shared = SharedPage.open(page)
        os.close(page)
        self.client = CoreClient(self._theirs, *self._segments, shared)
        self.client.on_question = self._answer
        return self.client

    async def _answer(self, question: frames.ShardQuestion) -> bytes:
        """There are no models."""
        return b""

    def stall(self) -> None:
        """It lives and does nothing any more."""
        self._loop.remove_reader(self._theirs.fileno())

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        if self._is_alive:
            self._is_alive = False
            if self.client is not None:
                self.client.close()
            self._theirs.close()
            for segment in self._segments:
                segment.close()
            self._loop.call_soon(self._on_death, reason)

    def socket_closed(self) -> None:
        self.kill()


@dataclass
class Served:
    catalog: Catalog
    lifecycle: Lifecycle
    process: ShardProcess
    lives: list[ShardLife]

    def drain(self) -> None:
        self.lifecycle.drain()
        self.process.drain()

    @property
    def client(self) -> CoreClient:
        client = self.lives[-1].client
        assert client is not None
        return client


@asynccontextmanager
async def serving(
    config: Size = SMALL,
    is_serving: bool = True,
    keys: Keys | None = None,
    repository: Path | str = ".",
    http: Callable[[Exchange], None] | None = None,
) -> AsyncIterator[Served]:
    shards = Shards(1)
    catalog = Catalog(shards=shards)
    lives: list[ShardLife] = []

    def start(loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> ShardLife:
        lives.append(ShardLife(loop, on_death))
        return lives[-1]

    control = Control(catalog, str(repository), is_explicit=True)
    lifecycle = Lifecycle(is_loading=not is_serving)
    core = CoreApi(ManagementApi(catalog, control, lifecycle), http, shards=shards)
    process = ShardProcess(core, spec(config, Gate(keys), start))
    process.start()
    lives[-1].connect().send(frames.Listening(frames.VERSION))
    await process.listening()
    try:
        yield Served(catalog, lifecycle, process, lives)
    finally:
        lives[-1].kill()
        await process.close()
        await catalog.close()
        shards.close()


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_processes, "PING_S", 0.01)


class Held:
    """A handler that answers nothing, and what becomes of its exchanges."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.num_left = 0

    def __call__(self, exchange: Exchange) -> None:
        exchange.abandon = self.abandon
        self.exchanges.append(exchange)

    def abandon(self) -> None:
        self.num_left += 1


def forward(remote: CoreClient, answers: list[tuple[bytes, frames.Forwarded]]) -> frames.Forward:
    message = frames.Forward(0, 1.0, b"GET", b"/a?b", {b"c": b"d"}, True, False, frames.Parcel())
    remote.forward(message, b"body", lambda data, frame: answers.append((data, frame)))
    return message


async def test_a_message_is_answered_with_the_bytes_for_the_client(until):
    held = Held()
    answers: list[tuple[bytes, frames.Forwarded]] = []
    async with serving(http=held) as served:
        for _ in range(2):
            forward(served.client, answers)
        await until(lambda: len(held.exchanges) == 2)
        assert served.process.num_running == 2
        first, second = held.exchanges
        assert (first.head.path, first.head.query, bytes(first.body)) == (b"/a", b"b", b"body")
        first.reply(200, b"X: y\r\n", (b"one", b" two"))
        first.reply(500, b"", ())
        served.drain()
        second.reply_error(404, "nobody")
        await until(lambda: len(answers) == 2)
        (whole, told), (refusal, last) = answers
        assert whole == b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 7\r\n\r\none two"
        assert b"Connection: close" in refusal and refusal.endswith(b'{"error":"nobody"}')
        assert (told.keeps, told.is_cut, last.keeps) == (True, False, False)
        assert served.process.num_running == served.client.num_running == 0


async def test_a_message_that_nobody_waits_for_is_given_up_and_its_answer_dropped(until):
    held = Held()
    answers: list[tuple[bytes, frames.Forwarded]] = []
    async with serving(http=held) as served:
        message = forward(served.client, answers)
        await until(lambda: held.exchanges)
        served.client.cancel_forward(message.call)
        await until(lambda: answers)
        assert held.num_left == 1 and answers[0][1].is_cut
        held.exchanges[0].reply(200, b"", ())
        assert served.process.num_running == served.client.num_running == 0


async def test_an_answer_that_fits_no_memory_cuts_the_connection(until):
    held = Held()
    answers: list[tuple[bytes, frames.Forwarded]] = []
    async with serving(http=held) as served:
        forward(served.client, answers)
        await until(lambda: held.exchanges)
        held.exchanges[0].reply(200, b"", (bytes(SMALL.segment_bytes + 1),))
        await until(lambda: answers)
        assert answers[0][1].is_cut


async def test_a_management_call_is_answered_with_json_or_its_error(until):
    async with serving() as served:
        answer = await served.client.manage(ManagementCall("index"), b"")
        assert isinstance(json.loads(answer), list)
        with pytest.raises(NotFound, match="'nobody' is not found"):
            await served.client.manage(ManagementCall("config", "nobody"), b"")
        too_long = ManagementCall("load", "echo", parameters={"x" * MAX_SENT_BYTES: True})
        with pytest.raises(TooLarge):
            await served.client.manage(too_long, b"")
        assert served.client.num_running == served.process.num_running == 0


async def test_an_answer_to_a_management_call_may_be_large(monkeypatch, until):
    large = bytes(5 * INLINE_BYTES)

    async def index(self: ManagementApi, call: ManagementCall) -> bytes:
        assert call.parameters == {"ready": True}
        return large

    monkeypatch.setattr(ManagementApi, "index", index)
    async with serving() as served:
        for _ in range(30):
            asked = ManagementCall("index", parameters={"ready": True})
            assert await served.client.manage(asked, b"") == large


async def test_a_management_call_that_nobody_waits_for_is_given_up(monkeypatch, until):
    begun: list[asyncio.Event] = []
    ended: list[bool] = []

    async def load(self: ManagementApi, call: ManagementCall) -> bytes:
        begun.append(asyncio.Event())
        try:
            await begun[-1].wait()
        finally:
            ended.append(True)
        return b""

    monkeypatch.setattr(ManagementApi, "load", load)
    async with serving() as served:
        task = asyncio.create_task(served.client.manage(ManagementCall("load", "echo"), b""))
        await until(lambda: begun)
        task.cancel()
        await until(lambda: ended and not served.process.num_running)
        # Given up before it has begun: both frames come at once.
        task = asyncio.create_task(served.client.manage(ManagementCall("load", "echo"), b""))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: served.process.num_running == 0)
        assert served.client.num_running == 0
        # And with the process that asked.
        task = asyncio.create_task(served.client.manage(ManagementCall("load", "echo"), b""))
        num_begun = len(begun)
        await until(lambda: len(begun) > num_begun)
        num_ended = len(ended)
        served.lives[-1].kill()
        await until(lambda: len(ended) > num_ended)
        task.cancel()


async def test_a_shard_that_starts_while_the_server_drains_is_told(until):
    async with serving() as served:
        served.drain()
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        told: list[str] = []
        remote = served.lives[-1].connect()
        remote.on_drain = lambda: told.append("drain")
        remote.send(frames.Listening(frames.VERSION))
        await until(lambda: told)


async def test_how_many_clients_a_shard_has_is_known_a_ping_later(quick_pings, until):
    async with serving() as served:
        served.client.count_connections = lambda: 7
        await until(lambda: served.process.num_connections == 7)
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        assert served.process.num_connections == 0
        served.lives[-1].connect()


async def test_deaths_that_repeat_are_answered_with_patience(until):
    async with serving() as served:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(2, 5):
            served.lives[-1].kill()
            await until(lambda number=number: len(served.lives) == number)
            served.lives[-1].connect()
        assert loop.time() - began > 0.25


async def test_a_shard_that_never_listens_is_given_up(quick_pings, monkeypatch, until):
    monkeypatch.setattr(shard_processes, "START_S", 0.05)
    async with serving() as served:
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 3)


@pytest.mark.parametrize("limit_s", [3.0, 10.0])
def test_silence_is_over_when_the_limit_has_passed(limit_s):
    clock = FakeClock()
    silence = Silence(limit_s, clock())
    for _ in range(int(limit_s / PING_S)):
        clock.advance(PING_S)
        assert not silence.is_over(clock())
    clock.advance(PING_S)
    assert silence.is_over(clock())


def test_an_answer_begins_the_silence_anew():
    clock = FakeClock()
    silence = Silence(3.0, clock())
    for _ in range(100):
        clock.advance(2.0)
        assert not silence.is_over(clock())
        silence.heard()
    clock.advance(2.0)
    assert not silence.is_over(clock())
    clock.advance(2.0)
    assert silence.is_over(clock())


def test_time_in_which_the_core_stood_still_itself_is_not_held_against_the_shard():
    clock = FakeClock()
    silence = Silence(3.0, clock())
    clock.advance(3600)
    assert not silence.is_over(clock())
    silence.heard()
    clock.advance(3600)
    assert not silence.is_over(clock())
    clock.advance(PING_S)
    assert not silence.is_over(clock())
    clock.advance(PING_S)
    assert silence.is_over(clock())


async def test_a_shard_gets_the_keys_of_the_core_again_after_a_restart(until):
    keys = Keys({b"digest": frozenset(("infer", "admin"))})
    async with serving(keys=keys) as served:
        first = served.lives[-1].opened
        assert {digest: set(scopes) for digest, scopes in first.keys.items()} == keys.scopes
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        served.lives[-1].connect()
        assert served.lives[-1].opened.keys == first.keys
    async with serving() as served:
        assert served.lives[-1].opened.keys is None


async def test_a_shard_that_dies_is_replaced_and_its_messages_are_given_up(until):
    held = Held()
    async with serving(http=held) as served:
        forward(served.client, [])
        forward(served.client, [])
        await until(lambda: len(held.exchanges) == 2)
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        assert held.num_left == 2 and served.process.num_running == 0
        held.exchanges[0].reply(200, b"", (b"too late",))
        served.lives[-1].connect().send(frames.Listening(frames.VERSION))
        answers: list[tuple[bytes, frames.Forwarded]] = []
        forward(served.client, answers)
        await until(lambda: len(held.exchanges) == 3)
        held.exchanges[2].reply(200, b"", ())
        await until(lambda: answers)


async def test_a_shard_that_answers_is_left_alone(quick_pings, until):
    async with serving(config=replace(SMALL, hang_s=0.1)) as served:
        await asyncio.sleep(0.3)
        assert len(served.lives) == 1


async def test_a_shard_that_hangs_is_killed_and_replaced(quick_pings, until):
    held = Held()
    async with serving(config=replace(SMALL, hang_s=0.1), http=held) as served:
        forward(served.client, [])
        await until(lambda: held.exchanges)
        served.lives[-1].stall()
        await until(lambda: len(served.lives) == 2)
        assert held.num_left == 1
        served.lives[-1].connect()


class Scarce:
    """Starts shards; those of the given numbers, counted from 1, get no process."""

    def __init__(self, *missing: int) -> None:
        self._missing = missing
        self.num_tried = 0
        self.lives: list[ShardLife] = []

    def __call__(
        self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]
    ) -> ShardLife:
        self.num_tried += 1
        if self.num_tried in self._missing:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.lives.append(ShardLife(loop, on_death))
        return self.lives[-1]


def make_core() -> CoreApi:
    shards = Shards(1)
    catalog = Catalog(shards=shards)
    management = ManagementApi(catalog, Control(catalog, ".", is_explicit=False))
    return CoreApi(management, shards=shards)


def process_of(start_life: Scarce) -> ShardProcess:
    return ShardProcess(make_core(), spec(SMALL, Gate(), start_life))


async def test_a_shard_that_gets_no_process_is_tried_again(until):
    start = Scarce(1, 3, 4)
    process = process_of(start)
    num_fds = len(os.listdir("/proc/self/fd"))
    process.start()
    assert len(os.listdir("/proc/self/fd")) == num_fds, "a failed start leaves nothing"
    await until(lambda: len(start.lives) == 1)
    start.lives[-1].connect().send(frames.Listening(frames.VERSION))
    await process.listening()
    start.lives[-1].kill()
    await until(lambda: len(start.lives) == 2)
    assert start.num_tried == 5
    start.lives[-1].connect()
    start.lives[-1].kill()
    await process.close()


async def test_a_shard_that_never_gets_a_process_is_a_config_error():
    start = Scarce(*range(1, 10))
    process = process_of(start)
    process.start()
    with pytest.raises(ConfigError, match="could not be started .*unavailable.*, 3 times"):
        await process.listening()
    assert start.num_tried == 3
    await process.close()


async def test_a_shard_that_cannot_listen_is_a_config_error(until):
    lives: list[ShardLife] = []

    def start(loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> ShardLife:
        lives.append(ShardLife(loop, on_death))
        return lives[-1]

    for problems, words in [(("port in use",), "port in use"), ((), "exited with status 1")]:
        process = ShardProcess(make_core(), spec(SMALL, Gate(), start))
        lives.clear()
        process.start()
        listening = asyncio.ensure_future(process.listening())
        number = 0
        while not listening.done():
            remote = lives[number].connect()
            if problems:
                remote.send(frames.StartFailed(problems))
            lives[number].kill("exited with status 1")
            number += 1
            await until(lambda n=number, task=listening: len(lives) > n or task.done())
        with pytest.raises(ConfigError, match=words):
            await listening
        assert number == (1 if problems else 3)
        await process.close()
