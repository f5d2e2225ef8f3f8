"""Turn the Q/DQ nodes of an imported graph into layers that compute in INT8.

A convolution or linear layer whose input and weights are quantised becomes an `Int8Layer`, together
with the residual and the activation after it; if all that follows quantises its result in the same
way, the result stays in INT8. Pooling and sums between INT8 tensors stay in INT8 too. Values are
those of the file up to rounding: only a rounding between two fused operators would be visible, and
those are not fused. What is left of Q/DQ runs as one kernel each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from penstock.backends.onnx_import import quantised
from penstock.backends.onnx_import.importer import WEIGHT_SCALE
from penstock.backends.torch_activations import activation_of
from penstock.kernels.activation import Activation
from penstock.kernels.convolution import IMAGE_RANK, ConvGeometry, Tuner
from penstock.kernels.int8_layers import (
    MAX_STEM_WINDOW,
    STEM_CHANNELS,
    STEM_STRIDES,
    Dequantize,
    Int8Add,
    Int8Layer,
    Int8MaxPool,
    Int8Shape,
    Levels,
    Quantize,
)

# Unsigned values are kept as signed ones, 128 lower.
UNSIGNED_SHIFT = 128
# Largest value of INT8, without its sign.
MOST = 128
NO_MODULE = nn.Module()


def quantise_graph(module: fx.GraphModule, tuner: Tuner | None) -> Counter[str]:
    """Rewrite the graph; return the layers in INT8 by kind. A graph without Q/DQ is unchanged."""
    with torch.no_grad():
        return _Quantiser(module, tuner).run()


def quantised_inputs(module: fx.GraphModule, names: Sequence[str]) -> frozenset[str]:
    """Return the inputs of a graph that only layers read which quantise them."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(
        name
        for name, node in zip(names, placeholders, strict=True)
        if node.users and all(_quantises(module, user) for user in node.users)
    )


def _quantises(module: fx.GraphModule, node: fx.Node) -> bool:
    layer = module.get_submodule(str(node.target)) if node.op == "call_module" else NO_MODULE
    return isinstance(layer, Quantize) or (isinstance(layer, Int8Layer) and layer.is_stem)


@dataclass(slots=True)
class _Tail:
    """What follows a layer and is computed with it."""

    nodes: list[fx.Node]
    residual: fx.Node | None = None
    lowest: float = -math.inf
    highest: float = math.inf
    # One that does more than limit.
    activation: Activation | None = None
    # The residual is added after the activation.
    adds_last: bool = False

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]


@dataclass(slots=True)
class _Quantiser:
    module: fx.GraphModule
    tuner: Tuner | None
    counts: Counter[str] = field(default_factory=Counter)
    # Levels by node: those that quantise, and those that turn levels into floats.
    _to: dict[fx.Node, Levels] = field(default_factory=dict)
    _from: dict[fx.Node, Levels] = field(default_factory=dict)
    _order: dict[fx.Node, int] = field(default_factory=dict)

    def run(self) -> Counter[str]:
        graph = self.module.graph
        self._note_all()
        for node in list(graph.nodes):
            if self._layer(node) is not None:
                self._replace_layer(node)
        for node in list(graph.nodes):
            if self._is_sum(node):
                self._replace_sum(node)
            elif self._is_pool(node):
                self._replace_pool(node)
        graph.eliminate_dead_code()
        self._replace_rest()
        graph.eliminate_dead_code()
        self.module.delete_all_unused_submodules()
        self.module.recompile()
        return self.counts

    def _note_all(self) -> None:
        graph = self.module.graph
        for node in graph.nodes:
            self._order[node] = len(self._order)
            if _calls(node, quantised.quantize):
                self._note(node, self._to)
            elif _calls(node, quantised.dequantize):
                self._note(node, self._from)
        for node in list(graph.nodes):
            if self._is_pool(node):
                self._quantise_before(node)
        # Both ends of an INT8 tensor must be known, or its values would be shifted for one only.
        self._forget_halves()

    def _note(self, node: fx.Node, found: dict[fx.Node, Levels]) -> None:
        """Note the levels of a node if they are one constant for the whole tensor."""
        scale, zero = (self._constant(each) for each in (*node.args, None)[1:3])
        has_zero = len(node.args) > 2 and node.args[2] is not None
        # A datatype that is given besides is that of the zero.
        plain = {"axis", "types", "saturate", *(["output_dtype"] if has_zero else [])}
        is_other = any(value for key, value in node.kwargs.items() if key not in plain)
        if scale is None or scale.numel() != 1 or (has_zero and zero is None) or is_other:
            return
        source = self._to.get(node.args[0])
        if zero is None and found is self._from and source is not None:
            # Zero, in the datatype that was written.
            is_known = source.zero in (0, -UNSIGNED_SHIFT)
            if is_known:
                found[node] = Levels(float(scale), source.zero)
            return
        # Without a zero a value is UINT8.
        dtype = torch.uint8 if zero is None else zero.dtype
        if dtype not in (torch.int8, torch.uint8) or (zero is None and found is self._from):
            return
        start = 0 if zero is None else int(zero)
        found[node] = Levels(float(scale), start - (UNSIGNED_SHIFT if dtype == torch.uint8 else 0))

    def _forget_halves(self) -> None:
        """Keep only values that a known node writes and that only known nodes read."""
        is_changed = True
        while is_changed:
            lone = [
                node
                for node, levels in self._to.items()
                if any(self._from.get(user) != levels for user in node.users)
            ]
            loose = [node for node in self._from if node.args[0] not in self._to]
            for node in lone:
                del self._to[node]
            for node in loose:
                del self._from[node]
            is_changed = bool(lone or loose)

    def _constant(self, node: object) -> torch.Tensor | None:
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        found = getattr(self.module, str(node.target), None)
        return found if isinstance(found, torch.Tensor) else None

    def _module(self, node: fx.Node) -> nn.Module:
        is_call = node.op == "call_module"
        return self.module.get_submodule(str(node.target)) if is_call else NO_MODULE

    def _layer(self, node: fx.Node) -> nn.Conv2d | nn.Linear | None:
        """Return the layer that a node calls if it can run in INT8."""
        layer = self._module(node)
        scale = getattr(layer, WEIGHT_SCALE, None)
        if scale is None or node.args[0] not in self._from:
            return None
        if type(layer) not in (nn.Linear, nn.Conv2d) or _levels_of(layer) is None:
            return None
        if type(layer) is nn.Linear:
            return layer
        is_plain = layer.groups == 1 and layer.dilation == (1, 1)
        return layer if is_plain and not isinstance(layer.padding, str) else None

    def _replace_layer(self, node: fx.Node) -> None:
        layer = self._layer(node)
        assert layer is not None
        given = node.args[0]
        assert isinstance(given, fx.Node)
        levels = self._from[given]
        tail = self._tail(node)
        out = self._levels_after(tail.last)
        residual, added = tail.residual, None
        if residual is not None and residual in self._from:
            added, residual = self._from[residual], residual.args[0]
        geometry = ConvGeometry()
        if isinstance(layer, nn.Conv2d):
            geometry = ConvGeometry(layer.stride, layer.padding)
        scale, values = getattr(layer, WEIGHT_SCALE).double(), _levels_of(layer)
        assert values is not None
        limits = tail.lowest, tail.highest
        after = tail.activation, tail.adds_last
        shape = Int8Shape(levels, out, *limits, added, geometry, *after)
        source = given.args[0]
        assert isinstance(source, fx.Node)
        is_image = values.ndim == IMAGE_RANK and values.shape[1] <= STEM_CHANNELS
        is_stem = is_image and max(values.shape[2:]) <= MAX_STEM_WINDOW
        is_stem &= geometry.stride[0] == geometry.stride[1] and geometry.stride[0] in STEM_STRIDES
        is_stem &= residual is None and _calls(source, quantised.quantize)
        if is_stem:
            # The layer quantises by itself.
            (source, *_) = source.args
        dtype = layer.weight.dtype
        made = Int8Layer(values, scale, layer.bias, shape, self.tuner, is_stem=is_stem, dtype=dtype)
        kind = "linear" if made.is_matmul else "convolution"
        arguments = (source,) if residual is None else (source, residual)
        self._insert(tail.nodes, kind, made, arguments, out)

    def _levels_after(self, node: fx.Node) -> Levels | None:
        """Return how a result is quantised, if all that follows does so in the same way."""
        wanted = {self._to.get(user) for user in node.users}
        return wanted.pop() if len(wanted) == 1 else None

    def _insert(
        self,
        replaced: Sequence[fx.Node],
        kind: str,
        made: nn.Module,
        arguments: tuple[fx.Node, ...],
        out: Levels | None,
    ) -> None:
        """Put a layer in place of nodes, and of those that quantise their result."""
        graph, last = self.module.graph, replaced[-1]
        name = f"int8_{kind}_{self.counts[kind]}"
        self.counts[kind] += 1
        self.module.add_submodule(name, made)
        with graph.inserting_after(last):
            new = graph.call_module(name, arguments)
        self._order[new] = self._order[last]
        if out is None:
            last.replace_all_uses_with(new)
        else:
            # Readers find the levels of their input through it.
            self._to[new] = out
            for user in list(last.users):
                user.replace_all_uses_with(new)
                del self._to[user]
                graph.erase_node(user)
        for node in reversed(replaced):
            graph.erase_node(node)

    def _tail(self, node: fx.Node) -> _Tail:
        """Follow a layer over an addition and an activation, in this order or the other, without
        other users."""
        tail = _Tail([node])
        following = self._sum_after(node)
        if following is not None:
            tail = _Tail([node, following], _other(following, node))
        following = _only_user(tail.last)
        found = None if following is None else activation_of(self.module, following)
        if following is None or found is None:
            return tail
        nodes, residual = [*tail.nodes, following], tail.residual
        last = self._sum_after(following)
        if residual is None and last is not None:
            other = _other(last, following)
            return _Tail([*nodes, last], other, activation=found, adds_last=True)
        limits = self._limits(following)
        if limits is not None:
            return _Tail(nodes, residual, *limits)
        return _Tail(nodes, residual, activation=found)

    def _sum_after(self, node: fx.Node) -> fx.Node | None:
        """Return the addition of another tensor that alone reads a node."""
        found = _only_user(node)
        is_sum = found is not None and self._is_sum(found) and _other(found, node) is not node
        return found if is_sum else None

    def _limits(self, node: fx.Node) -> tuple[float, float] | None:
        """Return the limits of an activation that only limits its input."""
        found = activation_of(self.module, node)
        if found is None or found.kind not in ("relu", "clamp"):
            return None
        return (0.0, math.inf) if found.kind == "relu" else (found.a, found.b)

    def _is_sum(self, node: fx.Node) -> bool:
        """Return whether it adds two tensors that are computed."""
        if not _calls(node, torch.add) or node.kwargs or len(node.args) != 2:
            return False
        return all(isinstance(each, fx.Node) and self._constant(each) is None for each in node.args)

    def _replace_sum(self, node: fx.Node) -> None:
        if not all(each in self._from for each in node.args):
            return
        one, other = node.args
        assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
        nodes, lowest = [node], -math.inf
        following = _only_user(node)
        if following is not None and self._limits(following) == (0.0, math.inf):
            nodes, lowest = [node, following], 0.0
        out = self._levels_after(nodes[-1])
        if out is None:
            return
        made = Int8Add((self._from[one], self._from[other]), out, lowest)
        sources = one.args[0], other.args[0]
        assert isinstance(sources[0], fx.Node) and isinstance(sources[1], fx.Node)
        self._insert(nodes, "sum", made, sources, out)

    def _is_pool(self, node: fx.Node) -> bool:
        pool = self._module(node)
        if type(pool) is not nn.MaxPool2d or pool.ceil_mode or pool.return_indices:
            return False
        return _pair(pool.dilation) == (1, 1)

    def _quantise_before(self, node: fx.Node) -> None:
        """Quantise the input of pooling as its result is: the largest value stays the largest."""
        levels, given = self._levels_after(node), node.args[0]
        if levels is None or given in self._from:
            return
        (first, *_) = node.users
        graph = self.module.graph
        with graph.inserting_before(node):
            constants = [
                graph.get_attr(str(each.target)) if isinstance(each, fx.Node) else each
                for each in first.args[1:]
            ]
            made = graph.call_function(first.target, (given, *constants), dict(first.kwargs))
            undone = graph.call_function(quantised.dequantize, (made, *constants))
        self._to[made] = self._from[undone] = levels
        self._order[made] = self._order[undone] = self._order[node]
        node.args = (undone,)

    def _replace_pool(self, node: fx.Node) -> None:
        pool, given = self._module(node), node.args[0]
        levels = self._from.get(given)
        if levels is None or self._levels_after(node) != levels:
            return
        made = Int8MaxPool(_pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding))
        assert isinstance(given, fx.Node) and isinstance(given.args[0], fx.Node)
        self._insert([node], "pooling", made, (given.args[0],), levels)

    def _replace_rest(self) -> None:
        """Let nodes that quantise, and those that undo it, run as one kernel each."""
        left = set(self.module.graph.nodes)
        for kind, nodes in (("quantise", self._to), ("dequantise", self._from)):
            for node, levels in list(nodes.items()):
                if node.op != "call_function" or node not in left:
                    continue
                scale = self._constant(node.args[1])
                assert scale is not None
                is_first = kind == "quantise"
                layer = Quantize(levels) if is_first else Dequantize(levels, scale.dtype)
                name = f"int8_{kind}_{self._order[node]}"
                self.module.add_submodule(name, layer)
                with self.module.graph.inserting_after(node):
                    new = self.module.graph.call_module(name, (node.args[0],))
                node.replace_all_uses_with(new)
                self.module.graph.erase_node(node)


def _levels_of(layer: nn.Conv2d | nn.Linear) -> torch.Tensor | None:
    """Return the INT8 values of a layer's weights; None if the scales are not by output channel,
    which shows in values that are not whole."""
    scale = getattr(layer, WEIGHT_SCALE).double()
    if len(scale) not in (1, len(layer.weight)):
        return None
    by_channel = scale.reshape(-1, *[1] * (layer.weight.ndim - 1))
    values = layer.weight.double() / by_channel
    whole = values.round()
    # Weights are rounded to the type of the file.
    tolerance = 0.2 if layer.weight.dtype == torch.float16 else 1e-3
    is_whole = bool(((values - whole).abs() < tolerance).all() & (whole.abs() <= MOST).all())
    return whole.to(torch.int8) if is_whole else None


def _calls(node: object, function: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is function


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(total: fx.Node, node: fx.Node) -> fx.Node:
    """Return what a sum adds to a node."""
    one, other = total.args
    found = other if one is node else one
    assert isinstance(found, fx.Node)
    return found


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
