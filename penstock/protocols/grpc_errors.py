"""Errors over gRPC: one table of statuses. Used by the gRPC front, and by the core for its logs."""

from __future__ import annotations

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

# gRPC statuses. Overload is not RESOURCE_EXHAUSTED, which blames the caller: it exceeds its quota,
# or (answered by gRPC itself) sends a message that is too long. A full disk is gRPC's own example.
STATUS: dict[type[PenstockError], str] = {
    InvalidRequest: "INVALID_ARGUMENT",
    TooLarge: "INVALID_ARGUMENT",
    NotAllowed: "PERMISSION_DENIED",
    NotFound: "NOT_FOUND",
    NotReady: "UNAVAILABLE",
    Overloaded: "UNAVAILABLE",
    QuotaExceeded: "RESOURCE_EXHAUSTED",
    Quarantined: "FAILED_PRECONDITION",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Cancelled: "CANCELLED",
    Unsupported: "UNIMPLEMENTED",
    BackendFailed: "INTERNAL",
    StorageFull: "RESOURCE_EXHAUSTED",
}


def status_name(error: PenstockError) -> str:
    """Return an error's gRPC status name, for answers and the core's access log."""
    if isinstance(error, NotAllowed) and error.needs_key:
        return "UNAUTHENTICATED"
    return STATUS.get(type(error), "INTERNAL")
