"""The ingress of an application on a Ray cluster: v2 and OpenAI over Ray's HTTP proxies, v2 over
its gRPC proxies. It admits messages and hands them to the replicas of their models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import HttpLimits
from penstock.errors import ConfigError
from penstock.protocols.asgi_http import AsgiHttp, Receive, Scope, Send
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.key_file import KeyFile, watch_keys
from penstock.protocols.v2_http import V2Http
from penstock.ray.cluster_models import ClusterModels, ModelHandle
from penstock.ray.cluster_router import ClusterRouter
from penstock.ray.inference_rpcs import InferenceRpcs, RawMessage, RpcContext


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """Settings of an ingress, beside the handles of the models."""

    # Models of language, whose requests are routed by their prompts.
    texts: tuple[str, ...] = ()
    retries: int = 2
    id: str = "penstock"
    api_keys: str = ""
    max_body_bytes: int = 64 << 20
    max_json_bytes: int = 8 << 20
    log_requests: bool = False

    @property
    def limits(self) -> HttpLimits:
        return HttpLimits(self.max_body_bytes, self.max_json_bytes)


class ClusterApp:
    """The ASGI application of an ingress; made on its event loop."""

    def __init__(self, spec: IngressSpec, handles: Mapping[str, ModelHandle]) -> None:
        """ConfigError if the API keys cannot be read, or have quotas."""
        self._api_keys = spec.api_keys
        self._key_file = KeyFile(Path(spec.api_keys)) if spec.api_keys else None
        keys = None if self._key_file is None else self._key_file.read()
        if keys is not None:
            self._check_keys(keys)
        self.gate = Gate(keys)
        self.models = ClusterModels(handles, spec.texts, spec.id)
        router = ClusterRouter(self.models)
        self._v2 = V2Http(router, spec.limits, self.gate, spec.log_requests)
        self._http = AsgiHttp(self._v2, spec.limits)
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http.answer(scope, receive, send)
            case "lifespan":
                await self._live(receive, send)
            case _:
                await receive()
                await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] == "lifespan.startup":
            if self._key_file is not None:
                watching = watch_keys(self._key_file, self._check_keys, self._use_keys)
                self._watching = asyncio.create_task(watching)
            await send({"type": "lifespan.startup.complete"})
        if self._watching is not None:
            self._watching.cancel()
        await self._v2.close()
        self._http.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _check_keys(self, keys: Keys) -> None:
        check_no_quotas(self._api_keys, keys)

    def _use_keys(self, keys: Keys) -> None:
        self.gate.keys = keys


def check_no_quotas(api_keys: str, keys: Keys) -> None:
    """Raise ConfigError if keys have quotas, which each ingress would count for itself."""
    if keys.quotas:
        raise ConfigError(
            f"{api_keys}: has quotas, which are counted by one server; remove them, or let a "
            "gateway before the cluster apply them"
        )


class Ingress:
    """The deployment. Ray calls the methods below by the names of the RPCs."""

    def __init__(self, spec: IngressSpec, handles: Mapping[str, Any]) -> None:
        """`handles` are Ray's, by the names of their models."""
        from penstock.ray.handles import RayHandle

        models = {name: RayHandle(each, name, spec.retries) for name, each in handles.items()}
        self._app = ClusterApp(spec, models)
        self._rpcs = InferenceRpcs(self._app.models, self._app.gate)

    def __serve_build_asgi_app__(self) -> ClusterApp:
        return self._app

    async def ModelInfer(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.infer(request, grpc_context)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[bytes], grpc_context: RpcContext
    ) -> AsyncIterator[RawMessage]:
        async for answer in self._rpcs.stream(requests, grpc_context):
            yield answer

    async def ServerLive(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("ServerLive", request, grpc_context)

    async def ServerReady(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("ServerReady", request, grpc_context)

    async def ModelReady(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("ModelReady", request, grpc_context)

    async def ServerMetadata(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("ServerMetadata", request, grpc_context)

    async def ModelMetadata(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("ModelMetadata", request, grpc_context)

    async def ModelConfig(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("ModelConfig", request, grpc_context)

    async def ModelStatistics(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("ModelStatistics", request, grpc_context)

    async def RepositoryIndex(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.manage("RepositoryIndex", request, grpc_context)

    async def Check(self, request: bytes, grpc_context: RpcContext) -> RawMessage:
        return await self._rpcs.check(request, grpc_context)
