"""The front's side alone, against a core that the test plays."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from doubles import RecordingSink

from penstock.errors import BackendFailed, Cancelled, Overloaded, TooLarge
from penstock.processes.channel import Datagrams, socket_pair
from penstock.protocols.line import INLINE_BYTES, MAX_SENT_BYTES, Line
from penstock.protocols.remote import KINDS, MAX_HEAD_BYTES, MAX_WAITING, Remote
from penstock.serving.slab import Segment
from penstock.types import Request, Tensor
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
        self.remote = Remote(theirs, *self.segments)

    def _hear(self, data: memoryview) -> None:
        self.heard.extend(frames.decode_all_from_front(data))

    def leave(self) -> None:
        if self.line.is_open:
            self.line.flush()
            self.line.close()
            self._datagrams.close()
            self._sock.close()

    def close(self) -> None:
        self.leave()
        self.remote.close()
        self._theirs.close()
        for segment in self.segments:
            segment.close()


def submit(core: Core, size: int = 1) -> tuple[RecordingSink, Request]:
    sink = RecordingSink()
    request = Request(sink, [Tensor("x", "UINT8", (size,), bytes(size))], 1.0)
    core.remote.find("m", "1").submit(request)
    return sink, request


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_an_error_keeps_its_kind_and_text(kind: str, until: Callable[..., Any]):
    core = Core()
    sink, _ = submit(core)
    await until(lambda: core.heard)
    call = core.heard[0].call
    core.line.send(frames.InferReply(call, frames.Parcel(), error_kind=kind, error="why"))
    await until(lambda: sink.num_final)
    assert (type(sink.error), str(sink.error)) == (KINDS[kind], "why")
    core.close()


async def test_a_refusal_says_when_to_ask_again(until: Callable[..., Any]):
    core = Core()
    sink, _ = submit(core)
    await until(lambda: core.heard)
    refusal = frames.InferReply(core.heard[0].call, frames.Parcel(), error_kind="Overloaded")
    refusal.retry_after_s = 2.5
    core.line.send(refusal)
    await until(lambda: sink.num_final)
    assert isinstance(sink.error, Overloaded) and sink.error.retry_after_s == 2.5
    core.close()


async def test_a_ping_is_answered_with_the_number_of_clients(until: Callable[..., Any]):
    core = Core()
    core.remote.count_connections = lambda: 7
    core.line.send(frames.Ping())
    await until(lambda: core.heard)
    assert core.heard == [frames.Pong(7)]
    core.close()


def forward(
    core: Core, size: int, headers: dict[bytes, bytes] | None = None
) -> tuple[frames.Forward, list[bytes]]:
    message = frames.Forward(0, 1.0, b"GET", b"/", headers or {}, True, False, frames.Parcel())
    answers: list[bytes] = []
    core.remote.forward(message, bytes(size), lambda data, _: answers.append(data))
    return message, answers


async def test_the_memory_of_a_message_is_kept_until_the_core_has_answered(
    until: Callable[..., Any],
):
    core = Core()
    message, answers = forward(core, BIG)
    await until(lambda: core.heard)
    core.remote.cancel_forward(message.call)
    await until(lambda: len(core.heard) == 2)
    assert core.heard == [message, frames.Cancel(message.call)]
    assert (core.remote.num_extents_held, core.remote.num_running) == (1, 1)
    core.line.send(frames.Forwarded(message.call, frames.Parcel(), is_cut=True))
    await until(lambda: answers)
    assert (core.remote.num_extents_held, core.remote.num_running) == (0, 0)
    core.close()


async def test_a_message_that_waits_for_memory_can_be_taken_back(until: Callable[..., Any]):
    core = Core()
    forward(core, BIG)
    message, answers = forward(core, BIG)
    core.remote.cancel_forward(message.call)
    assert core.remote.num_running == 1
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
    num_held = core.remote.num_running
    with pytest.raises(TooLarge, match="head"):
        forward(core, size, {b"x": bytes(MAX_SENT_BYTES)})
    assert core.remote.num_running == core.remote.num_extents_held == num_held
    largest, _ = forward(core, size, {b"x": bytes(MAX_HEAD_BYTES - 100)})
    if held is not None:
        await until(lambda: core.heard)
        core.line.send(frames.Forwarded(held.call, frames.Parcel()))
    await until(lambda: largest in core.heard)
    core.close()


async def test_an_error_of_an_unknown_kind_is_the_backends(until: Callable[..., Any]):
    core = Core()
    sink, _ = submit(core)
    await until(lambda: core.heard)
    call = core.heard[0].call
    core.line.send(frames.InferReply(call, frames.Parcel(), error_kind="Strange", error="why"))
    await until(lambda: sink.num_final)
    assert (type(sink.error), str(sink.error)) == (BackendFailed, "why")
    core.close()


async def test_memory_of_a_cancelled_request_is_kept_until_the_core_has_answered(
    until: Callable[..., Any],
):
    core = Core()
    sink, request = submit(core, BIG)
    await until(lambda: core.heard)
    core.remote.cancel(request)
    assert isinstance(sink.error, Cancelled)
    assert core.remote.num_extents_held == 1
    await until(lambda: len(core.heard) == 2)
    call = core.heard[0].call
    assert core.heard[1] == frames.Cancel(call)
    # The answer was on its way already; what it holds is given back unread.
    core.line.send(frames.InferReply(call, frames.Parcel(offset=64), "m", "1"))
    await until(lambda: len(core.heard) == 3)
    assert core.heard[2] == frames.Release((64,))
    assert core.remote.num_extents_held == core.remote.num_running == 0
    assert sink.num_final == 1
    core.close()


async def test_only_so_many_requests_wait_for_memory():
    core = Core()
    submit(core, BIG)
    waiting = [submit(core, BIG)[0] for _ in range(MAX_WAITING)]
    sink, _ = submit(core, BIG)
    assert isinstance(sink.error, Overloaded)
    assert not any(each.num_final for each in waiting)
    core.close()


async def test_it_stops_when_told_and_when_the_core_has_gone():
    told, left = Core(), Core()
    told.line.send(frames.Stop())
    await told.remote.stopped.wait()
    left.leave()
    await left.remote.stopped.wait()
    sink, _ = submit(left)
    assert sink.num_final == 0, "its client is about to be cut off"
    told.close()
    left.close()


async def test_an_answer_to_a_call_that_has_gone_does_not_take_others_with_it(
    until: Callable[..., Any],
):
    core = Core()
    sink, _ = submit(core)
    await until(lambda: core.heard)
    call = core.heard[0].call
    core.line.send(frames.InferReply(call + 7, frames.Parcel(offset=64), "m", "1"))
    core.line.send(frames.InferReply(call, frames.Parcel(), "m", "1"))
    await until(lambda: sink.num_final)
    assert sink.error is None
    await until(lambda: len(core.heard) == 2)
    assert core.heard[1] == frames.Release((64,)), "what nobody reads is given back"
    core.close()
