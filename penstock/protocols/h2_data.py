"""The receiving side of an HTTP/2 connection's flow control: DATA frames, as they arrive.

A frame is handed to its stream in parts, so a large one is never stored here. Windows are extended
when half of them is used, and not for streams whose messages would take too much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.config import HttpLimits
from penstock.protocols.h2_stream import H2Stream
from penstock.types import Buffer
from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import H2Error, Violation

# Bytes that a client may send before it is told to go on: on a stream, and on all of them.
STREAM_WINDOW = 1 << 20
CONNECTION_WINDOW = 1 << 24
# Larger frames save a head for each.
FRAME_BYTES = 1 << 18
# Parts shorter than this are copied out of the read; of longer ones a view is kept.
VIEW_BYTES = 1 << 14


class DataReader:
    """Owns the windows for receiving and the frame that is being received. `fail` resets a stream;
    `use` counts a frame without use."""

    def __init__(
        self,
        streams: Mapping[int, H2Stream],
        write: Callable[[bytes], None],
        fail: Callable[[H2Stream, H2Error], None],
        use: Callable[[], None],
        max_held_bytes: int,
    ) -> None:
        self._streams = streams
        self._write = write
        self._fail = fail
        self._use = use
        self._max_held_bytes = max_held_bytes
        self._window = CONNECTION_WINDOW
        # Bytes of data and of padding to come.
        self._data_left = self._pad_left = 0
        self._stream: H2Stream | None = None
        self._ends = False
        # Bytes of incomplete messages, in all streams.
        self.num_held = 0
        # Streams whose windows are not extended because too much is held.
        self._ungranted: dict[int, H2Stream] = {}

    @property
    def is_within(self) -> bool:
        """Whether a frame is incomplete."""
        return self._data_left > 0 or self._pad_left > 0

    def close(self) -> None:
        self._stream = None
        self._ungranted.clear()

    def begin(self, data: bytes, start: int, length: int, flags: int, number: int) -> int:
        """Start a frame of an open stream, or of one that was; return where its data begins."""
        if length > FRAME_BYTES:
            text = f"a frame of {length} bytes; expected at most {FRAME_BYTES}"
            raise Violation(H2Error.FRAME_SIZE_ERROR, text)
        self._window -= length
        if self._window < 0:
            raise Violation(H2Error.FLOW_CONTROL_ERROR, "more data than the connection's window")
        if self._window < CONNECTION_WINDOW // 2:
            self._write(h2.window_update(0, CONNECTION_WINDOW - self._window))
            self._window = CONNECTION_WINDOW
        self._data_left, self._pad_left = length, 0
        if flags & h2.PADDED:
            # The length of the padding counts too.
            if length == 0 or data[start] >= length:
                raise Violation(H2Error.PROTOCOL_ERROR, "the padding is longer than the frame")
            self._pad_left = data[start]
            self._data_left -= self._pad_left + 1
            start += 1
        self._ends = bool(flags & h2.END_STREAM)
        self._stream = self._check(number, length)
        if self._data_left == 0:
            if not self._ends:
                self._use()
            self._deliver(b"", self._ends)
        return start

    def _check(self, number: int, length: int) -> H2Stream | None:
        """Return the stream that takes this data; None if it is to be dropped."""
        stream = self._streams.get(number)
        if stream is None:
            # It was reset or answered early, which the client may not know yet.
            self._use()
            return None
        if stream.has_ended:
            self._fail(stream, H2Error.STREAM_CLOSED)
            return None
        stream.receive_window -= length
        if stream.receive_window < 0:
            self._fail(stream, H2Error.FLOW_CONTROL_ERROR)
            return None
        stream.num_unacked += length
        return stream

    def read(self, data: bytes, position: int, end: int) -> int:
        """Take what has arrived of the frame; return the position after it."""
        if num_data := min(self._data_left, end - position):
            self._data_left -= num_data
            stop = position + num_data
            chunk: Buffer
            if num_data < VIEW_BYTES:
                chunk = data[position:stop]
            else:
                chunk = memoryview(data)[position:stop]
            self._deliver(chunk, self._ends and self._data_left == 0)
            position = stop
        num_pad = min(self._pad_left, end - position)
        self._pad_left -= num_pad
        return position + num_pad

    def _deliver(self, chunk: Buffer, is_end: bool) -> None:
        stream = self._stream
        if stream is None or stream.is_over:
            return
        stream.has_ended = is_end
        stream.receiver.data(chunk, is_end)
        if not is_end and stream.num_unacked >= STREAM_WINDOW // 2:
            self.grant(stream)

    def grant(self, stream: H2Stream) -> None:
        """Extend the window of a stream. While too much is held, only the oldest incomplete message
        goes on: it can always end, and then the next."""
        if stream.is_paused or stream.has_ended or stream.is_over or not stream.num_unacked:
            return
        if self.num_held > self._max_held_bytes and stream is not self._oldest_held():
            self._ungranted[stream.number] = stream
            return
        self._ungranted.pop(stream.number, None)
        stream.receive_window += stream.num_unacked
        self._write(h2.window_update(stream.number, stream.num_unacked))
        stream.num_unacked = 0

    def find_late(self, now: float, limits: HttpLimits) -> list[H2Stream]:
        """Return streams whose messages take too long; the server's own delays do not count."""
        late = []
        for stream in self._streams.values():
            if stream.number in self._ungranted or stream.is_paused:
                stream.held_since = now
            allowed_s = limits.body_timeout_s + stream.num_held / limits.min_body_rate
            if stream.num_held and now - stream.held_since > allowed_s:
                late.append(stream)
        return late

    def release(self, num_bytes: int) -> None:
        """Count bytes that are no longer held, and extend windows that waited for it."""
        self.num_held -= num_bytes
        for stream in list(self._ungranted.values()):
            if stream.is_over:
                del self._ungranted[stream.number]
            else:
                self.grant(stream)

    def _oldest_held(self) -> H2Stream | None:
        return next((each for each in self._streams.values() if each.num_held), None)
