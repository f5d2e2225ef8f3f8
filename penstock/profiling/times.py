"""Operator times in the common form that all profile readers return. Values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.profiling.results import GpuTime
from penstock.profiling.work import Shaped


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator in a run of the model: `seconds` of all its calls, shapes of one call."""

    name: str
    # ONNX operator type, or the library's own where ONNX has none.
    kind: str
    seconds: float
    inputs: tuple[Shaped, ...] = ()
    outputs: tuple[Shaped, ...] = ()
    # Constant inputs: read from memory however small the batch is.
    weight_bytes: float = 0.0
    num_calls: int = 1
    # Compute datatype that the library reports; empty: follows from the inputs.
    datatype: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A span of the trace, in seconds from the first."""

    name: str
    kind: str
    start_s: float
    seconds: float
    # Shapes and the like, as text.
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """Result of a library's profiler."""

    operators: Sequence[OperatorTime]
    # Median time of a run under the profiler.
    profiled_s: float
    events: Sequence[Event]
    notes: Sequence[str] = ()
    # None on CPUs.
    gpu: GpuTime | None = None
