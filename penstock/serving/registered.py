"""Memory that a caller in this process registers once, and whose rows are submitted by reference.
Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.config import ModelConfig
from penstock.errors import InvalidRequest
from penstock.serving.held_rows import HeldRows
from penstock.types import DATATYPES, Array, Tensor, TensorSpec, shape_fits
from penstock.wire.arrays import InputForm, InputReader


class _Column(NamedTuple):
    """One registered array: its input, the shape of a row, and its bytes."""

    spec: TensorSpec
    row_shape: tuple[int, ...]
    row_bytes: int
    data: memoryview


class _Registration:
    """What all rows of one registration share."""

    def __init__(self, owner: object, columns: Sequence[_Column], reader: InputReader) -> None:
        self.owner = owner
        self._columns = columns
        self._reader = reader
        # By the number of rows.
        self._forms: dict[int, InputForm] = {}

    def read(self, start: int, stop: int) -> tuple[list[Tensor], InputForm]:
        """Return some rows as tensors that refer to the memory, and their form."""
        count = stop - start
        if len(self._columns) == 1:
            spec, shape, size, data = self._columns[0]
            view = data[start * size : stop * size]
            tensors = [Tensor(spec.name, spec.datatype, (count, *shape), view)]
        else:
            tensors = [
                Tensor(spec.name, spec.datatype, (count, *shape), data[start * size : stop * size])
                for spec, shape, size, data in self._columns
            ]
        form = self._forms.get(count)
        if form is None:
            form = self._forms[count] = self._reader.form_of(tensors)
        return tensors, form


class RegisteredRows(HeldRows):
    """Consecutive rows of registered memory. `rows[3]` and `rows[3:5]` can be submitted like
    arrays of one and of two rows; nothing is copied. The memory lives as long as its rows, and must
    not change between a submit and its answer."""

    __slots__ = ("registration",)

    def __init__(
        self, arrays: Mapping[str, Array], start: int, stop: int, registration: _Registration
    ) -> None:
        self.arrays = arrays
        self.start = start
        self.stop = stop
        self.registration = registration

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int | slice) -> RegisteredRows:
        count = self.stop - self.start
        if isinstance(index, slice):
            first, stop, step = index.indices(count)
            if step != 1:
                raise InvalidRequest(f"rows must be consecutive; a step of {step} is not")
            stop = max(first, stop)
        else:
            first = operator.index(index)
            first += count if first < 0 else 0
            if not 0 <= first < count:
                raise IndexError(f"row {index} of {count}")
            stop = first + 1
        start = self.start
        return RegisteredRows(self.arrays, start + first, start + stop, self.registration)

    def __repr__(self) -> str:
        return f"<RegisteredRows {self.start}:{self.stop} of {', '.join(self.arrays)}>"


def register(
    owner: object, config: ModelConfig, reader: InputReader, given: object
) -> RegisteredRows:
    """Return the rows of arrays whose first dimension is the rows; InvalidRequest says what does
    not fit the model."""
    if config.max_batch_size <= 0:
        raise InvalidRequest(
            f"model '{config.name}' has no batch dimension, so it takes no rows; submit its arrays"
        )
    by_name = given if isinstance(given, Mapping) else _by_name(config, given)
    specs = {spec.name: spec for spec in config.inputs}
    missing = [spec.name for spec in config.inputs if spec.name not in by_name]
    missing = [name for name in missing if not specs[name].is_optional]
    if missing or not by_name:
        raise InvalidRequest(f"model '{config.name}' needs {', '.join(missing or specs)} as well")
    arrays: dict[str, Array] = {}
    columns: list[_Column] = []
    num_rows = None
    for name, array in by_name.items():
        if name not in specs:
            takes = ", ".join(specs)
            raise InvalidRequest(f"model '{config.name}' has no input '{name}'; it takes {takes}")
        view = _checked(specs[name], array)
        if num_rows is not None and len(view) != num_rows:
            text = f"input '{name}' has {len(view)} rows, but another input has {num_rows}"
            raise InvalidRequest(text)
        num_rows = len(view)
        arrays[name] = view
        data = view.reshape(-1).view(np.uint8).data
        columns.append(_Column(specs[name], view.shape[1:], view.nbytes // num_rows, data))
    assert num_rows is not None
    return RegisteredRows(arrays, 0, num_rows, _Registration(owner, columns, reader))


def _by_name(config: ModelConfig, array: object) -> Mapping[str, object]:
    required = [spec.name for spec in config.inputs if not spec.is_optional]
    names = required or [spec.name for spec in config.inputs]
    if len(names) != 1:
        every = ", ".join(spec.name for spec in config.inputs)
        text = f"model '{config.name}' has several inputs; register them by name: {every}"
        raise InvalidRequest(text)
    return {names[0]: array}


def _checked(spec: TensorSpec, array: object) -> Array:
    """Return a read-only view of an array that can be used as it is."""
    start = f"input '{spec.name}' cannot be registered:"
    if not isinstance(array, np.ndarray):
        text = f"{start} a {type(array).__name__} is no numpy array, and it is not copied"
        raise InvalidRequest(text)
    if spec.datatype == "BYTES":
        raise InvalidRequest(f"{start} texts have no fixed size; submit them as arrays")
    dtype = DATATYPES[spec.datatype].numpy
    if array.dtype != dtype:
        text = f"{start} its dtype is {array.dtype.str}, expected {dtype.str} for {spec.datatype}"
        raise InvalidRequest(text)
    expected = (-1, *spec.shape)
    if not shape_fits(array.shape, expected) or not array.size:
        text = f"its shape is {list(array.shape)}, expected {list(expected)} with one or more rows"
        raise InvalidRequest(f"{start} {text}")
    if not array.flags.c_contiguous:
        raise InvalidRequest(f"{start} it is not C-contiguous; np.ascontiguousarray makes a copy")
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
