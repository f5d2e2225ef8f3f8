"""A shard in its own process: HTTP, gRPC and the requests of all models, for when one event loop is
the bottleneck.

Started by `protocols.fronts` as `python -m penstock.protocols.shard_main FD PARENT`. It accepts
connections from listeners that the core has made, decodes, queues and batches inferences, and sends
them to the workers itself (`serving.shard`). It tokenizes texts, sends them to the engines of
language models, and streams the answers. All other routes and methods go to the core, so that
answers do not depend on the process. Exits when the core says so or has exited.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial

import uvloop

from penstock.config import HttpLimits, ModelConfig, TlsConfig
from penstock.errors import QuotaExceeded
from penstock.llm.language_model import LanguageModel, TextShard
from penstock.protocols import access_log
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.http import Exchange
from penstock.protocols.http_front import SWITCH_S, Forwarding, finish
from penstock.protocols.http_server import HttpServer
from penstock.protocols.infer_grpc import InferRpcs
from penstock.protocols.infer_http import InferCall
from penstock.protocols.leased_rates import LeasedRates
from penstock.protocols.listener import Listener
from penstock.protocols.openai_http import OpenAiHttp
from penstock.protocols.remote import Remote, begin, gate_of
from penstock.protocols.route import Match
from penstock.protocols.tls import H2, HTTP_1, TlsFiles, watch
from penstock.protocols.v2_grpc import GrpcService
from penstock.protocols.v2_http import LocalInference, Parked, V2Http
from penstock.serving.core_link import EngineCore, EnginePart
from penstock.serving.leases import IDLE_S
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.model_table import ModelTable
from penstock.serving.served import Served
from penstock.serving.shard import Shard
from penstock.serving.shared_tokens import SharedTokens
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
        rates: LeasedRates,
        logs_requests: bool,
    ) -> None:
        self._remote = remote
        openai = OpenAiHttp(table, lambda: lifecycle.is_draining, logs_requests)
        generate = GenerateHttp(table, lambda: lifecycle.is_draining, logs_requests)
        handlers = (openai.handle, generate.handle)
        self._table, self._gate, self._rates = table, gate, rates
        self._local = local = LocalInference(table, lifecycle, logs_requests, *handlers, gate)
        self.refuse, self.infer, self.prepare = local.refuse, local.infer, local.prepare
        # Messages that have waited for a token and may go on, or why not.
        self._decided: dict[Exchange, QuotaExceeded | None] = {}
        self.handle: Callable[[Exchange], None] = lambda exchange: None

    def count(self, call: InferCall, exchange: Exchange) -> None:
        try:
            self._admit(call.caller, exchange)
        except QuotaExceeded as error:
            name, version = call.model_name, call.model_version
            self._table.count_refusal(error, exchange.received, name, version)
            raise

    def _admit(self, key: bytes, exchange: Exchange) -> None:
        """Take a token of the key's rate. Parked if the core must be asked; QuotaExceeded if it
        has said no."""
        if exchange in self._decided:
            if (error := self._decided.pop(exchange)) is not None:
                raise error
            return
        if not self._rates.take(key, partial(self._go_on, exchange)):
            raise Parked

    def _go_on(self, exchange: Exchange, error: QuotaExceeded | None) -> None:
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
    logs_requests = settings.logs_requests
    if logs_requests:
        access_log.log.setLevel(logging.INFO)
    limits, gate, lifecycle = settings.limits or HttpLimits(), gate_of(settings), Lifecycle()
    shard = make_shard(remote, settings)
    rates = LeasedRates(remote.send)
    router = ShardRouter(remote, shard.table, lifecycle, gate, rates, logs_requests)
    v2 = V2Http(router, limits, gate, logs_requests)
    http = HttpServer(v2.handle, limits, v2.screen, lifecycle, v2.prepare)
    infer = InferRpcs(shard.table, lifecycle, gate, logs_requests, rates.take)
    service = GrpcService(infer, remote.manage, gate)
    grpc = None
    if settings.grpc is not None:
        grpc = GrpcServer(service.methods(), settings.grpc, gate, limits)
    servers: list[Listener] = [http] if grpc is None else [http, grpc]

    def use_keys(keys: Keys) -> None:
        gate.keys = keys
        http.forget_heads()

    def drain() -> None:
        lifecycle.drain()
        if grpc is not None:
            grpc.go_away()

    remote.on_keys, remote.on_drain = use_keys, drain
    router.handle = v2.handle
    rates.replace(settings.rates)
    remote.on_rates, remote.on_leased = rates.replace, rates.leased
    remote.on_part, remote.on_question = shard.receive, shard.answer
    remote.count_connections = lambda: sum(each.num_connections for each in servers)

    async def give_back() -> None:
        while True:
            await asyncio.sleep(IDLE_S)
            rates.give_back()

    tasks = [asyncio.create_task(give_back())]
    for server, listener, protocol in zip(servers, remote.listeners, (HTTP_1, H2), strict=False):
        files, context = load_tls(settings.tls, protocol)
        accepting = accept(shard.published, server, listener, files, context)
        tasks.append(asyncio.create_task(accepting))
    await remote.serve_until_stopped(settings.port)
    for task in tasks:
        task.cancel()
    drain()
    await finish(servers)
    await v2.close()
    service.stop()
    await asyncio.gather(*(server.close() for server in servers))
    await service.close()
    await shard.close()


def make_shard(remote: Remote, settings: frames.OpenFront) -> Shard:
    """Create the shard's models, and connect those of language with the quotas of the core."""
    page, number = remote.page, settings.shard
    assert page is not None and number is not None
    tokens = SharedTokens(remote.send, asyncio.get_running_loop().call_soon)
    tokens.replace(settings.token_rates)
    remote.on_token_rates, remote.on_tokens = tokens.replace, tokens.taken

    def make_text(config: ModelConfig, core: EngineCore) -> tuple[Served, EnginePart]:
        place = TextShard(core, tokens, page.layout.num_shards)
        model = LanguageModel(config, quotas=shard.table.quotas, shard=place)
        return model, model.part

    shard = Shard(remote.send, page, number, make_text)
    return shard


def load_tls(tls: TlsConfig | None, protocol: str) -> tuple[TlsFiles | None, ssl.SSLContext | None]:
    if tls is None:
        return None, None
    files = TlsFiles(tls, warns=False, protocol=protocol)
    return files, files.load()


async def accept(
    published: asyncio.Event,
    server: Listener,
    listener: socket.socket,
    files: TlsFiles | None,
    context: ssl.SSLContext | None,
) -> None:
    """Accept connections once the core has published the models; reload changed TLS files."""
    await published.wait()
    await server.start_on(listener, tls=context)
    if files is not None:
        await watch(files, [server])


if __name__ == "__main__":
    begin(serve, uvloop.run)
