"""Errors over gRPC: one table of statuses. Used by the gRPC front, and by the core for its logs."""

from __future__ import annotations

from penstock import errors
from penstock.errors import NotAllowed, PenstockError

# gRPC statuses. Overload is not RESOURCE_EXHAUSTED, which blames the caller: it exceeds its quota,
# or (answered by gRPC itself) sends a message that is too long. A full disk is gRPC's own example.
STATUS: dict[type[PenstockError], str] = {
    errors.InvalidRequest: "INVALID_ARGUMENT",
    errors.TooLarge: "INVALID_ARGUMENT",
    errors.NotAllowed: "PERMISSION_DENIED",
    errors.NotFound: "NOT_FOUND",
    errors.NotReady: "UNAVAILABLE",
    errors.Overloaded: "UNAVAILABLE",
    errors.QuotaExceeded: "RESOURCE_EXHAUSTED",
    errors.Quarantined: "FAILED_PRECONDITION",
    errors.DeadlineExceeded: "DEADLINE_EXCEEDED",
    errors.Cancelled: "CANCELLED",
    errors.Unsupported: "UNIMPLEMENTED",
    errors.BackendFailed: "INTERNAL",
    errors.StorageFull: "RESOURCE_EXHAUSTED",
}


def status_name(error: PenstockError) -> str:
    """Return an error's gRPC status name, for answers and the core's access log."""
    if isinstance(error, NotAllowed) and error.needs_key:
        return "UNAUTHENTICATED"
    return STATUS.get(type(error), "INTERNAL")
