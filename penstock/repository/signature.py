"""The tensors that a model's file declares, before a configuration says more."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import TensorSpec


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors that a model's file declares. Shapes include the batch dimension, which exists if
    the first dimension of every tensor is variable."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # Most rows that the file allows, if it says so; 0: the first dimension is not a batch.
    max_batch: int | None = None
    # The batch size that the model's author chose; 0: no batching.
    chosen_batch: int | None = None
    # Whether the code says that a request has any number of responses.
    is_decoupled: bool = False
    # Notes for the user about how the file is served.
    notes: tuple[str, ...] = ()

    @property
    def has_batch(self) -> bool:
        tensors = (*self.inputs, *self.outputs)
        if self.max_batch == 0 or self.chosen_batch == 0:
            return False
        return all(spec.shape[:1] == (-1,) for spec in tensors)
