"""Requests and answers of many kilobytes, bit for bit, while clients are slow or leave and workers
die. Each request has bytes of its own, so memory of another one would be noticed."""

import asyncio
import json
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served

ROW_BYTES = 300_000
MODEL = """
backend: "null" max_batch_size: {max_batch} {batching}
input {{ name: "x" data_type: TYPE_UINT8 dims: {dims} }}
output {{ name: "y" data_type: TYPE_UINT8 dims: {dims} }}
parameters {{ key: "null.a_ms" value {{ string_value: "3" }} }}
"""
MODELS = ("rows", "extents")


def repository(root: Path) -> Path:
    """`rows` are received into slabs, `extents` into the spill."""
    batching = "dynamic_batching { }"
    texts = {
        "rows": MODEL.format(max_batch=4, batching=batching, dims=ROW_BYTES),
        "extents": MODEL.format(max_batch=0, batching="", dims=-1),
    }
    for name, text in texts.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(text)
    return root


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(repository(tmp_path)) as served:
        yield served


class Asker:
    """One client with one connection."""

    def __init__(self, served: Served, seed: int) -> None:
        self.served = served
        self.chance = random.Random(seed)
        self.num_answers = 0
        self.is_done = False

    async def connect(self, receive_bytes: int | None = None) -> None:
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.served.port))
        self.reader, self.writer = await asyncio.open_connection(sock=sock)

    def message(self) -> tuple[bytes, bytes]:
        """A message, and the bytes that must come back."""
        model = self.chance.choice(MODELS)
        data = self.chance.randbytes(ROW_BYTES)
        shape = [1, ROW_BYTES] if model == "rows" else [ROW_BYTES]
        sized = {"binary_data_size": len(data)}
        tensor = {"name": "x", "datatype": "UINT8", "shape": shape, "parameters": sized}
        asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
        head = json.dumps(asked).encode()
        lines = [
            f"POST /v2/models/{model}/infer HTTP/1.1",
            "Host: localhost",
            f"Inference-Header-Content-Length: {len(head)}",
            f"Content-Length: {len(head) + len(data)}",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + head + data, data

    async def send(self, data: bytes, num_pieces: int = 1, pause_s: float = 0.0) -> None:
        size = -(-len(data) // num_pieces)
        for start in range(0, len(data), size):
            self.writer.write(data[start : start + size])
            await self.writer.drain()
            await asyncio.sleep(pause_s)

    async def answer(self) -> tuple[int, bytes]:
        """Return the status and the tensor, or the error."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        body = await self.reader.readexactly(int(fields["content-length"]))
        status = int(head.split()[1])
        start = int(fields["inference-header-content-length"]) if status == 200 else 0
        return status, body[start:]

    async def check_answer(self, expected: bytes) -> None:
        status, data = await self.answer()
        assert status == 200, data
        assert data == expected
        self.num_answers += 1

    async def ask(self, count: int) -> None:
        """Send and read as fast as it can; sometimes two messages at once."""
        await self.connect()
        while self.num_answers < count:
            messages = [self.message() for _ in range(self.chance.choice((1, 1, 2)))]
            sending = asyncio.ensure_future(self.send(b"".join(data for data, _ in messages)))
            for _, expected in messages:
                await self.check_answer(expected)
            await sending
        self.leave_politely()

    def leave_politely(self) -> None:
        self.is_done = True
        self.writer.close()

    async def send_slowly(self, count: int) -> None:
        await self.connect()
        for _ in range(count):
            data, expected = self.message()
            await self.send(data, num_pieces=8, pause_s=0.1)
            await self.check_answer(expected)
        self.leave_politely()

    async def read_slowly(self, count: int) -> None:
        await self.connect(receive_bytes=4096)
        for _ in range(count):
            data, expected = self.message()
            await self.send(data)
            await asyncio.sleep(0.3)
            await self.check_answer(expected)
        self.leave_politely()

    async def leave(self, count: int) -> None:
        """Leave in the middle of a body, or before the answer."""
        for _ in range(count):
            await self.connect()
            data, _ = self.message()
            await self.send(data[: self.chance.choice((300, ROW_BYTES // 2, len(data)))])
            await asyncio.sleep(self.chance.choice((0.0, 0.01)))
            self.writer.transport.abort()


async def kill_workers(served: Served, askers: list[Asker], count: int) -> None:
    """A request that loses two workers fails, so each has its answer before the next death: an
    asker has at most two in flight."""
    for _ in range(count):
        await asyncio.sleep(0.7)
        await asyncio.to_thread(served.kill_workers)
        needed = [asker.num_answers + 2 for asker in askers]
        while any(
            asker.num_answers < number and not asker.is_done
            for asker, number in zip(askers, needed, strict=True)
        ):
            await asyncio.sleep(0.05)


def test_every_byte_arrives_whatever_others_do(served: Served) -> None:
    async def scenario() -> None:
        askers = [Asker(served, seed) for seed in range(14)]
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            for asker in askers[:6]:
                tasks.create_task(asker.ask(120))
            for asker in askers[6:9]:
                tasks.create_task(asker.send_slowly(3))
            for asker in askers[9:11]:
                tasks.create_task(asker.read_slowly(4))
            for asker in askers[11:]:
                tasks.create_task(asker.leave(30))
            tasks.create_task(kill_workers(served, askers[:11], 2))

    asyncio.run(scenario())
    assert "internal error" not in served.logged()


def test_slow_clients_do_not_take_the_memory_of_others(served: Served) -> None:
    async def scenario() -> None:
        first = Asker(served, 0)
        await first.ask(2)
        slow = [Asker(served, seed) for seed in range(1, 60)]
        for asker in slow:
            await asker.connect()
            data, _ = asker.message()
            await asker.send(data[: ROW_BYTES // 2])
        async with asyncio.timeout(120):
            await Asker(served, 100).ask(40)
        for asker in slow:
            asker.writer.close()

    asyncio.run(scenario())


def test_drain_answers_what_is_complete(tmp_path: Path) -> None:
    served = Served(repository(tmp_path))
    processes = served.processes()

    async def scenario() -> list[int]:
        askers = [Asker(served, seed) for seed in range(6)]
        expected = []
        for asker in askers:
            await asker.connect()
            data, wanted = asker.message()
            expected.append(wanted)
            await asker.send(data)
        # One more, whose body is never complete.
        late = Asker(served, 7)
        await late.connect()
        await late.send(late.message()[0][:ROW_BYTES])
        served.process.send_signal(signal.SIGTERM)
        statuses = []
        async with asyncio.timeout(60):
            for asker, wanted in zip(askers, expected, strict=True):
                status, data = await asker.answer()
                statuses.append(status)
                assert status != 200 or data == wanted
        for asker in (*askers, late):
            asker.writer.close()
        return statuses

    # The signal may be handled before a message that was sent before it.
    assert set(asyncio.run(scenario())) <= {200, 503}
    assert served.finish(processes) == 0
