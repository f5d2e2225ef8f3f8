"""Frames over a socket that may be full or gone, and tensors through shared memory."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import TooLarge
from penstock.processes.channel import Datagrams, socket_pair
from penstock.protocols.line import (
    INLINE_BYTES,
    Line,
    Outbox,
    handle_all,
    reserve,
    unpack,
    why_not_listen,
)
from penstock.serving.slab import Segment
from penstock.types import Tensor
from penstock.wire import frames

BIG = INLINE_BYTES + 1


class End:
    """One end of a line and what it has heard."""

    def __init__(self, sock: socket.socket, decode: Callable[[memoryview], Any]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.heard: list[Any] = []
        self.is_lost = False
        self._decode = decode
        self.datagrams = Datagrams(asyncio.get_running_loop(), sock, self._hear, self._lost)
        self.line = Line(self.datagrams.send)

    def _hear(self, data: memoryview) -> None:
        handle_all(self._decode(data), self.heard.append)

    def _lost(self) -> None:
        self.is_lost = True

    def close(self) -> None:
        self.line.flush()
        self.line.close()
        self.datagrams.close()
        self.sock.close()


@pytest.fixture
def pair() -> Callable[[], tuple[End, End]]:
    def make() -> tuple[End, End]:
        ours, theirs = socket_pair()
        return End(ours, frames.decode_all_from_shard), End(theirs, frames.decode_all_to_shard)

    return make


async def test_frames_arrive_in_order_though_the_socket_is_full(pair, until):
    core, shard = pair()
    sent = [frames.Forwarded(call, frames.Parcel((), bytes(100_000))) for call in range(100)]
    for frame in sent:
        core.line.send(frame)
    assert len(shard.heard) == 0
    await until(lambda: len(shard.heard) == len(sent))
    assert shard.heard == sent
    core.close()
    shard.close()


def test_a_frame_that_cannot_be_handled_takes_no_other_with_it(caplog):
    def receive(frame: frames.FromShard) -> None:
        if frame == frames.Cancel(1):
            raise KeyError(1)
        heard.append(frame)

    heard: list[frames.FromShard] = []
    handle_all([frames.Cancel(call) for call in range(3)], receive)
    assert heard == [frames.Cancel(0), frames.Cancel(2)]
    assert "a frame could not be handled: Cancel" in caplog.text


async def test_the_loss_of_the_other_end_is_told_once_and_frames_are_dropped(pair, until):
    core, shard = pair()
    shard.line.send(frames.Cancel(1))
    shard.close()
    await until(lambda: core.is_lost)
    assert core.heard == [frames.Cancel(1)]
    core.line.send(frames.Stop())
    core.datagrams.read()
    core.close()


async def test_a_frame_that_no_socket_takes_is_refused(pair):
    core, shard = pair()
    with pytest.raises(TooLarge):
        core.line.send(frames.Forwarded(1, frames.Parcel((), bytes(frames.MAX_FRAME_BYTES))))
    core.close()
    shard.close()


def tensors(*sizes: int) -> list[Tensor]:
    return [
        Tensor(f"t{index}", "UINT8", (size,), bytes([index + 1]) * size)
        for index, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [(), (0,), (5, 0, 3), (INLINE_BYTES,), (BIG,), (BIG, 7, BIG)])
def test_a_parcel_is_unpacked_as_it_was_packed(sizes):
    segment = Segment(1 << 20)
    outbox = Outbox(segment)
    parcels: list[frames.Parcel] = []
    outbox.post(1, tensors(*sizes), parcels.append)
    (parcel,) = parcels
    assert (parcel.offset is None) == (sum(sizes) <= INLINE_BYTES)
    received = unpack(parcel, segment)
    assert [(t.name, t.shape, bytes(t.data)) for t in received] == [
        (t.name, t.shape, t.data) for t in tensors(*sizes)
    ]
    if parcel.offset is not None:
        outbox.release(parcel.offset)
    assert outbox.num_held == 0
    del received
    segment.close()


def test_what_finds_no_room_is_sent_in_turn_when_there_is():
    segment = Segment(3 * BIG)
    outbox = Outbox(segment)
    parcels: dict[int, frames.Parcel] = {}
    for call in range(5):
        outbox.post(call, tensors(BIG), lambda parcel, call=call: parcels.update({call: parcel}))
    assert (list(parcels), outbox.num_waiting) == ([0, 1], 3)
    outbox.post(9, tensors(1), lambda parcel: parcels.update({9: parcel}))
    assert 9 in parcels, "what fits the frame need not wait"
    assert outbox.withdraw(2) and not outbox.withdraw(0)
    outbox.release(parcels[0].offset)
    assert (3 in parcels, outbox.num_waiting) == (True, 1)
    outbox.release(parcels[1].offset)
    assert 4 in parcels and 2 not in parcels
    segment.close()


def test_what_waits_keeps_its_bytes():
    segment = Segment(2 * BIG)
    outbox = Outbox(segment)
    parcels: list[frames.Parcel] = []
    memory = bytearray(b"a" * BIG)
    outbox.post(1, tensors(BIG), parcels.append)
    outbox.post(2, [Tensor("x", "UINT8", (BIG,), memoryview(memory))], parcels.append)
    memory[:] = bytes(BIG)
    outbox.release(parcels[0].offset)
    assert bytes(unpack(parcels[1], segment)[0].data) == b"a" * BIG
    segment.close()


def test_what_never_fits_is_refused():
    segment = Segment(2 * BIG)
    with pytest.raises(TooLarge, match=f"take {3 * BIG} bytes"):
        Outbox(segment).post(1, tensors(3 * BIG), lambda parcel: None)
    segment.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_reserved_port_is_for_those_who_share_it(host: str):
    with contextlib.closing(reserve(host, 0)) as reserved:
        address = reserved.getsockname()[:2]
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(
                    socket.create_server(address, family=reserved.family, reuse_port=True)
                )
            assert why_not_listen(*address) == "Address already in use"
        # Only reserved: nobody answers there.
        with socket.socket(reserved.family) as client:
            assert client.connect_ex(address) == errno.ECONNREFUSED
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", 0)) as taken:
        reserve(*taken.getsockname()[:2])
