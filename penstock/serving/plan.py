"""Whether a request fits a model, and the memory layout of its tensors. Pure.

A plan depends only on names, datatypes and shapes, so it is computed once per combination and then
cached.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.config import MIB, ModelConfig
from penstock.errors import InvalidRequest
from penstock.serving.lanes import Lane
from penstock.serving.padding import Pads, Shapes
from penstock.serving.regions import Loan
from penstock.serving.sequences import LiveSequence
from penstock.serving.slab import Layout, Slab
from penstock.types import (
    DATATYPES,
    Buffer,
    Request,
    Tensor,
    TensorSpec,
    num_elements,
    shape_fits,
    split_bytes,
)
from penstock.units import quoted

MAX_PLANS = 1024
MAX_RANK = 32
VARIABLE_SLAB_BYTES = 4 * MIB
_LENGTH = struct.Struct("<I")


class Geometry:
    """Requests of one geometry can share a batch; compared by identity, interned by `Planner`.

    With a `layout` their tensors are in slab rows; without one each request has its own extents.
    """

    __slots__ = ("input_columns", "key", "layout", "output_columns", "row_shapes")

    def __init__(
        self, row_shapes: tuple[tuple[int, ...], ...], layout: Layout | None, key: str = ""
    ) -> None:
        self.row_shapes = row_shapes
        self.layout = layout
        # Equal in all processes that plan for the model.
        self.key = key
        num_inputs = len(row_shapes)
        columns = [] if layout is None else list(zip(layout.offsets, layout.row_bytes, strict=True))
        # (offset of the column, bytes of one row)
        self.input_columns = tuple(columns[:num_inputs])
        self.output_columns = tuple(columns[num_inputs:])


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The layout of requests of one signature. `order` lists, per input of the model, the index of
    the request's tensor; `sizes` are the expected bytes (None: BYTES)."""

    geometry: Geometry
    num_rows: int
    order: tuple[int, ...]
    sizes: tuple[int | None, ...]
    # Row shapes before padding to those of the geometry, and the unpadded length.
    own_shapes: Shapes | None = None
    length: int = 0
    # Share of a token budget; 0 without one.
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A plan together with the requested outputs: all that is needed to run a request. Compared by
    identity; `has_fixed_outputs`: every answer has the same shapes."""

    plan: RequestPlan
    selection: tuple[int, ...]
    has_fixed_outputs: bool


@dataclass(slots=True, eq=False)
class Ticket:
    """How an admitted request runs, and what it holds. The batcher sets `queue`: its lane, its
    sequence, or the reruns; None: not queued. Its place in shared memory is `slab` and `row`; None:
    no rows. Extents of its own, if it was received into them, begin at `offsets`."""

    fit: Fit
    queue: Lane | LiveSequence | deque[Request] | None = None
    # What its sequence holds in the worker; negative: it belongs to none.
    slot: int = -1
    slab: Slab | None = None
    row: int = 0
    offsets: tuple[int, ...] = ()
    # Memory of clients that its tensors are in.
    loan: Loan | None = None


# Fit of requests that are only queued and never run, as in a simulation.
UNPLANNED = Fit(RequestPlan(Geometry((), None), 1, (), ()), (), has_fixed_outputs=False)


def fixed_outputs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return the outputs that have columns in a slab, in column order."""
    return tuple(spec for spec in config.outputs if spec.is_fixed)


def column_bytes(config: ModelConfig, row_shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the bytes of one row for every column: all inputs, then the fixed outputs."""
    inputs = [spec.row_bytes(shape) for spec, shape in zip(config.inputs, row_shapes, strict=True)]
    return tuple(inputs + [spec.row_bytes(spec.shape) for spec in fixed_outputs(config)])


def slab_bytes(config: ModelConfig) -> int:
    """Return the size of the model's slabs: a full batch each, if its rows have a fixed size."""
    if config.memory.slab_bytes is not None:
        return config.memory.slab_bytes
    if config.max_batch_size == 0 or not all(spec.is_fixed for spec in config.inputs):
        return VARIABLE_SLAB_BYTES
    row_bytes = column_bytes(config, [spec.shape for spec in config.inputs])
    return max(4096, Layout.of(row_bytes, config.max_batch_size).nbytes)


class Planner:
    """Makes plans for one model; holds nothing but the cache."""

    def __init__(self, config: ModelConfig, slab_bytes: int) -> None:
        self._config = config
        self.slab_bytes = slab_bytes
        has_bytes = any(spec.datatype == "BYTES" for spec in config.inputs)
        # Whether requests can have rows of slabs.
        self.has_rows = config.max_batch_size > 0 and not (has_bytes or config.joins_requests)
        # ONNX strings are UTF-8; a preprocess function may take any bytes.
        self._needs_utf8 = config.backend == "onnxruntime" and config.preprocess is None
        self._inputs = {spec.name: index for index, spec in enumerate(config.inputs)}
        self._outputs = {spec.name: index for index, spec in enumerate(config.outputs)}
        self._has_ragged = any(spec.is_ragged for spec in config.inputs)
        self._num_required = sum(not spec.is_optional for spec in config.inputs)
        self._plans: dict[object, RequestPlan] = {}
        self._geometries: dict[object, Geometry] = {}
        # By the form of a request (`Request.form`); ask it before `fit`.
        self.known: dict[object, Fit] = {}
        self._all_outputs = tuple(range(len(config.outputs)))
        # Set once padding has been proven harmless.
        self.pads: Pads | None = None
        # Counts tokens, even if the rows are not padded.
        self._counter = Pads(config) if config.batching.max_tokens is not None else None

    def fit(self, request: Request) -> Fit:
        """Return how to run the request; InvalidRequest if it does not fit the model."""
        plan = self.plan(request)
        selection = self.select_outputs(request)
        specs = self._config.outputs
        is_fixed = plan.geometry.layout is not None and all(specs[i].is_fixed for i in selection)
        fit = Fit(plan, selection, is_fixed)
        # The contents of BYTES tensors must be checked each time.
        if request.form is not None and None not in plan.sizes:
            _remember(self.known, request.form, fit)
        return fit

    def plan(self, request: Request) -> RequestPlan:
        """Return the plan of a request; InvalidRequest if it or its buffer sizes do not fit."""
        inputs = request.inputs
        if len(inputs) == 1:
            tensor = inputs[0]
            key: object = (tensor.name, tensor.datatype, tensor.shape)
        else:
            key = tuple((t.name, t.datatype, t.shape) for t in inputs)
        plan = self._plans.get(key)
        if plan is None:
            plan = _remember(self._plans, key, self._resolve(inputs))
        for index, size in zip(plan.order, plan.sizes, strict=True):
            if size is None:
                self._check_bytes(inputs[index])
            elif inputs[index].nbytes != size:
                raise InvalidRequest(
                    f"input byte size mismatch for input '{inputs[index].name}' for model "
                    f"'{self._config.name}'. Expected {size}, got {inputs[index].nbytes}"
                )
        return plan

    def select_outputs(self, request: Request) -> tuple[int, ...]:
        """Return the indices of the requested outputs; all, if the request names none."""
        if not request.outputs:
            return self._all_outputs
        for output in request.outputs:
            if output.name not in self._outputs:
                raise InvalidRequest(
                    f"unexpected inference output '{output.name}' for model "
                    f"'{self._config.name}'; it has {quoted(self._outputs)}"
                )
        return tuple(self._outputs[output.name] for output in request.outputs)

    def _resolve(self, tensors: Sequence[Tensor]) -> RequestPlan:
        by_input = self._match(tensors)
        num_rows = 1
        row_shapes: list[tuple[int, ...]] = []
        sizes: list[int | None] = []
        for position, (index, tensor_index) in enumerate(by_input):
            tensor, spec = tensors[tensor_index], self._config.inputs[index]
            self._check_tensor(tensor, spec)
            if self._config.max_batch_size > 0:
                if position == 0:
                    num_rows = tensor.shape[0]
                elif tensor.shape[0] != num_rows:
                    raise InvalidRequest(
                        f"input '{tensor.name}' batch size does not match other inputs for "
                        f"'{self._config.name}': {tensor.shape[0]} and {num_rows}"
                    )
                row_shapes.append(tensor.shape[1:])
            else:
                row_shapes.append(tensor.shape)
            itemsize = DATATYPES[spec.datatype].itemsize
            sizes.append(None if itemsize is None else num_elements(tensor.shape) * itemsize)
        self._check_rows(num_rows)
        present = tuple(index for index, _ in by_input)
        order = tuple(tensor_index for _, tensor_index in by_input)
        own_shapes = tuple(row_shapes)
        padded = self._padded(present, own_shapes, num_rows)
        is_padded = padded is not None
        num_tokens = num_rows * self._row_tokens(present, own_shapes, is_padded=is_padded)
        shared = self._shared_shapes(present, own_shapes) if self._has_ragged else own_shapes
        geometry, length = padded or (self._geometry(present, shared, num_rows), 0)
        unpadded = own_shapes if is_padded else None
        return RequestPlan(geometry, num_rows, order, tuple(sizes), unpadded, length, num_tokens)

    def _shared_shapes(self, present: tuple[int, ...], shapes: Shapes) -> Shapes:
        """Return the shapes that requests of one batch have in common: all but ragged ones."""
        specs = [self._config.inputs[index] for index in present]
        pairs = zip(specs, shapes, strict=True)
        return tuple(spec.shape if spec.is_ragged else shape for spec, shape in pairs)

    def _row_tokens(self, present: tuple[int, ...], shapes: Shapes, *, is_padded: bool) -> int:
        """Return the tokens of a row, by its longest axis; 0 without a token budget."""
        if self._counter is None:
            return 0
        by_input = dict(zip(present, shapes, strict=True))
        # An optional input may be missing.
        lengths = [by_input[i][axis] for i, axis in self._counter.axes if i in by_input]
        longest = max(lengths, default=1)
        bucket = self._counter.bucket(longest) if is_padded else None
        return self._counter.row_tokens(longest, bucket)

    def bucket_geometry(self, length: int) -> Geometry | None:
        """Return the geometry of rows padded to this bucket; None if other axes vary too."""
        assert self.pads is not None
        shapes = self.pads.shapes(tuple(spec.shape for spec in self._config.inputs), length)
        if any(size < 0 for shape in shapes for size in shape):
            return None
        return self._geometry(tuple(range(len(shapes))), shapes, 1)

    def _padded(
        self, present: tuple[int, ...], own_shapes: Shapes, num_rows: int
    ) -> tuple[Geometry, int] | None:
        """Return the bucket's geometry and the row's own length; None if it is not padded."""
        if self.pads is None or len(present) < len(self._config.inputs):
            return None
        if any(0 in shape for shape in own_shapes):
            return None
        length = self.pads.length(own_shapes)
        bucket = self.pads.bucket(length) if length is not None else None
        if length is None or bucket is None:
            return None
        geometry = self._geometry(present, self.pads.shapes(own_shapes, bucket), num_rows)
        return (geometry, length) if geometry.layout is not None else None

    def _match(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return pairs (input of the model, tensor of the request), in the model's order."""
        name = self._config.name
        seen: dict[int, int] = {}
        for tensor_index, tensor in enumerate(tensors):
            index = self._inputs.get(tensor.name)
            if index is None:
                raise InvalidRequest(
                    f"unexpected inference input '{tensor.name}' for model '{name}'; "
                    f"it takes {quoted(self._inputs)}"
                )
            if index in seen:
                raise InvalidRequest(f"input '{tensor.name}' already exists in request")
            seen[index] = tensor_index
        missing = [
            spec.name
            for index, spec in enumerate(self._config.inputs)
            if index not in seen and not spec.is_optional
        ]
        if missing:
            total = len(self._config.inputs)
            expected = (
                f"expected {total} inputs"
                if self._num_required == total
                else f"expected number of inputs between {self._num_required} and {total}"
            )
            given, lacked = (
                ",".join(map(repr, names)) for names in ([each.name for each in tensors], missing)
            )
            raise InvalidRequest(
                f"{expected} but got {len(tensors)} inputs for model '{name}'. "
                f"Got input(s) [{given}], but missing required input(s) [{lacked}]. "
                "Please provide all required input(s)."
            )
        return sorted(seen.items())

    def _check_tensor(self, tensor: Tensor, spec: TensorSpec) -> None:
        name = self._config.name
        if tensor.datatype != spec.datatype:
            raise InvalidRequest(
                f"inference input '{spec.name}' data-type is '{tensor.datatype}', "
                f"but model '{name}' expects '{spec.datatype}'"
            )
        expected = (-1, *spec.shape) if self._config.max_batch_size > 0 else spec.shape
        shape = tensor.shape
        if len(shape) > MAX_RANK or min(shape, default=0) < 0 or not shape_fits(shape, expected):
            raise InvalidRequest(
                f"unexpected shape for input '{spec.name}' for model '{name}'. "
                f"Expected {_dims(expected)}, got {_dims(tensor.shape)}"
            )

    def _check_rows(self, num_rows: int) -> None:
        limit, start = self._config.max_batch_size, "inference request batch-size must be"
        if limit > 0 and num_rows > limit:
            raise InvalidRequest(f"{start} <= {limit} for '{self._config.name}', got {num_rows}")
        if num_rows < 1:
            raise InvalidRequest(f"{start} at least 1 for '{self._config.name}'")

    def _geometry(
        self, present: tuple[int, ...], row_shapes: tuple[tuple[int, ...], ...], num_rows: int
    ) -> Geometry:
        layout = None
        if self.has_rows and len(present) == len(self._config.inputs):
            row_bytes = column_bytes(self._config, row_shapes)
            layout = Layout.fitting(row_bytes, self.slab_bytes, self._config.max_batch_size)
            if layout is not None and layout.capacity < num_rows:
                layout = None
        key = (present, row_shapes, layout is not None)
        geometry = self._geometries.get(key)
        if geometry is None:
            if len(self._geometries) >= MAX_PLANS:
                self._geometries.clear()
                self._plans.clear()
                self.known.clear()
            geometry = self._geometries[key] = Geometry(row_shapes, layout, repr(key))
        return geometry

    def _check_bytes(self, tensor: Tensor) -> None:
        expected = num_elements(tensor.shape)
        count = _count_bytes(tensor.data, expected)
        if count != expected:
            raise InvalidRequest(
                f"expected {expected} string elements for inference input '{tensor.name}' "
                f"for model '{self._config.name}', got {count}"
            )
        if self._needs_utf8 and (index := _find_invalid_utf8(tensor.data)) is not None:
            raise InvalidRequest(
                f"input '{tensor.name}': element {index} is not valid UTF-8, which model "
                f"'{self._config.name}' needs"
            )


Key = TypeVar("Key")
Value = TypeVar("Value")


def _remember(cache: dict[Key, Value], key: Key, value: Value) -> Value:
    """Cache a value; forget all others if there are too many."""
    if len(cache) >= MAX_PLANS:
        cache.clear()
    cache[key] = value
    return value


def _count_bytes(data: Buffer, expected: int) -> str | int:
    """Count the elements of a BYTES buffer, or return what is wrong with it."""
    position, end, count = 0, len(data), 0
    while position < end:
        if end - position < 4:
            return f"an incomplete string length at byte {position}"
        position += 4 + _LENGTH.unpack_from(data, position)[0]
        if position > end:
            return f"a string that runs {position - end} bytes past the end"
        count += 1
        if count > expected:
            return f"more than {expected}"
    return count


def _find_invalid_utf8(data: Buffer) -> int | None:
    """Return the index of the first element of a BYTES buffer that is not UTF-8."""
    whole = bytes(data)
    if whole.isascii():
        return None  # Length prefixes are included; they are ASCII only if short.
    for index, element in enumerate(split_bytes(whole)):
        try:
            element.decode()
        except UnicodeDecodeError:
            return index
    return None


def _dims(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
