"""Long answers of one connection, sent from the memory that they lie in instead of being joined.

The socket is written to directly, but only while the transport has nothing buffered: otherwise
bytes would overtake each other.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence

from penstock.types import Buffer

# Of an answer that the socket does not take at once, this much is copied and left to the transport,
# which says when the socket has room for the rest.
PIECE_BYTES = 64 * 1024
# A client that has not read its answer by then reads from a copy, so that it holds no rows.
MAX_KEPT_S = 0.05
# Buffers of one system call; the kernel takes 1,024.
MAX_BUFFERS = 512

# Keeps the memory of an answer; returns what gives it back, or None if it has to be copied.
Keep = Callable[[], Callable[[], None] | None]
Held = tuple[memoryview, Callable[[], None] | None]


class AnswerSender:
    """What the socket did not take at once, in order. Only for transports without TLS."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._fd: int = transport.get_extra_info("socket").fileno()
        # Views and, with the last one of an answer, what gives its memory back.
        self._queue: deque[Held] = deque()
        self._timer: asyncio.TimerHandle | None = None
        # Called once, when nothing is queued any more.
        self.when_sent: Callable[[], object] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether bytes are queued: then all others have to be queued behind them."""
        return bool(self._queue)

    @property
    def num_unsent(self) -> int:
        """Queued bytes; those in the transport are not counted."""
        return sum(len(view) for view, _ in self._queue)

    def send(self, parts: Sequence[Buffer], keep: Keep | None) -> None:
        """Send now what the socket takes, and the rest later. Without `keep`, what is left is
        copied before this returns."""
        transport = self._transport
        if transport.is_closing():
            return
        num_sent = 0
        if not self._queue and not transport.get_write_buffer_size():
            num_sent = self._try(parts[:MAX_BUFFERS])
            if num_sent == sum(map(len, parts)):
                return
        rest = deque[Held]((memoryview(part).cast("B"), None) for part in parts if len(part))
        self._remove(rest, num_sent)
        if not self._queue and sum(len(view) for view, _ in rest) <= PIECE_BYTES:
            transport.write(b"".join(view for view, _ in rest))
            return
        release = None if keep is None else keep()
        if release is None:
            rest = deque((_copied(view), None) for view, _ in rest)
        else:
            rest[-1] = (rest[-1][0], release)
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(MAX_KEPT_S, self._copy_out)
        self._queue += rest
        # From now on the transport says when its buffer is empty.
        transport.set_write_buffer_limits(high=0)
        self.flush()

    def append(self, data: Buffer) -> None:
        """Send these bytes, which nobody changes, after what is queued."""
        if data:
            self._queue.append((memoryview(data), None))

    def flush(self) -> None:
        """Send what the socket takes; called again whenever the transport's buffer is empty."""
        transport, queue = self._transport, self._queue
        if not queue:
            return
        while queue:
            if transport.is_closing():
                # Its descriptor may belong to another connection soon.
                self.drop()
            elif transport.get_write_buffer_size():
                return
            else:
                self._write(queue)
                if queue:
                    transport.write(self._take_piece())
        self._end()

    def drop(self) -> None:
        """Forget what is queued: the connection is lost."""
        while self._queue:
            self._pop(self._queue)
        self._stop_timer()

    def _end(self) -> None:
        self._stop_timer()
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()
        if self.when_sent is not None:
            # Not now: the transport may be in the middle of its own work.
            asyncio.get_running_loop().call_soon(self.when_sent)
            self.when_sent = None

    def _write(self, queue: deque[Held]) -> None:
        """Write from the front of a queue until the socket is full."""
        while queue:
            views = [queue[index][0] for index in range(min(len(queue), MAX_BUFFERS))]
            num_sent = self._try(views)
            self._remove(queue, num_sent)
            if num_sent < sum(map(len, views)):
                return

    def _try(self, parts: Sequence[Buffer]) -> int:
        """Return how many bytes the socket took."""
        try:
            return os.writev(self._fd, parts)
        except OSError:
            return 0  # It is full; or broken, which the transport notices.

    def _remove(self, queue: deque[Held], num_bytes: int) -> None:
        while num_bytes:
            view, release = queue[0]
            if num_bytes < len(view):
                queue[0] = (view[num_bytes:], release)
                return
            num_bytes -= len(view)
            self._pop(queue)

    def _pop(self, queue: deque[Held]) -> None:
        _, release = queue.popleft()
        if release is not None:
            release()

    def _take_piece(self) -> bytes:
        view = self._queue[0][0][:PIECE_BYTES]
        piece = bytes(view)
        self._remove(self._queue, len(piece))
        return piece

    def _copy_out(self) -> None:
        """Copy what is queued, and give its memory back."""
        self._timer = None
        held, self._queue = self._queue, deque()
        for view, _ in held:
            self._queue.append((_copied(view), None))
        for _, release in held:
            if release is not None:
                release()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _copied(view: memoryview) -> memoryview:
    """Return the view itself if nobody can change what it shows."""
    return view if isinstance(view.obj, bytes) else memoryview(bytes(view))
