"""Fuse self-attention in an ONNX graph into one operator of ONNX Runtime.

The search starts at each Softmax and matches the computation in both directions, not the node
pattern of one exporter: softmax(scale * Q K^T + mask) V, with Q, K and V from matmuls of the same
input with constant weights. Anything else stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from penstock.optimizer import onnx_model
from penstock.types import Array

DOMAIN = "com.microsoft"
# packed: with the projections in the operator; heads: with a MatMul that can be quantised.
Form = Literal["packed", "heads"]
FORMS: tuple[Form, ...] = ("packed", "heads")
HEADS_TO_FRONT = [0, 2, 1, 3]
KEYS_TRANSPOSED = [0, 2, 3, 1]
SWAP_LAST = [0, 1, 3, 2]
# Lower limit of mask values if the graph guards against rows whose positions are all masked.
LOWEST = -1e30


class AttentionMisfit(Exception):
    """The graph around a Softmax is not an attention pattern that `fuse` knows."""


@dataclass(frozen=True, slots=True)
class Projection:
    source: str
    weight: Array
    bias: Array
    head_size: int


@dataclass(frozen=True, slots=True)
class AttentionMatch:
    query: Projection
    key: Projection
    value: Projection
    scale: float
    # Name of the tensor that is added to the scores; empty: none.
    mask: str
    is_guarded: bool
    output: str


def fuse(model: ModelProto, form: Form) -> int:
    """Fuse in place; return how many attentions were found."""
    graph = _AttentionGraph(model.graph)
    num_found = 0
    for softmax in [node for node in model.graph.node if node.op_type == "Softmax"]:
        try:
            found = graph.attention_at(softmax)
        except AttentionMisfit:
            continue
        _replace(model.graph, softmax, found, form, num_found)
        num_found += 1
    if num_found:
        onnx_model.remove_dead(model.graph)
        if all(each.domain != DOMAIN for each in model.opset_import):
            model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return num_found


class _AttentionGraph:
    def __init__(self, graph: GraphProto) -> None:
        self._makers = {name: node for node in graph.node for name in node.output}
        self._consumers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._consumers.setdefault(name, []).append(node)
        self._given = {value.name for value in graph.output}
        self._weights = onnx_model.constants(graph)

    def attention_at(self, softmax: NodeProto) -> AttentionMatch:
        scores, scale, mask = self._scores(softmax.input[0])
        query, key = scores.input
        query_scale, query = self._scaled(query)
        key_scale, key = self._scaled(key)
        weighted, is_guarded = self._weighted(softmax)
        output = self._merged(weighted)
        found = AttentionMatch(
            self._projection(self._unheaded(query)),
            self._projection(self._unheaded_keys(key)),
            self._projection(self._unheaded(weighted.input[1])),
            scale * query_scale * key_scale,
            mask,
            is_guarded,
            output,
        )
        parts = (found.query, found.key, found.value)
        if len({part.source for part in parts}) > 1 or len({p.weight.shape for p in parts}) > 1:
            raise AttentionMisfit
        return found

    def _made_by(self, name: str, *kinds: str) -> NodeProto:
        node: NodeProto | None = self._makers.get(name)
        if node is None or node.op_type not in kinds:
            raise AttentionMisfit
        return node

    def _only_consumer(self, name: str, kind: str) -> NodeProto:
        consumers = self._consumers.get(name, [])
        if len(consumers) != 1 or consumers[0].op_type != kind or name in self._given:
            raise AttentionMisfit
        return consumers[0]

    def _constant(self, name: str) -> Array:
        if name not in self._weights:
            raise AttentionMisfit
        return numpy_helper.to_array(self._weights[name])

    def _scores(self, name: str) -> tuple[NodeProto, float, str]:
        """Return the matmul of queries and keys, its scale, and the name of the mask."""
        mask = ""
        node = self._made_by(name, "Add", "Mul", "Div", "MatMul")
        if node.op_type == "Add":
            sides = list(node.input)
            if not self._leads_to_product(sides[0]):
                sides.reverse()
            name, mask = sides
        scale, name = self._scaled(name)
        return self._made_by(name, "MatMul"), scale, mask

    def _leads_to_product(self, name: str) -> bool:
        try:
            self._made_by(self._scaled(name)[1], "MatMul")
        except AttentionMisfit:
            return False
        return True

    def _scaled(self, name: str) -> tuple[float, str]:
        """Return the factor by which a tensor was multiplied, and the tensor's name."""
        node = self._makers.get(name)
        if node is None or node.op_type not in ("Mul", "Div"):
            return 1.0, name
        source, other = node.input
        if source in self._weights and node.op_type == "Mul":
            source, other = other, source
        factor = self._constant(other)
        if factor.size != 1:
            raise AttentionMisfit
        number = float(factor.reshape(-1)[0])
        return (1 / number if node.op_type == "Div" else number), source

    def _weighted(self, softmax: NodeProto) -> tuple[NodeProto, bool]:
        """Return the matmul with the values, and whether a guard against NaN precedes it."""
        consumers = self._consumers.get(softmax.output[0], [])
        guards = [node for node in consumers if node.op_type == "IsNaN"]
        if not guards:
            return self._only_consumer(softmax.output[0], "MatMul"), False
        where = self._only_consumer(guards[0].output[0], "Where")
        if len(consumers) != 2 or where not in consumers or np.any(self._constant(where.input[1])):
            raise AttentionMisfit
        return self._only_consumer(where.output[0], "MatMul"), True

    def _merged(self, weighted: NodeProto) -> str:
        """Return the name of the output after the heads are merged again."""
        transpose = self._only_consumer(weighted.output[0], "Transpose")
        _check_order(transpose, HEADS_TO_FRONT)
        reshape = self._only_consumer(transpose.output[0], "Reshape")
        return str(reshape.output[0])

    def _unheaded(self, name: str) -> NodeProto:
        transpose = self._made_by(name, "Transpose")
        _check_order(transpose, HEADS_TO_FRONT)
        return self._made_by(transpose.input[0], "Reshape")

    def _unheaded_keys(self, name: str) -> NodeProto:
        transpose = self._made_by(name, "Transpose")
        if _order(transpose) == SWAP_LAST:
            scale, source = self._scaled(transpose.input[0])
            if scale != 1.0:
                raise AttentionMisfit
            return self._unheaded(source)
        _check_order(transpose, KEYS_TRANSPOSED)
        return self._made_by(transpose.input[0], "Reshape")

    def _projection(self, reshape: NodeProto) -> Projection:
        name = reshape.input[0]
        bias: Array | None = None
        if self._made_by(name, "Add", "MatMul").op_type == "Add":
            sides = list(self._makers[name].input)
            if sides[1] in self._weights:
                sides.reverse()
            bias, name = self._constant(sides[0]), sides[1]
        product = self._made_by(name, "MatMul")
        weight = self._constant(product.input[1])
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[1:]):
            raise AttentionMisfit
        if bias is None:
            bias = np.zeros(weight.shape[1], weight.dtype)
        head_size = self._head_size(reshape.input[1], weight.shape[1])
        return Projection(product.input[0], weight, bias, head_size)

    def _head_size(self, shape: str, hidden_size: int) -> int:
        """Return the head size, from the last two of four sizes; one of the two may be inferred."""
        maker = None if shape in self._weights else self._makers.get(shape)
        parts = maker.input[-2:] if maker and maker.op_type == "Concat" else [shape]
        sizes = [int(n) for part in parts for n in np.ravel(self._constant(part))][-2:]
        num_heads, size = sizes if len(sizes) == 2 else (-1, -1)
        if size <= 0 < num_heads:
            size = hidden_size // num_heads
        if size <= 0 or hidden_size % size:
            raise AttentionMisfit
        return size


def _order(transpose: NodeProto) -> list[int]:
    return list(onnx_model.attribute(transpose, "perm", []))


def _check_order(transpose: NodeProto, order: list[int]) -> None:
    if _order(transpose) != order:
        raise AttentionMisfit


def _replace(
    graph: GraphProto, softmax: NodeProto, found: AttentionMatch, form: Form, index: int
) -> None:
    """Insert the operator before the Softmax; what it replaces is left without consumers."""
    prefix = f"attention_{index}"
    parts = (found.query, found.key, found.value)
    weights = np.concatenate([part.weight for part in parts], axis=1)
    weight = onnx_model.add_constant(graph, f"{prefix}_weight", weights)
    biases = np.concatenate([part.bias for part in parts])
    bias = onnx_model.add_constant(graph, f"{prefix}_bias", biases)
    mask, made = _mask(graph, found, prefix)
    hidden_size = found.query.weight.shape[1]
    settings = {"num_heads": hidden_size // found.query.head_size, "scale": found.scale}
    for node in graph.node:
        for place, name in enumerate(node.output):
            if name == found.output:
                node.output[place] = f"{prefix}_replaced"
    if form == "packed":
        names = [found.query.source, weight, bias, "", "", mask]
        kind = "Attention"
    else:
        sizes = np.full(3, hidden_size, np.int64)
        split = onnx_model.add_constant(graph, f"{prefix}_sizes", sizes)
        sides = [f"{prefix}_{part}" for part in ("query", "key", "value")]
        names = [*sides, "", "", mask]
        made += [
            helper.make_node("MatMul", [found.query.source, weight], [f"{prefix}_product"]),
            helper.make_node("Add", [f"{prefix}_product", bias], [f"{prefix}_biased"]),
            helper.make_node("Split", [f"{prefix}_biased", split], sides, axis=-1),
        ]
        kind = "MultiHeadAttention"
    made.append(helper.make_node(kind, names, [found.output], domain=DOMAIN, **settings))
    place = next(n for n, node in enumerate(graph.node) if node.output[0] == softmax.output[0])
    for node in reversed(made):
        node.name = f"{prefix}/{node.op_type}"
        graph.node.insert(place, node)


def _mask(graph: GraphProto, found: AttentionMatch, prefix: str) -> tuple[str, list[NodeProto]]:
    """Return the mask with a row per query, finite if guarded, and the nodes that make it."""
    if not found.mask:
        return "", []
    shape, length, full = (f"{prefix}_{part}" for part in ("shape", "length", "mask_shape"))
    one = onnx_model.add_constant(graph, f"{prefix}_one", np.array([1], np.int64))
    ones = onnx_model.add_constant(graph, f"{prefix}_ones", np.array([1, 1], np.int64))
    name = f"{prefix}_mask"
    made = [
        helper.make_node("Shape", [found.query.source], [shape]),
        helper.make_node("Gather", [shape, one], [length]),
        helper.make_node("Concat", [ones, length, one], [full], axis=0),
        helper.make_node("Expand", [found.mask, full], [name]),
    ]
    if found.is_guarded:
        lowest = onnx_model.add_constant(graph, f"{prefix}_lowest", np.array(LOWEST, np.float32))
        made.append(helper.make_node("Max", [name, lowest], [f"{prefix}_finite_mask"]))
        name = f"{prefix}_finite_mask"
    return name, made
