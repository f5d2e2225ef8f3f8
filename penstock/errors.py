"""Everything that can go wrong, by whose fault it is.

    PenstockError
    ├── InvalidRequest     the client sent something that cannot be run
    ├── TooLarge           ... and it is the size that is wrong
    ├── NotFound           no such model, version or route
    ├── NotAllowed         the caller may not do this, or nobody may here
    ├── NotReady           the thing exists and cannot answer now
    ├── Overloaded         refused to keep the promise made to others
    │   └── QuotaExceeded  ... because this client's API key sends more than it may
    ├── Quarantined        the request, or its API key, killed workers before
    ├── DeadlineExceeded   the request's own time ran out
    ├── Cancelled          the client went away
    ├── Unsupported        a known feature that this server does not have
    ├── BackendFailed      the model itself failed
    └── ConfigError        the operator's files are wrong (all problems at once)
        └── CommandLineError   the flags are wrong

No protocol word appears here: each protocol has one table from these classes to its statuses.
"""

from collections.abc import Sequence


class PenstockError(Exception):
    """Base of all errors whose text may be shown to whoever asked. `reason` is what a request that
    is refused with it counts as."""

    reason = "other"


class InvalidRequest(PenstockError):
    reason = "invalid"


class TooLarge(InvalidRequest):
    reason = "too_large"


class NotFound(PenstockError):
    pass


class NotAllowed(PenstockError):
    """`needs_key` when a valid key might change it."""

    def __init__(self, message: str, needs_key: bool = False) -> None:
        super().__init__(message)
        self.needs_key = needs_key


class NotReady(PenstockError):
    """`retry_after_s` is when it may be ready, where that is known."""

    reason = "not_ready"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(PenstockError):
    """`retry_after_s` is when asking again may make sense."""

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


class BackendFailed(PenstockError):
    pass


class ConfigError(PenstockError):
    """Carries every problem found, each starting with the path of what is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(printable(problem) for problem in problems)
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


def describe_error(error: BaseException) -> str:
    """Return the type and text of an exception that a model's code raised."""
    text = error_text(error)
    if isinstance(error, SystemExit):
        return f"the model's code ended the process: sys.exit({text})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
