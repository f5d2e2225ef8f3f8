"""The shard's side alone, against a core that the test plays."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import BackendFailed, Overloaded, TooLarge
from penstock.processes.channel import Datagrams, socket_pair
from penstock.protocols.core_client import KINDS, MAX_HEAD_BYTES, MAX_WAITING, CoreClient
from penstock.protocols.line import INLINE_BYTES, MAX_SENT_BYTES, Line
from penstock.serving.management import ManagementCall
from penstock.serving.shared_page import PageLayout, SharedPage
from penstock.serving.slab import Segment
from penstock.wire import frames

BIG = INLINE_BYTES + 1


class Core:
    """The other end of the socket: hears frames, says what it is told to."""

    def __init__(self) -> None:
        self._sock, theirs = socket_pair()
        theirs.setblocking(False)
        self._theirs = theirs
        self.segments = [Segment(2 * BIG) for _ in range(2)]
        self.heard: list[Any] = []
        loop = asyncio.get_running_loop()
        self._datagrams = Datagrams(loop, self._sock, self._hear, lambda: None)
        self.line = Line(self._datagrams.send)
        page = SharedPage.in_memory(PageLayout(1))
        self.client = CoreClient(theirs, *self.segments, page)

    def _hear(self, data: memoryview) -> None:
        self.heard.extend(frames.decode_all_from_shard(data))

    def leave(self) -> None:
        if self.line.is_open:
            self.line.flush()
            self.line.close()
            self._datagrams.close()
            self._sock.close()

    def close(self) -> None:
        self.leave()
        self.client.close()
        self._theirs.close()
        for segment in self.segments:
            segment.close()


async def test_a_ping_is_answered_with_the_number_of_clients(until: Callable[..., Any]):
    core = Core()
    core.client.count_connections = lambda: 7
    core.line.send(frames.Ping())
    await until(lambda: core.heard)
    assert core.heard == [frames.Pong(7)]
    core.close()


def forward(
    core: Core, size: int, headers: dict[bytes, bytes] | None = None
) -> tuple[frames.Forward, list[bytes]]:
    message = frames.Forward(0, 1.0, b"GET", b"/", headers or {}, True, False, frames.Parcel())
    answers: list[bytes] = []
    core.client.forward(message, bytes(size), lambda data, _: answers.append(data))
    return message, answers


async def test_the_memory_of_a_message_is_kept_until_the_core_has_answered(
    until: Callable[..., Any],
):
    core = Core()
    message, answers = forward(core, BIG)
    await until(lambda: core.heard)
    core.client.cancel_forward(message.call)
    await until(lambda: len(core.heard) == 2)
    assert core.heard == [message, frames.Cancel(message.call)]
    assert (core.client.num_extents_held, core.client.num_running) == (1, 1)
    core.line.send(frames.Forwarded(message.call, frames.Parcel(), is_cut=True))
    await until(lambda: answers)
    assert (core.client.num_extents_held, core.client.num_running) == (0, 0)
    core.close()


async def test_a_message_that_waits_for_memory_can_be_taken_back(until: Callable[..., Any]):
    core = Core()
    forward(core, BIG)
    message, answers = forward(core, BIG)
    core.client.cancel_forward(message.call)
    assert core.client.num_running == 1
    await until(lambda: core.heard)
    assert [type(frame) for frame in core.heard] == [frames.Forward] and not answers
    with pytest.raises(Overloaded):
        for _ in range(MAX_WAITING + 1):
            forward(core, BIG)
    core.close()


@pytest.mark.parametrize("size", [1, INLINE_BYTES, BIG])
async def test_a_head_that_fits_no_frame_is_refused_and_holds_nothing(
    size: int, until: Callable[..., Any]
):
    core = Core()
    held = forward(core, BIG)[0] if size == BIG else None  # There is no room for a second.
    num_held = core.client.num_running
    with pytest.raises(TooLarge, match="head"):
        forward(core, size, {b"x": bytes(MAX_SENT_BYTES)})
    assert core.client.num_running == core.client.num_extents_held == num_held
    largest, _ = forward(core, size, {b"x": bytes(MAX_HEAD_BYTES - 100)})
    if held is not None:
        await until(lambda: core.heard)
        core.line.send(frames.Forwarded(held.call, frames.Parcel()))
    await until(lambda: largest in core.heard)
    core.close()


@pytest.mark.parametrize("kind", [*sorted(KINDS), "Strange"])
async def test_an_error_keeps_its_kind_and_text(kind: str, until: Callable[..., Any]):
    """One of an unknown kind is the backend's."""
    core = Core()
    asked = asyncio.create_task(core.client.manage(ManagementCall("index"), b""))
    await until(lambda: core.heard)
    core.line.send(frames.Managed(core.heard[0].call, frames.Parcel(), kind, "why"))
    with pytest.raises(KINDS.get(kind, BackendFailed), match="why"):
        await asked
    core.close()


async def test_it_stops_when_told_and_when_the_core_has_gone():
    told, left = Core(), Core()
    told.line.send(frames.Stop())
    await told.client.stopped.wait()
    left.leave()
    await left.client.stopped.wait()
    _, answers = forward(left, 1)
    assert answers == [], "its client is about to be cut off"
    told.close()
    left.close()


async def test_an_answer_to_a_call_that_has_gone_does_not_take_others_with_it(
    until: Callable[..., Any],
):
    core = Core()
    asked = asyncio.create_task(core.client.manage(ManagementCall("index"), b""))
    await until(lambda: core.heard)
    call = core.heard[0].call
    core.line.send(frames.Managed(call + 7, frames.Parcel(offset=64)))
    core.line.send(frames.Managed(call, frames.Parcel()))
    assert await asked == b""
    await until(lambda: len(core.heard) == 2)
    assert core.heard[1] == frames.Release((64,)), "what nobody reads is given back"
    core.close()


async def test_questions_are_answered_also_with_an_error(until: Callable[..., Any]):
    core = Core()

    async def answer(question: frames.ShardQuestion) -> bytes:
        if isinstance(question, frames.DrainModel):
            raise ValueError("never heard of it")
        return b"yes"

    core.client.on_question = answer
    for call, question in ((1, frames.ReadModels()), (2, frames.DrainModel(5))):
        data = frames.encode(question)
        piece = frames.TensorHeader("body", "UINT8", (len(data),), len(data))
        core.line.send(frames.AskShard(call, frames.Parcel((piece,), data)))
    await until(lambda: len(core.heard) == 2)
    first, second = core.heard
    assert (first.call, first.parcel.data, first.error) == (1, b"yes", "")
    assert (second.call, second.error) == (2, "ValueError: never heard of it")
    core.close()
