"""Find the encoder layers of an imported graph, for `torch_packing`.

A layer is recognised from its end: layer norm of a residual and a linear layer, behind an
activation and another linear layer, behind a layer norm of a residual and a linear layer, behind
attention over three linear layers of the same input. Operators of ONNX Runtime's optimiser that
stand for several of these are taken apart. Scales and masks are not looked at: the caller compares
answers. What does not match is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends.onnx_import import contrib, elementwise, matrices, patterns, shapes
from penstock.backends.torch_activations import activation_of
from penstock.kernels.activation import GELU, GELU_TANH, RELU
from penstock.kernels.packed_encoder import PackedLayer, PackedLinear, PackedStack

NAME = "penstock_packed_layers"
ACTIVATIONS = {GELU: "gelu", GELU_TANH: "gelu_tanh", RELU: "relu"}
# Functions that may add a bias first.
WITH_BIAS = {contrib.bias_gelu: "gelu", contrib.fast_gelu: "gelu_tanh"}
# What may stand between a linear layer and the products of heads.
RESHAPING = {
    shapes.reshape,
    shapes.transpose,
    torch.permute,
    torch.transpose,
    patterns.transpose_heads,
    torch.mul,
    elementwise.divide,
    elementwise.where,
    elementwise.cast,
}
NUM_QKV = 3
# Rows, tokens, heads and their size.
HEADS_RANK = 4


class NoMatch(Exception):
    """A node is not what an encoder layer has there; the message names it."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """A layer: the nodes that it reads and gives, and what it is made of."""

    source: fx.Node
    result: fx.Node
    layer: PackedLayer


def replace_layers(module: fx.GraphModule) -> PackedStack:
    """Replace the encoder layers of a graph by a packed stack, and return it. NoMatch says which
    node is not as expected."""
    finder = _Finder(module)
    parts = finder.layers()
    first, last = parts[0], parts[-1]
    for one in parts[:-1]:
        extra = [user.name for user in one.result.users if not finder.is_inside(user)]
        if extra:
            raise NoMatch(f"node '{extra[0]}' reads the result of a layer in between")
    stack = PackedStack([each.layer for each in parts], gives_tuple=False)
    module.add_submodule(NAME, stack.eval())
    with module.graph.inserting_after(last.result):
        made = module.graph.call_module(NAME, (first.source,))
    last.result.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()
    return stack


class _Finder:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._inside: set[fx.Node] = set()
        self._reasons: list[str] = []

    def layers(self) -> list[EncoderPart]:
        """Return the layers, from first to last, each of which reads the one before."""
        found: dict[fx.Node, EncoderPart] = {}
        for node in self._module.graph.nodes:
            if self._is_norm(node):
                try:
                    part = self._layer(node)
                except NoMatch as error:
                    self._reasons.append(str(error))
                    continue
                found[part.result] = part
        if not found:
            reasons = self._reasons[-1] if self._reasons else "it has no layer norm"
            raise NoMatch(f"found no encoder layer: {reasons}")
        parts = list(found.values())
        for before, part in zip(parts, parts[1:], strict=False):
            if part.source is not before.result:
                raise NoMatch(f"node '{part.source.name}' is between two encoder layers")
        return parts

    def is_inside(self, node: fx.Node) -> bool:
        return node in self._inside

    def _layer(self, last: fx.Node) -> EncoderPart:
        residual, (outer_node, last_norm, outer_bias) = self._residual(last)
        outer = self._linear(outer_node, outer_bias)
        activated = outer_node.args[0]
        activation, inner_node, inner_bias = self._activation(activated)
        inner = self._linear(inner_node, inner_bias)
        if inner_node.args[0] is not residual:
            raise _mismatch(inner_node, "a linear layer of the norm after attention")
        source, (out_node, first_norm, out_bias) = self._residual(residual)
        out = self._linear(out_node, out_bias)
        qkv, num_heads = self._attention(out_node.args[0], source)
        self._inside |= {last, residual, outer_node, inner_node, out_node, activated}
        products = [PackedLinear(each.weight, each.bias) for each in (qkv, out, inner, outer)]
        layer = PackedLayer(products, (first_norm, last_norm), num_heads, activation)
        return EncoderPart(source, last, layer)

    # Parts.

    def _called(self, node: object) -> nn.Module | None:
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return None
        return self._module.get_submodule(str(node.target))

    def _constant(self, node: object) -> torch.Tensor | None:
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        found = getattr(self._module, str(node.target), None)
        return found if isinstance(found, torch.Tensor) else None

    def _is_norm(self, node: fx.Node) -> bool:
        return type(self._called(node)) is nn.LayerNorm or _calls(node, contrib.skip_layer_norm)

    def _residual(
        self, node: object
    ) -> tuple[fx.Node, tuple[fx.Node, nn.LayerNorm, torch.Tensor | None]]:
        """Return what is added in front of a layer norm: the residual and the linear layer; and the
        norm, and a bias that is added there too."""
        bias = None
        if not isinstance(node, fx.Node) or not self._is_norm(node):
            raise _mismatch(node, "a layer norm of a residual")
        if _calls(node, contrib.skip_layer_norm):
            one, other, *weights = node.args
            given = [self._constant(each) for each in weights]
            norm = _norm(given, float(node.kwargs.get("epsilon", 1e-12)))
            bias = given[2] if len(given) > 2 else None
            if norm is None or node.kwargs["num_outputs"] != 1:
                raise _mismatch(node, "constant weights and one output")
        else:
            norm = self._called(node)
            added = node.args[0]
            if not _calls(added, torch.add) or len(added.args) != 2:
                raise _mismatch(added, f"an addition before layer norm '{node.name}'")
            self._inside.add(added)
            one, other = added.args
        assert isinstance(norm, nn.LayerNorm)
        for linear, residual in ((one, other), (other, one)):
            if type(self._called(linear)) is nn.Linear and isinstance(residual, fx.Node):
                return residual, (linear, norm, bias)
        raise _mismatch(node, "the sum of a residual and a linear layer before it")

    def _linear(self, node: fx.Node, bias: torch.Tensor | None = None) -> LinearPart:
        linear = self._called(node)
        if linear is None or type(linear) is not nn.Linear:
            raise _mismatch(node, "a linear layer")
        weight = linear.weight.detach()
        parts = [each for each in (linear.bias, bias) if each is not None]
        total = weight.new_zeros(len(weight))
        for each in parts:
            total = total + each.detach()
        return LinearPart(weight, total)

    def _activation(self, node: object) -> tuple[str, fx.Node, torch.Tensor | None]:
        """Return the activation, the linear layer before it, and a bias added in between."""
        name, bias = "", None
        if isinstance(node, fx.Node):
            found = activation_of(self._module, node)
            name = ACTIVATIONS.get(found, "") if found is not None else ""
            if _calls(node, *WITH_BIAS):
                name = WITH_BIAS[node.target]
                bias = self._constant(node.args[1]) if len(node.args) > 1 else None
                if bias is None and len(node.args) > 1:
                    raise _mismatch(node, "a constant bias")
        if not name or not isinstance(node, fx.Node) or not isinstance(node.args[0], fx.Node):
            raise _mismatch(node, "GELU or ReLU between two linear layers")
        return name, node.args[0], bias

    def _attention(self, mixed: object, source: fx.Node) -> tuple[LinearPart, int]:
        """Return the weights of queries, keys and values, and the number of heads."""
        node = self._skip(mixed)
        if _calls(node, contrib.attention):
            return self._joined(node, source)
        if _calls(node, contrib.multi_head_attention):
            return self._several(node, source)
        if _calls(node, matrices.attention):
            heads, num_heads = node.args[:NUM_QKV], int(node.kwargs.get("q_num_heads", 0))
            return self._merged(heads, source, num_heads)
        if _calls(node, patterns.attend):
            return self._merged(node.args[:NUM_QKV], source, 0, node.args[-1])
        if _calls(node, functional.scaled_dot_product_attention):
            return self._merged(node.args[:NUM_QKV], source, 0, node.kwargs.get("scale"))
        if not _calls(node, torch.matmul):
            raise _mismatch(node, "attention, or the product of weights and values")
        weights, values = node.args
        softmax = self._skip(weights, stop=patterns.SOFTMAX)
        if not _calls(softmax, patterns.SOFTMAX):
            raise _mismatch(softmax, "softmax of the products of queries and keys")
        scores = softmax.args[0]
        while _calls(scores, torch.add, torch.mul, elementwise.divide):
            scores = next(
                (each for each in scores.args if self._leads_to_product(each)), scores.args[0]
            )
        if not _calls(scores, torch.matmul):
            raise _mismatch(scores, "the product of queries and keys")
        return self._merged((*scores.args, values), source, 0)

    def _leads_to_product(self, node: object) -> bool:
        while isinstance(node, fx.Node) and _calls(node, torch.mul, elementwise.divide, torch.add):
            node = node.args[0]
        return _calls(node, torch.matmul)

    def _skip(self, node: object, stop: Callable[..., object] | None = None) -> fx.Node:
        """Return what a node was made from, behind reshapes; of a choice, its last argument."""
        while isinstance(node, fx.Node) and _calls(node, *RESHAPING) and node.target is not stop:
            self._inside.add(node)
            node = node.args[2] if _calls(node, elementwise.where) else node.args[0]
        if not isinstance(node, fx.Node):
            raise NoMatch("attention reads a constant; expected tokens")
        self._inside.add(node)
        return node

    def _merged(
        self, heads: Sequence[object], source: fx.Node, num_heads: int, scale: float | None = None
    ) -> tuple[LinearPart, int]:
        """Join the linear layers of queries, keys and values. The usual scale tells the size of a
        head where the graph computes it."""
        parts = []
        for each in heads:
            node = self._skip(each)
            if node.args[:1] != (source,):
                raise _mismatch(node, f"a linear layer of '{source.name}', for attention")
            parts.append(self._linear(node))
        width = len(parts[0].weight)
        if any(len(each.weight) != width for each in parts):
            raise NoMatch("queries, keys and values of an attention differ in width")
        size = round(scale**-2) if scale else 0
        told = [_count_heads(each, width) for each in heads]
        told.append(width // size if size and width % size == 0 else 0)
        num_heads = num_heads or next(filter(None, told), 0)
        if not num_heads:
            raise _mismatch(heads[0], "heads of a size that is written in the graph")
        return _join(parts), num_heads

    def _joined(self, node: fx.Node, source: fx.Node) -> tuple[LinearPart, int]:
        x, weight, bias = (*node.args, None)[:NUM_QKV]
        given = self._constant(weight)
        sizes = node.kwargs.get("qkv_hidden_sizes") or []
        if x is not source or given is None or len({*sizes}) > 1:
            raise _mismatch(node, f"attention over '{source.name}', with constant weights")
        total = self._constant(bias)
        made = given.t().contiguous()
        total = made.new_zeros(len(made)) if total is None else total
        return LinearPart(made, total), int(node.kwargs["num_heads"])

    def _several(self, node: fx.Node, source: fx.Node) -> tuple[LinearPart, int]:
        heads, num_heads = node.args[:NUM_QKV], int(node.kwargs["num_heads"])
        if len(heads) != NUM_QKV or None in heads:
            raise _mismatch(node, "queries, keys and values")
        joined, _ = self._merged(heads, source, num_heads)
        bias = self._constant(node.args[NUM_QKV]) if len(node.args) > NUM_QKV else None
        if bias is not None:
            joined = LinearPart(joined.weight, joined.bias + bias)
        return joined, num_heads


def _calls(node: object, *functions: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def _mismatch(node: object, expected: str) -> NoMatch:
    if not isinstance(node, fx.Node):
        return NoMatch(f"found {node!r}; expected {expected}")
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return NoMatch(f"node '{node.name}' ({target}): expected {expected}")


def _norm(weights: Sequence[torch.Tensor | None], epsilon: float) -> nn.LayerNorm | None:
    weight, bias = (*weights, None)[:2]
    if weight is None:
        return None
    with torch.device("meta"):
        norm = nn.LayerNorm(len(weight), epsilon, bias=bias is not None)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    norm.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return norm


def _join(parts: Sequence[LinearPart]) -> LinearPart:
    return LinearPart(
        torch.cat([each.weight for each in parts]), torch.cat([each.bias for each in parts])
    )


def _count_heads(node: object, width: int) -> int:
    """Return the number of heads, from the first reshape of a linear layer's result: to rows,
    tokens, heads and their size; 0 if that is not known."""
    sizes: Sequence[int] = ()
    while isinstance(node, fx.Node) and _calls(node, *RESHAPING):
        if _calls(node, shapes.reshape):
            sizes = _sizes(node.args[1])
        node = node.args[0]
    if len(sizes) != HEADS_RANK:
        return 0
    count, size = sizes[2:]
    count = width // size if count <= 0 < size else count
    return count if count > 0 and width % count == 0 else 0


def _sizes(shape: object) -> Sequence[int]:
    """Return the sizes that a reshape takes; -1 for those that the graph computes."""
    if isinstance(shape, list | tuple):
        return shape
    found: list[int] = []
    if not isinstance(shape, fx.Node) or not _calls(shape, shapes.concat):
        return found
    for part in shape.args:
        is_told = _calls(part, torch.tensor) and isinstance(part.args[0], list | tuple)
        found += part.args[0] if is_told else [-1]
    return found
