"""One HTTP/2 connection of a client (RFC 9113): frames, streams, limits, time-outs.

Hands each request to the server's `open_stream` as an `H2Stream`; the receiver that it returns gets
the body. Knows nothing of gRPC. A client that breaks the protocol is told so by GOAWAY or
RST_STREAM; frames without use are limited, so that no flood of cheap frames keeps the loop busy.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, cast

from penstock.errors import SHUTTING_DOWN
from penstock.protocols.h2_data import (
    CONNECTION_WINDOW,
    FRAME_BYTES,
    STREAM_WINDOW,
    DataReader,
)
from penstock.protocols.h2_heads import HeadReader
from penstock.protocols.h2_sender import H2Sender
from penstock.protocols.h2_stream import H2Stream
from penstock.protocols.http import refusal
from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import Allowance, H2Error, StreamViolation, Violation

if TYPE_CHECKING:
    from penstock.protocols.grpc_server import GrpcServer

log = logging.getLogger("penstock.h2")

# Requests of one connection at a time; clients queue more than that themselves.
MAX_STREAMS = 100
# Payload of frames other than DATA and headers.
MAX_CONTROL_BYTES = h2.DEFAULT_FRAME_BYTES
# Unsent bytes from which on answers wait in their streams.
WRITE_BUFFER_BYTES = 1 << 20
# A connection without any frame for this long is asked whether it is alive, and closed if it does
# not answer within PING_S.
IDLE_S = 300.0
PING_S = 20.0
_HTTP_1 = re.compile(rb"[A-Z]{3,10} [^\r\n]*HTTP/1")


class H2Connection(asyncio.Protocol):
    """One client. Reads frames as they come."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._limits = server.limits
        self._streams: dict[int, H2Stream] = {}
        self._last_number = 0
        self._heads = HeadReader(server.limits)
        self._sender = sender = H2Sender(server.repeated_fields, self._finished)
        self._data = DataReader(
            self._streams, sender.write, self._fail_stream, self._use, server.max_held_bytes
        )
        self._rest = b""
        self._has_preface = self._has_settings = False
        self._is_closing = self._is_going = False
        self._write_blocked_since: float | None = None
        self._num_sent = 0
        self._received = self._since = server.now()
        self._pinged: float | None = None
        self._allowance = Allowance(self._received)
        self._on_frame = {
            h2.HEADERS: self._on_headers,
            h2.PRIORITY: self._on_priority,
            h2.RST_STREAM: self._on_reset,
            h2.SETTINGS: self._on_settings,
            h2.PUSH_PROMISE: self._on_push_promise,
            h2.PING: self._on_ping,
            h2.GOAWAY: self._on_goaway,
            h2.WINDOW_UPDATE: self._on_window_update,
            h2.CONTINUATION: self._on_continuation,
        }

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._sender.transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        settings = {
            h2.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            h2.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            h2.MAX_FRAME_SIZE: FRAME_BYTES,
            h2.MAX_HEADER_LIST_SIZE: self._limits.max_header_bytes,
        }
        window = h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)
        self._sender.write(h2.settings(settings) + window)
        if not self._server.add(self):
            self._end(H2Error.ENHANCE_YOUR_CALM, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._server.remove(self)
        self._rest = b""
        self._sender.close()
        self._data.close()
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.is_over = True
            stream.receiver.gone()
        # Break the cycles, which only the GC would free.
        self._on_frame.clear()

    def pause_writing(self) -> None:
        self._sender.is_paused = True
        self._write_blocked_since = self._server.now()

    def resume_writing(self) -> None:
        self._sender.is_paused = False
        self._write_blocked_since = None
        self._sender.pump_all()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._received = self._server.now()
        if self._rest:
            data = self._rest + data
            self._rest = b""
        try:
            if self._has_preface:
                self._rest = self._read(data)
            else:
                self._read_preface(data)
        except Violation as violation:
            self._end(violation.code, str(violation))
        except Exception:  # Keep serving.
            log.exception("while reading from an HTTP/2 connection")
            self._end(H2Error.INTERNAL_ERROR, "internal error")

    # Frames.

    def _read_preface(self, data: bytes) -> None:
        """Check the first bytes, and read what follows them."""
        if data.startswith(h2.PREFACE):
            self._has_preface = True
            self._rest = self._read(data[len(h2.PREFACE) :])
        elif h2.PREFACE.startswith(data):
            self._rest = data
        elif _HTTP_1.match(data):
            text = "this port speaks gRPC over HTTP/2; use the HTTP port for HTTP/1.1"
            self._sender.close()
            self._is_closing = True
            self._transport.write(refusal(400, text))
            self._transport.close()
        else:
            raise Violation(H2Error.PROTOCOL_ERROR, "expected the preface of HTTP/2")

    def _read(self, data: bytes) -> bytes:
        """Handle all frames, and the data of an incomplete one; return what is left."""
        position, end, reader = 0, len(data), self._data
        while not self._is_closing:
            if reader.is_within:
                position = reader.read(data, position, end)
                if reader.is_within:
                    return b""
            start = position + h2.HEAD_BYTES
            if end < start:
                break
            high, low, kind, flags, number = h2.FRAME_HEAD.unpack_from(data, position)
            length = high << 8 | low
            number &= h2.MAX_NUMBER
            self._check_frame(kind, length, number)
            if kind == h2.DATA:
                if flags & h2.PADDED and length and end == start:
                    break  # The length of the padding is still to come.
                position = reader.begin(data, start, length, flags, number)
            elif end - start < length:
                break
            else:
                position = start + length
                self._on_control(kind, flags, number, data[start:position])
        return data[position:]

    def _check_frame(self, kind: int, length: int, number: int) -> None:
        """Check a frame by its head, before its payload is stored."""
        if not self._has_settings and kind != h2.SETTINGS:
            raise Violation(H2Error.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if self._heads.number and (kind != h2.CONTINUATION or number != self._heads.number):
            text = f"expected CONTINUATION of stream {self._heads.number}"
            raise Violation(H2Error.PROTOCOL_ERROR, text)
        if kind == h2.DATA:
            self._check_not_idle(number)
        elif length > FRAME_BYTES:
            text = f"a frame of {length} bytes; expected at most {FRAME_BYTES}"
            raise Violation(H2Error.FRAME_SIZE_ERROR, text)
        elif kind in (h2.HEADERS, h2.CONTINUATION):
            self._heads.check_length(length)
        elif length > MAX_CONTROL_BYTES:
            raise Violation(H2Error.ENHANCE_YOUR_CALM, f"a frame of type {kind} is too long")

    def _on_control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        on_frame = self._on_frame.get(kind)
        if on_frame is None:
            # Section 4.1: unknown types are ignored.
            self._use()
            return
        try:
            on_frame(flags, number, payload)
        except StreamViolation as violation:
            self._reset(number, violation.code)

    def _use(self) -> None:
        self._allowance.use(self._received)

    def _check_not_idle(self, number: int) -> None:
        if number == 0 or number > self._last_number:
            raise Violation(H2Error.PROTOCOL_ERROR, f"a frame for stream {number}, which is idle")

    # Headers.

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number & 1:
            raise Violation(H2Error.PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & (h2.PADDED | h2.HAS_PRIORITY):
            payload = h2.strip_padding(flags, payload)
        if flags & h2.END_HEADERS:
            self._on_block(number, flags, payload)
        else:
            self._heads.begin(number, flags, payload)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        complete = self._heads.go_on(flags, payload)
        if complete is not None:
            self._on_block(number, *complete)

    def _on_block(self, number: int, flags: int, block: bytes) -> None:
        is_end = bool(flags & h2.END_STREAM)
        if number <= self._last_number:
            self._on_trailers(number, is_end, block)
            return
        self._last_number = number
        head = self._heads.read(block)
        if len(self._streams) >= MAX_STREAMS:
            raise StreamViolation(H2Error.REFUSED_STREAM, "too many streams")
        stream = H2Stream(number, head, self._sender, self._data, STREAM_WINDOW)
        stream.has_ended = is_end
        self._streams[number] = stream
        try:
            stream.receiver = receiver = self._server.open_stream(stream)
        except Exception:  # Keep serving.
            log.exception("while opening %r", head.path)
            self._drop(stream)
            raise StreamViolation(H2Error.INTERNAL_ERROR, "internal error") from None
        if is_end and not stream.is_over:
            receiver.data(b"", True)

    def _on_trailers(self, number: int, is_end: bool, block: bytes) -> None:
        """The fields are dropped. The stream may have been answered, and closed, before."""
        self._heads.skip(block)
        stream = self._streams.get(number)
        if stream is None:
            self._use()
        elif stream.has_ended:
            raise StreamViolation(H2Error.STREAM_CLOSED, "HEADERS after the end of the stream")
        elif not is_end:
            raise StreamViolation(H2Error.PROTOCOL_ERROR, "trailers that do not end the stream")
        else:
            stream.has_ended = True
            stream.receiver.data(b"", True)

    # Other frames.

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise Violation(H2Error.PROTOCOL_ERROR, "SETTINGS on a stream")
        self._use()
        if flags & h2.ACK:
            if payload:
                raise Violation(H2Error.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        self._has_settings = True
        sender = self._sender
        for name, value in h2.read_settings(payload):
            if name == h2.HEADER_TABLE_SIZE:
                sender.encoder.limit_table(value)
            elif name == h2.MAX_FRAME_SIZE:
                sender.max_frame_bytes = value
            elif name == h2.INITIAL_WINDOW_SIZE:
                sender.change_initial(value, self._streams.values())
        sender.write(h2.frame(h2.SETTINGS, h2.ACK, 0))
        sender.pump_all()

    def _on_window_update(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Violation(H2Error.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have 4 bytes")
        self._use()
        increment = h2.read_number(payload)
        if number == 0:
            self._sender.extend(increment)
            return
        self._check_not_idle(number)
        stream = self._streams.get(number)
        if stream is not None:
            self._sender.extend_stream(stream, increment)

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Violation(H2Error.FRAME_SIZE_ERROR, "RST_STREAM must have 4 bytes")
        self._check_not_idle(number)
        self._use()
        stream = self._streams.get(number)
        if stream is not None:
            self._drop(stream)
            stream.receiver.gone()

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise Violation(H2Error.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise Violation(H2Error.FRAME_SIZE_ERROR, "PING must have 8 bytes")
        self._use()
        if not flags & h2.ACK:
            self._sender.write(h2.frame(h2.PING, h2.ACK, 0, payload))

    def _on_priority(self, flags: int, number: int, payload: bytes) -> None:
        if not number:
            raise Violation(H2Error.PROTOCOL_ERROR, "PRIORITY without a stream")
        self._use()
        if len(payload) != 5:
            raise StreamViolation(H2Error.FRAME_SIZE_ERROR, "PRIORITY must have 5 bytes")

    def _on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """The client opens no more streams; those that are open get their answers."""
        if number or len(payload) < 8:
            raise Violation(H2Error.PROTOCOL_ERROR, "a GOAWAY that is malformed")
        self._use()

    def _on_push_promise(self, flags: int, number: int, payload: bytes) -> None:
        raise Violation(H2Error.PROTOCOL_ERROR, "clients cannot push")

    # The ends of streams.

    def _finished(self, stream: H2Stream) -> None:
        """The answer is complete."""
        if not stream.has_ended:
            # Section 8.1: the client need not send the rest.
            self._sender.write(h2.reset(stream.number, H2Error.NO_ERROR))
        self._allowance.earn()
        self._drop(stream)

    def _fail_stream(self, stream: H2Stream, code: H2Error) -> None:
        self._sender.write(h2.reset(stream.number, code))
        self._drop(stream)
        stream.receiver.gone()

    def _reset(self, number: int, code: H2Error) -> None:
        self._use()
        stream = self._streams.get(number)
        if stream is None:
            self._sender.write(h2.reset(number, code))
        else:
            self._fail_stream(stream, code)

    def _drop(self, stream: H2Stream) -> None:
        stream.is_over = True
        self._streams.pop(stream.number, None)
        self._sender.drop(stream)
        stream.unhold()

    # The end of the connection.

    @property
    def is_running(self) -> bool:
        return any(each.unsent or each.receiver.is_busy for each in self._streams.values())

    @property
    def is_receiving(self) -> bool:
        return not self._is_closing and not self._has_settings

    def go_away(self) -> None:
        """Tell the client to use another connection; open streams are answered."""
        if not self._is_closing and not self._is_going:
            self._is_going = True
            self._sender.write(h2.goaway(h2.MAX_NUMBER, H2Error.NO_ERROR, SHUTTING_DOWN))

    def close(self) -> None:
        """Close after all written data is sent."""
        if not self._is_closing:
            self._end(H2Error.NO_ERROR, "")

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    def _end(self, code: H2Error, text: str) -> None:
        self._sender.write(h2.goaway(self._last_number, code, text))
        self._sender.close()
        self._is_closing = True
        self._transport.close()

    def sweep(self, now: float) -> None:
        """Enforce time-outs; called about once a second."""
        if self._is_write_blocked(now):
            self.abort()
        elif self._is_closing:
            return
        elif not self._has_settings or self._heads.number:
            since = self._received if self._heads.number else self._since
            if now - since > self._limits.header_timeout_s:
                self._end(H2Error.SETTINGS_TIMEOUT, "the client took too long")
        elif now - self._received < IDLE_S:
            self._pinged = None
            if self._data.num_held:
                for stream in self._data.find_late(now, self._limits):
                    self._fail_stream(stream, H2Error.CANCEL)
        elif self._pinged is None:
            self._pinged = now
            self._sender.write(h2.frame(h2.PING, 0, 0, b"penstock"))
        elif now - self._pinged > PING_S:
            self.abort()

    def _is_write_blocked(self, now: float) -> bool:
        """Whether the client has read nothing for too long."""
        blocked = self._write_blocked_since
        if blocked is None:
            return False
        # Compare bytes sent, not bytes unsent: new data must not hide that the client reads.
        num_sent = self._sender.num_written - self._transport.get_write_buffer_size()
        if num_sent > self._num_sent:
            self._write_blocked_since = blocked = now
        self._num_sent = num_sent
        return now - blocked > self._limits.write_timeout_s
