"""Every HTTP route and every RPC in one table: methods, path, scope, handler, body. Pure.

The gate reads the scope of a row and the router calls the handler of the same row, so a request can
never be checked as one route and answered as another. A path without a row is not found; there is
no default scope. Core, front processes and metrics port all look up paths here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import unquote

from penstock.wire.v2 import IndexBody, InferBody, LoadBody, UnloadBody

Scope = Literal["open", "infer", "metrics", "admin"]

GET = ("GET", "HEAD")
POST = ("POST",)
BOTH = ("GET", "HEAD", "POST")
MODEL = "/v2/models/{name}"
VERSION = MODEL + "/versions/{version}"
INFERENCE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
# Handlers of features that Penstock does not have, and the subject of their errors.
MISSING = {
    "trace": "trace settings are",
    "logging": "log settings are",
    "system_shared_memory": "system shared memory regions are",
    "cuda_shared_memory": "CUDA shared memory regions are",
}
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


@dataclass(frozen=True, slots=True)
class Route:
    """One row. `{name}` in a path is one non-empty segment, `{name:path}` at its end one or more.
    `rpcs` are the equivalent gRPC methods, which need the same scope."""

    methods: tuple[str, ...]
    path: str
    scope: Scope
    handler: str
    body: type | None = None
    rpcs: tuple[str, ...] = ()
    is_on_metrics_port: bool = False
    _segments: tuple[bytes | None, ...] = field(init=False, repr=False)
    _names: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = self.path.split("/")[1:]
        matches = [_PARAMETER.fullmatch(part) for part in parts]
        segments = tuple(
            None if match else part.encode() for part, match in zip(parts, matches, strict=True)
        )
        object.__setattr__(self, "_segments", segments)
        object.__setattr__(self, "_names", tuple(match[1] for match in matches if match))

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def takes_rest(self) -> bool:
        return self.path.endswith(":path}")

    def match(self, given: list[bytes]) -> Match | None:
        """Match segments of a path, still percent-encoded; there must be as many as in this row."""
        values = []
        for expected, segment in zip(self._segments, given, strict=True):
            if expected is None and segment:
                values.append(unquote(segment.decode("latin-1")))
            elif expected != segment:
                return None
        return Match(self, dict(zip(self._names, values, strict=True)))


@dataclass(frozen=True, slots=True)
class Match:
    """A row, and the decoded values of its path parameters."""

    route: Route
    names: Mapping[str, str]

    @property
    def model_name(self) -> str:
        return self.names.get("name", "")

    @property
    def model_version(self) -> str:
        return self.names.get("version", "")


def _rpcs(*names: str) -> tuple[str, ...]:
    return tuple(INFERENCE + name for name in names)


def _of_models() -> list[Route]:
    """Return the routes of a model, each also with a version."""
    infer = _rpcs("ModelInfer", "ModelStreamInfer")
    rows = [
        Route(POST, MODEL + "/infer", "infer", "infer", InferBody, infer),
        Route(POST, MODEL + "/generate", "infer", "generate"),
        Route(POST, MODEL + "/generate_stream", "infer", "generate_stream"),
        Route(GET, MODEL, "infer", "metadata", None, _rpcs("ModelMetadata")),
        Route(GET, MODEL + "/ready", "infer", "model_ready", None, _rpcs("ModelReady")),
        Route(GET, MODEL + "/config", "infer", "config", None, _rpcs("ModelConfig")),
        Route(GET, MODEL + "/stats", "infer", "statistics", None, _rpcs("ModelStatistics")),
        Route(GET, MODEL + "/explain", "metrics", "explain"),
        Route(BOTH, MODEL + "/trace/setting", "admin", "trace"),
    ]
    versions = [replace(row, path=row.path.replace(MODEL, VERSION), rpcs=()) for row in rows]
    return rows + versions


def _of_server() -> list[Route]:
    live = (INFERENCE + "ServerLive",)
    ready = (INFERENCE + "ServerReady", HEALTH + "Check", HEALTH + "Watch")
    return [
        Route(GET, "/v2/health/live", "open", "live", None, live, is_on_metrics_port=True),
        Route(GET, "/v2/health/ready", "open", "ready", None, ready, is_on_metrics_port=True),
        Route(GET, "/metrics", "metrics", "metrics", is_on_metrics_port=True),
        Route(GET, "/v2", "infer", "server_metadata", None, _rpcs("ServerMetadata")),
        Route(GET, "/v2/", "infer", "server_metadata"),
        Route(GET, "/v2/models/stats", "infer", "statistics"),
        Route(BOTH, "/v2/trace/setting", "admin", "trace", None, _rpcs("TraceSetting")),
        Route(BOTH, "/v2/logging", "admin", "logging", None, _rpcs("LogSettings")),
    ]


def _of_repository() -> list[Route]:
    model = "/v2/repository/models/{name}"
    index, load, unload = (
        _rpcs(f"Repository{name}") for name in ("Index", "ModelLoad", "ModelUnload")
    )
    return [
        Route(POST, "/v2/repository/index", "admin", "index", IndexBody, index),
        Route(POST, model + "/load", "admin", "load", LoadBody, load),
        Route(POST, model + "/unload", "admin", "unload", UnloadBody, unload),
    ]


def _of_shared_memory(kind: str) -> list[Route]:
    root, handler = f"/v2/{kind}sharedmemory", f"{kind}_shared_memory"
    status, register, unregister = (
        _rpcs(f"{kind.capitalize()}SharedMemory{name}")
        for name in ("Status", "Register", "Unregister")
    )
    region = root + "/region/{region}"
    return [
        Route(GET, root + "/status", "admin", handler, None, status),
        Route(GET, region + "/status", "admin", handler),
        Route(POST, region + "/register", "admin", handler, None, register),
        Route(POST, region + "/unregister", "admin", handler),
        Route(POST, root + "/unregister", "admin", handler, None, unregister),
    ]


def _of_openai() -> list[Route]:
    posts = ("completions", "chat/completions", "embeddings")
    return [
        *(Route(POST, f"/v1/{name}", "infer", "openai") for name in posts),
        Route(GET, "/v1/models", "infer", "openai"),
        # Model names may contain slashes.
        Route(GET, "/v1/models/{name:path}", "infer", "openai"),
        Route(POST, "/tokenize", "infer", "openai"),
        Route(POST, "/detokenize", "infer", "openai"),
        Route(GET, "/tokenizer_info", "infer", "openai"),
    ]


# The first matching row wins: literal segments go before parameters.
ROUTES: tuple[Route, ...] = (
    *_of_server(),
    *_of_models(),
    *_of_repository(),
    *_of_shared_memory("system"),
    *_of_shared_memory("cuda"),
    *_of_openai(),
)
RPC_SCOPES: Mapping[str, Scope] = {rpc: route.scope for route in ROUTES for rpc in route.rpcs}


def _by_num_segments() -> dict[int, list[Route]]:
    found: dict[int, list[Route]] = {}
    for route in ROUTES:
        if not route.takes_rest:
            found.setdefault(route.num_segments, []).append(route)
    return found


_BY_NUM_SEGMENTS = _by_num_segments()
_TAKING_REST = tuple(route for route in ROUTES if route.takes_rest)


def find(path: bytes) -> Match | None:
    """Return the row for a path in the form of `protocols.http.Head.path`, or None."""
    given = path.split(b"/")[1:]
    for route in _BY_NUM_SEGMENTS.get(len(given), ()):
        if (match := route.match(given)) is not None:
            return match
    for route in _TAKING_REST:
        start = route.num_segments - 1
        if len(given) > start:
            rest = b"/".join(given[start:])
            if (match := route.match([*given[:start], rest])) is not None:
                return match
    return None
