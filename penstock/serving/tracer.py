"""Traces a sample of the requests of one process, as the published settings say.

A sampled request gets a sink that notes when it ends and hands its record on: in the core to
`traces`, in a shard to the core. Runs on the event loop and never waits. A protocol asks `is_on`
before it submits a request; that is all that tracing costs while it is off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.types import ReplySink, Request, Response, Tensor, Timings, to_array
from penstock.wire.trace_records import (
    TENSORS,
    TIMESTAMPS,
    ParentSpan,
    TracedStep,
    TracedTensor,
    TraceRecord,
    TraceSetting,
    TraceTable,
    parse_traceparent,
)

# Tensors of a request in a trace, and elements and characters of each; encoding more would delay
# other requests, and a record must fit a frame to the core.
MAX_TENSORS = 16
MAX_ELEMENTS = 256
MAX_CHARACTERS = 4096
# Characters of a name or an element, and dimensions.
MAX_TEXT = 200
MAX_DIMENSIONS = 32
QUEUE_INPUT, BACKEND_OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"


@dataclass(slots=True, eq=False)
class TraceSampler:
    """Picks one in `rate` requests of a model, or of all that have no settings of their own."""

    scope: str
    setting: TraceSetting
    # Requests until the next one that is traced.
    _left: int = 1

    def is_next(self) -> bool:
        setting = self.setting
        if not setting.is_sampling:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._left = setting.rate
        return True


@dataclass(eq=False)
class Tracer:
    """`send` takes the records."""

    send: Callable[[TraceRecord], None] = lambda record: None
    clock: Callable[[], float] = time.monotonic
    is_on: bool = False
    table: TraceTable = field(default_factory=TraceTable)
    _samplers: dict[str, TraceSampler] = field(default_factory=dict)
    _common: TraceSampler = field(default_factory=lambda: TraceSampler("", TraceSetting()))

    def use(self, table: TraceTable) -> None:
        """Sample by these settings from now on. A changed rate begins with the next request."""
        if table == self.table:
            return
        self.table = table
        old = self._samplers
        self._samplers = {
            name: _renewed(old.get(name), name, setting) for name, setting in table.models.items()
        }
        self._common = _renewed(self._common, "", table.common)
        self.is_on = table.is_on

    def see(
        self, request: Request, config: ModelConfig, headers: Mapping[bytes, bytes], protocol: str
    ) -> None:
        """Trace the request if it is in the sample. Call it before the request is submitted."""
        sampler = self._samplers.get(config.name, self._common)
        parent = None
        if self.table.follows_clients and (given := headers.get(b"traceparent")) is not None:
            parent = parse_traceparent(given)
        if parent is None:
            if not sampler.is_next():
                return
        elif not parent.is_sampled or not sampler.setting.levels:
            return
        levels = sampler.setting.levels
        request.steps = []
        call = TracedCall(sampler.scope, levels, config, protocol, parent)
        request.sink = TraceSink(request.sink, self, call)
        if TENSORS in levels:
            call.tensors += traced_tensors(QUEUE_INPUT, request.inputs)


@dataclass(slots=True, eq=False)
class TracedCall:
    """What is known of a traced request before it is answered."""

    scope: str
    levels: Sequence[str]
    config: ModelConfig
    protocol: str
    parent: ParentSpan | None
    tensors: list[TracedTensor] = field(default_factory=list)


def _renewed(sampler: TraceSampler | None, scope: str, setting: TraceSetting) -> TraceSampler:
    """Return a sampler with these settings that goes on counting, unless the rate is another."""
    if sampler is None or sampler.setting.rate != setting.rate:
        return TraceSampler(scope, setting)
    sampler.setting = setting
    return sampler


class TraceSink:
    """The sink of a traced request: passes its answers on, and makes its record at the end."""

    __slots__ = ("_call", "_inner", "_tracer")

    def __init__(self, inner: ReplySink, tracer: Tracer, call: TracedCall) -> None:
        self._inner = inner
        self._tracer = tracer
        self._call = call

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        call, sending = self._call, self._tracer.clock()
        if TENSORS in call.levels and isinstance(answer, Response):
            call.tensors += traced_tensors(BACKEND_OUTPUT, answer.outputs)
        try:
            self._inner.respond(request, answer, final)
        finally:
            if final:
                self._tracer.send(self._record(request, answer, sending))

    def _record(
        self, request: Request, answer: Response | PenstockError, sending: float
    ) -> TraceRecord:
        call, timings = self._call, request.timings
        config, parent = call.config, call.parent
        return TraceRecord(
            call.scope,
            call.protocol,
            config.name,
            config.version,
            request.id[:MAX_TEXT],
            timings.received,
            step_of(config.name, timings, config.version, request.steps or ()),
            sending,
            self._tracer.clock(),
            error=type(answer).__name__ if isinstance(answer, PenstockError) else "",
            tensors=tuple(call.tensors),
            trace_id="" if parent is None else parent.trace_id,
            parent_id="" if parent is None else parent.span_id,
            has_timestamps=TIMESTAMPS in call.levels,
        )


def step_of(
    name: str, timings: Timings, version: str = "", steps: Sequence[TracedStep] = ()
) -> TracedStep:
    queued, dispatched, ended = timings.queued, timings.dispatched, timings.completed
    return TracedStep(name, queued, dispatched, timings.compute_s, ended, version, tuple(steps))


def member_step(config: ModelConfig, request: Request, began: float, now: float) -> TracedStep:
    """Return the step of an ensemble's member; one that refused its request queued nothing."""
    step = step_of(config.name, request.timings, config.version, request.steps or ())
    if step.queued and step.ended:
        return step
    return replace(step, queued=step.queued or began, ended=step.ended or now)


def traced_tensors(activity: str, tensors: Sequence[Tensor]) -> list[TracedTensor]:
    return [
        TracedTensor(
            activity,
            each.name[:MAX_TEXT],
            each.datatype[:MAX_TEXT],
            tuple(each.shape[:MAX_DIMENSIONS]),
            _text(each)[:MAX_CHARACTERS],
        )
        for each in tensors[:MAX_TENSORS]
    ]


def _text(tensor: Tensor) -> str:
    """Return the first elements as text; empty for tensors in clients' memory, and for those that
    do not fit their shape, which the model refuses."""
    if tensor.place is not None:
        return ""
    try:
        if tensor.datatype == "BYTES":
            return ",".join(each.decode("utf-8", "replace") for each in _elements(tensor))
        elements = to_array(tensor).ravel()[:MAX_ELEMENTS]
    except (ValueError, KeyError):
        return ""
    return ",".join(map(str, elements.tolist()))


def _elements(tensor: Tensor) -> list[bytes]:
    """Return the first elements of a BYTES tensor, without reading all of a long one."""
    data = memoryview(tensor.data)
    found: list[bytes] = []
    position = 0
    while position + 4 <= len(data) and len(found) < MAX_ELEMENTS:
        length = int.from_bytes(data[position : position + 4], "little")
        found.append(bytes(data[position + 4 : position + 4 + min(length, MAX_TEXT)]))
        position += 4 + length
    return found
