"""The description of the HTTP API, in OpenAPI 3.1, made from the route table.

Every row is one path; its request and answer are the types of its row.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import msgspec

import penstock
from penstock.protocols.http_errors import is_openai
from penstock.protocols.route import Route
from penstock.protocols.route_table import ROUTES
from penstock.wire.documented import ErrorAnswer, OpenAiErrorAnswer
from penstock.wire.json_errors import JsonObject

JSON, BINARY, EVENTS = "application/json", "application/octet-stream", "text/event-stream"
# The schema of each type.
Schemas: TypeAlias = dict[object, JsonObject]
INTRODUCTION = (
    "Routes of this server: the v2 inference protocol (KServe, Triton), OpenAI's API, "
    "administration and metrics."
)
TAGS = {
    "inference": "Run models: the v2 inference protocol",
    "text": "Language models and embeddings: OpenAI's API",
    "server": "Health, metadata and metrics",
    "administration": "Models and their versions, and settings",
    "shared memory": "Memory that clients on this machine register",
    "pages": "Pages of this server, and what they read",
}
STATUSES = {
    400: "The request is invalid; the error says why",
    401: "An API key is needed, or the key is not known",
    403: "The API key lacks the scope, or the host or operation is not allowed",
    404: "There is no such model",
    405: "The path does not take this method",
    409: "The model's code says that something exists already",
    413: "The body is too large",
    415: "The content encoding is not supported",
    422: "The request made a worker crash before and is not run again",
    429: "Too many requests; Retry-After says when to try again",
    500: "The model failed",
    501: "The server does not have this feature",
    503: "Not ready, or overloaded",
    504: "The deadline passed",
    507: "The disk is full",
}
# Statuses of every route, then in addition by handler.
ALWAYS = (400, 403, 405)
RUNS_MODELS = (404, 409, 413, 415, 422, 429, 500, 501, 503, 504)
OF_HANDLERS = {
    **dict.fromkeys(("infer", "generate", "generate_stream"), RUNS_MODELS),
    **dict.fromkeys(("metadata", "model_ready", "config", "statistics", "explain"), (404, 503)),
    "logging": (413, 501),
    # Of shared memory, which may not be allowed; and there may be no GPU.
    **{route.handler: (413, 501) for route in ROUTES if route.scope == "shared_memory"},
    "trace": (404, 413, 501, 503),
    "ready": (503,),
    "events": (503,),
    "what_if": (404, 413, 500, 501, 503),
    "index": (413,),
    "load": (404, 413, 501, 507),
    "unload": (413,),
    **dict.fromkeys(("versions", "history", "diff", "verify", "rollout"), (404, 413, 503)),
    **dict.fromkeys(("promote", "rollback", "prune"), (404, 413, 501, 503, 507)),
}
KEY = "apiKey"
BEARER = "bearer"
REF = "#/components/schemas/{name}"
# How the names of error responses begin.
_V2, _OPENAI = "Error", "OpenAiError"


@cache
def describe(needs_key: bool) -> JsonObject:
    """Return the document; `needs_key`: routes that are not open need an API key."""
    schemas = [schema for route in ROUTES for schema in (route.body, route.answer) if schema]
    types = list(dict.fromkeys([*schemas, ErrorAnswer, OpenAiErrorAnswer]))
    found, components = msgspec.json.schema_components(types, ref_template=REF)
    by_type = dict(zip(types, found, strict=True))
    version = penstock.__version__
    document: JsonObject = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version, "description": INTRODUCTION},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": {path_of(route): _path_item(route, by_type, needs_key) for route in ROUTES},
        "components": {"schemas": components, "responses": _error_responses(by_type)},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {
            BEARER: {"type": "http", "scheme": "bearer"},
            KEY: {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
    return document


@cache
def describe_json(needs_key: bool) -> bytes:
    return msgspec.json.encode(describe(needs_key))


def path_of(route: Route) -> str:
    return route.path.replace(":path}", "}")


def tag_of(route: Route) -> str:
    if route.handler in ("start_page", "asset", "openapi", "state", "events", "what_if"):
        return "pages"
    if route.scope == "admin":
        return "administration"
    if route.scope == "shared_memory":
        return "shared memory"
    if route.handler == "openai":
        return "text"
    has_model = "{name}" in route.path
    return "inference" if has_model else "server"


def _path_item(route: Route, by_type: Schemas, needs_key: bool) -> JsonObject:
    item: JsonObject = {
        method.lower(): _operation(route, method, by_type, needs_key)
        for method in route.methods
        if method != "HEAD"
    }
    schema = {"type": "string", "minLength": 1}
    if names := [_word(part) for part in route.path.split("/") if "{" in part]:
        item["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": schema} for name in names
        ]
    return item


def _operation(route: Route, method: str, by_type: Schemas, needs_key: bool) -> JsonObject:
    operation: JsonObject = {
        "operationId": _operation_id(route, method),
        "summary": route.summary,
        "tags": [tag_of(route)],
        "x-scope": route.scope,
        "responses": _responses(route, by_type),
    }
    if needs_key and route.scope != "open":
        operation["security"] = [{BEARER: []}, {KEY: []}]
    if route.body is not None and method != "GET":
        content: JsonObject = {JSON: {"schema": by_type[route.body]}}
        if route.handler == "infer":
            content[BINARY] = {}
        is_optional = route.handler in ("index", "load", "unload", "rollback", "trace", "logging")
        operation["requestBody"] = {"required": not is_optional, "content": content}
    return operation


def _operation_id(route: Route, method: str) -> str:
    words = map(_word, route.path.split("/"))
    name = "_".join(word.replace(".", "_") for word in words if word) or "start"
    # "/v2" and "/v2/" are two rows.
    end = "_root" if route.path.endswith("/") and len(route.path) > 1 else ""
    return f"{method.lower()}_{name}{end}"


def _word(segment: str) -> str:
    return segment.strip("{}").removesuffix(":path")


def _responses(route: Route, by_type: Schemas) -> JsonObject:
    responses: JsonObject = {"200": {"description": "The answer"}}
    if content := _content(route, by_type):
        responses["200"]["content"] = content
    form = _OPENAI if is_openai(route.path.encode()) else _V2
    for status in _errors(route):
        responses[str(status)] = {"$ref": f"#/components/responses/{form}{status}"}
    return responses


def _error_responses(by_type: Schemas) -> JsonObject:
    error = by_type[ErrorAnswer]
    # Bytes that are not an HTTP message are refused before the path is known.
    either = {"anyOf": [by_type[OpenAiErrorAnswer], error]}
    return {
        f"{form}{status}": {"description": text, "content": {JSON: {"schema": schema}}}
        for form, schema in ((_V2, error), (_OPENAI, either))
        for status, text in STATUSES.items()
    }


def _content(route: Route, by_type: Schemas) -> JsonObject:
    content: JsonObject = {}
    if route.answer is not None:
        content[JSON] = {"schema": by_type[route.answer]}
    if route.media:
        content[route.media] = {} if route.media == EVENTS else {"schema": {"type": "string"}}
    if route.handler == "infer":
        content[BINARY] = {}
    if route.path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        content[EVENTS] = {}
    return content


def _errors(route: Route) -> list[int]:
    found = {*ALWAYS, *OF_HANDLERS.get(route.handler, ())}
    if route.scope != "open":
        found.add(401)
    if route.handler == "openai":
        found.update(RUNS_MODELS if route.body is not None else (404, 503))
    return sorted(found)
