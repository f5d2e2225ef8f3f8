"""A decoupled model whose responses the test sends itself, and its configuration."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from penstock.backends import Batch, Responder
from penstock.backends.finished import Unanswered
from penstock.backends.null import NullRunner
from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.types import TensorSpec

DECOUPLED = ModelConfig(
    name="many",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (-1,)),),
    outputs=(TensorSpec("y", "INT64", (-1,)), TensorSpec("z", "BYTES", (1,))),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MemoryPolicy(slab_bytes=1024, max_slabs=2, spill_bytes=1 << 16),
    is_decoupled=True,
)


def values(*numbers: int) -> dict[str, np.ndarray]:
    return {"y": np.array([numbers], np.int64)}


class Told(NullRunner):
    """Keeps the responders of each request, in the order in which they came."""

    is_decoupled = needs_requests = True
    keeps_rows_apart = True
    # All requests so far: what they sent, and where their responses go.
    seen: list[tuple[np.ndarray, Responder]] = []

    def start(self, batch: Batch) -> Unanswered:
        if (batch.inputs["x"] == -1).any():
            raise ValueError("raised by the model")
        row = 0
        for part, responder in zip(batch.requests, batch.responders, strict=True):
            Told.seen.append((batch.inputs["x"][row : row + part.num_rows], responder))
            row += part.num_rows
        return Unanswered()

    @classmethod
    def drop(cls, number: int) -> weakref.ref[Responder]:
        """Forget a request without a final response."""
        _, responder = cls.seen.pop(number)
        return weakref.ref(responder)


def responders() -> Sequence[Responder]:
    return [responder for _, responder in Told.seen]
