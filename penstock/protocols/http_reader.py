"""Reads HTTP/1.1 messages from the bytes of a connection with httptools, under limits.

Bytes in, messages or a refusal out: no clock, no socket. `http` owns the connections.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import NoReturn, Protocol
from urllib.parse import quote, unquote_to_bytes

import httptools

from penstock.config import HttpLimits
from penstock.types import Buffer

log = logging.getLogger("penstock.http")

# Factor by which a chunked body may be larger on the wire; a one-byte chunk takes six.
# MAX_CHUNK_BYTES come on top, since one read may contain other messages too.
MAX_CHUNK_OVERHEAD = 8
MAX_CHUNK_BYTES = 1 << 20
# Longer heads are not cached.
MAX_KNOWN_HEAD_BYTES = 1024
# Shorter bodies are not worth memory of their own.
LONG_BYTES = 16 * 1024
# Smaller bodies are read before the handler looks at the head.
SCREEN_BYTES = 1 << 20
_ONCE = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"inference-header-content-length")
)
# Headers that may hold an API key.
CREDENTIALS = (b"authorization", b"x-api-key")
# Characters that need no escape in a segment of a path (RFC 3986, pchar).
_PATH_CHARACTERS = "!$&'()*+,;=:@"
# ASCII and Unicode control characters in a normalized path.
_CONTROL = re.compile(rb"%(?:[01][0-9A-F]|7F|C2%[89][0-9A-F])")
# RFC 9112, section 3.2.2: servers must accept the absolute form, whose host overrides Host.
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


class MessageHead:
    """The parsed start of a message. Header names are lower case; a repeated header keeps its last
    value, except for headers that must not repeat. `path` is normalized: all percent-encodings of
    the same segments have one spelling."""

    __slots__ = (
        "content_length", "headers", "is_http_1_0", "keep_alive", "method", "note", "path", "query",
    )  # fmt: skip

    def __init__(self, method: bytes, target: bytes, headers: dict[bytes, bytes]) -> None:
        self.method = method
        path, _, self.query = target.partition(b"?")
        self.path = normalize_path(path)
        self.headers = headers
        self.keep_alive = True
        self.is_http_1_0 = False
        # Cached by the handler: what it derived from this head, which may come again.
        self.note: object = None
        self.content_length: int | None = None


class Rejection(Exception):
    """The bytes are not an acceptable message: answer with `status`, then close the connection.
    `head` is that of the message, if it was read."""

    def __init__(self, status: int, text: str, head: MessageHead | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.head = head


class LongBody(Protocol):
    """The memory of a body of known length, filled from its start."""

    @property
    def num_received(self) -> int: ...
    @property
    def buffer(self) -> Buffer | None:
        """The complete body, if it lies in one piece."""

    def room(self) -> memoryview:
        """Return memory for the next bytes. Never empty."""

    def fill(self, num_bytes: int) -> None:
        """Note that this many bytes of `room` were received."""

    def move_out(self) -> None:
        """Move to private memory: the client is slow."""

    def drop(self) -> None:
        """Give the memory back, unless the handler has taken it. Safe to call again."""


Message = tuple[MessageHead, Buffer] | tuple[MessageHead, Buffer, LongBody]
Screen = Callable[[MessageHead], bool]
# Returns memory for the body of a message; None: it is read as any other.
Prepare = Callable[[MessageHead], LongBody | None]


class MessageReader:
    """The message that a connection is receiving. `screen` decides by its head whether a long body
    is read; `prepare` may give it memory, which is filled without the parser; `receive` gets each
    complete message; `expect_continue` is called if the client waits for 100 Continue before it
    sends the body."""

    def __init__(
        self,
        limits: HttpLimits,
        screen: Screen,
        receive: Callable[[Message], None],
        expect_continue: Callable[[], None],
        prepare: Prepare = lambda head: None,
    ) -> None:
        self._limits = limits
        self._screen = screen
        self._receive = receive
        self._expect_continue = expect_continue
        self._prepare = prepare
        # Memory of the body that is being received.
        self.long: LongBody | None = None
        # The parser has read the head of the long body, so it expects the body too.
        self._is_parser_behind = False
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: Message | Rejection | None = None
        self._is_upgrade = False
        self._head: MessageHead | None = None
        self._body = bytearray()
        self._num_complete = 0
        self.on_message_begin()
        # Between two messages.
        self.at_boundary = True

    @property
    def head(self) -> MessageHead | None:
        """That of a message whose body is being received."""
        return self._head if self.has_head and not self.at_boundary else None

    def find_late(self, since_s: float, silent_s: float) -> Rejection | None:
        """Refuse a message that began `since_s` ago, if it takes too long."""
        limits = self._limits
        if not self.has_head:
            is_late, part = since_s > limits.header_timeout_s, "head"
        else:
            num_bytes = len(self._body) if self.long is None else self.long.num_received
            allowed_s = limits.body_timeout_s + num_bytes / limits.min_body_rate
            is_late, part = silent_s > limits.body_timeout_s or since_s > allowed_s, "body"
        return Rejection(408, f"the request {part} took too long") if is_late else None

    def feed(self, data: Buffer) -> Message | Rejection | None:
        """Parse; complete messages go to `receive`. Return a refusal if no bytes after
        these can be read: a rejection, or a head that the handler refuses."""
        self._num_complete = 0
        try:
            if self.long is not None:
                data = self._copy_long(data, self.fill_long)
            self._feed(data)
        except httptools.HttpParserCallbackError:
            if self._refusal is None:
                log.exception("while parsing a message")
                return Rejection(500, "internal error; this is a bug")
            return self._refusal
        except httptools.HttpParserError as error:
            return Rejection(400, f"malformed HTTP: {error}")
        return None if self.at_boundary else self._check_unfinished(len(data))

    def begin_long(self, head: MessageHead) -> bool:
        """Begin a message whose head is known, if there is memory for its body, which follows."""
        long = self._prepare(head)
        if long is None:
            return False
        self.on_message_begin()
        self._head, self.has_head, self.long = head, True, long
        return True

    def fill_long(self, num_bytes: int) -> None:
        """Note that the long body has received this many bytes, and end it if it is complete."""
        long, head = self.long, self._head
        assert long is not None and head is not None
        long.fill(num_bytes)
        if long.num_received == head.content_length:
            if self._is_parser_behind:
                self._parser = httptools.HttpRequestParser(self)
            self._end_message()

    def _copy_long(self, data: Buffer, fill: Callable[[int], None]) -> bytes:
        """Copy data into the long body and `fill` it; return what comes after its end."""
        view = memoryview(data)
        while self.long is not None and len(view):
            room = self.long.room()
            part = view[: len(room)]
            room[: len(part)] = part
            view = view[len(part) :]
            fill(len(part))
        return bytes(view)

    def stop(self) -> None:
        """Give up the message that is being received."""
        self.at_boundary = True
        self._drop_body()
        self._drop_long()

    def close(self) -> None:
        """Break the cycles with the parser and the connection, which only the GC would free."""
        self._drop_body()
        self._drop_long()
        del self._parser, self._receive, self._expect_continue, self._prepare

    def _feed(self, data: Buffer) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + bytes(data[upgrade.args[0] :])

    def _without_upgrade(self) -> bytes:
        """Restart the message without its Upgrade header, which servers may ignore (RFC 9110,
        section 7.8): the parser would take what follows, also a body, for another protocol."""
        parser = self._parser
        start = (parser.get_method(), self._target, parser.get_http_version().encode())
        lines = [b"%b: %b\r\n" % item for item in self._headers.items() if item[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._is_upgrade = False
        return b"%b %b HTTP/%b\r\n%b\r\n" % (*start, b"".join(lines))

    def _check_unfinished(self, num_bytes: int) -> Rejection | None:
        """Limit what the parser buffers without a callback: lines that do not end."""
        if not self.has_head:
            if self._num_complete:
                # The head began inside this read; its later reads count in full.
                return None
            self._head_bytes += num_bytes
            if self._head_bytes > 2 * self._limits.max_header_bytes:
                return _too_many_headers(self._limits)
        elif self._head is not None and self._head.content_length is None:
            self._chunk_bytes += num_bytes
            if self._chunk_bytes > MAX_CHUNK_BYTES + MAX_CHUNK_OVERHEAD * len(self._body):
                return Rejection(400, "the chunks have more extensions than content")
        return None

    def only_head(self, data: bytes, end: int) -> MessageHead | None:
        """Return the head if `data`, just fed, was exactly one plain message, or the start of a
        long one, whose head ends at `end`: the same bytes may be taken for the same head."""
        head = self._head
        if head is None:
            return None
        num_body = head.content_length
        is_only = self._num_complete == 1 and self.at_boundary
        if self.long is not None:
            num_body, is_only = self.long.num_received, self._num_complete == 0
        if (
            not is_only
            or not 4 <= end <= MAX_KNOWN_HEAD_BYTES
            or len(data) - end != num_body
            or not head.keep_alive
            or b"expect" in head.headers
        ):
            return None
        return head

    # Called by the parser.

    def on_message_begin(self) -> None:
        self.at_boundary = False
        self.has_head = False
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = 0
        self._head_bytes = 0
        self._chunk_bytes = 0
        self._num_headers = 0
        self._first_part = b""

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self._limits.max_url_bytes:
            self._refuse(414, f"the URL is longer than {self._limits.max_url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._header_bytes += len(name) + len(value) + 4
        self._num_headers += 1
        limits = self._limits
        if self._header_bytes > limits.max_header_bytes or self._num_headers > limits.max_headers:
            self._refusal = _too_many_headers(limits)
            raise self._refusal
        if self.has_head:
            return  # Ignore trailers.
        try:
            add_header(self._headers, name, value)
        except Rejection as refusal:
            self._refusal = refusal
            raise

    def on_headers_complete(self) -> None:
        headers = self._headers
        if b"upgrade" in headers and self._parser.should_upgrade():
            self._is_upgrade = True
            return
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(505, f"HTTP/{version} is not supported")
        coding = headers.get(b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            self._refuse(400, "the only Transfer-Encoding is chunked")
        if b"host" not in headers and version != "1.0":
            self._refuse(400, "the Host header is missing")
        head = MessageHead(self._parser.get_method(), self._path_and_query(), headers)
        if text := check_path(head.path):
            self._refuse(400, text)
        head.is_http_1_0 = version == "1.0"
        head.keep_alive = self._parser.should_keep_alive()
        length = headers.get(b"content-length")
        if length is not None:
            head.content_length = int(length)
            if head.content_length > self._limits.max_body_bytes:
                self._refuse_body(head)
        elif b"transfer-encoding" not in headers:
            head.content_length = 0
        self._check_screen(head)
        self._head = head
        self.has_head = True
        self._body = bytearray()
        if head.content_length is not None and head.content_length > LONG_BYTES:
            self.long = self._prepare(head)
            self._is_parser_behind = self.long is not None

    def _check_screen(self, head: MessageHead) -> None:
        """Refuse a message by its head alone, before the body is read, if the body is long or the
        client expects 100 Continue."""
        expect = head.headers.get(b"expect", b"").lower()
        expects = expect == b"100-continue" and not head.is_http_1_0
        is_long = head.content_length is None or head.content_length > SCREEN_BYTES
        if (expects or is_long) and not self._screen(head):
            head.keep_alive = False
            self._refusal = head, b""
            raise Rejection(400, "refused by its head")
        if expects:
            self._expect_continue()

    def _path_and_query(self) -> bytes:
        """Return path and query of the target; a target in absolute form also sets the host."""
        target = self._target
        if self._parser.get_method() == b"CONNECT":
            self._refuse(400, "this server is not a proxy: CONNECT is not supported")
        if target.startswith(b"/"):
            return target
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            self._refuse(400, "the request target must be a path that starts with '/', or a URL")
        self._headers[b"host"] = absolute[1]
        rest: bytes = absolute[2] or b""
        return rest if rest.startswith(b"/") else b"/" + rest

    def on_body(self, part: bytes) -> None:
        head = self._head
        assert head is not None
        if self.long is not None:
            # As long as it gets the whole body, the parser says when it is complete.
            self._copy_long(part, self.long.fill)
            return
        if not self._body and not self._first_part and len(part) == head.content_length:
            self._first_part = part
            return
        self._body += part
        if len(self._body) > self._limits.max_body_bytes:
            self._refuse_body(head)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._end_message()

    def _end_message(self) -> None:
        assert self._head is not None
        self.at_boundary = True
        self._num_complete += 1
        long, self.long = self.long, None
        self._is_parser_behind = False
        body = self._first_part or self._body
        self._drop_body()
        if long is None:
            self._receive((self._head, body))
        elif (whole := long.buffer) is not None:
            self._receive((self._head, whole))
        else:
            self._receive((self._head, b"", long))

    def _drop_body(self) -> None:
        """Drop the body, which its exchange has: an idle connection keeps none."""
        self._first_part, self._body = b"", bytearray()

    def _drop_long(self) -> None:
        long, self.long = self.long, None
        if long is not None:
            long.drop()

    def _refuse(self, status: int, text: str, head: MessageHead | None = None) -> NoReturn:
        self._refusal = Rejection(status, text, head)
        raise self._refusal

    def _refuse_body(self, head: MessageHead) -> NoReturn:
        self._refusal = body_refusal(self._limits, head)
        raise self._refusal


def add_header(headers: dict[bytes, bytes], name: bytes, value: bytes) -> None:
    """Add a header under its lower-case name. Rejection for a second one that must not repeat."""
    if name in headers and name in _ONCE:
        raise Rejection(400, f"the header {name.decode('latin-1')} is given twice")
    if name in headers and name in CREDENTIALS:
        # For the gate, which refuses them; no value of a header holds a line feed.
        value = headers[name] + b"\n" + value
    headers[name] = value


def check_path(path: bytes) -> str:
    """Return why a normalized path is refused; empty if it is not."""
    has_control = b"%" in path and _CONTROL.search(path)
    return "the path contains an encoded control character" if has_control else ""


def body_refusal(limits: HttpLimits, head: MessageHead) -> Rejection:
    """Return the refusal of a body that is too large."""
    limit = limits.max_body_bytes
    text = f"the request body is larger than {limit} bytes (--max-body-bytes)"
    return Rejection(413, text, head)


def normalize_path(path: bytes) -> bytes:
    """Escape exactly the bytes that need it, so that equal paths are equal bytes. An encoded slash
    stays encoded: it is part of a segment, never a separator."""
    if b"%" not in path:
        return path
    segments = [unquote_to_bytes(segment) for segment in path.split(b"/")]
    return "/".join([quote(segment, safe=_PATH_CHARACTERS) for segment in segments]).encode()


def _too_many_headers(limits: HttpLimits) -> Rejection:
    return Rejection(
        431, f"more than {limits.max_header_bytes} bytes or {limits.max_headers} lines of headers"
    )
