"""A shard in its own process: HTTP, gRPC and the requests of all models, for when one event loop is
the bottleneck.

Started by `protocols.shard_processes` as `python -m penstock.protocols.shard_main FD PARENT`. It
accepts connections from listeners that the core has made, decodes, queues and batches inferences,
and sends them to the workers itself (`serving.shard`). It tokenizes texts, sends them to the
engines of language models, and streams the answers. All other routes and methods go to the core, so
that answers do not depend on the process. Exits when the core says so or has exited.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop

from penstock.config import HttpLimits, ModelConfig, TlsConfig
from penstock.errors import QuotaExceeded
from penstock.llm.language_model import LanguageModel
from penstock.llm.open_generations import TextShard
from penstock.protocols import access_log
from penstock.protocols.core_client import CoreClient, begin, gate_of
from penstock.protocols.forwarding import Forwarding
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.http import Exchange
from penstock.protocols.http_server import HttpServer
from penstock.protocols.infer_grpc import InferRpcs
from penstock.protocols.infer_http import InferCall
from penstock.protocols.leased_rates import LeasedRates
from penstock.protocols.listener import Listener
from penstock.protocols.openai_http import OpenAiHttp
from penstock.protocols.route import Match
from penstock.protocols.tls import H2, HTTP_1, TlsFiles, watch
from penstock.protocols.v2_grpc import GrpcService
from penstock.protocols.v2_http import LocalInference, Parked, V2Http
from penstock.serving.core_link import EngineCore, EnginePart
from penstock.serving.header_forwarding import make_forwarding
from penstock.serving.leases import IDLE_S
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import for_models
from penstock.serving.model_table import ModelTable
from penstock.serving.owned_model import HandingProcess
from penstock.serving.recording_files import RingPlace
from penstock.serving.served import Served
from penstock.serving.shard import Shard
from penstock.serving.shared_page import Heartbeat
from penstock.serving.shared_tokens import SharedTokens
from penstock.wire import frames

# Interval between heartbeats on the shared page.
BEAT_S = 0.25
# GIL switch interval: threads that inflate bodies must yield quickly to the event loop.
SWITCH_S = 0.0005
# Time for clients to read their last answers.
STOP_GRACE_S = 2.0
# Handlers of routes that use models directly.
DIRECT = frozenset(("openai", "generate", "generate_stream"))


class ShardRouter:
    """The `Router` of a shard: inference to its models, all else to the core."""

    def __init__(
        self,
        core: CoreClient,
        table: ModelTable,
        lifecycle: Lifecycle,
        gate: Gate,
        rates: LeasedRates,
        logs_requests: bool,
    ) -> None:
        self._core = core
        openai = OpenAiHttp(table, lambda: lifecycle.is_draining, logs_requests)
        generate = GenerateHttp(table, lambda: lifecycle.is_draining, logs_requests)
        handlers = (openai.handle, generate.handle)
        self._table, self._gate, self._rates = table, gate, rates
        self._local = local = LocalInference(table, lifecycle, logs_requests, *handlers, gate)
        self.infer, self.prepare, self.refused = local.infer, local.prepare, local.refused
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
            Forwarding(self._core, exchange).start()

    async def close(self) -> None:
        """Do nothing: nothing here outlives its exchange."""


async def serve(core: CoreClient, settings: frames.OpenShard) -> None:
    """Answer until the core says Stop, let accepted requests finish, then close."""
    sys.setswitchinterval(SWITCH_S)
    if logs_requests := settings.logs_requests:
        access_log.log.setLevel(logging.INFO)
    limits, gate, lifecycle = settings.limits or HttpLimits(), gate_of(settings, core), Lifecycle()
    shard = make_shard(core, settings)
    rates = LeasedRates(core.send)
    router = ShardRouter(core, shard.table, lifecycle, gate, rates, logs_requests)
    v2 = V2Http(router, limits, gate, logs_requests)
    http = HttpServer(v2.handle, limits, v2.screen, lifecycle, v2.prepare, v2.rejected)
    infer = InferRpcs(shard.table, lifecycle, gate, logs_requests, rates.take)
    service = GrpcService(infer, core.manage, gate)
    shard.table.manage = for_models(core.manage)
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
            service.drain()

    core.on_keys, core.on_drain = use_keys, drain
    router.handle = v2.handle
    rates.replace(settings.rates)
    core.on_rates, core.on_leased = rates.replace, rates.leased
    shard.table.set_shares(settings.shares)
    core.on_shares = shard.table.set_shares
    core.on_part, core.on_question = shard.receive, shard.answer
    shard.regions.is_allowed = settings.allows_regions
    core.on_region, core.on_region_closed = shard.regions.open, shard.regions.close
    core.count_connections = lambda: sum(each.num_connections for each in servers)

    core.on_move = partial(move_clients, servers)
    beating = show_use(shard.published, servers, partial(core.page.beat, settings.shard))
    tasks = [asyncio.create_task(give_back(rates)), asyncio.create_task(beating)]
    for server, listener, protocol in zip(servers, core.listeners, (HTTP_1, H2), strict=False):
        files, context = load_tls(settings.tls, protocol)
        accepting = accept(shard.published, server, listener, files, context)
        tasks.append(asyncio.create_task(accepting))
    await core.serve_until_stopped()
    for task in tasks:
        task.cancel()
    drain()
    await finish(servers)
    await v2.close()
    await service.stop()
    await asyncio.gather(*(server.close() for server in servers))
    await service.close()
    await shard.close()


async def give_back(rates: LeasedRates) -> None:
    """Return tokens that are not used to the core."""
    while True:
        await asyncio.sleep(IDLE_S)
        rates.give_back()


async def show_use(
    published: asyncio.Event, servers: Sequence[Listener], show: Callable[[Heartbeat], None]
) -> None:
    """Show the core how busy this shard is, once it accepts connections."""
    await published.wait()
    while True:
        counts = [each.count_clients() for each in servers]
        clients, moving = map(sum, zip(*counts, strict=True))
        show(Heartbeat(time.monotonic(), time.thread_time(), clients, moving))
        await asyncio.sleep(BEAT_S)


def move_clients(servers: Sequence[Listener], count: int) -> None:
    """Ask up to `count` clients to connect again; other shards will get them."""
    for server in servers:
        count -= server.move(count)


def make_shard(core: CoreClient, settings: frames.OpenShard) -> Shard:
    """Create the shard's models, and connect those of language with the quotas of the core."""
    tokens = SharedTokens(core.send, asyncio.get_running_loop().call_soon)
    tokens.replace(settings.token_rates)
    core.on_token_rates, core.on_tokens = tokens.replace, tokens.taken

    def make_text(config: ModelConfig, engine: EngineCore) -> tuple[Served, EnginePart]:
        place = TextShard(engine, tokens, core.page.layout.num_shards)
        model = LanguageModel(config, quotas=shard.table.quotas, shard=place)
        return model, model.part

    shard = Shard(core.send, core.page, settings.shard, make_text, core.parcels, HandingProcess)
    shard.table.metrics_config = settings.metrics
    shard.table.forwarding = make_forwarding(settings.header_patterns)
    shard.table.tracer.send = lambda record: core.send(frames.Traced(record))
    shard.table.caches.divide(settings.cache, settings.num_shards)
    recorders = shard.table.recorders
    recorders.folder = Path(settings.record_folder) if settings.record_folder else None
    recorders.place = RingPlace(settings.shard, settings.num_shards)
    return shard


async def finish(servers: Sequence[Listener]) -> None:
    """Wait for answers that the core has sent but that are not written yet."""
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            while any(server.num_running for server in servers):
                await asyncio.sleep(0.005)
    except TimeoutError:
        pass
    await asyncio.gather(*(server.settle() for server in servers))


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
