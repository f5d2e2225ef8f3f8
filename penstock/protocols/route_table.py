"""Every HTTP route and every RPC in one table: methods, path, scope, handler, schemas. Pure.

The gate reads the scope of a row and the router calls the handler of the same row, so a request can
never be checked as one route and answered as another. A path without a row is not found; there is
no default scope. Core, front processes and metrics port all look up paths here; `/openapi.json` is
made from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import unquote

from penstock.errors import Unsupported
from penstock.serving.explain import Explanation
from penstock.wire import documented as doc
from penstock.wire import openai_v1 as openai
from penstock.wire import server_state
from penstock.wire.v2 import IndexBody, LoadBody, UnloadBody

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
    # Purpose in a few words.
    summary: str = ""
    # The JSON of requests and of answers; None: no body, or not JSON.
    body: Any = None
    answer: Any = None
    # The content type of an answer that is not JSON.
    media: str = ""
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


def _get(path: str, scope: Scope, handler: str, summary: str, **more: Any) -> Route:
    return Route(GET, path, scope, handler, summary, **more)


def _post(path: str, scope: Scope, handler: str, summary: str, **more: Any) -> Route:
    return Route(POST, path, scope, handler, summary, **more)


def _of_pages() -> list[Route]:
    """The server's own pages. They are static and open; data comes from the state route."""
    html, script, style = "text/html", "text/javascript", "text/css"
    start, asset = {"answer": server_state.Links, "media": html}, "asset"
    return [
        _get("/", "open", "start_page", "Start page; links, for clients but browsers", **start),
        _get("/docs", "open", asset, "Description of the API, to read", media=html),
        _get("/openapi.json", "open", "openapi", "Description of the API", answer=dict[str, Any]),
        _get("/dashboard/app.js", "open", asset, "Script of the start page", media=script),
        _get("/dashboard/docs.js", "open", asset, "Script of /docs", media=script),
        _get("/dashboard/style.css", "open", asset, "Style of the pages", media=style),
        _get(
            "/dashboard/state",
            "infer",
            "state",
            "Models, their state and example calls",
            answer=server_state.ServerState,
        ),
    ]


def _of_models() -> list[Route]:
    """Return the routes of a model, each also with a version."""
    infer: dict[str, Any] = {"body": doc.InferFields, "answer": doc.InferAnswer}
    infer["rpcs"] = _rpcs("ModelInfer", "ModelStreamInfer")
    text = {"body": doc.GenerateBody, "answer": doc.GenerateAnswer}
    events = {"body": doc.GenerateBody, "media": "text/event-stream"}
    described = {"answer": doc.ModelDescription, "rpcs": _rpcs("ModelMetadata")}
    ready = {"answer": doc.ReadyAnswer, "rpcs": _rpcs("ModelReady")}
    config = {"answer": dict[str, Any], "rpcs": _rpcs("ModelConfig")}
    counts = {"answer": doc.StatisticsAnswer, "rpcs": _rpcs("ModelStatistics")}
    rows = [
        _post(MODEL + "/infer", "infer", "infer", "Run the model on tensors", **infer),
        _post(MODEL + "/generate", "infer", "generate", "Generate text", **text),
        _post(
            MODEL + "/generate_stream",
            "infer",
            "generate_stream",
            "Generate text, as a stream of events",
            **events,
        ),
        _get(MODEL, "infer", "metadata", "Inputs and outputs of the model", **described),
        _get(MODEL + "/ready", "infer", "model_ready", "Whether the model can answer", **ready),
        _get(MODEL + "/config", "infer", "config", "Configuration of the model", **config),
        _get(MODEL + "/stats", "infer", "statistics", "Counts and times of requests", **counts),
        _get(
            MODEL + "/explain",
            "metrics",
            "explain",
            "Why batches are as they are",
            answer=Explanation,
        ),
        Route(BOTH, MODEL + "/trace/setting", "admin", "trace", "Trace settings of the model"),
    ]
    versions = [replace(row, path=row.path.replace(MODEL, VERSION), rpcs=()) for row in rows]
    return rows + versions


def _of_server() -> list[Route]:
    live = {"answer": doc.LiveAnswer, "rpcs": (INFERENCE + "ServerLive",)}
    ready: dict[str, Any] = {"answer": doc.ReadyAnswer}
    ready["rpcs"] = (INFERENCE + "ServerReady", HEALTH + "Check", HEALTH + "Watch")
    there = {"is_on_metrics_port": True}
    about = {"answer": doc.ServerDescription}
    trace, logging = _rpcs("TraceSetting"), _rpcs("LogSettings")
    return [
        _get("/v2/health/live", "open", "live", "Whether the server runs", **live, **there),
        _get(
            "/v2/health/ready", "open", "ready", "Whether all models can answer", **ready, **there
        ),
        _get("/metrics", "metrics", "metrics", "Prometheus metrics", media="text/plain", **there),
        _get(
            "/v2",
            "infer",
            "server_metadata",
            "Name, version and extensions of the server",
            **about,
            rpcs=_rpcs("ServerMetadata"),
        ),
        _get("/v2/", "infer", "server_metadata", "The same as /v2", **about),
        _get(
            "/v2/models/stats",
            "infer",
            "statistics",
            "Counts and times of requests, of all models",
            answer=doc.StatisticsAnswer,
        ),
        Route(BOTH, "/v2/trace/setting", "admin", "trace", "Trace settings", rpcs=trace),
        Route(BOTH, "/v2/logging", "admin", "logging", "Log settings", rpcs=logging),
    ]


def _of_repository() -> list[Route]:
    model = "/v2/repository/models/{name}"
    index, load, unload = (
        _rpcs(f"Repository{name}") for name in ("Index", "ModelLoad", "ModelUnload")
    )
    return [
        _post(
            "/v2/repository/index",
            "admin",
            "index",
            "Models of the repository and their state",
            body=IndexBody,
            answer=list[doc.IndexRow],
            rpcs=index,
        ),
        _post(model + "/load", "admin", "load", "Load or reload a model", body=LoadBody, rpcs=load),
        _post(model + "/unload", "admin", "unload", "Unload a model", body=UnloadBody, rpcs=unload),
    ]


def _of_shared_memory(kind: str) -> list[Route]:
    root, handler = f"/v2/{kind}sharedmemory", f"{kind}_shared_memory"
    what = f"{'CUDA' if kind == 'cuda' else kind} shared memory"
    status, register, unregister = (
        _rpcs(f"{kind.capitalize()}SharedMemory{name}")
        for name in ("Status", "Register", "Unregister")
    )
    region = root + "/region/{region}"
    return [
        _get(root + "/status", "admin", handler, f"All regions of {what}", rpcs=status),
        _get(region + "/status", "admin", handler, f"One region of {what}"),
        _post(region + "/register", "admin", handler, f"Register {what}", rpcs=register),
        _post(region + "/unregister", "admin", handler, f"Unregister one region of {what}"),
        _post(root + "/unregister", "admin", handler, f"Unregister all {what}", rpcs=unregister),
    ]


def _of_openai() -> list[Route]:
    completion = {"body": openai.CompletionBody, "answer": doc.TextAnswer}
    chat = {"body": openai.ChatBody, "answer": doc.TextAnswer}
    vectors = {"body": openai.EmbeddingsBody, "answer": doc.EmbeddingsList}
    tokens = {"body": openai.TokenizeBody, "answer": doc.TokenizeAnswer}
    text = {"body": openai.DetokenizeBody, "answer": doc.DetokenizeAnswer}
    one, some = {"answer": doc.OpenAiModel}, {"answer": doc.OpenAiModels}
    info = {"answer": dict[str, Any]}
    name = "openai"
    return [
        _post("/v1/completions", "infer", name, "Complete a prompt", **completion),
        _post("/v1/chat/completions", "infer", name, "Answer a chat", **chat),
        _post("/v1/embeddings", "infer", name, "Embed texts", **vectors),
        _get("/v1/models", "infer", name, "Models for text and embeddings", **some),
        # Model names may contain slashes.
        _get("/v1/models/{name:path}", "infer", name, "One model for text or embeddings", **one),
        _post("/tokenize", "infer", name, "Tokens of a text or chat", **tokens),
        _post("/detokenize", "infer", name, "Text of tokens", **text),
        _get("/tokenizer_info", "infer", name, "Special tokens and chat template", **info),
    ]


# The first matching row wins: literal segments go before parameters.
ROUTES: tuple[Route, ...] = (
    *_of_pages(),
    *_of_server(),
    *_of_models(),
    *_of_repository(),
    *_of_shared_memory("system"),
    *_of_shared_memory("cuda"),
    *_of_openai(),
)
RPC_ROUTES: Mapping[str, Route] = {rpc: route for route in ROUTES for rpc in route.rpcs}


def _by_num_segments() -> dict[int, list[Route]]:
    found: dict[int, list[Route]] = {}
    for route in ROUTES:
        if not route.takes_rest:
            found.setdefault(route.num_segments, []).append(route)
    return found


_BY_NUM_SEGMENTS = _by_num_segments()
_TAKING_REST = tuple(route for route in ROUTES if route.takes_rest)


def unsupported(handler: str) -> Unsupported:
    """Return the answer of a feature that Penstock does not have."""
    return Unsupported(f"{MISSING[handler]} not supported by this server")


def find(path: bytes) -> Match | None:
    """Return the row for a path in the form of `http_reader.MessageHead.path`, or None."""
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
