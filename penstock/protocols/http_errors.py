"""Errors over HTTP: v2's statuses in one table, and the form that a path answers in.

Paths of OpenAI's API answer in its form (`openai_errors`), all others in v2's.
"""

from __future__ import annotations

from penstock import errors
from penstock.errors import NotAllowed, PenstockError
from penstock.protocols import openai_errors
from penstock.protocols.http import Exchange

STATUS: dict[type[PenstockError], int] = {
    errors.InvalidRequest: 400,
    errors.TooLarge: 413,
    errors.NotFound: 404,
    errors.NotReady: 503,
    errors.Overloaded: 503,
    errors.QuotaExceeded: 429,
    errors.Quarantined: 422,
    errors.DeadlineExceeded: 504,
    errors.Cancelled: 499,
    errors.Unsupported: 501,
    errors.BackendFailed: 500,
    errors.StorageFull: 507,
    errors.NotAllowed: 403,
}


class WrongHead(Exception):
    """A message that HTTP itself refuses, with 404, 405 or 415."""

    def __init__(self, status: int, text: str, headers: bytes = b"") -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


Refusal = PenstockError | WrongHead


def status_of(error: Refusal) -> int:
    """Return the status of an error in v2."""
    if isinstance(error, WrongHead):
        return error.status
    if isinstance(error, NotAllowed) and error.needs_key:
        return 401
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def status_at(path: bytes, error: PenstockError) -> int:
    """Return the status in the protocol of this path."""
    return openai_errors.kind_of(error)[0] if openai_errors.is_openai(path) else status_of(error)


def reply_error(exchange: Exchange, error: Refusal) -> None:
    """Answer in the form of the protocol that the path belongs to."""
    is_openai = openai_errors.is_openai(exchange.head.path)
    if isinstance(error, WrongHead):
        if is_openai:
            openai_errors.reply_wrong_head(exchange, error.status, str(error), error.headers)
        else:
            exchange.reply_error(error.status, str(error), error.headers)
    elif is_openai:
        openai_errors.reply_error(exchange, error)
    else:
        headers = openai_errors.retry_after(error)
        if isinstance(error, NotAllowed) and error.needs_key:
            headers = b"WWW-Authenticate: Bearer\r\n"
        exchange.reply_error(status_of(error), str(error), headers)
