"""Errors on the wire: one table of statuses, by kind and protocol, and their JSON. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock import errors
from penstock.errors import InvalidRequest, NotAllowed, NotFound, PenstockError

# Characters of an error, which may quote the request.
MAX_ERROR_CHARS = 1000
_encode = msgspec.json.Encoder().encode


class Status(NamedTuple):
    """The status in v2 over HTTP, status and type in OpenAI's API, and the status in gRPC."""

    http: int
    openai: int
    openai_type: str
    grpc: str


# In gRPC, overload is not RESOURCE_EXHAUSTED, which blames the caller: it exceeds its quota, or
# (answered by gRPC itself) sends a message that is too long. A full disk is gRPC's own example.
STATUSES: dict[type[PenstockError], Status] = {
    errors.InvalidRequest: Status(400, 400, "invalid_request_error", "INVALID_ARGUMENT"),
    errors.TooLarge: Status(413, 413, "invalid_request_error", "INVALID_ARGUMENT"),
    errors.NotAllowed: Status(403, 403, "permission_error", "PERMISSION_DENIED"),
    errors.NotFound: Status(404, 404, "not_found_error", "NOT_FOUND"),
    errors.NotReady: Status(503, 503, "server_error", "UNAVAILABLE"),
    errors.Overloaded: Status(503, 429, "rate_limit_error", "UNAVAILABLE"),
    errors.QuotaExceeded: Status(429, 429, "rate_limit_error", "RESOURCE_EXHAUSTED"),
    errors.Quarantined: Status(422, 422, "invalid_request_error", "FAILED_PRECONDITION"),
    errors.DeadlineExceeded: Status(504, 504, "server_error", "DEADLINE_EXCEEDED"),
    errors.Cancelled: Status(499, 499, "server_error", "CANCELLED"),
    errors.Unsupported: Status(501, 501, "invalid_request_error", "UNIMPLEMENTED"),
    errors.BackendFailed: Status(500, 500, "server_error", "INTERNAL"),
    errors.UnknownFailure: Status(500, 500, "server_error", "UNKNOWN"),
    errors.AlreadyExists: Status(409, 409, "invalid_request_error", "ALREADY_EXISTS"),
    errors.StorageFull: Status(507, 507, "server_error", "RESOURCE_EXHAUSTED"),
}
# Classes by the names that frames have for them.
KINDS = {kind.__name__: kind for kind in STATUSES}
NEEDS_KEY = Status(401, 401, "authentication_error", "UNAUTHENTICATED")


def status_of(error: PenstockError) -> Status:
    if isinstance(error, NotAllowed) and error.needs_key:
        return NEEDS_KEY
    kinds = [kind for kind in type(error).__mro__ if kind in STATUSES]
    return STATUSES[kinds[0] if kinds else errors.BackendFailed]


def make_error(kind: str, text: str) -> PenstockError:
    """Return the error of a frame; BackendFailed without a class, or with one that is not known."""
    return KINDS.get(kind, errors.BackendFailed)(text)


def encode_error(text: str) -> bytes:
    """Encode an error in v2's form."""
    return _encode({"error": text})


def openai_error(text: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[:MAX_ERROR_CHARS]}…"
    return _encode({"error": {"message": text, "type": kind, "param": param, "code": code}})


def encode_openai_error(failure: PenstockError) -> bytes:
    """Encode an error with the invalid field and OpenAI's code for it."""
    param: str | None = None
    code: str | None = None
    match failure:
        case InvalidRequest():
            param, code = failure.field, failure.code
        case NotFound():
            param, code = "model", "model_not_found"
        case NotAllowed(needs_key=True):
            code = "invalid_api_key"
    return openai_error(str(failure), status_of(failure).openai_type, param, code)
