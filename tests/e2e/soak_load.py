"""A cheap closed-loop generator for millions of requests, in a process of its own.

    python soak_load.py PORT

Each line of stdin is an order, `{"requests": 20000, "cancels": 100, "regions": 1000}`; when it is
done, one line of JSON says what came back. Requests go to `model`, each connection with its own
prebuilt bytes, and the bytes of the answer are compared. A cancel is a request to `slow` whose
connection is closed before the answer. A region is shared memory that is registered, used by one
request for its input and its output, and unregistered.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen

import uvloop
from load import Load, read_answer
from open_loop import is_whole, percentile

NUM_CONNECTIONS = 16
NUM_CANCELLING = 4
NUM_SHARING = 2
# Bytes of one INT32.
TENSOR_BYTES = 4
POST = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n{body}"
# The slow model takes 20 ms.
LEAVES_AFTER_S = 0.003


@dataclass
class Done:
    """The result of one order."""

    num_good: int = 0
    num_bad: int = 0
    num_cancelled: int = 0
    num_shared: int = 0
    p99_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One keep-alive connection: the next request when the last one is answered."""

    def __init__(self, message: bytes, payload: bytes) -> None:
        self._message = message
        self._payload = payload
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None
        self._answered: Callable[[Client, float, bool], None] | None = None
        self._sent_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answered is not None:
            self._answered(self, 0.0, False)

    def send(self, answered: Callable[[Client, float, bool], None]) -> None:
        """`answered` is called once, with the seconds it took and whether it was right."""
        assert self._transport is not None, "the server has closed a connection"
        self._answered = answered
        self._sent_at = time.perf_counter()
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not is_whole(self._buffer):
            return
        is_good = self._buffer[9:12] == b"200" and self._buffer.endswith(self._payload)
        self._buffer = b""
        answered, self._answered = self._answered, None
        assert answered is not None
        answered(self, time.perf_counter() - self._sent_at, is_good)


class Requests:
    """So many requests over the given connections."""

    def __init__(self, clients: list[Client], count: int, done: Done) -> None:
        self._num_unsent, self._num_open = count, 0
        self._done = done
        self._ended = asyncio.get_running_loop().create_future()
        self._clients = clients

    async def run(self) -> None:
        for client in self._clients[: self._num_unsent]:
            self._send(client)
        if self._num_open:
            await self._ended

    def _send(self, client: Client) -> None:
        self._num_unsent -= 1
        self._num_open += 1
        client.send(self._answered)

    def _answered(self, client: Client, took_s: float, is_good: bool) -> None:
        self._num_open -= 1
        done = self._done
        if is_good:
            done.num_good += 1
            done.latencies_s.append(took_s)
        else:
            done.num_bad += 1
        if self._num_unsent:
            self._send(client)
        elif not self._num_open:
            self._ended.set_result(None)


async def cancel(port: int, count: int, done: Done) -> None:
    load = Load(port, 0, model="slow")
    message = load.message(load.payload(1))
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(message)
        await asyncio.sleep(LEAVES_AFTER_S)
        writer.transport.abort()
        done.num_cancelled += 1


async def share(port: int, number: int, count: int, done: Done) -> None:
    """Register, use and unregister a region `count` times over one connection."""
    name = f"penstock-soak-{os.getpid()}-{number}"
    path = Path("/dev/shm") / name
    path.write_bytes(bytes(2 * TENSOR_BYTES))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def post(target: str, body: object) -> None:
        text = json.dumps(body)
        writer.write(POST.format(path=target, length=len(text), body=text).encode())
        status, _, answer = await read_answer(reader)
        assert status == 200, (target, status, answer)

    place = {"key": f"/{name}", "offset": 0, "byte_size": 2 * TENSOR_BYTES}
    where = {"shared_memory_region": name, "shared_memory_byte_size": TENSOR_BYTES}
    x = {"name": "x", "datatype": "INT32", "shape": [1, 1], "parameters": where}
    y = {"name": "y", "parameters": {**where, "shared_memory_offset": TENSOR_BYTES}}
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 2 * TENSOR_BYTES) as memory:
            for value in range(1, count + 1):
                memory[:] = struct.pack("<ii", 1_000_000 + value, 0)
                await post(f"/v2/systemsharedmemory/region/{name}/register", place)
                await post("/v2/models/model/infer", {"inputs": [x], "outputs": [y]})
                await post(f"/v2/systemsharedmemory/region/{name}/unregister", {})
                done.num_shared += memory[:TENSOR_BYTES] == memory[TENSOR_BYTES:]
    finally:
        writer.close()
        path.unlink()


def split(count: int, parts: int) -> list[int]:
    return [count // parts + (number < count % parts) for number in range(parts)]


def make_clients(port: int) -> list[Client]:
    load = Load(port, 0, model="model")
    payloads = [load.payload(1_000_000 + number) for number in range(NUM_CONNECTIONS)]
    return [Client(load.message(payload), payload) for payload in payloads]


async def connect(clients: list[Client], port: int) -> None:
    """Connect those that are not: the server closes connections that were idle between orders."""
    for client in clients:
        if not client.is_open:
            make = lambda client=client: client  # noqa: E731
            await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)


async def main() -> None:
    port = int(sys.argv[1])
    loop = asyncio.get_running_loop()
    clients = make_clients(port)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        done = Done()
        await connect(clients, port)
        regions = enumerate(split(order["regions"], NUM_SHARING))
        await asyncio.gather(
            Requests(clients, order["requests"], done).run(),
            *(cancel(port, part, done) for part in split(order["cancels"], NUM_CANCELLING)),
            *(share(port, number, part, done) for number, part in regions if part),
        )
        done.p99_s = percentile(done.latencies_s, 0.99)
        # Only the percentile leaves; the rest would be megabytes.
        done.latencies_s = []
        print(json.dumps(asdict(done)), flush=True)


class SoakLoad:
    """The process, as a test sees it."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, str(Path(__file__)), str(port)]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)

    def run(self, requests: int, cancels: int = 0, regions: int = 0) -> Done:
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"requests": requests, "cancels": cancels, "regions": regions}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the generator has died"
        return Done(**json.loads(line))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)
        if self._process.stdout is not None:
            self._process.stdout.close()


if __name__ == "__main__":
    uvloop.run(main())
