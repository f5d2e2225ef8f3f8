"""A front and the core on one event loop: requests, answers, deaths, drains."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from doubles import FakeClock, RecordingSink

from penstock.config import BatchPolicy, HttpLimits, ModelConfig
from penstock.errors import (
    BackendFailed,
    Cancelled,
    ConfigError,
    InvalidRequest,
    NotFound,
    NotReady,
    TooLarge,
)
from penstock.processes.channel import socket_pair
from penstock.protocols import fronts
from penstock.protocols.fronts import PING_S, CoreApi, Front, FrontSpec, Silence, http_spec
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.http import Exchange
from penstock.protocols.line import INLINE_BYTES, MAX_SENT_BYTES
from penstock.protocols.remote import Remote
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.serving.slab import Segment
from penstock.serving.supervisor import ThreadLife
from penstock.types import Request, RequestedOutput, TensorSpec, from_array
from penstock.wire import frames


@dataclass(frozen=True)
class Size:
    segment_bytes: int
    hang_s: float = 10.0


SMALL = Size(256 * 1024)


def spec(size: Size, gate: Gate, start_life: Callable[..., "FrontLife"]) -> FrontSpec:
    """An HTTP front with less memory than it really has."""
    made = http_spec(1, ("127.0.0.1", 0), HttpLimits(), gate)
    opening = msgspec.structs.replace(made.opening, segment_bytes=size.segment_bytes)
    return replace(made, opening=opening, hang_s=size.hang_s, start_life=start_life)


class FrontLife:
    """A front in this process; its socket is served by the test."""

    pid = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> None:
        self.sock, self._theirs = socket_pair()
        self._loop = loop
        self._on_death = on_death
        self._is_alive = True
        self._segments: list[Segment] = []
        self.remote: Remote | None = None

    def connect(self) -> Remote:
        data, fds, _, _ = socket.recv_fds(self._theirs, frames.MAX_FRAME_BYTES, 2)
        self.opened = frames.decode_to_front(data)
        assert isinstance(self.opened, frames.OpenFront)
        self._theirs.setblocking(False)
        self._segments = [Segment(self.opened.segment_bytes, fd) for fd in fds]
        self.remote = Remote(self._theirs, *self._segments)
        return self.remote

    def stall(self) -> None:
        """It lives and does nothing any more."""
        self._loop.remove_reader(self._theirs.fileno())

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        if self._is_alive:
            self._is_alive = False
            if self.remote is not None:
                self.remote.close()
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
    front: Front
    lives: list[FrontLife]

    async def infer(self, values: np.ndarray, model: str = "echo", **fields: object) -> object:
        """The one output, or the error."""
        sink, _ = self.submit(values, model, **fields)
        while not sink.num_final:
            await asyncio.sleep(0.001)
        return sink.error or sink.outputs[0]["y"]

    def drain(self) -> None:
        self.lifecycle.drain()
        self.front.drain()

    def submit(
        self, values: np.ndarray, model: str = "echo", name: str = "x", **fields: object
    ) -> tuple[RecordingSink, Request]:
        sink = RecordingSink()
        request = Request(sink, [from_array(name, "FP32", values)], 1.0, id="id")
        for key, value in fields.items():
            setattr(request, key, value)
        self.remote.find(model).submit(request)
        return sink, request

    @property
    def remote(self) -> Remote:
        remote = self.lives[-1].remote
        assert remote is not None
        return remote


def model(name: str, **options: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        version="1",
        backend="null",
        artifact="",
        inputs=(TensorSpec("x", "FP32", (-1,)),),
        outputs=(TensorSpec("y", "FP32", (-1,)),),
        max_batch_size=8,
        batching=BatchPolicy(max_batch_size=8, is_dynamic=True),
        options={f"null.{key}": value for key, value in options.items()},
    )


@asynccontextmanager
async def serving(
    *configs: ModelConfig,
    config: Size = SMALL,
    is_serving: bool = True,
    keys: Keys | None = None,
    repository: Path | str = ".",
    http: Callable[[Exchange], None] | None = None,
) -> AsyncIterator[Served]:
    catalog = Catalog(ThreadLife)
    await catalog.load(RepositoryScan(list(configs) or [model("echo")]))
    lives: list[FrontLife] = []

    def start(loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> FrontLife:
        lives.append(FrontLife(loop, on_death))
        return lives[-1]

    control = Control(catalog, str(repository), is_explicit=True)
    lifecycle = Lifecycle(is_loading=not is_serving)
    core = CoreApi(ManagementApi(catalog, control, lifecycle), http)
    front = Front(core, spec(config, Gate(keys), start))
    front.start()
    lives[-1].connect().send(frames.Listening(frames.VERSION, 7))
    await front.listening()
    try:
        yield Served(catalog, lifecycle, front, lives)
    finally:
        lives[-1].kill()
        await front.close()
        await catalog.close()


def row(size: int, value: float = 1.0) -> np.ndarray:
    return np.full((1, size), value, dtype=np.float32)


@pytest.mark.parametrize("size", [1, 16, 10_000])
async def test_a_request_gets_its_own_bits_back_and_leaves_nothing(size, until):
    async with serving() as served:
        assert served.front.port == 7
        for value in range(20):
            np.testing.assert_array_equal(
                await served.infer(row(size, value)), row(size, value), strict=True
            )
        assert served.remote.num_running == served.front.num_running == 0
        assert served.remote.num_extents_held == 0


async def test_more_than_the_segments_hold_is_answered_in_time():
    async with serving() as served:
        values = [row(12_000, value) for value in range(40)]
        answers = await asyncio.gather(*(served.infer(each) for each in values))
        for sent, received in zip(values, answers, strict=True):
            np.testing.assert_array_equal(sent, received)
        assert served.remote.num_extents_held == 0


async def test_refusals_arrive_as_what_they_are():
    async with serving(model("echo"), model("fails", fail_on="13")) as served:
        error = await served.infer(row(4), "none")
        assert isinstance(error, NotFound)
        assert str(error) == ("Request for unknown model: 'none' is not found; loaded: echo, fails")
        error = await served.infer(row(4), name="z")
        assert isinstance(error, InvalidRequest)
        assert "unexpected inference input 'z' for model 'echo'" in str(error)
        error = await served.infer(row(4, 13), "fails")
        assert isinstance(error, BackendFailed)
        assert "null.fail_on" in str(error)
        error = await served.infer(row(4), parameters={"p": "x" * frames.MAX_FRAME_BYTES})
        assert isinstance(error, TooLarge)
        error = await served.infer(row(100_000))
        assert isinstance(error, TooLarge)
        assert not isinstance(await served.infer(row(4)), Exception)
        assert served.remote.num_extents_held == 0


async def test_a_cancelled_request_is_cancelled_in_the_core(until):
    async with serving(model("slow", a_ms="100")) as served:
        sink, request = served.submit(row(10_000), "slow")
        other, waiting = served.submit(row(10_001), "slow")
        await until(lambda: served.front.num_running == 2)
        for each in (request, waiting, request):
            served.remote.cancel(each)
        assert isinstance(sink.error, Cancelled) and isinstance(other.error, Cancelled)
        assert (sink.num_final, other.num_final) == (1, 1)
        await until(lambda: served.front.num_running == served.remote.num_running == 0)
        assert served.remote.num_extents_held == 0
        assert not isinstance(await served.infer(row(4), "slow"), Exception)


async def test_a_request_that_waits_for_memory_can_be_cancelled(until):
    async with serving(model("slow", a_ms="100")) as served:
        first = [served.submit(row(16_000), "slow") for _ in range(4)]
        sink, request = served.submit(row(16_000), "slow")
        served.remote.cancel(request)
        assert isinstance(sink.error, Cancelled)
        await until(lambda: all(each.num_final for each, _ in first))
        assert served.remote.num_extents_held == 0


async def test_a_front_that_dies_is_replaced_and_its_requests_are_cancelled(until):
    async with serving(model("slow", a_ms="50")) as served:
        served.submit(row(10_000), "slow")
        served.submit(row(10_001), "slow")
        await until(lambda: served.front.num_running == 2)
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        (slow,) = served.catalog
        assert slow.num_waiting == 0
        served.lives[-1].connect().send(frames.Listening(frames.VERSION, 7))
        assert served.lives[-1].opened.port == 7, "it listens where the first one did"
        np.testing.assert_array_equal(await served.infer(row(4), "slow"), row(4))
        await until(lambda: slow.num_running == 0)


@pytest.fixture
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "PING_S", 0.01)


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


def forward(remote: Remote, answers: list[tuple[bytes, frames.Forwarded]]) -> frames.Forward:
    message = frames.Forward(0, 1.0, b"GET", b"/a?b", {b"c": b"d"}, True, False, frames.Parcel())
    remote.forward(message, b"body", lambda data, frame: answers.append((data, frame)))
    return message


async def test_a_message_is_answered_with_the_bytes_for_the_client(until):
    held = Held()
    answers: list[tuple[bytes, frames.Forwarded]] = []
    async with serving(http=held) as served:
        for _ in range(2):
            forward(served.remote, answers)
        await until(lambda: len(held.exchanges) == 2)
        assert served.front.num_running == 2
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
        assert served.front.num_running == served.remote.num_running == 0


async def test_a_message_that_nobody_waits_for_is_given_up_and_its_answer_dropped(until):
    held = Held()
    answers: list[tuple[bytes, frames.Forwarded]] = []
    async with serving(http=held) as served:
        message = forward(served.remote, answers)
        await until(lambda: held.exchanges)
        served.remote.cancel_forward(message.call)
        await until(lambda: answers)
        assert held.num_left == 1 and answers[0][1].is_cut
        held.exchanges[0].reply(200, b"", ())
        assert served.front.num_running == served.remote.num_running == 0


async def test_an_answer_that_fits_no_memory_cuts_the_connection(until):
    held = Held()
    answers: list[tuple[bytes, frames.Forwarded]] = []
    async with serving(http=held) as served:
        forward(served.remote, answers)
        await until(lambda: held.exchanges)
        held.exchanges[0].reply(200, b"", (bytes(SMALL.segment_bytes + 1),))
        await until(lambda: answers)
        assert answers[0][1].is_cut


async def test_messages_of_a_front_that_dies_are_given_up(until):
    held = Held()
    async with serving(http=held) as served:
        forward(served.remote, [])
        await until(lambda: held.exchanges)
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        assert held.num_left == 1
        held.exchanges[0].reply(200, b"", (b"too late",))
        served.lives[-1].connect()


async def test_a_management_call_is_answered_with_json_or_its_error(until):
    async with serving() as served:
        answer = await served.remote.manage(ManagementCall("metadata", "echo", "1"), b"")
        assert json.loads(answer)["name"] == "echo"
        with pytest.raises(NotFound, match="'nobody' is not found"):
            await served.remote.manage(ManagementCall("config", "nobody"), b"")
        too_long = ManagementCall("load", "echo", parameters={"x" * MAX_SENT_BYTES: True})
        with pytest.raises(TooLarge):
            await served.remote.manage(too_long, b"")
        assert served.remote.num_running == served.front.num_running == 0


async def test_an_answer_to_a_management_call_may_be_large(monkeypatch, until):
    large = bytes(5 * INLINE_BYTES)

    async def index(self: ManagementApi, call: ManagementCall) -> bytes:
        assert call.parameters == {"ready": True}
        return large

    monkeypatch.setattr(ManagementApi, "index", index)
    async with serving() as served:
        for _ in range(30):
            asked = ManagementCall("index", parameters={"ready": True})
            assert await served.remote.manage(asked, b"") == large


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
        task = asyncio.create_task(served.remote.manage(ManagementCall("load", "echo"), b""))
        await until(lambda: begun)
        task.cancel()
        await until(lambda: ended and not served.front.num_running)
        # Given up before it has begun: both frames come at once.
        task = asyncio.create_task(served.remote.manage(ManagementCall("load", "echo"), b""))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: served.front.num_running == 0)
        assert served.remote.num_running == 0
        # And with the front that asked.
        task = asyncio.create_task(served.remote.manage(ManagementCall("load", "echo"), b""))
        num_begun = len(begun)
        await until(lambda: len(begun) > num_begun)
        num_ended = len(ended)
        served.lives[-1].kill()
        await until(lambda: len(ended) > num_ended)
        task.cancel()


async def test_a_front_that_starts_while_the_server_drains_is_told(until):
    async with serving() as served:
        served.drain()
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        told: list[str] = []
        remote = served.lives[-1].connect()
        remote.on_drain = lambda: told.append("drain")
        remote.send(frames.Listening(frames.VERSION, 7))
        await until(lambda: told)


async def test_how_many_clients_a_front_has_is_known_a_ping_later(quick_pings, until):
    async with serving() as served:
        served.remote.count_connections = lambda: 7
        await until(lambda: served.front.num_connections == 7)
        served.lives[-1].kill()
        await until(lambda: len(served.lives) == 2)
        assert served.front.num_connections == 0
        served.lives[-1].connect()


async def test_timings_come_back_only_when_they_are_asked_for(until):
    async with serving(model("slow", a_ms="20")) as served:
        for wants_timings in (False, True):
            sink = RecordingSink()
            request = Request(sink, [from_array("x", "FP32", row(4))], 1.0)
            served.remote.find("slow", wants_timings=wants_timings).submit(request)
            await until(lambda sink=sink: sink.num_final)
            timings = request.timings
            assert (timings.completed > timings.dispatched >= timings.queued > 1) == wants_timings
            assert (timings.compute_infer_s >= 0.020) == wants_timings


async def test_deaths_that_repeat_are_answered_with_patience(until):
    async with serving() as served:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(2, 5):
            served.lives[-1].kill()
            await until(lambda number=number: len(served.lives) == number)
            served.lives[-1].connect()
        assert loop.time() - began > 0.25


async def test_a_front_that_answers_is_left_alone(quick_pings, until):
    config = replace(SMALL, hang_s=0.1)
    async with serving(config=config) as served:
        await asyncio.sleep(0.3)
        assert len(served.lives) == 1
        np.testing.assert_array_equal(await served.infer(row(4)), row(4))


async def test_a_front_that_hangs_is_killed_and_replaced_and_its_requests_cancelled(
    quick_pings, until
):
    config = replace(SMALL, hang_s=0.1)
    async with serving(model("slow", a_ms="100"), config=config) as served:
        served.submit(row(10_000), "slow")
        served.submit(row(10_001), "slow")
        await until(lambda: served.front.num_running == 2)
        served.lives[-1].stall()
        await until(lambda: len(served.lives) == 2)
        (slow,) = served.catalog
        assert slow.num_waiting == 0
        served.lives[-1].connect().send(frames.Listening(frames.VERSION, 7))
        np.testing.assert_array_equal(await served.infer(row(4), "slow"), row(4))
        await until(lambda: slow.num_running == 0)


async def test_a_front_that_never_listens_is_given_up(quick_pings, monkeypatch, until):
    monkeypatch.setattr(fronts, "START_S", 0.05)
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


def test_time_in_which_the_core_stood_still_itself_is_not_held_against_the_front():
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


async def test_a_front_gets_the_keys_of_the_core_again_after_a_restart(until):
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


class Scarce:
    """Starts fronts; those of the given numbers, counted from 1, get no process."""

    def __init__(self, *missing: int) -> None:
        self._missing = missing
        self.num_tried = 0
        self.lives: list[FrontLife] = []

    def __call__(
        self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]
    ) -> FrontLife:
        self.num_tried += 1
        if self.num_tried in self._missing:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.lives.append(FrontLife(loop, on_death))
        return self.lives[-1]


def make_core() -> CoreApi:
    catalog = Catalog(ThreadLife)
    return CoreApi(ManagementApi(catalog, Control(catalog, ".", is_explicit=False)))


def front_of(start_life: Scarce) -> Front:
    return Front(make_core(), spec(SMALL, Gate(), start_life))


async def test_a_front_that_gets_no_process_is_tried_again(until):
    start = Scarce(1, 3, 4)
    front = front_of(start)
    num_fds = len(os.listdir("/proc/self/fd"))
    front.start()
    assert len(os.listdir("/proc/self/fd")) == num_fds, "a failed start leaves nothing"
    await until(lambda: len(start.lives) == 1)
    start.lives[-1].connect().send(frames.Listening(frames.VERSION, 7))
    await front.listening()
    start.lives[-1].kill()
    await until(lambda: len(start.lives) == 2)
    assert start.num_tried == 5
    start.lives[-1].connect()
    start.lives[-1].kill()
    await front.close()


async def test_a_front_that_never_gets_a_process_is_a_config_error():
    start = Scarce(*range(1, 10))
    front = front_of(start)
    front.start()
    with pytest.raises(ConfigError, match="could not be started .*unavailable.*, 3 times"):
        await front.listening()
    assert start.num_tried == 3
    await front.close()


async def test_a_front_that_cannot_listen_is_a_config_error(until):
    lives: list[FrontLife] = []

    def start(loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> FrontLife:
        lives.append(FrontLife(loop, on_death))
        return lives[-1]

    for problems, words in [(("port in use",), "port in use"), ((), "exited with status 1")]:
        front = Front(make_core(), spec(SMALL, Gate(), start))
        lives.clear()
        front.start()
        listening = asyncio.ensure_future(front.listening())
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
        await front.close()


async def test_a_draining_server_finishes_what_it_has_and_refuses_the_rest(until):
    async with serving(model("slow", a_ms="50")) as served:
        sink, _ = served.submit(row(4), "slow")
        await until(lambda: served.front.num_running == 1)
        served.drain()
        error = await served.infer(row(4), "slow")
        assert isinstance(error, NotReady)
        assert str(error) == "the server is shutting down"
        await until(lambda: sink.num_final)
        assert sink.error is None
        closing = asyncio.ensure_future(served.front.close())
        await served.remote.stopped.wait()
        served.lives[-1].kill()
        await closing


async def test_outputs_may_be_asked_for_as_classes(until):
    labelled = replace(
        model("echo"), outputs=(TensorSpec("y", "FP32", (-1,), labels=("a", "b", "c", "d")),)
    )
    values = np.array([[1, 4, 2, 3], [8, 7, 6, 5]], dtype=np.float32)
    async with serving(labelled) as served:
        asked = [RequestedOutput("y", {"classification": 2})]
        classes = await served.infer(values, outputs=asked)
        assert classes.tolist() == [
            [b"4.000000:1:b", b"3.000000:3:d"],
            [b"8.000000:0:a", b"7.000000:1:b"],
        ]
        plain = await served.infer(values, outputs=[RequestedOutput("y")])
        np.testing.assert_array_equal(plain, values)


async def test_what_cannot_be_classified_is_refused(until):
    config = replace(
        model("echo"),
        inputs=(TensorSpec("x", "BOOL", (-1,)),),
        outputs=(TensorSpec("y", "BOOL", (-1,)),),
    )
    async with serving(config) as served:
        sink = RecordingSink()
        request = Request(sink, [from_array("x", "BOOL", np.ones((1, 4), bool))], 1.0)
        request.outputs = [RequestedOutput("y", {"classification": 2})]
        served.remote.find("echo").submit(request)
        await until(lambda: sink.num_final)
        assert isinstance(sink.error, InvalidRequest)
        assert str(sink.error) == "output 'y': BOOL cannot be classified"
