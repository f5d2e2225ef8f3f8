"""Types of inputs: the requested inputs, the target's form, one request's content, and its origin.
Values only; the modules beside this file make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.data.lengths import Lengths
from penstock.types import Array, Tensor, TensorSpec


class InputSpec(msgspec.Struct, frozen=True):
    """Everything the command line says about inputs; sent to the generator processes."""

    # Empty: random.
    path: str = ""
    # Name of the tensor or field that a file without names (.npy, images) is for.
    name: str = ""
    lengths: Lengths | None = None
    output_lengths: Lengths | None = None
    batch_size: int = 1
    seed: int = 0
    # A recorded trace: request k is as long as the trace's k-th.
    trace_path: str = ""
    # Take only this number of different rows of a recording, the latest; 0: all.
    latest: int = 0
    # Send this number of a recording's requests as they came; 0: their rows are examples.
    num_replayed: int = 0


class RequestForm(msgspec.Struct, frozen=True):
    """What a target takes: "tensors" (of a v2 model, shapes without the batch dimension), "prompt"
    or "messages" (OpenAI), or "fields" (of a body template)."""

    kind: str
    inputs: tuple[TensorSpec, ...] = ()
    has_batch: bool = False
    fields: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.inputs]

    @property
    def required(self) -> list[TensorSpec]:
        return [spec for spec in self.inputs if not spec.is_optional]


@dataclass(slots=True)
class Sample:
    """One request's content: tensors by name, or a text, or the fields of a template."""

    tensors: Mapping[str, Array] = field(default_factory=dict)
    # "prompt": str or "messages": list for LLMs; anything for templates.
    fields: Mapping[str, object] = field(default_factory=dict)
    max_tokens: int | None = None
    # The recorded answer, if there is one.
    reference: Sequence[Tensor] = ()


class Origin(msgspec.Struct, frozen=True):
    """Where inputs come from, for the report."""

    text: str  # "450 examples of digits.npz, shuffled anew each time round"
    is_random: bool
    num_examples: int | None = None
    digest: str = ""
    # Doubts about the data, one sentence each.
    warnings: tuple[str, ...] = ()


class Source(Protocol):
    """An endless supply. `index` identifies an example that comes again, so that its encoding can
    be cached; None for one that does not."""

    origin: Origin

    def next(self) -> tuple[int | None, Sample]: ...
