"""All errors, by cause.

    PenstockError
    ├── InvalidRequest     the client sent something that cannot be run
    │   └── TooLarge       ... because it is too large
    ├── NotFound           no such model, version or route
    ├── NotAllowed         the caller may not do this, or it is disabled on this server
    ├── NotReady           it exists but cannot answer now
    ├── Overloaded         refused because of load
    │   └── QuotaExceeded  ... because this client's API key exceeds its quota
    ├── Quarantined        the request, or its API key, crashed workers before
    ├── DeadlineExceeded   the request's own deadline passed
    ├── Cancelled          the client disconnected
    ├── Unsupported        a known feature that this server does not have
    ├── BackendFailed      the model itself failed
    │   ├── UnknownFailure ... and says that it does not know why
    │   ├── PromptsFailed  ... for some of many prompts; has the other answers
    │   └── AlreadyExists  ... because what was to be made is there
    ├── StorageFull        a file system is full
    └── ConfigError        the operator's files are wrong (all problems at once)
        └── CommandLineError   the flags are wrong

Knows no protocol: `wire.statuses` has the status of each class in every protocol.
"""

from collections.abc import Mapping, Sequence

SHUTTING_DOWN = "the server is shutting down"


class PenstockError(Exception):
    """Base of all errors whose text may be shown to the client. `reason` is the label under which a
    refused request is counted."""

    reason = "other"


class InvalidRequest(PenstockError):
    """`field` is the invalid field of the request and `code` one word for the problem, if known."""

    reason = "invalid"

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class TooLarge(InvalidRequest):
    reason = "too_large"


class NotFound(PenstockError):
    pass


class NotAllowed(PenstockError):
    """`needs_key`: a valid key might allow it."""

    def __init__(self, message: str, needs_key: bool = False) -> None:
        super().__init__(message)
        self.needs_key = needs_key


class NotReady(PenstockError):
    """`retry_after_s` is when it may be ready, if known."""

    reason = "not_ready"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(PenstockError):
    """`retry_after_s` is when a retry may succeed."""

    def __init__(
        self, message: str, retry_after_s: float = 1.0, reason: str = "queue_full"
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class QuotaExceeded(Overloaded):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s, reason="quota")


class Quarantined(PenstockError):
    reason = "quarantined"


class DeadlineExceeded(PenstockError):
    pass


class Cancelled(PenstockError):
    pass


class Unsupported(PenstockError):
    reason = "unsupported"


# In the message of a BackendFailed: no batch was run.
CANNOT_LOAD = "cannot load the model"


class BackendFailed(PenstockError):
    pass


class UnknownFailure(BackendFailed):
    """TRITONSERVER_ERROR_UNKNOWN of a model."""


class PromptsFailed(BackendFailed):
    """Some of many prompts have no answer. `texts` has None for them, `errors` says why."""

    def __init__(self, texts: Sequence[str | None], errors: Mapping[int, PenstockError]) -> None:
        self.texts, self.errors = texts, errors
        first = min(errors)
        text = f"{len(errors)} of {len(texts)} prompts failed; prompts[{first}]: {errors[first]}"
        super().__init__(text)


class AlreadyExists(BackendFailed):
    """TRITONSERVER_ERROR_ALREADY_EXISTS of a model."""


class StorageFull(PenstockError):
    """Partial writes are removed; the same call works once there is space."""


class ConfigError(PenstockError):
    """Holds every problem found, each starting with the path of its cause. A text is one."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        found = [problems] if isinstance(problems, str) else problems
        self.problems = tuple(map(printable, found))
        super().__init__("; ".join(self.problems))


class CommandLineError(ConfigError):
    """The command line itself is wrong: a malformed value, a missing flag, a contradiction."""


def printable(text: str) -> str:
    """Escape lone surrogates: UTF-8, and with it every protocol, has no bytes for them."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return the text of an exception. Never fails, whatever the class of the exception does."""
    try:
        return printable(str(error))
    except BaseException as failure:  # `__str__` of a model's own exception may raise anything.
        return f"<no text: __str__ raised {type(failure).__name__}>"


def first_line(error: BaseException) -> str:
    text = error_text(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def describe_error(error: BaseException) -> str:
    """Return the type and text of an exception that a model's code raised."""
    text = error_text(error)
    if isinstance(error, SystemExit):
        return f"the model's code ended the process: sys.exit({text})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
