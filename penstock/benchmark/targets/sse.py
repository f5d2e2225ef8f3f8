"""Server-sent events (WHATWG HTML, section 9.2) to the data each carries. Pure: fed with bytes that
are cut anywhere."""

from __future__ import annotations

MAX_EVENT_BYTES = 1 << 20


class NotEvents(ValueError):
    """What comes is no stream of events, or one of absurd size."""


class EventParser:
    """Lines end with LF, CR or CRLF. Comments and fields other than `data` are passed over."""

    def __init__(self) -> None:
        # The line that has not ended, and the data of the event that has not.
        self._line = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._follows_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is now complete."""
        if not data:
            return []
        # The second half of a CRLF whose first half was the end of a line already.
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
        """Nothing more will come. The standard drops an event without an empty line behind it; some
        servers leave that line out at the end."""
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
