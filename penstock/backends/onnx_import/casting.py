"""Casts an imported graph to another floating datatype.

Weights, casts and numbers of the graph change; `precision` says which values stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from penstock.backends.onnx_import import shapes
from penstock.backends.onnx_import.elementwise import cast, cast_like, cast_within
from penstock.backends.onnx_import.importer import ON_HOST, ImportedGraph, parameter_names
from penstock.backends.onnx_import.precision import (
    MOVES,
    PERIODIC,
    constants_of,
    find_divisor,
    is_tiny,
    keep_wide,
    may_be_float,
    read_constant,
    recast_nodes,
    takes_wide,
)
from penstock.backends.onnx_import.quantised import dequantize, quantize
from penstock.backends.onnx_import.values import FLOAT_NUMBERS
from penstock.errors import ConfigError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
NUMBERS = dict(zip(FLOATS, FLOAT_NUMBERS, strict=True))
EPSILON = "epsilon"
INTEGER_OPERATORS = {
    "ConvInteger",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QAttention",
    "QEmbedLayerNormalization",
    "QGemm",
    "QLinearAveragePool",
    "QLinearConv",
    "QLinearMatMul",
    "QLinearWhere",
}


def retype(model: ImportedGraph, dtype: torch.dtype, keep: Collection[str] = ()) -> None:
    """Let the graph compute in another floating datatype.

    Casts to a float become casts to it, but not those of sizes on the host, nor what `precision`
    finds: these stay as they are. Finite constants beyond its range, such as those that mask,
    become half its largest number, so that scores can be added; those too small for it, such as an
    epsilon, become its smallest. Nodes and layers in `keep` stay as they are. Raise ConfigError for
    graphs that compute with integers, whose sums 16 bits do not hold.
    """
    quantised = sorted(INTEGER_OPERATORS & set(model.counts))
    is_half = dtype.itemsize < torch.float32.itemsize
    if quantised and is_half:
        raise ConfigError(
            [f"{', '.join(quantised)}: the model is quantised; {dtype} does not hold its sums"]
        )
    exact = recast_nodes(model.module)
    if is_half:
        exact |= keep_wide(model.module, dtype)
    for node in model.module.graph.nodes:
        if (
            node.op != "call_function"
            or node.meta.get(ON_HOST)
            or node in exact
            or node.name in keep
        ):
            continue
        node.args = tuple(_fitted(each, dtype) for each in node.args)
        node.kwargs = _retyped(node, dtype)
    if is_half:
        _keep_scales(model.module, exact, dtype, keep)
    _keep_exact(model.module, exact, dtype)
    named = [*model.module.named_buffers(), *model.module.named_parameters()]
    for name, tensor in named:
        if tensor.dtype in FLOATS and tensor.numel():
            owner, _, attribute = name.rpartition(".")
            if owner in keep or name in keep:
                continue
            _limit(model.module.get_submodule(owner), attribute, tensor, dtype)
    model.module.recompile()


def _retyped(node: fx.Node, dtype: torch.dtype) -> dict[str, object]:
    """Return the attributes of a node that computes in this datatype."""
    # Norms add epsilon in FP32.
    found = {
        key: each if key == EPSILON else _fitted(each, dtype) for key, each in node.kwargs.items()
    }
    types = found.get("types")
    if node.target is cast and found.get("to") in FLOAT_NUMBERS:
        found["to"] = dtype
    if node.target is cast_like and isinstance(types, list) and types[1] in FLOAT_NUMBERS:
        # The other tensor's datatype, which is changed as well.
        found["types"] = []
    if node.target is shapes.make_range and isinstance(types, list):
        found["types"] = [NUMBERS[dtype] if each in FLOAT_NUMBERS else each for each in types]
    if "output_datatype" in parameter_names(node.target):
        # FLOAT unless the file says otherwise.
        found.setdefault("output_datatype", 1)
    if found.get("dtype") in FLOATS:
        found["dtype"] = dtype
    numbers = [key for key in ("dtype", "output_datatype") if found.get(key) in FLOAT_NUMBERS]
    return found | dict.fromkeys(numbers, NUMBERS[dtype])


def _keep_exact(module: fx.GraphModule, exact: set[fx.Node], dtype: torch.dtype) -> None:
    """Let these nodes compute in the precision of the file: their constants are not cast with the
    other weights, and their results are cast where others use them. Outputs are not cast."""
    narrowing = _Narrowing(module, exact, dtype)
    for node in [each for each in module.graph.nodes if each in exact and may_be_float(each)]:
        others = [
            user
            for user in node.users
            if user not in exact
            and user.op != "output"
            and may_be_float(user)
            and not takes_wide(user, node)
        ]
        for user in others:
            user.replace_input_with(node, narrowing.narrow(node))
    for node in [each for each in module.graph.nodes if each in exact]:
        _keep_constants(module, node)
    module.graph.eliminate_dead_code()


@dataclass(slots=True)
class _Narrowing:
    """Casts exact values for nodes that compute in the new datatype, each once."""

    module: fx.GraphModule
    exact: set[fx.Node]
    dtype: torch.dtype
    _made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # Nodes whose constants are beyond the range, or too small for it, and those computed from them.
    _large: set[fx.Node] = field(default_factory=set)
    _small: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.module.graph.nodes:
            # Sines and logarithms are neither.
            if node not in self.exact or node.target in PERIODIC | {torch.log}:
                continue
            constants = list(constants_of(self.module, node))
            for found, is_outside in ((self._large, _is_large), (self._small, is_tiny)):
                is_first = any(bool(is_outside(each, self.dtype).any()) for each in constants)
                # Clients may mask with any number.
                is_first |= node.op == "placeholder" and is_outside is _is_large
                if is_first or any(each in found for each in node.all_input_nodes):
                    found.add(node)
            if find_divisor(self.module, node) in self._small:
                # The inverse of an epsilon may be beyond the range; it is no epsilon itself.
                self._large.add(node)
                self._small.discard(node)

    def narrow(self, node: fx.Node) -> fx.Node:
        if node not in self._made:
            self._made[node] = self._copy(node) if self._is_moved(node) else self._cast(node)
        return self._made[node]

    def _is_moved(self, node: fx.Node) -> bool:
        """Whether a value is an integer that was cast and moved, with no arithmetic: it is cast to
        the new datatype at once."""
        sources = [each for each in node.all_input_nodes if each in self.exact]
        if node.target is cast:
            return not sources and not may_be_float(node.all_input_nodes[0])
        return node.target in MOVES and bool(sources) and all(map(self._is_moved, sources))

    def _copy(self, node: fx.Node) -> fx.Node:
        graph = self.module.graph
        narrow = {each: self.narrow(each) for each in node.all_input_nodes if each in self.exact}
        with graph.inserting_after(node):
            made = graph.node_copy(node, lambda each: narrow.get(each, each))
        made.args = tuple(_fitted(each, self.dtype) for each in made.args)
        made.kwargs = _retyped(made, self.dtype)
        return made

    def _cast(self, node: fx.Node) -> fx.Node:
        how: dict[str, object] = {"to": self.dtype}
        is_outside = node in self._large | self._small
        if is_outside:
            how["has_small"] = node in self._small
        with self.module.graph.inserting_after(node):
            return self.module.graph.call_function(
                cast_within if is_outside else cast, (node,), how
            )


def _is_large(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    if tensor.numel():
        # One pass over large weights; NaN is not within.
        lowest, highest = tensor.aminmax()
        if bool((lowest >= -most) & (highest <= most)):
            return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return tensor.isfinite() & (tensor.abs() > most)


def _keep_scales(
    module: fx.GraphModule, exact: set[fx.Node], dtype: torch.dtype, keep: Collection[str]
) -> None:
    """Keep constant scales of Q/DQ nodes in the precision of the file: 16 bits hold none below
    6e-5. What a node makes of integers is of the new datatype all the same."""
    for node in list(module.graph.nodes):
        is_known = node.op == "call_function" and node.target in (quantize, dequantize)
        if not is_known or node in exact or node.name in keep:
            continue
        _keep_constants(module, node)
        if node.target is dequantize:
            node.kwargs = {**node.kwargs, "output_dtype": NUMBERS[dtype]}


def _keep_constants(module: fx.GraphModule, node: fx.Node) -> None:
    """Keep the constants of a node as bits, which stay the same when the module is cast."""
    graph = module.graph
    for each in node.all_input_nodes:
        tensor = read_constant(module, each)
        if tensor is not None and tensor.dtype in BITS:
            name = f"exact_{each.name}"
            module.register_buffer(name, tensor.detach().clone().view(BITS[tensor.dtype]))
            with graph.inserting_before(node):
                stored = graph.get_attr(name)
                whole = graph.call_function(torch.Tensor.view, (stored, tensor.dtype))
                node.replace_input_with(each, whole)


def _fitted(value: object, dtype: torch.dtype) -> object:
    """Return a number as one that the datatype has; anything else as it is."""
    if not isinstance(value, float) or not math.isfinite(value) or value == 0:
        return value
    limits = torch.finfo(dtype)
    size = max(abs(value), limits.smallest_normal)
    return math.copysign(limits.max / 2 if size > limits.max else size, value)


def _limit(module: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    is_large, is_small = _is_large(tensor, dtype), is_tiny(tensor, dtype)
    if not bool((is_large | is_small).any()):
        return
    limited = torch.where(is_large, tensor.sign() * (limits.max / 2), tensor)
    limited = torch.where(is_small, tensor.sign() * limits.smallest_normal, limited)
    if isinstance(tensor, nn.Parameter):
        limited = nn.Parameter(limited, requires_grad=False)
    setattr(module, name, limited)
