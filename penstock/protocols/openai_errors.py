"""Errors in OpenAI's form: a status and a type."""

from __future__ import annotations

from math import ceil

from penstock.errors import (
    BackendFailed,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    PenstockError,
    Quarantined,
    QuotaExceeded,
    StorageFull,
    TooLarge,
    Unsupported,
)
from penstock.protocols.http import Exchange
from penstock.wire import openai_v1

KINDS: dict[type[PenstockError], tuple[int, str]] = {
    InvalidRequest: (400, "invalid_request_error"),
    TooLarge: (413, "invalid_request_error"),
    NotFound: (404, "not_found_error"),
    NotAllowed: (403, "permission_error"),
    Unsupported: (501, "invalid_request_error"),
    Overloaded: (429, "rate_limit_error"),
    QuotaExceeded: (429, "rate_limit_error"),
    Quarantined: (422, "invalid_request_error"),
    NotReady: (503, "server_error"),
    DeadlineExceeded: (504, "server_error"),
    Cancelled: (499, "server_error"),
    BackendFailed: (500, "server_error"),
    StorageFull: (507, "server_error"),
}
# vLLM's paths without a version.
OTHERS = (b"/tokenize", b"/detokenize", b"/tokenizer_info")
_JSON = b"Content-Type: application/json\r\n"


def is_openai(path: bytes) -> bool:
    return path.startswith(b"/v1/") or path in OTHERS


def kind_of(error: PenstockError) -> tuple[int, str]:
    if isinstance(error, NotAllowed) and error.needs_key:
        return 401, "authentication_error"
    return next(
        (KINDS[kind] for kind in type(error).__mro__ if kind in KINDS), (500, "server_error")
    )


def reply_error(exchange: Exchange, error: PenstockError) -> None:
    status, kind = kind_of(error)
    headers = _JSON
    headers += retry_after(error)
    if status == 401:
        headers += b"WWW-Authenticate: Bearer\r\n"
    param, code = place_of(error)
    exchange.reply(status, headers, (openai_v1.error(str(error), kind, param, code),))


def reply_wrong_head(exchange: Exchange, status: int, text: str, headers: bytes) -> None:
    """Answer a path that does not exist, or a method that it does not accept."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    exchange.reply(status, _JSON + headers, (openai_v1.error(text, kind),))


def retry_after(error: PenstockError) -> bytes:
    """Return the Retry-After header; empty if the delay is unknown."""
    delay_s = error.retry_after_s if isinstance(error, Overloaded | NotReady) else None
    return b"" if delay_s is None else b"Retry-After: %d\r\n" % max(1, ceil(delay_s))


def place_of(error: PenstockError) -> tuple[str | None, str | None]:
    """Return the invalid field, and OpenAI's code for it."""
    match error:
        case InvalidRequest():
            return error.field, error.code
        case NotFound():
            return "model", "model_not_found"
        case NotAllowed(needs_key=True):
            return None, "invalid_api_key"
    return None, None


def error_event(error: PenstockError) -> bytes:
    """Encode the event that ends a stream which cannot be completed."""
    _, kind = kind_of(error)
    return b"data: " + openai_v1.error(str(error), kind, *place_of(error)) + b"\n\n"


def reply_method(exchange: Exchange, allowed: bytes) -> None:
    text = f"{exchange.head.path.decode('latin-1')} takes {allowed.decode()}"
    body = openai_v1.error(text, "invalid_request_error")
    exchange.reply(405, _JSON + b"Allow: " + allowed + b"\r\n", (body,))
