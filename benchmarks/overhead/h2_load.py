"""A gRPC load generator that costs little: ModelInfer over raw HTTP/2 frames, closed loop.

    python benchmarks/overhead/h2_load.py PORT MODEL INPUT SECONDS CONNECTIONS CALLS

CALLS are in flight on each connection. Heads are compressed once, bodies are copied, and answers
are compared with the first one, which is parsed: the model must return its input. Prints one line
of JSON: calls, seconds, latencies, failures, and its own CPU time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import cast

import uvloop
from tritonclient.grpc import service_pb2

from penstock.wire import h2_frames as h2
from penstock.wire.hpack import HpackDecoder, HpackEncoder

PATH = b"/inference.GRPCInferenceService/ModelInfer"
HEAD = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", PATH),
    (b":authority", b"127.0.0.1"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
ROW = bytes(range(64))
WARM_UP_S = 1.0
# What is granted to the server at a time; half of it used, it is granted again.
WINDOW = 1 << 30


def make_body(model: str, input_name: str) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[ROW])
    request.inputs.add(name=input_name, datatype="FP32", shape=[1, 16])
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4) + data


@dataclass
class Totals:
    num_calls: int = 0
    num_failed: int = 0
    latencies_s: list[float] = field(default_factory=list)
    is_counting: bool = False
    is_stopping: bool = False


class Caller(asyncio.Protocol):
    """One connection, with `num_calls` calls in flight."""

    def __init__(self, body: bytes, num_calls: int, totals: Totals) -> None:
        self._body = body
        self._num_calls = num_calls
        self._totals = totals
        self._encoder = HpackEncoder(HEAD)
        self._decoder = HpackDecoder(1 << 16)
        self._number = 1
        self._rest = b""
        self._received = 0
        self._began: dict[int, float] = {}
        self._answers: dict[int, list[bytes]] = {}
        # Trailers and answers that are known to be good.
        self._good_blocks: dict[bytes, int] = {}
        self._good_answer: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        settings = h2.settings({h2.INITIAL_WINDOW_SIZE: WINDOW, h2.ENABLE_PUSH: 0})
        transport.write(h2.PREFACE + settings + h2.window_update(0, WINDOW))
        self._send(self._num_calls)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._totals.is_stopping:
            self._totals.num_failed += self._num_calls

    def _send(self, count: int) -> None:
        parts: list[bytes] = []
        now = time.perf_counter()
        for _ in range(count):
            block, number = self._encoder.encode(HEAD), self._number
            parts += (h2.frame_head(len(block), h2.HEADERS, h2.END_HEADERS, number), block)
            parts += (h2.frame_head(len(self._body), h2.DATA, h2.END_STREAM, number), self._body)
            self._began[number] = now
            self._number += 2
        self._transport.write(b"".join(parts))

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        position, end, num_ended = 0, len(data), 0
        while end - position >= h2.HEAD_BYTES:
            high, low, kind, flags, number = h2.FRAME_HEAD.unpack_from(data, position)
            stop = position + h2.HEAD_BYTES + (high << 8 | low)
            if stop > end:
                break
            num_ended += self._on_frame(kind, flags, number, data[position + h2.HEAD_BYTES : stop])
            position = stop
        self._rest = data[position:]
        if num_ended and not self._totals.is_stopping:
            self._send(num_ended)

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> bool:
        """Handle a frame; True if it ends a call."""
        if kind == h2.DATA:
            self._answers.setdefault(number, []).append(payload)
            self._received += len(payload)
            if self._received > WINDOW // 2:
                self._transport.write(h2.window_update(0, self._received))
                self._received = 0
        elif kind == h2.HEADERS:
            is_good = self._is_good_block(payload)
            if flags & h2.END_STREAM:
                self._end(number, is_good)
                return True
        elif kind == h2.PING and not flags & h2.ACK:
            self._transport.write(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.SETTINGS and not flags & h2.ACK:
            self._transport.write(h2.frame(h2.SETTINGS, h2.ACK, 0))
        elif kind == h2.RST_STREAM and number in self._began:
            self._end(number, is_good=False)
            return True
        return False

    def _is_good_block(self, payload: bytes) -> bool:
        if self._good_blocks.get(payload) == self._decoder.num_changes:
            return True
        fields = dict(self._decoder.decode(payload))
        status, http_status = fields.get(b"grpc-status", b"0"), fields.get(b":status", b"200")
        is_good = (status, http_status) == (b"0", b"200")
        if is_good:
            self._good_blocks[payload] = self._decoder.num_changes
        return is_good

    def _end(self, number: int, is_good: bool) -> None:
        answer = b"".join(self._answers.pop(number, ()))
        took_s = time.perf_counter() - self._began.pop(number)
        if self._good_answer is None and is_good:
            parsed = service_pb2.ModelInferResponse.FromString(answer[5:])
            if list(parsed.raw_output_contents) == [ROW]:
                self._good_answer = answer
        totals = self._totals
        if not is_good or answer != self._good_answer:
            totals.num_failed += 1
        elif totals.is_counting:
            totals.num_calls += 1
            totals.latencies_s.append(took_s)


async def run(port: int, body: bytes, seconds: float, num_connections: int, calls: int) -> Totals:
    totals, loop = Totals(), asyncio.get_running_loop()
    for _ in range(num_connections):
        await loop.create_connection(lambda: Caller(body, calls, totals), "127.0.0.1", port)
    await asyncio.sleep(WARM_UP_S)
    print("warm", flush=True)
    sys.stdin.readline()
    totals.is_counting = True
    began, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    totals.is_counting = False
    took_s, used_s = time.perf_counter() - began, time.process_time() - used
    latencies = sorted(totals.latencies_s) or [0.0]
    found = {
        "num_calls": totals.num_calls,
        "num_failed": totals.num_failed,
        "seconds": took_s,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[len(latencies) * 99 // 100] * 1e3,
        "cpu_s": used_s,
    }
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
    totals.is_stopping = True
    return totals


if __name__ == "__main__":
    port, model, input_name, seconds, num_connections, calls = sys.argv[1:]
    body = make_body(model, input_name)
    uvloop.run(run(int(port), body, float(seconds), int(num_connections), int(calls)))
