"""Arrays and texts that Python callers give, as tensors of a model's inputs. Pure.

Used by models in this process and by the client: both take what numpy understands and cast it to
the datatype of the input, within its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.errors import InvalidRequest
from penstock.types import DATATYPES, Array, Tensor, TensorSpec, from_array

# What `infer` takes: one array or text for a model with one input that it needs, or inputs by name.
Given = Array | str | bytes | Sequence[object] | Mapping[str, object]


def to_tensors(
    given: Given, inputs: Sequence[TensorSpec], model: str, *, has_batch: bool = False
) -> list[Tensor]:
    """Return the tensors of a request; InvalidRequest names the input that does not fit.
    `has_batch`: the arrays have a batch dimension before the shapes of `inputs`."""
    specs = {spec.name: spec for spec in inputs}
    tensors = []
    for name, values in _by_name(given, specs, model).items():
        spec = specs.get(name)
        if spec is None:
            raise InvalidRequest(
                f"unexpected inference input '{name}' for model '{model}'; "
                f"it takes {', '.join(specs)}"
            )
        num_dims = len(spec.shape) + has_batch
        tensors.append(from_array(name, spec.datatype, cast(spec, values, num_dims)))
    return tensors


def cast(spec: TensorSpec, values: object, num_dims: int) -> Array:
    """Cast within the kind of the datatype (float64 to FP32); refuse other casts. Texts may leave
    out dimensions of size 1: a text or a list of texts becomes an array of `num_dims`."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # Rows of several lengths.
        raise InvalidRequest(f"inference input '{spec.name}' is no array: {error}") from error
    if spec.datatype == "BYTES":
        if array.dtype.kind not in "OSUT":
            raise _wrong_type(spec, array)
        missing = max(0, num_dims - array.ndim)
        return array.astype(np.object_).reshape(array.shape + (1,) * missing)
    target = DATATYPES[spec.datatype].numpy
    if array.dtype.kind in "iu" and target.kind in "iu":
        limits = np.iinfo(target)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise _too_large(spec)
    elif not np.can_cast(array.dtype, target, "same_kind"):
        raise _wrong_type(spec, array)
    try:
        with np.errstate(over="raise"):
            return array.astype(target, copy=False)
    except FloatingPointError:
        raise _too_large(spec) from None


def _by_name(given: Given, specs: Mapping[str, TensorSpec], model: str) -> Mapping[str, object]:
    if isinstance(given, Mapping):
        return given
    required = [name for name, spec in specs.items() if not spec.is_optional]
    for names in (list(specs), required):
        if len(names) == 1:
            return {names[0]: given}
    text = f"model '{model}' has {len(specs)} inputs; give them by name: {', '.join(specs)}"
    raise InvalidRequest(text)


def _too_large(spec: TensorSpec) -> InvalidRequest:
    text = f"inference input '{spec.name}' has values that do not fit {spec.datatype}"
    return InvalidRequest(text)


def _wrong_type(spec: TensorSpec, array: Array) -> InvalidRequest:
    return InvalidRequest(
        f"inference input '{spec.name}' data-type is {array.dtype}, "
        f"which cannot be given as '{spec.datatype}'"
    )
