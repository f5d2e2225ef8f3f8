"""An open-loop client: requests leave at their intended times, whatever the server does.

Latency counts from the intended time, so what the client itself is late with is not hidden. Each
connection carries one request at a time; when none is free the request waits here, and pays.
"""

import asyncio
import gc
import random
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from load import Load

# Shorter sleeps would be busy waiting on a machine whose cores the server needs.
TICK_S = 0.001
CONTENT_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass
class OpenTally:
    """What happened to the requests that were due within the window. `answered_at_s` and
    `refused_at_s` are when each of the answered and refused ones was due, since the beginning."""

    window_s: float
    num_due: int = 0
    num_cut: int = 0
    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    answered_at_s: list[float] = field(default_factory=list)
    refused_at_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)

    def goodput(self, slo_s: float) -> float:
        """Good answers in time, per second."""
        return sum(latency <= slo_s for latency in self.answered_s) / self.window_s


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def intended_times(rate: float, cv: float, duration_s: float, seed: int) -> list[float]:
    """A renewal process with gamma gaps; CV 1 is Poisson."""
    chance = random.Random(seed)
    shape = 1 / cv**2
    now, times = 0.0, []
    while now < duration_s:
        now += chance.gammavariate(shape, 1 / (shape * rate))
        times.append(now)
    return times


def phases(parts: Sequence[tuple[float, float]], seed: int) -> list[float]:
    """Poisson arrivals at each rate for its seconds, one after the other."""
    times: list[float] = []
    began = 0.0
    for number, (rate, duration_s) in enumerate(parts):
        arrivals = intended_times(rate, 1.0, duration_s, seed + number)
        times += [began + each for each in arrivals if each < duration_s]
        began += duration_s
    return times


def is_whole(answer: bytes) -> bool:
    """Whether these bytes are a head with a Content-Length and the body after it."""
    end = answer.find(b"\r\n\r\n")
    length = CONTENT_LENGTH.search(answer, 0, max(0, end + 2))
    return length is not None and len(answer) >= end + 4 + int(length[1])


class Connection(asyncio.Protocol):
    def __init__(self, client: "OpenLoop") -> None:
        self._client = client
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None
        self.intended = 0.0
        self._is_waiting = False

    def connection_made(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    def send(self, message: bytes, intended: float) -> None:
        assert self._transport is not None
        self.intended = intended
        self._is_waiting = True
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not is_whole(self._buffer):
            return
        status = int(self._buffer[9:12])
        self._buffer = b""
        self._is_waiting = False
        self._client.answered(self, status)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost(self, self._is_waiting)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class OpenLoop:
    """Sends one `null` request, with an API key and parameters if given, or this `message`, at each
    of the times; `warm_s` at the start do not count."""

    def __init__(
        self,
        port: int,
        model: str,
        times: list[float],
        warm_s: float = 1.0,
        message: bytes | None = None,
        key: str = "",
        **parameters: object,
    ) -> None:
        self._port = port
        self._times = times
        self._warm_s = warm_s
        maker = Load(port, 0, model=model)
        self._message = message or maker.message(maker.payload(1000), key, **parameters)
        self._free: list[Connection] = []
        self._overdue: deque[float] = deque()
        self._is_over = False
        self.began = 0.0
        self.tally = OpenTally(window_s=times[-1] - warm_s)

    async def run(self, num_connections: int, patience_s: float = 1.0) -> OpenTally:
        loop = asyncio.get_running_loop()
        connections = []
        for _ in range(num_connections):
            make = lambda: Connection(self)  # noqa: E731
            _, connection = await loop.create_connection(make, "127.0.0.1", self._port)
            connections.append(connection)
        self._free = list(connections)
        gc.collect()
        gc.disable()  # A full collection in a test process stops it for tens of milliseconds.
        try:
            await self._send_all()
            await asyncio.sleep(patience_s)
        finally:
            gc.enable()
        self._is_over = True
        for connection in connections:
            connection.close()
        await asyncio.sleep(0.1)
        return self.tally

    async def _send_all(self) -> None:
        self.began = time.monotonic()
        for offset in self._times:
            wait_s = self.began + offset - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(max(wait_s, TICK_S))
            self.tally.num_due += offset >= self._warm_s
            if self._free:
                self._free.pop().send(self._message, self.began + offset)
            else:
                self._overdue.append(self.began + offset)

    def answered(self, connection: Connection, status: int) -> None:
        intended = connection.intended
        if intended - self.began >= self._warm_s and not self._is_over:
            latency_s = time.monotonic() - intended
            tally = self.tally
            tally.statuses[status] = tally.statuses.get(status, 0) + 1
            is_good = status == 200
            (tally.answered_s if is_good else tally.refused_s).append(latency_s)
            due_s = intended - self.began
            (tally.answered_at_s if is_good else tally.refused_at_s).append(due_s)
        if self._overdue:
            connection.send(self._message, self._overdue.popleft())
        else:
            self._free.append(connection)

    def lost(self, connection: Connection, is_waiting: bool) -> None:
        """A connection that was idle for too long may be closed; no request is lost with it."""
        if is_waiting:
            self.tally.num_cut += not self._is_over
        elif connection in self._free:
            self._free.remove(connection)
