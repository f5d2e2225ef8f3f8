"""How a Python model declares its tensors: `@penstock.model(...)` and `penstock.Tensor`.

Imported by users' code, so it needs nothing but the standard library. `backends.python_signature`
reads what is declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

MARK = "__penstock_model__"
Marked = TypeVar("Marked", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class TensorType:
    """Datatype and shape of an array as the function sees it: `penstock.Tensor("FP32", [-1, 3])`.
    A first dimension of -1 in every array is the batch; other dimensions of -1 are of any size."""

    datatype: str
    shape: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclass(frozen=True, slots=True)
class Declaration:
    """What `@penstock.model` says; None: worked out from annotations."""

    # By name: a TensorType, or a Python type such as str or list[float].
    inputs: Mapping[str, object] | None = None
    outputs: Mapping[str, object] | None = None
    # Most rows of a batch; 0: the function takes one request at a time.
    max_batch_size: int | None = None
    # Whether a call gets a whole batch, rather than one row.
    batched: bool | None = None


def model(
    inputs: Mapping[str, object] | None = None,
    outputs: Mapping[str, object] | None = None,
    *,
    max_batch_size: int | None = None,
    batched: bool | None = None,
) -> Callable[[Marked], Marked]:
    """Mark a function, or a class with a method `infer`, as the model of its file.

    `inputs` and `outputs` are types by name: `penstock.Tensor("FP32", [-1, 3])`, or Python types
    such as `str`. Without them the annotations decide. `max_batch_size` limits batches; 0 switches
    batching off. `batched` says whether a call gets a whole batch (arrays and lists, one entry for
    each row) or one row; by default arrays mean a batch, and other types one row."""

    def mark(function: Marked) -> Marked:
        setattr(function, MARK, Declaration(inputs, outputs, max_batch_size, batched))
        return function

    return mark
