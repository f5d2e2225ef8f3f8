"""Shape-specialised constant folding: replace what a graph computes from known dimensions.

Exporters leave the arithmetic of shapes in the graph (Shape, Gather, Div, Concat, Pad, ...). ONNX
Runtime folds it only if every dimension is known, and the batch dimension is not. This walk tracks
integers element by element: [batch, 3, 224, 224] has three known elements. Sound by construction: a
value that depends on an unknown dimension stays in the graph. Knows nothing of candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from penstock.errors import BackendFailed
from penstock.optimizer import onnx_model
from penstock.types import Array

# Larger constants cost more memory than they save time.
MAX_VALUES = 1 << 16
# Symbols of elements. Above 0: the number of the named dimension that the element equals.
KNOWN, UNKNOWN = 0, -1
# Operators that only move elements of their first input (Concat: of all); others must be known.
MOVING = frozenset(
    {"Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze"}
    | {"Tile", "Transpose", "Unsqueeze"}
)
ELEMENTWISE = frozenset(
    {"Abs", "Add", "And", "Ceil", "Clip", "Div", "Equal", "Floor", "Greater", "GreaterOrEqual"}
    | {"Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Round", "Sign"}
    | {"Sub", "Where", "Xor"}
)
# Operators that are random or that their inputs alone do not determine.
NOT_FOLDED = frozenset(
    {"Bernoulli", "Dropout", "If", "Loop", "Multinomial", "RandomNormal", "RandomNormalLike"}
    | {"RandomUniform", "RandomUniformLike", "Scan"}
)
# Index of the input that is the output's shape.
SHAPED_BY = {"ConstantOfShape": 0, "Resize": 3}


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


def fold(model: ModelProto, shapes: Mapping[str, Sequence[int]] | None = None) -> ModelProto:
    """Return a copy of the model in which everything that follows from input dimensions is
    constant. `shapes` of inputs (-1: unknown) add to those fixed in the file, and are declared."""
    folded = copy.deepcopy(model)
    graph = folded.graph
    if not _can_be_walked(graph):
        return folded
    _declare(graph, shapes or {})
    walk = _Walk(graph, onnx_model.opset(folded))
    for node in graph.node:
        walk.visit(node)
    _replace(graph, walk.folded)
    _tidy_pads(graph)
    # Earlier shape inference may contradict the sizes that are now fixed.
    del graph.value_info[:]
    return folded


def _can_be_walked(graph: GraphProto) -> bool:
    """Return whether the graph can be folded: no initializer may be overridden by callers (the pass
    onnx-graph ensures this), and nodes must be in topological order."""
    if onnx_model.has_weights_as_inputs(graph):
        return False
    made = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if any(name and name not in made for name in node.input):
            return False
        made.update(node.output)
    return True


def _declare(graph: GraphProto, shapes: Mapping[str, Sequence[int]]) -> None:
    for value in onnx_model.true_inputs(graph):
        declared = value.type.tensor_type.shape.dim
        for dim in declared:
            if dim.dim_value < 0:
                # Some exporters write -1 for any size.
                dim.ClearField("dim_value")
        for dim, size in zip(declared, shapes.get(value.name, ()), strict=False):
            if size > 0 and not dim.HasField("dim_value"):
                dim.dim_value = size


def _replace(graph: GraphProto, folded: Mapping[str, Array]) -> None:
    """Replace nodes by the constants that they compute."""
    outputs = {value.name for value in graph.output}
    for index in reversed(range(len(graph.node))):
        names = [name for name in graph.node[index].output if name]
        if names and all(name in folded and name not in outputs for name in names):
            for name in names:
                onnx_model.add_constant(graph, name, folded[name])
            del graph.node[index]


class _Walk:
    """Types and integer values of everything before the current node."""

    def __init__(self, graph: GraphProto, opset: int) -> None:
        self._graph = graph
        self._opsets = [helper.make_opsetid("", opset)]
        self._types = {value.name: value.type for value in onnx_model.true_inputs(graph)}
        self._values: dict[str, Partial] = {}
        # Constants computed from dimensions or other constants.
        self.folded: dict[str, Array] = {}
        # Names of dimensions; that of symbol 1 is the first.
        self._symbols: list[str] = []
        for name, tensor in onnx_model.constants(graph).items():
            self._types[name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            if onnx_model.num_values(tensor) <= MAX_VALUES:
                self._values[name] = known(numpy_helper.to_array(tensor))

    def visit(self, node: NodeProto) -> None:
        if node.domain not in ("", "ai.onnx"):
            return
        if node.op_type == "Reshape":
            self._fix_reshape(node)
        self._infer(node)
        if node.op_type in NOT_FOLDED or all(name in self._values for name in node.output):
            return
        found = self._shape(node) or self._computed(node)
        self._values.update(found)
        self.folded.update({name: each.elements for name, each in found.items() if each.is_known})

    # Types.

    def _infer(self, node: NodeProto) -> None:
        """Infer the types of a node's outputs; skip what cannot be inferred."""
        names = [name for name in node.input if name]
        if any(name not in self._types for name in names):
            return
        values = {name: self._values[name] for name in names if name in self._values}
        elements = {name: each.elements for name, each in values.items() if each.is_known}
        data = {name: numpy_helper.from_array(each, name) for name, each in elements.items()}
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opsets[0].version, "")
            types = {name: self._types[name] for name in names}
            infer = onnx.shape_inference.infer_node_outputs
            inferred = infer(schema, node, types, data, opset_imports=self._opsets)
        except Exception:  # Shape inference raises many types for what it does not understand.
            return
        self._types.update(inferred)
        self._shape_by_input(node)

    def _shape_by_input(self, node: NodeProto) -> None:
        """Set the type of an output whose shape is a partially known input."""
        place = SHAPED_BY.get(node.op_type)
        if place is None or place >= len(node.input) or node.output[0] not in self._types:
            return
        sizes = self._values.get(node.input[place])
        if sizes is None or sizes.is_known or onnx_model.attribute(node, "axes", ()):
            return
        shape = self._types[node.output[0]].tensor_type.shape
        del shape.dim[:]
        for size, symbol in zip(sizes.elements.tolist(), sizes.symbols.tolist(), strict=True):
            dim = shape.dim.add()
            if symbol == KNOWN:
                dim.dim_value = int(size)
            elif symbol != UNKNOWN:
                dim.dim_param = self._symbols[symbol - 1]

    def _dims(self, name: str) -> Partial | None:
        """Return the dimensions of a tensor; None if its rank is unknown."""
        found = self._types.get(name)
        if found is None or not found.tensor_type.HasField("shape"):
            return None
        dims = found.tensor_type.shape.dim
        sizes = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in dims]
        symbols = [KNOWN if dim.HasField("dim_value") else self._symbol(dim) for dim in dims]
        return Partial(np.array(sizes, np.int64), np.array(symbols, np.int64))

    def _symbol(self, dim: onnx.TensorShapeProto.Dimension) -> int:
        if not dim.dim_param:
            return UNKNOWN
        if dim.dim_param not in self._symbols:
            self._symbols.append(dim.dim_param)
        return self._symbols.index(dim.dim_param) + 1

    # Values.

    def _shape(self, node: NodeProto) -> dict[str, Partial]:
        """Return the output of Shape or Size, from the type of its input."""
        dims = self._dims(node.input[0]) if node.op_type in ("Shape", "Size") else None
        if dims is None:
            return {}
        if node.op_type == "Shape":
            start = onnx_model.attribute(node, "start", 0)
            part = slice(start, onnx_model.attribute(node, "end", len(dims.elements)))
            return {node.output[0]: Partial(dims.elements[part], dims.symbols[part])}
        if not dims.is_known:
            return {}
        return {node.output[0]: known(np.array(dims.elements.prod(), np.int64))}

    def _computed(self, node: NodeProto) -> dict[str, Partial]:
        """Return the outputs of any other node, as far as its inputs are known."""
        names = [name for name in node.input if name]
        if any(name not in self._values for name in names) or not self._is_small(node):
            return {}
        inputs = {name: self._values[name] for name in names}
        is_known = all(each.is_known for each in inputs.values())
        if not is_known and node.op_type not in MOVING | ELEMENTWISE:
            return {}
        elements = self._run(node, {name: each.elements for name, each in inputs.items()})
        if is_known or not elements:
            return {name: known(array) for name, array in elements.items()}
        if node.op_type in MOVING:
            symbols = self._moved_symbols(node, inputs)
        else:
            # An element is known if all elements that it is computed from are.
            is_open = sum(each.symbols != KNOWN for each in inputs.values()) > 0
            marks = np.where(is_open, UNKNOWN, KNOWN)
            symbols = {name: np.broadcast_to(marks, a.shape) for name, a in elements.items()}
        found = {}
        for name, marks in symbols.items():
            ones = elements[name].dtype.type(1)
            found[name] = Partial(np.where(marks == KNOWN, elements[name], ones), marks)
        return found

    def _moved_symbols(self, node: NodeProto, inputs: Mapping[str, Partial]) -> dict[str, Array]:
        """Return the symbols behind a node that only moves elements: they move with them."""
        data = set(node.input if node.op_type == "Concat" else node.input[:1])
        if any(name not in data and not each.is_known for name, each in inputs.items()):
            return {}
        if node.op_type == "Cast":
            return {node.output[0]: inputs[node.input[0]].symbols}
        moved = {name: each.elements for name, each in inputs.items()}
        moved |= {name: inputs[name].symbols for name in data if name in inputs}
        return self._run(node, moved, is_symbolic=True)

    def _is_small(self, node: NodeProto) -> bool:
        """Return whether all outputs are known to be small enough."""
        for name in filter(None, node.output):
            dims = self._dims(name)
            if dims is None or not dims.is_known or dims.elements.prod() > MAX_VALUES:
                return False
        return True

    def _run(
        self, node: NodeProto, inputs: Mapping[str, Array], *, is_symbolic: bool = False
    ) -> dict[str, Array]:
        """Run a node by ONNX Runtime, for the same rounding as when served; empty if that fails.
        `is_symbolic` runs it on INT64 regardless of its types."""

        types = {name: self._types[name].tensor_type.elem_type for name in node.output if name}
        if is_symbolic:
            types = dict.fromkeys(types, TensorProto.INT64)
        outputs = [helper.make_tensor_value_info(*each, None) for each in types.items()]
        graph = helper.make_graph([node], "constant", [], outputs)
        for name, array in inputs.items():
            onnx_model.add_constant(graph, name, array)
        model = helper.make_model(graph, opset_imports=self._opsets, ir_version=8)
        try:
            return onnx_model.run(onnx_model.session(model, intra_op_num_threads=1), {})
        except BackendFailed:
            return {}

    # Reshape.

    def _fix_reshape(self, node: NodeProto) -> None:
        """Make a shape constant: 0 for a dimension of the input, -1 for the only unknown one."""
        sizes = self._values.get(node.input[1])
        if sizes is None or sizes.is_known or onnx_model.attribute(node, "allowzero", 0):
            return
        fixed = _reshaped(sizes, self._dims(node.input[0]))
        if fixed is None:
            return
        name = onnx_model.add_constant(self._graph, f"{node.output[0]}_folded_shape", fixed)
        self._types[name] = helper.make_tensor_type_proto(TensorProto.INT64, fixed.shape)
        self._values[name] = known(fixed)
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


def _tidy_pads(graph: GraphProto) -> None:
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


def _pad_sizes(node: NodeProto, constants: Mapping[str, TensorProto]) -> Array | None:
    """Return the padding before and behind each axis, or None if the node is not a Pad, its sizes
    are computed at run time, or it pads only some axes."""
    if node.op_type != "Pad" or not 2 <= len(node.input) <= 3:
        return None
    sizes = constants.get(node.input[1])
    return None if sizes is None else numpy_helper.to_array(sizes).reshape(2, -1)


def _padding(
    pad: NodeProto, constants: Mapping[str, TensorProto], producers: Mapping[str, NodeProto]
) -> _Padding | None:
    """Return a Pad's padding; None if it is computed, negative, or of batch or channels."""
    sizes = _pad_sizes(pad, constants)
    if sizes is None or sizes[:, :2].any() or (sizes < 0).any():
        return None
    if onnx_model.attribute(pad, "mode", b"constant") != b"constant":
        return None
    value = 0.0
    if len(pad.input) > 2 and pad.input[2]:
        if pad.input[2] not in constants:
            return None
        value = float(numpy_helper.to_array(constants[pad.input[2]]).item())
    source = producers.get(pad.input[0])
    is_positive = source is not None and source.op_type in ("Relu", "Sigmoid")
    return _Padding(pad.input[0], sizes[:, 2:], value, is_positive)


def _own_sizes(node: NodeProto, padding: _Padding) -> Array:
    none = [0] * padding.sizes.size
    return np.array(onnx_model.attribute(node, "pads", none)).reshape(2, -1)


def _join_conv(node: NodeProto, padding: _Padding) -> None:
    auto_pad = onnx_model.attribute(node, "auto_pad", b"NOTSET")
    if padding.value != 0 or auto_pad not in (b"NOTSET", b"VALID"):
        return
    sizes = _own_sizes(node, padding) + padding.sizes
    _set_attributes(node, auto_pad=None, pads=sizes.ravel().tolist())
    node.input[0] = padding.source


def _join_pool(node: NodeProto, padding: _Padding) -> None:
    """Fuse a Pad into MaxPool, whose own padding never wins. Exact if the Pad's value never wins
    either: it is -inf, or 0 and the input is not negative."""
    is_dilated = set(onnx_model.attribute(node, "dilations", [1])) != {1}
    is_padded = onnx_model.attribute(node, "auto_pad", b"NOTSET") != b"NOTSET"
    # With ceil_mode, dilations or indices the place of padding matters.
    if is_dilated or is_padded or onnx_model.attribute(node, "ceil_mode", 0) or node.output[1:]:
        return
    own = _own_sizes(node, padding)
    sizes = own + padding.sizes
    lowest = 0 if padding.is_positive else np.finfo(np.float32).min
    # No window may lie entirely in the padding.
    has_room = (sizes < np.array(onnx_model.attribute(node, "kernel_shape", ()))).all()
    if padding.value <= lowest and has_room:
        _set_attributes(node, pads=sizes.ravel().tolist())
        node.input[0] = padding.source
    elif not own.any():
        # ONNX Runtime 1.31 fuses a Pad of zeros into MaxPool even if zero may be the largest value
        # of a window. It does not fuse into a MaxPool declared without padding.
        _set_attributes(node, pads=None, auto_pad="VALID")


def _set_attributes(node: NodeProto, **values: str | list[int] | None) -> None:
    """Set these attributes; None removes one."""
    for index in reversed(range(len(node.attribute))):
        if node.attribute[index].name in values:
            del node.attribute[index]
    given = {name: value for name, value in values.items() if value is not None}
    node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())
