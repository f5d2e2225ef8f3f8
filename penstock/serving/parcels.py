"""Tensors between the core and a shard, in order. Knows no socket: `protocols.line` has them.

`ParcelQueue` sends the messages of one side about one model. Large tensors may have to wait for
shared memory; what is said later waits with them. Belongs to one event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from penstock.errors import Overloaded, TooLarge
from penstock.types import Tensor
from penstock.wire import frames

# Messages that may wait while the memory is full.
MAX_WAITING = 1024

Message = TypeVar("Message")


class Parcels(Protocol):
    """The memory for tensors to the other side, and what comes from it."""

    @property
    def max_parcel_bytes(self) -> int: ...

    @property
    def max_frame_bytes(self) -> int:
        """Limit on a message without its parcel."""

    @property
    def post(
        self,
    ) -> Callable[[Hashable, Sequence[Tensor], Callable[[frames.Parcel], None]], None]:
        """Call the function with the parcel, now or when there is room; the key is the sender's
        only one meanwhile."""

    def read(self, parcel: frames.Parcel) -> list[Tensor]:
        """Return the tensors as views, valid until `free`."""

    def free(self, parcel: frames.Parcel) -> None: ...

    def withdraw(self, parcel: frames.Parcel) -> None:
        """Free the memory of a parcel that is not sent after all."""


class ParcelQueue(Generic[Message]):
    """Invariant: messages leave by `send` in the order in which they were given."""

    def __init__(self, parcels: Parcels, send: Callable[[Message], None]) -> None:
        self._parcels = parcels
        self._send = send
        self._waiting: deque[tuple[Sequence[Tensor], Callable[[frames.Parcel], Message]]] = deque()
        # Whether a message waits for memory.
        self._is_held = False
        self._is_closed = False

    def check(self, tensors: Sequence[Tensor], message: frames.Frame) -> None:
        """Raise TooLarge if the message never fits, Overloaded if too many wait."""
        nbytes = sum(len(tensor.data) for tensor in tensors)
        if nbytes > self._parcels.max_parcel_bytes:
            most = self._parcels.max_parcel_bytes
            text = f"the tensors take {nbytes} bytes, more than the {most} that there are for them"
            raise TooLarge(text)
        if len(frames.encode(message)) > self._parcels.max_frame_bytes:
            raise TooLarge("the names, the id and the parameters are too large")
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded("too many messages wait for memory")

    def post(self, tensors: Sequence[Tensor], make: Callable[[frames.Parcel], Message]) -> None:
        """Send the message of a parcel with these tensors. It was checked before."""
        if self._is_held:
            kept = [Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in tensors]
            self._waiting.append((kept, make))
        else:
            self._start(tensors, make)

    def tell(self, message: Message) -> None:
        """Send a message without tensors."""
        if self._is_held:
            self._waiting.append(((), lambda parcel: message))
        else:
            self._send(message)

    def close(self) -> None:
        """Drop what waits, and send nothing any more."""
        self._is_closed = True
        self._waiting.clear()

    def _start(self, tensors: Sequence[Tensor], make: Callable[[frames.Parcel], Message]) -> None:
        is_starting = self._is_held = True

        def packed(parcel: frames.Parcel) -> None:
            self._is_held = False
            if self._is_closed:
                self._parcels.withdraw(parcel)
                return
            self._send(make(parcel))
            if not is_starting:
                self._go_on()

        self._parcels.post(self, tensors, packed)
        is_starting = False

    def _go_on(self) -> None:
        while self._waiting and not self._is_held:
            self._start(*self._waiting.popleft())


def read_pieces(parcel: frames.Parcel, memory: memoryview | None) -> list[Tensor]:
    """Return the tensors of a parcel as views, of the frame or of this memory."""
    view, start = memoryview(parcel.data), 0
    if parcel.offset is not None:
        assert memory is not None, "the parcel lies in shared memory"
        view, start = memory, parcel.offset
    tensors: list[Tensor] = []
    for piece in parcel.pieces:
        end = start + piece.nbytes
        tensors.append(Tensor(piece.name, piece.datatype, piece.shape, view[start:end]))
        start = end
    return tensors


def headers_of(tensors: Sequence[Tensor]) -> tuple[frames.TensorHeader, ...]:
    return tuple(
        [frames.TensorHeader(t.name, t.datatype, tuple(t.shape), len(t.data)) for t in tensors]
    )
