"""Clients that hold connections and hardly use them, in a process of their own.

    python slow_clients.py PORT [STREAM]

`idle` ones send nothing; `head` and `body` ones send a byte of it every few seconds; `stream` ones
send STREAM and read nothing. Each line of stdin is an order: `{"idle": 10000, "head": 1000}` opens
that many and replaces each connection that the server closes; `{}` stops replacing them. Each
order is answered with one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen

import uvloop

# A byte from each slow client this often, on average: those that began together do not stay so.
TRICKLE_S = 4.0
# Before a client whose connection was closed opens the next one.
MAX_PAUSE_S = 2.0
# Connections opened at once, so that the listening queue does not overflow.
MAX_OPENING = 256
# Each source address has some 28,000 ports.
NUM_SOURCES = 4
HEAD = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
BODY = b"POST /v2/models/model/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
# Clients that do not read have these, so that the kernel takes little from the server: it gives the
# server a buffer for a number of segments, which are 64 KiB long over loopback by default.
SMALL_BUFFER_BYTES, SMALL_SEGMENT_BYTES = 4096, 536
# The state of a connection, which is the first byte of TCP_INFO.
ESTABLISHED = 1


@dataclass
class Outcomes:
    """Connections of one kind of client, and how long those that the server closed lasted.
    `statuses` are those of answers that came before the end."""

    num_opened: int = 0
    num_refused: int = 0
    lasted_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)


class SlowClient:
    """A client of one kind, with one connection at a time."""

    def __init__(self, port: int, kind: str, start: bytes, outcomes: Outcomes, source: str) -> None:
        self._port = port
        self._kind = kind
        self._start = start
        self._outcomes = outcomes
        self._source = source

    async def hold(self, opening: asyncio.Semaphore, opened: asyncio.Event) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        if self._kind == "stream":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
        sock.bind((self._source, 0))
        loop = asyncio.get_running_loop()
        with sock:
            try:
                async with opening:
                    await loop.sock_connect(sock, ("127.0.0.1", self._port))
                    if self._start:
                        await loop.sock_sendall(sock, self._start)
            except OSError:
                self._outcomes.num_refused += 1
                return
            finally:
                opened.set()
            self._outcomes.num_opened += 1
            began = time.monotonic()
            status = await self._wait_for_end(sock)
            self._outcomes.lasted_s.append(time.monotonic() - began)
            if status:
                statuses = self._outcomes.statuses
                statuses[status] = statuses.get(status, 0) + 1

    async def _wait_for_end(self, sock: socket.socket) -> int:
        """The status of what the server said before it closed the connection; 0 without any."""
        loop = asyncio.get_running_loop()
        if self._kind == "stream":
            return await self._wait_for_reset(sock)
        trickle = asyncio.ensure_future(self._trickle(sock)) if self._start else None
        seen = b""
        try:
            while data := await loop.sock_recv(sock, 4096):
                seen += data
        except OSError:
            pass
        finally:
            if trickle is not None:
                trickle.cancel()
        return int(seen.split()[1]) if seen else 0

    async def _trickle(self, sock: socket.socket) -> None:
        while True:
            await asyncio.sleep(random.uniform(0, 2 * TRICKLE_S))
            try:
                await asyncio.get_running_loop().sock_sendall(sock, b"x")
            except OSError:
                return

    async def _wait_for_reset(self, sock: socket.socket) -> int:
        """Without a read: the kernel says when the other side has gone."""
        while sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
            await asyncio.sleep(0.25)
        return 0


class Crowd:
    """All clients of this process, by kind."""

    def __init__(self, port: int, stream: bytes) -> None:
        self._port = port
        self._starts = {"idle": b"", "head": HEAD, "body": BODY, "stream": stream}
        self.opens_again = True
        self._tasks: list[asyncio.Task[None]] = []
        self._opening = asyncio.Semaphore(MAX_OPENING)
        self.outcomes: dict[str, Outcomes] = {}

    async def open(self, counts: dict[str, int]) -> None:
        """Returns when each has tried to connect."""
        waiting = []
        for kind, count in counts.items():
            outcomes = self.outcomes.setdefault(kind, Outcomes())
            for number in range(count):
                source = f"127.0.0.{2 + number % NUM_SOURCES}"
                client = SlowClient(self._port, kind, self._starts[kind], outcomes, source)
                opened = asyncio.Event()
                self._tasks.append(asyncio.ensure_future(self._run(client, opened)))
                waiting.append(opened)
        for opened in waiting:
            await opened.wait()

    async def _run(self, client: SlowClient, opened: asyncio.Event) -> None:
        while True:
            await client.hold(self._opening, opened)
            if not self.opens_again:
                return
            # Not all at once, as tools for such attacks do it too.
            await asyncio.sleep(random.uniform(0, MAX_PAUSE_S))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self) -> str:
        return json.dumps({kind: asdict(each) for kind, each in self.outcomes.items()})


async def main() -> None:
    crowd = Crowd(int(sys.argv[1]), "".join(sys.argv[2:]).encode())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        counts = json.loads(line)
        crowd.opens_again = bool(counts)
        await crowd.open(counts)
        print(crowd.report(), flush=True)
    await crowd.close()


class SlowClients:
    """The process, as a test sees it."""

    def __init__(self, port: int, stream: bytes = b"") -> None:
        command = [sys.executable, str(Path(__file__)), str(port), stream.decode()]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)

    def open(self, **counts: int) -> dict[str, Outcomes]:
        """Send an order and return all outcomes so far."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(counts) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the slow clients have died"
        found = json.loads(line)
        return {
            kind: Outcomes(
                each["num_opened"],
                each["num_refused"],
                each["lasted_s"],
                {int(status): count for status, count in each["statuses"].items()},
            )
            for kind, each in found.items()
        }

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        finally:
            self._process.kill()
            if self._process.stdout is not None:
                self._process.stdout.close()


if __name__ == "__main__":
    uvloop.run(main())
