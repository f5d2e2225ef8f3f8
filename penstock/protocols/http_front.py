"""One of several HTTP fronts, in its own process: for when one event loop is the bottleneck.

Started by `protocols.fronts` as `python -m penstock.protocols.http_front FD PARENT`. Listens on the
port that all fronts share, reads and writes HTTP, decodes and encodes inference. Everything else,
and what it cannot decode, goes to the core, so that answers do not depend on the process. Exits
when the core says so or has exited.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop

from penstock.config import HttpLimits
from penstock.errors import PenstockError
from penstock.protocols import access_log
from penstock.protocols.gate import Keys
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import Refusal, reply_error
from penstock.protocols.http_reader import LongBody
from penstock.protocols.http_server import HttpServer
from penstock.protocols.infer_http import InferCall, InferSink
from penstock.protocols.line import MAX_SENT_BYTES, cannot_listen
from penstock.protocols.listener import Listener
from penstock.protocols.remote import Remote, begin, gate_of
from penstock.protocols.route import Match
from penstock.protocols.tls import TlsFiles, watch
from penstock.protocols.v2_http import V2Http
from penstock.types import Request
from penstock.wire import frames
from penstock.wire.v2 import Codec

# GIL switch interval: threads that inflate bodies must yield quickly to the event loop.
SWITCH_S = 0.0005
# Time for clients to read their last answers.
STOP_GRACE_S = 2.0
# Limit on everything in a frame but tensors; shorter JSON cannot exceed it.
MAX_NAMES_BYTES = MAX_SENT_BYTES // 4
# Bytes of a name, dimension or parameter in a frame besides its text, at most.
MAX_ITEM_BYTES = 10


class Forwarding:
    """A message that the core answers."""

    __slots__ = ("_exchange", "_message", "_remote")

    def __init__(
        self, remote: Remote, exchange: Exchange, headers: dict[bytes, bytes] | None = None
    ) -> None:
        """`headers` replace those of the message's head."""
        self._remote = remote
        self._exchange = exchange
        head = exchange.head
        self._message = frames.Forward(
            0,
            exchange.received,
            head.method,
            head.path + b"?" + head.query if head.query else head.path,
            head.headers if headers is None else headers,
            head.keep_alive,
            head.is_http_1_0,
            frames.Parcel(),
        )

    def start(self) -> None:
        exchange = self._exchange
        exchange.abandon = self.abandon
        try:
            self._remote.forward(self._message, exchange.body, self._deliver)
        except PenstockError as error:
            reply_error(exchange, error)

    def abandon(self) -> None:
        self._remote.cancel_forward(self._message.call)

    def _deliver(self, data: bytes, answer: frames.Forwarded) -> None:
        if answer.is_part:
            self._exchange.pass_part(data)
        elif not answer.is_cut:
            self._exchange.pass_on(data, answer.keeps)
        elif not self._exchange.is_finished:
            self._exchange.abort()


class Core:
    """The `Router` of a front: everything goes to the core."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._codec = Codec()

    def count(self, call: InferCall, exchange: Exchange) -> None:
        """Do nothing: every request reaches the core, which counts it."""

    def refused(self, call: InferCall, received: float, error: Refusal) -> None:
        """Do nothing: the core gets the message too."""

    def prepare(self, call: InferCall, json_bytes: int, num_bytes: int) -> LongBody | None:
        """Return None: the memory of models is not in this process."""
        return None

    def refuse(self, exchange: Exchange, error: Refusal) -> bool:
        """Forward the message: the core finds the same error, and counts it."""
        Forwarding(self._remote, exchange).start()
        return False

    def infer(self, call: InferCall, exchange: Exchange) -> None:
        json_bytes = call.json_bytes
        if json_bytes == 0:
            # Only the core knows the model's one input.
            self._hand_over(exchange)
            return
        model = self._remote.find(call.model_name, call.model_version, call.wants_timing)
        sink = InferSink(exchange, self._codec, call, model, None)
        try:
            request = self._codec.decode_infer(exchange.body, json_bytes, sink, exchange.received)
        except PenstockError:
            # The core reports the error: it first checks that the model exists, and counts it.
            self._hand_over(exchange)
            return
        if request.uses_regions:
            self._hand_over(exchange)
            return
        num_json = len(exchange.body) if json_bytes is None else json_bytes
        if num_json > MAX_NAMES_BYTES and _names_bytes(request) > MAX_NAMES_BYTES:
            self._hand_over(exchange)
            return
        request.caller = call.caller
        sink.request = request
        exchange.abandon = sink.abandon
        model.submit(request)

    def other(self, exchange: Exchange, match: Match) -> None:
        Forwarding(self._remote, exchange).start()

    def _hand_over(self, exchange: Exchange) -> None:
        """Forward an inference whose body is already inflated."""
        headers = dict(exchange.head.headers)
        headers.pop(b"content-encoding", None)
        Forwarding(self._remote, exchange, headers).start()

    async def close(self) -> None:
        """Do nothing: nothing here outlives its exchange."""


def _names_bytes(request: Request) -> int:
    """Return an upper estimate of the frame bytes for names, id and parameters."""
    total = len(request.id.encode())
    for tensor in request.inputs:
        total += len(tensor.name.encode()) + MAX_ITEM_BYTES * (4 + len(tensor.shape))
    for output in request.outputs:
        total += len(output.name.encode()) + 2 * MAX_ITEM_BYTES
    for name, value in (request.parameters or {}).items():
        total += len(name.encode()) + len(str(value).encode()) + 2 * MAX_ITEM_BYTES
    return total


async def serve(remote: Remote, settings: frames.OpenFront) -> None:
    """Listen and answer until the core says Stop, let accepted requests finish, then close."""
    sys.setswitchinterval(SWITCH_S)
    if settings.logs_requests:
        access_log.log.setLevel(logging.INFO)
    limits = settings.limits or HttpLimits()
    gate = gate_of(settings)
    v2 = V2Http(Core(remote), limits, gate, settings.logs_requests)
    http = HttpServer(v2.handle, limits, v2.screen)

    def use_keys(keys: Keys) -> None:
        gate.keys = keys
        http.forget_heads()

    remote.on_keys = use_keys
    remote.on_drain = http.lifecycle.drain
    remote.count_connections = lambda: http.num_connections
    files = None if settings.tls is None else TlsFiles(settings.tls, warns=False)
    try:
        context = None if files is None else files.load()
        port = await http.start(settings.host, settings.port, shares_port=True, tls=context)
    except OSError as error:
        raise cannot_listen(settings.host, settings.port, "HTTP", error) from None
    watching = None if files is None else asyncio.create_task(watch(files, [http]))
    await remote.serve_until_stopped(port)
    if watching is not None:
        watching.cancel()
    http.lifecycle.drain()
    await finish([http])
    await v2.close()
    await http.close()


async def finish(servers: Sequence[Listener]) -> None:
    """Wait for answers that the core has sent but that are not written yet; accept no more."""
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            while any(server.num_running for server in servers):
                await asyncio.sleep(0.005)
    except TimeoutError:
        pass
    await asyncio.gather(*(server.settle() for server in servers))


if __name__ == "__main__":
    begin(serve, uvloop.run)
