"""Parser for server-sent events (WHATWG HTML, section 9.2). Pure: takes bytes split anywhere."""

from __future__ import annotations

MAX_EVENT_BYTES = 1 << 20


class NotEvents(ValueError):
    """The data is not an event stream, or an event is far too large."""


class EventParser:
    """Lines end with LF, CR or CRLF. Comments and fields other than `data` are skipped."""

    def __init__(self) -> None:
        # The incomplete line, and the data of the incomplete event.
        self._line = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._follows_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that is now complete."""
        if not data:
            return []
        # The LF of a CRLF whose CR already ended a line.
        skip = 1 if self._follows_return and data[:1] == b"\n" else 0
        self._follows_return = data.endswith(b"\r")
        data = data[skip:]
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._line = (self._line + data).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._end_line(line, events)
        if len(self._line) + self._num_bytes > MAX_EVENT_BYTES:
            raise NotEvents(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def end(self) -> list[bytes]:
        """End the stream. The standard drops an event without an empty line after it, but some
        servers omit that line at the end."""
        events: list[bytes] = []
        if self._line:
            self._end_line(self._line, events)
        self._end_line(b"", events)
        self._line = b""
        return events

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._num_bytes = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._num_bytes += len(value) + 1
