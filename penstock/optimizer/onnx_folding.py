"""Shape-specialised constant folding: replace what a graph computes from known dimensions.

Exporters that trace a model leave the arithmetic of its shapes in the graph (Shape, Gather, Div,
Concat, Pad, ...). ONNX Runtime folds it only if every dimension is known, and the batch dimension
is not. This walk over the graph tracks integers element by element, so that [batch, 3, 224, 224]
has three known elements. Sound by construction: a value that depends on an unknown dimension stays
in the graph. Knows nothing of candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import BackendFailed
from penstock.optimizer import onnx_model
from penstock.types import Array

# Larger constants cost more memory than they save time.
MAX_VALUES = 1 << 16
# Symbols of an element that is known, and of one about which nothing is known. Above 0: the number
# of the named dimension that the element equals.
KNOWN, UNKNOWN = 0, -1
# Operators that only move elements of their first N inputs (None: all); other inputs must be known.
MOVING: Mapping[str, int | None] = {
    "Cast": 1,
    "Concat": None,
    "Expand": 1,
    "Flatten": 1,
    "Gather": 1,
    "Identity": 1,
    "Reshape": 1,
    "Slice": 1,
    "Squeeze": 1,
    "Tile": 1,
    "Transpose": 1,
    "Unsqueeze": 1,
}
ELEMENTWISE = frozenset(
    [
        "Abs",
        "Add",
        "And",
        "Ceil",
        "Clip",
        "Div",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Round",
        "Sign",
        "Sub",
        "Where",
        "Xor",
    ]
)
# Operators that are random or that their inputs alone do not determine.
NOT_FOLDED = frozenset(
    [
        "Bernoulli",
        "Dropout",
        "If",
        "Loop",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Scan",
    ]
)
# Index of the input that is the output's shape.
SHAPED_BY = {"ConstantOfShape": 0, "Resize": 3}
# Operators that compute or apply shapes; embeddings use Gather too, and stay.
SHAPE_OPERATORS = (
    "ConstantOfShape",
    "Expand",
    "Gather",
    "Pad",
    "Range",
    "Shape",
    "Size",
    "Slice",
    "Unsqueeze",
)

Dims = Sequence[int]


@dataclass(frozen=True, slots=True)
class Partial:
    """An array with some known elements. Others hold 1, so that nothing divides by 0."""

    elements: Array
    symbols: Array

    @property
    def is_known(self) -> bool:
        return not self.symbols.any()


def known(elements: Array) -> Partial:
    return Partial(elements, np.zeros(elements.shape, np.int64))


def fold(model: Any, shapes: Mapping[str, Dims] | None = None) -> Any:
    """Return a copy of the model in which everything that follows from input dimensions is
    constant. `shapes` are those of inputs, with -1 for unknown dimensions; dimensions fixed in the
    file stay. The copy declares them."""
    copy = type(model)()
    copy.CopyFrom(model)
    if not _can_be_walked(copy.graph):
        return copy
    _declare(copy.graph, shapes or {})
    walk = _Walk(onnx_model.opset(copy))
    walk.start(copy.graph)
    for node in copy.graph.node:
        walk.visit(copy.graph, node)
    _replace(copy.graph, walk.folded)
    tidy_pads(copy.graph)
    # Earlier shape inference may contradict the sizes that are now fixed.
    del copy.graph.value_info[:]
    return copy


def _can_be_walked(graph: Any) -> bool:
    """Return whether the graph can be folded: no initializer may be overridden by callers (the pass
    onnx-graph ensures this), and nodes must be in topological order."""
    if len(onnx_model.true_inputs(graph)) < len(graph.input):
        return False
    made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if any(name and name not in made for name in node.input):
            return False
        made.update(node.output)
    return True


def num_shape_nodes(operators: Mapping[str, int]) -> int:
    """Return how many of these nodes (by operator type) compute or apply shapes."""
    return sum(operators.get(name, 0) for name in SHAPE_OPERATORS)


def _declare(graph: Any, shapes: Mapping[str, Dims]) -> None:
    for value in onnx_model.true_inputs(graph):
        declared = value.type.tensor_type.shape.dim
        for dim in declared:
            if dim.dim_value < 0:
                # Some exporters write -1 for any size.
                dim.ClearField("dim_value")
        for dim, size in zip(declared, shapes.get(value.name, ()), strict=False):
            if size > 0 and not dim.HasField("dim_value"):
                dim.dim_value = size


def _replace(graph: Any, folded: Mapping[str, Array]) -> None:
    """Replace nodes by the constants that they compute."""
    import onnx

    outputs = {value.name for value in graph.output}
    for index in reversed(range(len(graph.node))):
        names = [name for name in graph.node[index].output if name]
        if names and all(name in folded and name not in outputs for name in names):
            tensors = [onnx.numpy_helper.from_array(folded[name], name) for name in names]
            graph.initializer.extend(tensors)
            del graph.node[index]


@dataclass(slots=True)
class _Walk:
    """Types and integer values of everything before the current node."""

    opset: int
    types: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Partial] = field(default_factory=dict)
    # Constants computed from dimensions or other constants.
    folded: dict[str, Array] = field(default_factory=dict)
    _symbols: dict[str, int] = field(default_factory=dict)

    def start(self, graph: Any) -> None:
        import onnx

        for value in onnx_model.true_inputs(graph):
            self.types[value.name] = value.type
        for name, tensor in onnx_model.constants(graph).items():
            self.types[name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            if onnx_model.num_values(tensor) <= MAX_VALUES:
                self.values[name] = known(onnx.numpy_helper.to_array(tensor))

    def visit(self, graph: Any, node: Any) -> None:
        if node.domain not in ("", "ai.onnx"):
            return
        if node.op_type == "Reshape":
            self._fix_reshape(graph, node)
        self._infer(node)
        if node.op_type in NOT_FOLDED or all(name in self.values for name in node.output):
            return
        found = self._shape(node) or self._computed(node)
        self.values.update(found)
        self.folded.update({name: each.elements for name, each in found.items() if each.is_known})

    # Types.

    def _infer(self, node: Any) -> None:
        """Infer the types of a node's outputs; skip what cannot be inferred."""
        import onnx

        names = [name for name in node.input if name]
        if any(name not in self.types for name in names):
            return
        data = {
            name: onnx.numpy_helper.from_array(self.values[name].elements, name)
            for name in names
            if name in self.values and self.values[name].is_known
        }
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset, "")
            inferred = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: self.types[name] for name in names},
                data,
                opset_imports=[onnx.helper.make_opsetid("", self.opset)],
            )
        except Exception:  # Shape inference raises many types for what it does not understand.
            return
        self.types.update(inferred)
        self._shape_by_input(node)

    def _shape_by_input(self, node: Any) -> None:
        """Set the type of an output whose shape is a partially known input."""
        place = SHAPED_BY.get(node.op_type)
        if place is None or place >= len(node.input) or node.output[0] not in self.types:
            return
        sizes = self.values.get(node.input[place])
        if sizes is None or sizes.is_known or onnx_model.attribute(node, "axes"):
            return
        shape = self.types[node.output[0]].tensor_type.shape
        del shape.dim[:]
        for size, symbol in zip(sizes.elements.tolist(), sizes.symbols.tolist(), strict=True):
            dim = shape.dim.add()
            if symbol == KNOWN:
                dim.dim_value = int(size)
            elif symbol != UNKNOWN:
                dim.dim_param = self._name(symbol)

    def _dims(self, name: str) -> Partial | None:
        """Return the dimensions of a tensor; None if its rank is unknown."""
        found = self.types.get(name)
        if found is None or not found.tensor_type.HasField("shape"):
            return None
        dims = found.tensor_type.shape.dim
        sizes = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in dims]
        return Partial(
            np.array(sizes, np.int64), np.array([self._symbol(dim) for dim in dims], np.int64)
        )

    def _symbol(self, dim: Any) -> int:
        if dim.HasField("dim_value"):
            return KNOWN
        if not dim.dim_param:
            return UNKNOWN
        return self._symbols.setdefault(dim.dim_param, len(self._symbols) + 1)

    def _name(self, symbol: int) -> str:
        return next(name for name, number in self._symbols.items() if number == symbol)

    # Values.

    def _shape(self, node: Any) -> dict[str, Partial]:
        """Return the output of Shape or Size, from the type of its input."""
        if node.op_type not in ("Shape", "Size"):
            return {}
        dims = self._dims(node.input[0])
        if dims is None:
            return {}
        if node.op_type == "Shape":
            start, end = (onnx_model.attribute(node, name) for name in ("start", "end"))
            part = slice(start, end)
            return {node.output[0]: Partial(dims.elements[part], dims.symbols[part])}
        if not dims.is_known:
            return {}
        return {node.output[0]: known(np.array(dims.elements.prod(), np.int64))}

    def _computed(self, node: Any) -> dict[str, Partial]:
        """Return the outputs of any other node, as far as its inputs are known."""
        names = [name for name in node.input if name]
        if any(name not in self.values for name in names) or not self._is_small(node):
            return {}
        inputs = {name: self.values[name] for name in names}
        elements = {name: each.elements for name, each in inputs.items()}
        if all(each.is_known for each in inputs.values()):
            return {name: known(array) for name, array in self._run(node, elements).items()}
        if node.op_type in MOVING:
            return self._moved(node, inputs)
        if node.op_type in ELEMENTWISE:
            return self._paired(node, inputs)
        return {}

    def _moved(self, node: Any, inputs: Mapping[str, Partial]) -> dict[str, Partial]:
        """Compute a node that only moves elements: symbols move with them."""
        data = set(node.input[: MOVING[node.op_type]])
        if any(name not in data and not each.is_known for name, each in inputs.items()):
            return {}
        elements = self._run(node, {name: each.elements for name, each in inputs.items()})
        if node.op_type == "Cast":
            symbols = {node.output[0]: inputs[node.input[0]].symbols}
        else:
            symbols = self._run(
                node,
                {
                    name: each.symbols if name in data else each.elements
                    for name, each in inputs.items()
                },
                is_symbolic=True,
            )
        return {
            name: Partial(np.where(symbols[name] == KNOWN, elements[name], 1), symbols[name])
            for name in elements
            if name in symbols
        }

    def _paired(self, node: Any, inputs: Mapping[str, Partial]) -> dict[str, Partial]:
        """Compute an elementwise node: an element is known if all of its inputs are."""
        found = self._run(node, {name: each.elements for name, each in inputs.items()})
        is_open = np.zeros((), bool)
        for each in inputs.values():
            is_open = is_open | (each.symbols != KNOWN)
        return {
            name: Partial(
                np.where(is_open, np.ones((), array.dtype), array),
                np.broadcast_to(np.where(is_open, UNKNOWN, KNOWN), array.shape),
            )
            for name, array in found.items()
        }

    def _is_small(self, node: Any) -> bool:
        """Return whether all outputs are known to be small enough."""
        for name in filter(None, node.output):
            dims = self._dims(name)
            if dims is None or not dims.is_known or dims.elements.prod() > MAX_VALUES:
                return False
        return True

    def _run(
        self, node: Any, inputs: Mapping[str, Array], *, is_symbolic: bool = False
    ) -> dict[str, Array]:
        """Run a node by ONNX Runtime, for the same rounding as when served; empty if that fails.
        `is_symbolic` runs it on INT64 regardless of its types."""
        import onnx

        def output(name: str) -> Any:
            elem_type = self.types[name].tensor_type.elem_type
            kind = onnx.TensorProto.INT64 if is_symbolic else elem_type
            return onnx.helper.make_tensor_value_info(name, kind, None)

        weights = [onnx.numpy_helper.from_array(array, name) for name, array in inputs.items()]
        graph = onnx.helper.make_graph(
            [node], "constant", [], [output(name) for name in node.output if name], weights
        )
        opsets = [onnx.helper.make_opsetid("", self.opset)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
        try:
            return onnx_model.run(onnx_model.session(model, num_threads=1), {})
        except BackendFailed:
            return {}

    # Reshape.

    def _fix_reshape(self, graph: Any, node: Any) -> None:
        """Make a shape constant that repeats the batch dimension: 0 if the input has it at the same
        place, -1 if it is the only unknown one."""
        import onnx

        sizes = self.values.get(node.input[1])
        if sizes is None or sizes.is_known or onnx_model.attribute(node, "allowzero", 0):
            return
        fixed = _reshaped(sizes, self._dims(node.input[0]))
        if fixed is None:
            return
        name = f"{node.output[0]}_folded_shape"
        graph.initializer.append(onnx.numpy_helper.from_array(fixed, name))
        self.types[name] = onnx.helper.make_tensor_type_proto(onnx.TensorProto.INT64, fixed.shape)
        self.values[name] = known(fixed)
        node.input[1] = name


def _reshaped(sizes: Partial, dims: Partial | None) -> Array | None:
    """Return a shape for Reshape that is fully known, or None if there is no such shape."""
    fixed = sizes.elements.astype(np.int64)
    left: list[int] = []
    for place, symbol in enumerate(sizes.symbols.tolist()):
        if symbol == KNOWN:
            continue
        if dims is not None and place < dims.symbols.size and symbol == dims.symbols[place] > 0:
            fixed[place] = 0
        else:
            left.append(place)
    if left:
        # A 0 or -1 elsewhere could stand for any size.
        if len(left) > 1 or (sizes.elements[sizes.symbols == KNOWN] <= 0).any():
            return None
        fixed[left[0]] = -1
    return fixed


# Pad.


@dataclass(frozen=True, slots=True)
class _Padding:
    """The padding that a Pad adds to each axis except batch and channels."""

    source: str
    sizes: Array
    value: float
    # The input is never negative.
    is_positive: bool


def tidy_pads(graph: Any) -> None:
    """Drop empty Pads, and fuse others into the Conv or MaxPool behind them where that is exact.
    ONNX Runtime's own fusion handles fewer cases of Conv, and one case of MaxPool wrongly."""
    constants = onnx_model.constants(graph)
    producers = {name: node for node in graph.node for name in node.output}
    renamed: dict[str, str] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        while node.op_type == "Pad" and not node.input[-1]:
            # A trailing empty input keeps ONNX Runtime from fusing the Pad into AveragePool.
            del node.input[-1]
        sizes = _pad_sizes(node, constants)
        if sizes is not None and not sizes.any():
            renamed[node.output[0]] = node.input[0]
        source = producers.get(node.input[0]) if node.input else None
        padding = None if source is None else _padding(source, constants, producers)
        if padding is not None and node.op_type == "Conv":
            _join_conv(node, padding)
        elif padding is not None and node.op_type == "MaxPool":
            _join_pool(node, padding)
    onnx_model.remove_dead(graph)


def _pad_sizes(node: Any, constants: Mapping[str, Any]) -> Array | None:
    """Return the padding before and behind each axis, or None if the node is not a Pad, its sizes
    are computed at run time, or it pads only some axes."""
    import onnx

    if node.op_type != "Pad" or not 2 <= len(node.input) <= 3:
        return None
    sizes = constants.get(node.input[1])
    return None if sizes is None else onnx.numpy_helper.to_array(sizes).reshape(2, -1)


def _padding(
    pad: Any, constants: Mapping[str, Any], producers: Mapping[str, Any]
) -> _Padding | None:
    """Return a Pad's padding; None if it is not constant, is negative, or pads batch or
    channels."""
    import onnx

    sizes = _pad_sizes(pad, constants)
    if sizes is None or sizes[:, :2].any() or (sizes < 0).any():
        return None
    if onnx_model.attribute(pad, "mode", b"constant") != b"constant":
        return None
    value = 0.0
    if len(pad.input) > 2 and pad.input[2]:
        if pad.input[2] not in constants:
            return None
        value = float(onnx.numpy_helper.to_array(constants[pad.input[2]]).item())
    source = producers.get(pad.input[0])
    is_positive = source is not None and source.op_type in ("Relu", "Sigmoid")
    return _Padding(pad.input[0], sizes[:, 2:], value, is_positive)


def _own_sizes(node: Any, padding: _Padding) -> Array:
    none = [0] * padding.sizes.size
    return np.array(onnx_model.attribute(node, "pads", none)).reshape(2, -1)


def _join_conv(node: Any, padding: _Padding) -> None:
    if padding.value != 0 or onnx_model.attribute(node, "auto_pad", b"NOTSET") not in (
        b"NOTSET",
        b"VALID",
    ):
        return
    sizes = _own_sizes(node, padding) + padding.sizes
    _remove_attribute(node, "auto_pad")
    _set_attribute(node, "pads", sizes.ravel().tolist())
    node.input[0] = padding.source


def _join_pool(node: Any, padding: _Padding) -> None:
    """Fuse a Pad into MaxPool, whose own padding never wins. Exact if the Pad's value never wins
    either: it is -inf, or 0 and the input is not negative."""
    if not _is_plain_pool(node):
        return
    own = _own_sizes(node, padding)
    sizes = own + padding.sizes
    is_lowest = padding.value <= np.finfo(np.float32).min or (
        padding.value == 0 and padding.is_positive
    )
    # No window may lie entirely in the padding.
    has_room = (sizes < np.array(onnx_model.attribute(node, "kernel_shape"))).all()
    if is_lowest and has_room:
        _set_attribute(node, "pads", sizes.ravel().tolist())
        node.input[0] = padding.source
    elif not own.any():
        # ONNX Runtime 1.31 fuses a Pad of zeros into MaxPool even if zero may be the largest value
        # of a window. It does not fuse into a MaxPool declared without padding.
        _remove_attribute(node, "pads")
        _set_attribute(node, "auto_pad", "VALID")


def _is_plain_pool(node: Any) -> bool:
    """Return whether results do not depend on where the padding is: no ceil_mode, dilations or
    indices."""
    return (
        len(node.output) == 1
        and not onnx_model.attribute(node, "ceil_mode", 0)
        and onnx_model.attribute(node, "auto_pad", b"NOTSET") == b"NOTSET"
        and all(each == 1 for each in onnx_model.attribute(node, "dilations", ()))
    )


def _remove_attribute(node: Any, name: str) -> None:
    for index in reversed(range(len(node.attribute))):
        if node.attribute[index].name == name:
            del node.attribute[index]


def _set_attribute(node: Any, name: str, value: Any) -> None:
    import onnx

    _remove_attribute(node, name)
    node.attribute.append(onnx.helper.make_attribute(name, value))
