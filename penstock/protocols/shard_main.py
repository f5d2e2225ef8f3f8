"""A shard in its own process: HTTP and the requests of all models, for when one event loop is the
bottleneck.

Started by `protocols.fronts` as `python -m penstock.protocols.shard_main FD PARENT`. It accepts
connections from a listener that the core has made, decodes, queues and batches inferences, and
sends them to the workers itself (`serving.shard`). All other routes go to the core, so that answers
do not depend on the process. Exits when the core says so or has exited.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import uvloop

from penstock.config import HttpLimits
from penstock.protocols import access_log
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.http import Exchange
from penstock.protocols.http_front import SWITCH_S, Forwarding, finish
from penstock.protocols.http_server import HttpServer
from penstock.protocols.openai_http import OpenAiHttp
from penstock.protocols.remote import Remote, begin, gate_of
from penstock.protocols.route import Match
from penstock.protocols.tls import TlsFiles, watch
from penstock.protocols.v2_http import LocalInference, V2Http
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.model_table import ModelTable
from penstock.serving.shard import Shard
from penstock.wire import frames


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
        self._local = local = LocalInference(table, lifecycle, logs_requests, *handlers, gate)
        self.count, self.refuse, self.infer = local.count, local.refuse, local.infer

    def other(self, exchange: Exchange, match: Match) -> None:
        if not self._local.handle_directly(exchange, match):
            Forwarding(self._remote, exchange).start()

    async def close(self) -> None:
        """Do nothing: nothing here outlives its exchange."""


async def serve(remote: Remote, settings: frames.OpenFront) -> None:
    """Answer until the core says Stop, let accepted requests finish, then close."""
    sys.setswitchinterval(SWITCH_S)
    if settings.logs_requests:
        access_log.log.setLevel(logging.INFO)
    assert remote.listener is not None
    limits, gate, lifecycle = settings.limits or HttpLimits(), gate_of(settings), Lifecycle()
    shard = Shard(remote.send)
    router = ShardRouter(remote, shard.table, lifecycle, gate, settings.logs_requests)
    v2 = V2Http(router, limits, gate, settings.logs_requests)
    http = HttpServer(v2.handle, limits, v2.screen, lifecycle)

    def use_keys(keys: Keys) -> None:
        gate.keys = keys
        http.forget_heads()

    remote.on_keys, remote.on_drain = use_keys, lifecycle.drain
    remote.on_part, remote.on_question = shard.receive, shard.answer
    remote.count_connections = lambda: http.num_connections
    files = None if settings.tls is None else TlsFiles(settings.tls, warns=False)
    context = None if files is None else files.load()

    async def accept() -> None:
        """Accept connections once the core has published the models."""
        assert remote.listener is not None
        await shard.published.wait()
        await http.start_on(remote.listener, tls=context)

    tasks = [asyncio.create_task(accept())]
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
