"""Every HTTP route and every RPC in one table: methods, path, scope, handler, schemas. Pure.

The gate reads the scope of a row and the router calls the handler of the same row, so a request can
never be checked as one route and answered as another. A path without a row is not found; there is
no default scope. Core, shards and metrics port all look up paths here; `/openapi.json` is
made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.operate.rollout_state import RolloutState
from penstock.protocols.route import Body, Methods, Route, RouteTable, Scope
from penstock.serving.explain import Explanation
from penstock.wire import documented as doc
from penstock.wire import live
from penstock.wire import openai_prompts as openai
from penstock.wire import version_rows as rows
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_responses import ResponsesBody
from penstock.wire.openai_v1 import ChatBody

GET = ("GET", "HEAD")
POST = ("POST",)
BOTH = ("GET", "HEAD", "POST")
MODEL = "/v2/models/{name}"
VERSION = MODEL + "/versions/{version}"
INFERENCE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.{}.ServerReflection/ServerReflectionInfo"


def _get(path: str, scope: Scope, handler: str, summary: str, answer: object, *rpcs: str) -> Route:
    return Route(GET, path, scope, handler, summary, None, answer, rpcs=_paths(*rpcs))


def _asset(path: str, summary: str, media: str) -> Route:
    return Route(GET, path, "open", "asset", summary, media=media)


def _post(path: str, handler: str, summary: str, body: Body, answer: object, *rpcs: str) -> Route:
    return Route(POST, path, "infer", handler, summary, body, answer, rpcs=_paths(*rpcs))


def _admin(methods: Methods, path: str, handler: str, summary: str, *rpcs: str) -> Route:
    return Route(methods, path, "admin", handler, summary, rpcs=_paths(*rpcs))


def _paths(*rpcs: str) -> tuple[str, ...]:
    return tuple(name if name.startswith("/") else INFERENCE + name for name in rpcs)


# The server's own pages. They are static and open; data comes from the state route.
_START = _get("/", "open", "start_page", "Start page; links, for clients but browsers", doc.Links)
_PAGES = [
    replace(_START, media="text/html"),
    _asset("/docs", "Description of the API, to read", "text/html"),
    _get("/openapi.json", "open", "openapi", "Description of the API", JsonObject),
    _asset("/dashboard", "Live figures of models, and changes", "text/html"),
    _asset("/dashboard/common.js", "Script of all pages", "text/javascript"),
    _asset("/dashboard/app.js", "Script of the start page", "text/javascript"),
    _asset("/dashboard/charts.js", "Charts of the dashboard", "text/javascript"),
    _asset("/dashboard/versions.js", "Versions on the dashboard", "text/javascript"),
    _asset("/dashboard/live.js", "Script of the dashboard", "text/javascript"),
    _asset("/dashboard/live.css", "Style of the dashboard", "text/css"),
    _asset("/dashboard/docs.js", "Script of /docs", "text/javascript"),
    _asset("/dashboard/style.css", "Style of the pages", "text/css"),
    _get("/dashboard/state", "infer", "state", "Models, their state and example calls",
         doc.ServerState),
    Route(GET, "/dashboard/events", "metrics", "events", "Live figures, as a stream of events",
          media="text/event-stream"),
    Route(POST, "/dashboard/what-if", "metrics", "what_if", "Predicted latency at another rate",
          live.WhatIfBody, live.WhatIfAnswer),
]  # fmt: skip
_HEALTH = [
    _get("/v2/health/live", "open", "live", "Whether the server runs", doc.LiveAnswer,
         "ServerLive"),
    _get("/v2/health/ready", "open", "ready", "Whether all models can answer", doc.ReadyAnswer,
         "ServerReady", HEALTH + "Check", HEALTH + "Watch"),
    Route(GET, "/metrics", "metrics", "metrics", "Prometheus metrics", media="text/plain"),
]  # fmt: skip
_TRACE = Route(BOTH, "/v2/trace/setting", "admin", "trace", "Trace settings",
               doc.TraceSettingsBody, doc.TraceSettings)  # fmt: skip
_SERVER = [
    *(replace(route, is_on_metrics_port=True) for route in _HEALTH),
    _get("/v2", "infer", "server_metadata", "Name, version and extensions of the server",
         doc.ServerDescription, "ServerMetadata", REFLECTION.format("v1"),
         REFLECTION.format("v1alpha")),
    _get("/v2/", "infer", "server_metadata", "The same as /v2", doc.ServerDescription),
    _get("/v2/models/stats", "infer", "statistics", "Counts and times of requests, of all models",
         doc.StatisticsAnswer),
    replace(_TRACE, rpcs=_paths("TraceSetting")),
    Route(BOTH, "/v2/logging", "admin", "logging", "Log settings", doc.LogSettingsBody,
          doc.LogSettingsAnswer, rpcs=_paths("LogSettings")),
]  # fmt: skip
_EVENTS = _post(MODEL + "/generate_stream", "generate_stream",
                "Generate text, as a stream of events", doc.GenerateBody, None)  # fmt: skip
# The routes of a model; each exists also with a version.
_MODELS = [
    _post(MODEL + "/infer", "infer", "Run the model on tensors", doc.InferFields, doc.InferAnswer,
          "ModelInfer", "ModelStreamInfer"),
    _post(MODEL + "/generate", "generate", "Generate text", doc.GenerateBody, doc.GenerateAnswer),
    replace(_EVENTS, media="text/event-stream"),
    _get(MODEL, "infer", "metadata", "Inputs and outputs of the model", doc.ModelDescription,
         "ModelMetadata"),
    _get(MODEL + "/ready", "infer", "model_ready", "Whether the model can answer", doc.ReadyAnswer,
         "ModelReady"),
    _get(MODEL + "/config", "infer", "config", "Configuration of the model", JsonObject,
         "ModelConfig"),
    _get(MODEL + "/stats", "infer", "statistics", "Counts and times of requests",
         doc.StatisticsAnswer, "ModelStatistics"),
    _get(MODEL + "/explain", "metrics", "explain", "Why batches are as they are", Explanation),
    replace(_TRACE, path=MODEL + "/trace/setting", summary="Trace settings of the model"),
]  # fmt: skip
_REPOSITORY = [
    replace(
        _admin(POST, "/v2/repository/" + path, handler, summary, "Repository" + rpc),
        body=body,
        answer=answer,
    )
    for path, handler, summary, body, answer, rpc in (
        ("index", "index", "Models of the repository and their state", doc.IndexBody,
         list[doc.IndexRow], "Index"),
        ("models/{name}/load", "load", "Load or reload a model", doc.LoadBody, None, "ModelLoad"),
        ("models/{name}/unload", "unload", "Unload a model", doc.UnloadBody, None, "ModelUnload"),
    )
]  # fmt: skip
_IN_REPOSITORY = "/v2/repository/models/{name}/"
# Versions of a model on disk.
_VERSIONS = [
    replace(_admin(methods, _IN_REPOSITORY + path, handler, summary), body=body, answer=answer)
    for methods, path, handler, summary, body, answer in (
        (GET, "versions", "versions", "Versions of a model and their evidence", None,
         list[rows.VersionRow]),
        (GET, "history", "history", "What was done to the versions of a model", None,
         list[rows.HistoryEvent]),
        (GET, "diff/{a}/{b}", "diff", "How two versions differ", None, rows.VersionDiff),
        (POST, "promote", "promote", "Serve a version whose evidence is good", rows.PromoteBody,
         rows.HistoryEvent),
        (POST, "rollback", "rollback", "Serve the version from before the last promotion",
         rows.RollbackBody, rows.HistoryEvent),
        (GET, "rollout", "rollout", "How the rollout of a model stands", None, RolloutState),
        (POST, "verify", "verify", "Compare the versions of a model with their manifests", None,
         list[rows.VerifyRow]),
        (POST, "prune", "prune", "Remove old versions", rows.PruneBody, rows.PruneAnswer),
    )
]  # fmt: skip


def _shared_memory(kind: str, body: Body, row: object) -> list[Route]:
    root, handler = f"/v2/{kind}sharedmemory", f"{kind}_shared_memory_"
    rpc = f"{kind.capitalize()}SharedMemory"
    what = f"{'CUDA' if kind == 'cuda' else kind} shared memory"
    region = root + "/region/{region}"

    def route(methods: Methods, path: str, action: str, summary: str, *rpcs: str) -> Route:
        scope: Scope = "shared_memory"
        answer = row if action == "status" else None
        return Route(methods, path, scope, handler + action, summary, None, answer, rpcs=rpcs)

    registers = route(POST, region + "/register", "register", f"Register {what}")
    return [
        route(GET, root + "/status", "status", f"All regions of {what}", *_paths(rpc + "Status")),
        route(GET, region + "/status", "status", f"One region of {what}"),
        replace(registers, body=body, rpcs=_paths(rpc + "Register")),
        route(POST, region + "/unregister", "unregister", f"Unregister one region of {what}"),
        route(POST, root + "/unregister", "unregister", f"Unregister all {what}",
              *_paths(rpc + "Unregister")),
    ]  # fmt: skip


_OPENAI = [
    _post("/v1/completions", "openai", "Complete a prompt", openai.CompletionBody, doc.TextAnswer),
    _post("/v1/chat/completions", "openai", "Answer a chat", ChatBody, doc.TextAnswer),
    _post("/v1/responses", "openai", "Answer as a response", ResponsesBody, doc.ResponseAnswer),
    _post("/v1/embeddings", "openai", "Embed texts", openai.EmbeddingsBody, doc.EmbeddingsList),
    _get("/v1/models", "infer", "openai", "Models for text and embeddings", doc.OpenAiModels),
    # Model names may contain slashes.
    _get("/v1/models/{name:path}", "infer", "openai", "One model for text or embeddings",
         doc.OpenAiModel),
    _post("/tokenize", "openai", "Tokens of a text or chat", openai.TokenizeBody,
          doc.TokenizeAnswer),
    _post("/detokenize", "openai", "Text of tokens", openai.DetokenizeBody, doc.DetokenizeAnswer),
    _get("/tokenizer_info", "infer", "openai", "Special tokens and chat template", JsonObject),
]  # fmt: skip
ROUTES: tuple[Route, ...] = (
    *_PAGES,
    *_SERVER,
    *_MODELS,
    *(replace(row, path=row.path.replace(MODEL, VERSION), rpcs=()) for row in _MODELS),
    *_REPOSITORY,
    *_VERSIONS,
    *_shared_memory("system", doc.SystemRegionBody, list[doc.SystemRegionRow]),
    *_shared_memory("cuda", doc.CudaRegionBody, list[doc.CudaRegionRow]),
    *_OPENAI,
)
find = RouteTable(ROUTES).find
RPC_ROUTES: Mapping[str, Route] = {rpc: route for route in ROUTES for rpc in route.rpcs}
