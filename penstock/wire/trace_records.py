"""What a traced request leaves: its record, and the settings by which requests are sampled. Pure.

Shards send records to the core, and the core publishes settings to shards; both travel in frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
UNLIMITED = -1
_HEX = frozenset(b"0123456789abcdef")


class TraceSetting(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How requests are sampled. `levels` is empty for OFF; one in `rate` requests is traced, none
    with 0; `count` is how many may follow, UNLIMITED without a limit."""

    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = UNLIMITED
    # Traces of one file; 0: all go to the same.
    log_frequency: int = 0

    @property
    def is_sampling(self) -> bool:
        return bool(self.levels) and self.rate > 0 and self.count != 0


class TraceTable(msgspec.Struct, array_like=True, frozen=True):
    """The settings of all models: their own by name, and those of all others."""

    common: TraceSetting = TraceSetting()
    models: dict[str, TraceSetting] = {}
    # Whether a request that belongs to a sampled trace of its client is traced in any case.
    follows_clients: bool = False

    @property
    def is_on(self) -> bool:
        """Whether any request may be traced."""
        settings = (self.common, *self.models.values())
        if self.follows_clients:
            return any(each.levels for each in settings)
        return any(each.is_sampling for each in settings)


class TracedTensor(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of a traced request; `data` are its first elements as text."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: str


class TracedStep(msgspec.Struct, array_like=True, frozen=True):
    """One model's work on a request, or one stage's, in seconds of the monotonic clock. `steps` are
    the members of an ensemble, or the stages of a pipeline, that did it."""

    name: str
    queued: float
    dispatched: float
    # Reading inputs, running the model and writing outputs, one after the other.
    compute_s: tuple[float, float, float]
    ended: float
    # Of the model; empty for a stage.
    version: str = ""
    steps: tuple[TracedStep, ...] = ()


class TraceRecord(msgspec.Struct, array_like=True):
    """A traced request that has ended. `scope` is the model whose settings sampled it, or empty.
    Moments are seconds of the monotonic clock; `sending` to `sent` is the answer's way out."""

    scope: str
    protocol: str
    model: str
    version: str
    request_id: str
    received: float
    # The request as a whole: its queueing and computing.
    whole: TracedStep
    sending: float
    sent: float
    # The name of the error that it ended with; empty for an answer.
    error: str = ""
    tensors: tuple[TracedTensor, ...] = ()
    # Of the client's trace, as hexadecimal digits; empty without one.
    trace_id: str = ""
    parent_id: str = ""
    has_timestamps: bool = True


@dataclass(frozen=True, slots=True)
class ParentSpan:
    """The span of the client that a request belongs to."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parse_traceparent(header: bytes) -> ParentSpan | None:
    """Read the header of https://www.w3.org/TR/trace-context; None if it is invalid, which
    restarts the trace. Later versions may append fields."""
    parts = header.strip().split(b"-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2]:
        return None
    version, trace_id, span_id, flags = parts[:4]
    if not all(_HEX.issuperset(part) for part in parts[:4]) or version == b"ff":
        return None
    if version == b"00" and len(parts) > 4:
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return ParentSpan(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1))
