"""How long each operator of a model took: the noun that all readers of profiles give. Values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.optimizer.profile.results import GpuTime
from penstock.optimizer.profile.work import Shaped


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Mean of one run of the model; `seconds` are of all its calls together, shapes of one."""

    name: str
    # ONNX's name for what it does, or the library's own where there is none.
    kind: str
    seconds: float
    inputs: tuple[Shaped, ...] = ()
    outputs: tuple[Shaped, ...] = ()
    # Of constants among the inputs: they come from memory however small the batch is.
    weight_bytes: float = 0.0
    num_calls: int = 1
    # What the library says it computed with; empty: by the inputs.
    datatype: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A span for the trace, in seconds from the first."""

    name: str
    kind: str
    start_s: float
    seconds: float
    # Shapes and the like, in words.
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """What a library's profiler said."""

    operators: Sequence[OperatorTime]
    # Mean time of a run while it was watched.
    profiled_s: float
    events: Sequence[Event]
    notes: Sequence[str] = ()
    # None on CPUs.
    gpu: GpuTime | None = None
