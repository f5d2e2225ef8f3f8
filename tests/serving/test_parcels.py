"""Messages with tensors keep their order although memory is short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Overloaded, TooLarge
from penstock.serving.parcels import MAX_WAITING, ParcelQueue
from penstock.types import Tensor
from penstock.wire import frames

CAPACITY = 100


class Memory:
    """Room for CAPACITY bytes; posts wait, also small ones, until `free` makes room."""

    max_parcel_bytes, max_frame_bytes = CAPACITY, 1000

    def __init__(self) -> None:
        self.held: list[int] = []
        self._waiting: list = []
        self.withdrawn = 0

    def post(self, key: object, tensors: list[Tensor], send: object) -> None:
        assert not self._waiting, "one at a time"
        self._waiting.append((sum(len(each.data) for each in tensors), send))
        self._try()

    def make_room(self) -> None:
        self.held.pop()
        self._try()

    def withdraw(self, parcel: frames.Parcel) -> None:
        self.withdrawn += 1

    def _try(self) -> None:
        while self._waiting and sum(self.held) + self._waiting[0][0] <= CAPACITY:
            nbytes, send = self._waiting.pop()
            if nbytes:
                self.held.append(nbytes)
            send(frames.Parcel(data=bytes(nbytes)))


def tensor(nbytes: int) -> list[Tensor]:
    return [Tensor("x", "UINT8", (nbytes,), bytes(nbytes))] if nbytes else []


@given(st.lists(st.integers(0, CAPACITY), max_size=40), st.data())
def test_messages_leave_in_order_and_all_of_them(sizes, data):
    memory, sent = Memory(), []
    queue = ParcelQueue(memory, sent.append)
    for number, size in enumerate(sizes):
        if size:
            queue.post(tensor(size), lambda parcel, n=number: (n, len(parcel.data)))
        else:
            queue.tell((number, 0))
        while memory.held and data.draw(st.booleans()):
            memory.make_room()
    while memory.held:
        memory.make_room()
    assert sent == list(enumerate(sizes))


def test_tensors_that_wait_are_copied():
    memory, kept = Memory(), []
    queue = ParcelQueue(memory, lambda message: None)
    memory.post, post = (
        lambda key, tensors, send: (kept.append(tensors), post(key, tensors, send)),
        memory.post,
    )
    data = [bytearray(b"a" * CAPACITY), bytearray(b"b" * CAPACITY), bytearray(b"c" * CAPACITY)]
    for each in data:
        queue.post([Tensor("x", "UINT8", (CAPACITY,), memoryview(each))], lambda parcel: None)
        each[:] = bytes(CAPACITY)
    for _ in range(2):
        memory.make_room()
    assert bytes(kept[2][0].data) == b"c" * CAPACITY


def test_limits_are_checked_before_anything_is_sent():
    memory = Memory()
    queue = ParcelQueue(memory, lambda message: None)
    message = frames.HandOver(1, 0.0, frames.Parcel())
    queue.check(tensor(CAPACITY), message)
    with pytest.raises(TooLarge, match="101 bytes, more than the 100"):
        queue.check(tensor(CAPACITY + 1), message)
    with pytest.raises(TooLarge, match="too large"):
        queue.check([], frames.HandOver(1, 0.0, frames.Parcel(), "x" * 1000))
    for _ in range(MAX_WAITING + 2):
        queue.post(tensor(CAPACITY), lambda parcel: None)
    with pytest.raises(Overloaded, match="too many messages"):
        queue.check([], message)


def test_a_closed_queue_sends_nothing_and_gives_memory_back():
    memory, sent = Memory(), []
    queue = ParcelQueue(memory, sent.append)
    for number in range(3):
        queue.post(tensor(CAPACITY), lambda parcel, n=number: n)
    queue.close()
    memory.make_room()
    assert (sent, memory.withdrawn) == ([0], 1)
