"""The sending side of an HTTP/2 connection: frames out, as far as the client's windows allow.

An answer that fits leaves in one write. What does not fit waits in its stream; streams take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.protocols.h2_stream import Fields, H2Stream, Unsent
from penstock.types import Buffer
from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import H2Error, StreamViolation, Violation
from penstock.wire.hpack import Field, HpackEncoder

_TOO_WIDE = "a window of more than 2^31 - 1 bytes"
_LAST = h2.END_HEADERS | h2.END_STREAM


class H2Sender:
    """Owns the windows for sending. `finished` is called with a stream whose answer has left.
    After `close`, nothing is written."""

    # Set when the connection is made.
    transport: asyncio.Transport

    def __init__(
        self, repeated_fields: Iterable[Field], finished: Callable[[H2Stream], None]
    ) -> None:
        self.encoder = HpackEncoder(repeated_fields)
        self._finished = finished
        self._window = self.initial_window = h2.DEFAULT_WINDOW
        self.max_frame_bytes = h2.DEFAULT_FRAME_BYTES
        # Streams with unsent frames, in the order in which they are served.
        self._blocked: dict[int, H2Stream] = {}
        # The transport has too much to send.
        self.is_paused = False
        self.is_closed = False
        self.num_written = 0

    def close(self) -> None:
        self.is_closed = True
        self._blocked.clear()

    def write(self, data: Buffer) -> None:
        if not self.is_closed:
            self.num_written += len(data)
            self.transport.write(data)

    # What the client allows.

    def extend(self, increment: int) -> None:
        """Extend the connection's window."""
        if not increment:
            raise Violation(H2Error.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
        self._window += increment
        if self._window > h2.MAX_NUMBER:
            raise Violation(H2Error.FLOW_CONTROL_ERROR, _TOO_WIDE)
        self.pump_all()

    def extend_stream(self, stream: H2Stream, increment: int) -> None:
        if not increment:
            raise StreamViolation(H2Error.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
        stream.send_window += increment
        if stream.send_window > h2.MAX_NUMBER:
            raise StreamViolation(H2Error.FLOW_CONTROL_ERROR, _TOO_WIDE)
        self._pump(stream)

    def change_initial(self, value: int, streams: Iterable[H2Stream]) -> None:
        """Section 6.9.2: the change applies to all streams, whose windows may become negative."""
        change, self.initial_window = value - self.initial_window, value
        for stream in streams:
            stream.send_window += change
            if stream.send_window > h2.MAX_NUMBER:
                raise Violation(H2Error.FLOW_CONTROL_ERROR, _TOO_WIDE)

    # Answers.

    def send(
        self, stream: H2Stream, headers: Fields | None, data: Buffer, trailers: Fields | None
    ) -> None:
        """Send in one write if the windows allow it; otherwise what remains waits."""
        length, number = len(data), stream.number
        if (
            length > self._window
            or length > stream.send_window
            or length > self.max_frame_bytes
            or stream.unsent
            or self.is_paused
        ):
            stream.unsent.append(Unsent(headers, memoryview(data), trailers))
            self._pump(stream)
            return
        encode = self.encoder.encode
        parts: list[Buffer] = []
        if headers is not None:
            block = encode(headers)
            parts += (h2.frame_head(len(block), h2.HEADERS, h2.END_HEADERS, number), block)
        if length:
            self._window -= length
            stream.send_window -= length
            parts += (h2.frame_head(length, h2.DATA, 0, number), data)
        if trailers is not None:
            block = encode(trailers)
            parts += (h2.frame_head(len(block), h2.HEADERS, _LAST, number), block)
        self.write(b"".join(parts))
        if trailers is not None:
            self._finished(stream)

    def send_last(self, stream: H2Stream, headers: Fields) -> None:
        """Send headers that end the stream, after what is unsent."""
        if stream.unsent:
            stream.unsent.append(Unsent(None, memoryview(b""), headers))
            return
        block = self.encoder.encode(headers)
        self.write(h2.frame(h2.HEADERS, _LAST, stream.number, block))
        self._finished(stream)

    def drop(self, stream: H2Stream) -> None:
        """Forget what the stream has not sent."""
        stream.unsent.clear()
        self._blocked.pop(stream.number, None)

    def pump_all(self) -> None:
        for stream in list(self._blocked.values()):
            if self._window <= 0 or self.is_paused:
                return
            if stream.number in self._blocked:
                self._pump(stream)

    def _pump(self, stream: H2Stream) -> None:
        """Send what the windows allow; the stream is in `_blocked` while something remains."""
        unsent, number = stream.unsent, stream.number
        # Behind the others, so that streams take turns.
        had_to_wait = self._blocked.pop(number, None) is not None
        while unsent:
            first = unsent[0]
            if first.headers is not None:
                block = self.encoder.encode(first.headers)
                self.write(h2.frame(h2.HEADERS, h2.END_HEADERS, number, block))
                first.headers = None
            if not self._send_data(stream, first):
                self._blocked[number] = stream
                return
            unsent.popleft()
            if first.trailers is not None:
                unsent.clear()
                block = self.encoder.encode(first.trailers)
                self.write(h2.frame(h2.HEADERS, _LAST, number, block))
                self._finished(stream)
                return
        if had_to_wait:
            stream.receiver.drained()

    def _send_data(self, stream: H2Stream, unsent: Unsent) -> bool:
        """Send data while the windows allow it; False if some remains."""
        data, limit = unsent.data, self.max_frame_bytes
        while data and not self.is_paused:
            length = min(len(data), self._window, stream.send_window, limit)
            if length <= 0:
                break
            self._window -= length
            stream.send_window -= length
            self.write(h2.frame_head(length, h2.DATA, 0, stream.number))
            self.write(data[:length])
            data = data[length:]
        unsent.data = data
        return not data
