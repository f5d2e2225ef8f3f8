"""A shard in its own process: HTTP and the requests of all models, for when one event loop is the
bottleneck.

Started by `protocols.fronts` as `python -m penstock.protocols.shard_main FD PARENT`. It accepts
connections from a listener that the core has made, decodes, queues and batches inferences, and
sends them to the workers itself (`serving.shard`). All other routes go to the core, so that answers
do not depend on the process. Exits when the core says so or has exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable

import uvloop

from penstock.config import HttpLimits
from penstock.errors import NotFound, NotReady, QuotaExceeded
from penstock.protocols import access_log
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.http import Exchange
from penstock.protocols.http_front import SWITCH_S, Forwarding, finish
from penstock.protocols.http_server import HttpServer
from penstock.protocols.infer_http import InferCall
from penstock.protocols.openai_http import OpenAiHttp
from penstock.protocols.remote import Remote, begin, gate_of
from penstock.protocols.route import Match
from penstock.protocols.tls import TlsFiles, watch
from penstock.protocols.v2_http import LocalInference, Parked, V2Http
from penstock.serving.leases import IDLE_S, Leases
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.model_table import ModelTable
from penstock.serving.shard import Shard
from penstock.wire import frames

# Handlers of routes that use models directly.
DIRECT = frozenset(("openai", "generate", "generate_stream"))


class ShardRouter:
    """The `Router` of a shard: inference to its models, all else to the core."""

    def __init__(
        self,
        remote: Remote,
        table: ModelTable,
        lifecycle: Lifecycle,
        gate: Gate,
        logs_requests: bool,
    ) -> None:
        self._remote = remote
        openai = OpenAiHttp(table, lambda: lifecycle.is_draining, logs_requests)
        generate = GenerateHttp(table, lambda: lifecycle.is_draining, logs_requests)
        handlers = (openai.handle, generate.handle)
        self._table, self._gate = table, gate
        self._local = local = LocalInference(table, lifecycle, logs_requests, *handlers, gate)
        self.refuse, self.infer, self.prepare = local.refuse, local.infer, local.prepare
        self.leases = Leases(lambda key, amount: remote.send(frames.Lease(key, amount)))
        # Messages that wait for a token, by key; and those that may go on, or why not.
        self._parked: dict[bytes, deque[Exchange]] = {}
        self._decided: dict[Exchange, QuotaExceeded | None] = {}
        self.handle: Callable[[Exchange], None] = lambda exchange: None

    def count(self, call: InferCall, exchange: Exchange) -> None:
        try:
            self._admit(call.caller, exchange)
        except QuotaExceeded as error:
            with contextlib.suppress(NotFound, NotReady):
                model = self._table.find(call.model_name, call.model_version)
                model.refused(error, exchange.received)
            raise

    def _admit(self, key: bytes, exchange: Exchange) -> None:
        """Take a token of the key's rate. Parked if the core must be asked; QuotaExceeded if it
        has said no."""
        if exchange in self._decided:
            if (error := self._decided.pop(exchange)) is not None:
                raise error
            return
        parked = self._parked.get(key, ())
        if not self.leases.take(key, time.monotonic(), len(parked)):
            self._parked.setdefault(key, deque()).append(exchange)
            raise Parked

    def leased(self, leased: frames.Leased) -> None:
        """Go on with messages that wait for tokens of this key."""
        parked = self._parked.pop(leased.key, deque())
        num_served, may_wait = self.leases.granted(leased.key, leased.amount, len(parked))
        if may_wait and num_served < len(parked):
            self._parked[leased.key] = deque(list(parked)[num_served:])
        for number, exchange in enumerate(parked):
            if number >= num_served and may_wait:
                return
            is_served = number < num_served
            error = None if is_served else self.leases.refusal(leased.key, leased.wait_s)
            self._decided[exchange] = error
            self.handle(exchange)

    def other(self, exchange: Exchange, match: Match) -> None:
        if match.route.handler in DIRECT and exchange.head.method == b"POST":
            self._admit(self._gate.caller(exchange.head.headers), exchange)
        if not self._local.handle_directly(exchange, match):
            Forwarding(self._remote, exchange).start()

    async def close(self) -> None:
        """Do nothing: nothing here outlives its exchange."""


async def serve(remote: Remote, settings: frames.OpenFront) -> None:
    """Answer until the core says Stop, let accepted requests finish, then close."""
    sys.setswitchinterval(SWITCH_S)
    if settings.logs_requests:
        access_log.log.setLevel(logging.INFO)
    assert remote.listener is not None and remote.page is not None and settings.shard is not None
    limits, gate, lifecycle = settings.limits or HttpLimits(), gate_of(settings), Lifecycle()
    shard = Shard(remote.send, remote.page, settings.shard)
    router = ShardRouter(remote, shard.table, lifecycle, gate, settings.logs_requests)
    v2 = V2Http(router, limits, gate, settings.logs_requests)
    http = HttpServer(v2.handle, limits, v2.screen, lifecycle, v2.prepare)

    def use_keys(keys: Keys) -> None:
        gate.keys = keys
        http.forget_heads()

    remote.on_keys, remote.on_drain = use_keys, lifecycle.drain
    router.handle = v2.handle
    router.leases.replace(settings.rates)
    remote.on_rates, remote.on_leased = router.leases.replace, router.leased
    remote.on_part, remote.on_question = shard.receive, shard.answer
    remote.count_connections = lambda: http.num_connections
    files = None if settings.tls is None else TlsFiles(settings.tls, warns=False)
    context = None if files is None else files.load()

    async def accept() -> None:
        """Accept connections once the core has published the models."""
        assert remote.listener is not None
        await shard.published.wait()
        await http.start_on(remote.listener, tls=context)

    async def give_back() -> None:
        while True:
            await asyncio.sleep(IDLE_S)
            router.leases.give_back(time.monotonic())

    tasks = [asyncio.create_task(accept()), asyncio.create_task(give_back())]
    if files is not None:
        tasks.append(asyncio.create_task(watch(files, [http])))
    await remote.serve_until_stopped(settings.port)
    for task in tasks:
        task.cancel()
    await finish(http)
    await v2.close()
    await http.close()
    await shard.close()


if __name__ == "__main__":
    begin(serve, uvloop.run)
