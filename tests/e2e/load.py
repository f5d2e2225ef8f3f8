"""A closed-loop client that checks every answer bit by bit: unique canaries in, the same out."""

import asyncio
import json
import struct
import time
from dataclasses import dataclass, field

HEAD = (
    "POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    "Inference-Header-Content-Length: {json}\r\nContent-Length: {total}\r\n{more}\r\n"
)


@dataclass
class Tally:
    """What came back, and when each good answer did."""

    num_sent: int = 0
    num_good: int = 0
    num_wrong: int = 0
    num_cut: int = 0
    # Which clients lost a connection.
    cut: set[int] = field(default_factory=set)
    statuses: dict[int, int] = field(default_factory=dict)
    finished: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a good answer."""
        times = sorted(self.finished)
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)

    def percentile_s(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[int(share * (len(ordered) - 1))]


class Load:
    """`num_connections` clients of one FP32 [16] identity model, or of a `null` INT32 [1] one."""

    def __init__(self, port: int, num_connections: int, *, model: str = "identity") -> None:
        self._port = port
        self._model = model
        self._num_connections = num_connections
        # Small numbers mean something to `null` models.
        self._counter = 1000
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.tally = Tally()

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.ensure_future(self._client(n)) for n in range(self._num_connections)]
        return self

    def stop(self) -> None:
        self._is_stopping = True

    async def __aexit__(self, *_: object) -> None:
        self.stop()
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        reader = writer = None
        while not self._is_stopping:
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                keep = await self._exchange(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                self.tally.num_cut += 1
                self.tally.cut.add(number)
                keep = False
            if not keep and writer is not None:
                writer.close()
                reader = writer = None
        if writer is not None:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self._counter += 1
        canary = self.payload(self._counter)
        began = time.monotonic()
        writer.write(self.message(canary))
        self.tally.num_sent += 1
        status, headers, body = await read_answer(reader)
        now = time.monotonic()
        self.tally.statuses[status] = self.tally.statuses.get(status, 0) + 1
        if status == 200:
            if body[int(headers["inference-header-content-length"]) :] == canary:
                self.tally.num_good += 1
                self.tally.finished.append(now)
                self.tally.latencies_s.append(now - began)
            else:
                self.tally.num_wrong += 1
        return headers.get("connection") != "close"

    def payload(self, number: int) -> bytes:
        if self._model == "identity":
            return struct.pack("<16I", *range(number * 16, number * 16 + 16))
        return struct.pack("<i", number)

    def message(self, payload: bytes, key: str = "", **parameters: object) -> bytes:
        """A request with these parameters, from the client with this API key."""
        fp32 = self._model == "identity"
        header = json.dumps(
            {
                "inputs": [
                    {
                        "name": "INPUT0" if fp32 else "x",
                        "datatype": "FP32" if fp32 else "INT32",
                        "shape": [1, 16 if fp32 else 1],
                        "parameters": {"binary_data_size": len(payload)},
                    }
                ],
                "parameters": {"binary_data_output": True, **parameters},
            }
        ).encode()
        total = len(header) + len(payload)
        more = f"X-API-Key: {key}\r\n" if key else ""
        head = HEAD.format(model=self._model, json=len(header), total=total, more=more)
        return head.encode() + header + payload


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    status = int(lines[0].split()[1])
    headers = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    return status, headers, await reader.readexactly(int(headers["content-length"]))
