"""Arrays and texts that Python callers give, as tensors of a model's inputs. Pure.

Used by models in this process and by the client: both take what numpy understands and cast it to
the datatype of the input, within its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import InvalidRequest
from penstock.types import DATATYPES, Array, Buffer, Tensor, TensorSpec, from_array

# What `infer` takes: one array or text for a model with one input that it needs, or inputs by name.
Given = Array | str | bytes | Sequence[object] | Mapping[str, object]
MAX_FORMS = 1024
# Smaller arrays are copied in less time than a view takes.
MIN_VIEW_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class InputForm:
    """Names and datatypes of arrays that are tensors as they are; compared by identity."""

    names: tuple[str, ...]
    datatypes: tuple[str, ...]


class InputReader:
    """Turns what callers give into tensors. Arrays that need no cast are copied, or referred to if
    they are large, by a form that is remembered for their dtypes and shapes. Safe to use from any
    thread."""

    def __init__(self, inputs: Sequence[TensorSpec], model: str, *, has_batch: bool) -> None:
        self._inputs = inputs
        self._model = model
        self._has_batch = has_batch
        self._known: dict[object, InputForm] = {}

    def read(self, given: Given, *, copy: bool = False) -> tuple[list[Tensor], InputForm | None]:
        """Return the tensors and their form; None if it has to be read anew each time. Large ones
        may share their memory with what is given, unless with `copy`. InvalidRequest names the
        input that does not fit."""
        if type(given) is np.ndarray:
            form = self._known.get((given.dtype, given.shape))
            if form is not None:
                data = given.tobytes() if copy else _data(given)
                return [Tensor(form.names[0], form.datatypes[0], given.shape, data)], form
        arrays = _arrays(given)
        form = self._known.get(_key(given, arrays)) if arrays else None
        if form is not None:
            return [
                Tensor(name, datatype, array.shape, array.tobytes() if copy else _data(array))
                for name, datatype, array in zip(form.names, form.datatypes, arrays, strict=True)
            ], form
        tensors = to_tensors(given, self._inputs, self._model, has_batch=self._has_batch)
        for tensor in tensors:
            if copy or len(tensor.data) < MIN_VIEW_BYTES:
                tensor.data = bytes(tensor.data)
        return tensors, self._remember(given, arrays, tensors)

    def form_of(self, tensors: Sequence[Tensor]) -> InputForm:
        """Return the form of tensors that fit the inputs; arrays by the same names have it too."""
        forms = [(DATATYPES[each.datatype].numpy, each.shape) for each in tensors]
        key = tuple(zip([each.name for each in tensors], forms, strict=True))
        return self._known.get(key) or self._add(key, tensors)

    def _remember(
        self, given: Given, arrays: Sequence[Array], tensors: Sequence[Tensor]
    ) -> InputForm | None:
        if not arrays:
            return None
        for array, tensor in zip(arrays, tensors, strict=True):
            if tensor.datatype == "BYTES" or array.dtype != DATATYPES[tensor.datatype].numpy:
                return None
        return self._add(_key(given, arrays), tensors)

    def _add(self, key: object, tensors: Sequence[Tensor]) -> InputForm:
        if len(self._known) >= MAX_FORMS:
            self._known.clear()
        names, datatypes = (each.name for each in tensors), (each.datatype for each in tensors)
        form = InputForm(tuple(names), tuple(datatypes))
        # Another thread may have been first; all of them use its form.
        return self._known.setdefault(key, form)


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


def _arrays(given: Given) -> Sequence[Array]:
    """Return the arrays that are given; none if something else is among them."""
    if type(given) is np.ndarray:
        return (given,)
    arrays = tuple(given.values()) if type(given) is dict else ()
    return arrays if all(type(each) is np.ndarray for each in arrays) else ()


def _data(array: Array) -> Buffer:
    """Return the bytes of an array; a view if it is large and contiguous."""
    if array.nbytes < MIN_VIEW_BYTES or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data


def _key(given: Given, arrays: Sequence[Array]) -> object:
    """Return what the form of arrays depends on."""
    if type(given) is np.ndarray:
        return given.dtype, given.shape
    assert isinstance(given, Mapping)
    forms = [(each.dtype, each.shape) for each in arrays]
    return tuple(zip(given, forms, strict=True))


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
