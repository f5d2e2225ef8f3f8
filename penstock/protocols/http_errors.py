"""Errors over HTTP: the status and the form that a path answers in.

Paths of OpenAI's API answer in its form, all others in v2's.
"""

from __future__ import annotations

from math import ceil

from penstock.errors import NotReady, Overloaded, PenstockError
from penstock.protocols.http import JSON, Exchange
from penstock.wire.statuses import (
    NEEDS_KEY,
    encode_error,
    encode_openai_error,
    openai_error,
    status_of,
)

# vLLM's paths without a version.
OTHERS = (b"/tokenize", b"/detokenize", b"/tokenizer_info")


class WrongHead(Exception):
    """A message that HTTP itself refuses, with 404, 405 or 415."""

    def __init__(self, status: int, text: str, headers: bytes = b"") -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


Refusal = PenstockError | WrongHead


def is_openai(path: bytes) -> bool:
    return path.startswith(b"/v1/") or path in OTHERS


def http_status(error: Refusal, path: bytes = b"") -> int:
    """Return the status of an error in the protocol of this path; in v2 without a path."""
    if isinstance(error, WrongHead):
        return error.status
    status = status_of(error)
    return status.openai if is_openai(path) else status.http


def logged_status(protocol: str, error: object, path: bytes = b"") -> int | str:
    """Return the status for logs in `protocol`; `error` may also be an answer, or None."""
    if not isinstance(error, PenstockError | WrongHead):
        return 200 if protocol == "http" else "OK"
    if protocol == "grpc" and isinstance(error, PenstockError):
        return status_of(error).grpc
    return http_status(error, path)


def reply_error(exchange: Exchange, error: Refusal) -> None:
    path = exchange.head.path
    headers = error.headers if isinstance(error, WrongHead) else _headers(error)
    exchange.reply(http_status(error, path), JSON + headers, (_encode(error, path),))


def _encode(error: Refusal, path: bytes) -> bytes:
    if not is_openai(path):
        return encode_error(str(error))
    if isinstance(error, WrongHead):
        kind = "not_found_error" if error.status == 404 else "invalid_request_error"
        return openai_error(str(error), kind)
    return encode_openai_error(error)


def _headers(error: PenstockError) -> bytes:
    if status_of(error) is NEEDS_KEY:
        return b"WWW-Authenticate: Bearer\r\n"
    delay_s = error.retry_after_s if isinstance(error, Overloaded | NotReady) else None
    return b"" if delay_s is None else b"Retry-After: %d\r\n" % max(1, ceil(delay_s))
