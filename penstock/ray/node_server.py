"""A `penstock serve` on each node of a Ray cluster, which Ray places, watches and replaces. Traffic
does not pass through Ray: clients connect to the servers' own ports.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable
from dataclasses import dataclass

from penstock.api.client import Client
from penstock.api.ray_options import RayOptions
from penstock.api.serve_options import ServeOptions
from penstock.api.server_handle import ServerHandle
from penstock.errors import SHUTTING_DOWN, NotReady, PenstockError
from penstock.ray.core_claims import CoreClaim
from penstock.ray.replica import assigned_cpus
from penstock.system.cores import usable_cores

log = logging.getLogger("penstock.ray")
HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The models that the server of a node serves, and its options. `digest` changes with
    the models."""

    repository: str
    digest: str
    options: ServeOptions


class NodeServer:
    """The deployment of servers, one on a node."""

    async def __init__(self, spec: NodeSpec) -> None:  # type: ignore[misc]
        """Return when the models are loaded; ConfigError fails the deployment."""
        self._claim = claim_cores(assigned_cpus())
        cores = self._claim.cores if self._claim is not None else None
        start = StartedServer(spec.repository, spec.options, cores)
        server = await asyncio.to_thread(start)
        self._client = Client(server.url, timeout_s=HEALTH_TIMEOUT_S)
        self._server: ServerHandle | None = server

    async def address(self) -> dict[str, str]:
        """Return where this server listens. `handle.broadcast("address")` asks all of them."""
        server = self._server
        if server is None:
            raise NotReady(SHUTTING_DOWN)
        return {"url": server.url, "grpc_url": server.grpc_url, "pid": str(server.pid)}

    async def check_health(self) -> None:
        """Raise if the server has ended or is not ready; Ray replaces it then."""
        if self._server is None or not self._server.is_running:
            raise NotReady("the server has ended")
        try:
            is_ready = await asyncio.to_thread(self._client.ready)
        except PenstockError as error:
            raise NotReady(f"the server does not answer: {error}") from None
        if not is_ready:
            raise NotReady("the server is not ready")

    def __del__(self) -> Awaitable[None] | None:
        """Drain and stop the server, once; Ray awaits it."""
        server, self._server = getattr(self, "_server", None), None
        return None if server is None else self._stop(server)

    async def _stop(self, server: ServerHandle) -> None:
        await asyncio.to_thread(server.stop)
        self._client.close()
        if self._claim is not None:
            self._claim.release()


@dataclass(frozen=True, slots=True)
class StartedServer:
    """Starts a server on given cores. Called in a thread of its own: the affinity of a thread is
    that of the processes which it starts."""

    repository: str
    options: ServeOptions
    cores: frozenset[int] | None

    def __call__(self) -> ServerHandle:
        before = os.sched_getaffinity(0)
        try:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            return ServerHandle(self.repository, self.options)
        finally:
            os.sched_setaffinity(0, before)


def claim_cores(num_cpus: float) -> CoreClaim | None:
    """Claim the cores that Ray has assigned, if these are not all; None if the server may use all
    of them, or if too few are free."""
    if not 1 <= num_cpus < usable_cores():
        return None
    claim = CoreClaim(int(num_cpus), sorted(os.sched_getaffinity(0)))
    if len(claim.cores) < int(num_cpus):
        log.warning("%d cores of %d are free: the server is not bound", len(claim.cores), num_cpus)
        claim.release()
        return None
    return claim


def server_options(options: RayOptions) -> ServeOptions:
    """Return the options of the server on each node."""
    return ServeOptions(
        host=options.host,
        http_port=options.http_port,
        grpc=options.grpc,
        grpc_port=options.grpc_port,
        metrics=False,
        id=options.id,
        api_keys=os.path.abspath(options.api_keys) if options.api_keys else "",
        insecure=options.insecure,
        max_body_bytes=options.max_body_bytes,
        max_json_bytes=options.max_json_bytes,
        drain_s=options.drain_s,
        log_requests=options.log_requests,
    )
