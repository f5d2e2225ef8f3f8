"""Fuse the layers of transformers and of networks built like them (`penstock.fuse`: "on").

Three linear layers of one input become one; nn.MultiheadAttention is taken apart; a linear layer
takes its activation, a layer scale and an addition with it; a sum and its layer norm become one
layer with two results; the halves of a gated linear unit are multiplied by one (`torch_gates`);
attention without a mask chooses its kernel. As in `torch_fusion`, only nodes without other users
are fused, and only if nothing writes to their inputs in between.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends.torch_activations import activation_of, factors_of
from penstock.backends.torch_aliasing import (
    ADD_IN_PLACE,
    GraphMemory,
    called_module,
    has_no_hooks,
)
from penstock.backends.torch_gates import find_halves
from penstock.kernels.activation import Activation
from penstock.kernels.convolution import Tuner
from penstock.kernels.fused_linear import (
    Attention,
    FusedLinear,
    GatedProduct,
    ResidualNorm,
    as_window,
    merge_heads,
    split_heads,
)

ATTENTION = functional.scaled_dot_product_attention
# Methods that change the shape only; of a slice, `view` may be impossible where `reshape` copies.
SHAPES = {"view", "reshape", "unflatten", "transpose", "permute", "unsqueeze", "squeeze", "flatten"}
TO_IMAGE, FROM_IMAGE = (0, 3, 1, 2), (0, 2, 3, 1)
# Linear layers of one input that are merged.
NUM_MERGED = 3
# Smallest normal number of FP16, and the share of channels that must reach it.
SMALLEST, MOST = 2.0**-14, 0.5


def fuse_layers(
    traced: fx.GraphModule, tuner: Tuner | None, *, leaves_linear: bool = False
) -> None:
    """Fuse the layers of a traced module, in place; `leaves_linear`: only attention, because linear
    layers get another precision, and norms go with them (`torch_linear`)."""
    _LayerFuser(traced, tuner).run(leaves_linear)


@dataclass(slots=True)
class _LinearChain:
    """A linear layer and the nodes fused with it, in order."""

    nodes: list[fx.Node]
    linear: nn.Linear
    scale: torch.Tensor | None = None
    residual: fx.Node | None = None
    activation: Activation | None = None
    adds_last: bool = False
    # Whether the end of the chain is an image, [batch, channels, height, width].
    is_image: bool = False


@dataclass(slots=True)
class _LayerFuser:
    traced: fx.GraphModule
    tuner: Tuner | None
    _memory: GraphMemory = field(init=False)
    _number: int = 0
    # Weights by layer: one that is called twice shares them.
    _weights: dict[nn.Module, nn.Parameter] = field(default_factory=dict)

    def run(self, leaves_linear: bool) -> None:
        of_linear = (self._take_apart, self._merge, self._norm, self._gate, self._linear)
        for step in (*((self._gate,) if leaves_linear else of_linear), self._attention):
            self._memory = GraphMemory(self.traced)
            for node in list(self.traced.graph.nodes):
                if node in self._memory.order:
                    step(node)

    def _add(self, kind: str, module: nn.Module) -> str:
        self._number += 1
        name = f"penstock_fused_{kind}_{self._number}"
        self.traced.add_submodule(name, module.eval())
        return name

    def _plain(self, node: fx.Node, kind: type[nn.Module]) -> nn.Module | None:
        """Return the module that a node calls with one tensor, if it is of this kind."""
        module = called_module(self.traced, node)
        is_one = len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node)
        return module if type(module) is kind and has_no_hooks(module) and is_one else None

    def _swap(self, nodes: Sequence[fx.Node], made: fx.Node) -> None:
        """Put a node in the place of others, of which the last has users."""
        nodes[-1].replace_all_uses_with(made)
        self._memory.order[made] = self._memory.order[nodes[-1]]
        for node in reversed(nodes):
            self._erase(node)

    def _erase(self, node: fx.Node) -> None:
        self.traced.graph.erase_node(node)
        del self._memory.order[node]

    def _take_apart(self, node: fx.Node) -> None:
        """nn.MultiheadAttention of one tensor: its products, and attention between them."""
        module = called_module(self.traced, node)
        if type(module) is not nn.MultiheadAttention or not _is_self_attention(module, node):
            return
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if len(results) != len(node.users) or not set(results) <= {0, 1}:
            return
        if 1 in results and results[1].users:
            return
        x, out = node.args[0], module.out_proj
        qkv = _linear_of(module.in_proj_weight, module.in_proj_bias)
        graph = self.traced.graph
        with graph.inserting_before(node):
            merged = graph.call_module(self._add("qkv", qkv), (x,))
            heads = graph.call_function(split_heads, (merged, module.num_heads))
            parts = [graph.call_function(operator.getitem, (heads, n)) for n in range(3)]
            mixed = graph.call_function(ATTENTION, tuple(parts))
            joined = graph.call_function(merge_heads, (mixed,))
            linear = _linear_of(out.weight, out.bias)
            made = graph.call_module(self._add("out", linear), (joined,))
        for index in sorted(results, reverse=True):
            if index == 0:
                results[0].replace_all_uses_with(made)
            self._erase(results[index])
        self._erase(node)

    def _merge(self, node: fx.Node) -> None:
        """Three linear layers of one input as one, whose result is split."""
        if self._plain(node, nn.Linear) is None:
            return
        x = node.args[0]
        users = [each for each in x.users if self._plain(each, nn.Linear) is not None]
        users = sorted(users, key=lambda each: self._memory.order.get(each, -1))
        layers = [called_module(self.traced, each) for each in users]
        if len(users) != NUM_MERGED or len(set(map(id, layers))) != NUM_MERGED or users[0] != node:
            return
        has_bias = {layer.bias is not None for layer in layers}
        if len(has_bias) > 1 or self._memory.is_written(x, users[0], users):
            return
        if len({layer.weight.dtype for layer in layers}) > 1:
            return
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = torch.cat([layer.bias.detach() for layer in layers]) if True in has_bias else None
        graph = self.traced.graph
        with graph.inserting_before(node):
            name = self._add("qkv", _linear_of(weight, bias))
            merged = graph.call_module(name, (x,))
            sizes = [layer.out_features for layer in layers]
            split = graph.call_function(torch.split, (merged, sizes), {"dim": -1})
            parts = [graph.call_function(operator.getitem, (split, n)) for n in range(NUM_MERGED)]
        for new, old in zip((merged, split, *parts), (node, node, *users), strict=True):
            self._memory.order[new] = self._memory.order[old]
        for part, user in zip(parts, users, strict=True):
            user.replace_all_uses_with(part)
            self._erase(user)
            _reshape(part)

    def _norm(self, node: fx.Node) -> None:
        """A layer norm, and the sum that it is of."""
        norm = self._plain(node, nn.LayerNorm)
        if norm is None or len(norm.normalized_shape) != 1:
            return
        graph, total = self.traced.graph, node.args[0]
        name = self._add("norm", ResidualNorm(norm, self.tuner))
        added = self._memory.added(total)
        if added is None or self._memory.is_written(total, total, [node]):
            node.target = name
            return
        with graph.inserting_after(total):
            both = graph.call_module(name, added)
        with graph.inserting_after(both):
            normed = graph.call_function(operator.getitem, (both, 1))
            summed = graph.call_function(operator.getitem, (both, 0))
        for new in (both, summed, normed):
            self._memory.order[new] = self._memory.order[total]
        node.replace_all_uses_with(normed)
        self._erase(node)
        total.replace_all_uses_with(summed)
        self._erase(total)

    def _gate(self, node: fx.Node) -> None:
        """The product of both halves of a tensor, one of them with an activation."""
        halves = find_halves(self.traced, node)
        if halves is None:
            return
        nodes = sorted(halves.nodes, key=lambda each: self._memory.order[each])
        if self._memory.is_written(halves.x, nodes[0], nodes):
            return
        made = GatedProduct(halves.axis, halves.activation, halves.is_first, self.tuner)
        with self.traced.graph.inserting_before(node):
            call = self.traced.graph.call_module(self._add("gate", made), (halves.x,))
        self._swap(nodes, call)

    def _linear(self, node: fx.Node) -> None:
        linear = self._plain(node, nn.Linear)
        if linear is None or not linear.weight.is_floating_point():
            return
        chain = _LinearChain([node], linear)
        while (longer := self._longer(chain)) is not None:
            chain = longer
        made = FusedLinear(
            *self._scaled(chain), chain.activation, self.tuner, adds_last=chain.adds_last
        )
        name, graph, last = self._add("linear", made), self.traced.graph, chain.nodes[-1]
        with graph.inserting_before(last):
            residual = [] if chain.residual is None else [chain.residual]
            if chain.is_image and residual:
                residual = [graph.call_method("permute", (residual[0], *FROM_IMAGE))]
                self._memory.order[residual[0]] = self._memory.order[last]
            call = graph.call_module(name, (node.args[0], *residual))
            self._memory.order[call] = self._memory.order[last]
            if chain.is_image:
                call = graph.call_method("permute", (call, *TO_IMAGE))
        self._swap(chain.nodes, call)

    def _scaled(self, chain: _LinearChain) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Return weight and bias, multiplied by the scale of each channel."""
        weight, bias = chain.linear.weight, chain.linear.bias
        if chain.scale is None:
            if chain.linear not in self._weights:
                self._weights[chain.linear] = _parameter(as_window(weight))
            return self._weights[chain.linear], None if bias is None else _parameter(bias)
        scale = chain.scale.double()
        weight = (weight.double() * scale.reshape(-1, 1)).to(weight.dtype)
        if bias is not None:
            bias = _parameter((bias.double() * scale.flatten()).to(bias.dtype))
        return _parameter(as_window(weight)), bias

    def _longer(self, chain: _LinearChain) -> _LinearChain | None:
        """Return the chain with the next node in it, if it may be."""
        users = list(chain.nodes[-1].users)
        if len(users) != 1:
            return None
        node, nodes = users[0], [*chain.nodes, users[0]]
        longer: _LinearChain | None = None
        is_bare = chain.activation is None and chain.residual is None
        if is_bare and not chain.is_image and chain.scale is None and _is_permuted(node, TO_IMAGE):
            longer = _LinearChain(nodes, chain.linear, is_image=True)
        elif is_bare and (scale := self._scale(node, chain)) is not None:
            longer = _LinearChain(nodes, chain.linear, scale, is_image=chain.is_image)
        elif chain.residual is None and (other := self._other(node, chain)) is not None:
            after = chain.activation is not None
            longer = _LinearChain(
                *(nodes, chain.linear, chain.scale, other, chain.activation, after, chain.is_image)
            )
        elif chain.activation is None and node.args[:1] == (chain.nodes[-1],):
            activation = activation_of(self.traced, node)
            if activation is not None:
                longer = _LinearChain(
                    *(nodes, chain.linear, chain.scale, chain.residual, activation, False),
                    chain.is_image,
                )
        return longer if longer is not None and self._may_move(longer) else None

    def _scale(self, node: fx.Node, chain: _LinearChain) -> torch.Tensor | None:
        """Return the constant for each channel that a node multiplies the layer's result by."""
        if chain.scale is not None:
            return None
        for value, factor in _orders(factors_of(node)):
            is_constant = isinstance(factor, fx.Node) and factor.op == "get_attr"
            if value is not chain.nodes[-1] or not is_constant:
                continue
            assert isinstance(factor, fx.Node)
            found = operator.attrgetter(str(factor.target))(self.traced)
            size = chain.linear.out_features
            wanted = [(size, 1, 1), (1, size, 1, 1)] if chain.is_image else [(size,), (1, 1, size)]
            if tuple(found.shape) in wanted and found.is_floating_point():
                return found.detach() if _stays_normal(chain.linear.weight, found) else None
        return None

    def _other(self, node: fx.Node, chain: _LinearChain) -> fx.Node | None:
        """Return what a node adds to the layer's result. A sum that has a norm was taken before."""
        added = self._memory.added(node)
        if added is None or chain.nodes[-1] not in added or added[0] is added[1]:
            return None
        if node.target in ADD_IN_PLACE and added[0] is not chain.nodes[-1]:
            return None
        other = added[1] if added[0] is chain.nodes[-1] else added[0]
        # Parameters are spread over rows more often than not.
        return None if other.op == "get_attr" else other

    def _may_move(self, chain: _LinearChain) -> bool:
        """Return whether its inputs are unchanged at the end of the chain."""
        reads = [(chain.nodes[0].args[0], chain.nodes[0])]
        if chain.residual is not None:
            readers = [each for each in chain.residual.users if each in chain.nodes]
            reads += [(chain.residual, each) for each in readers]
        return not any(self._memory.is_written(*each, chain.nodes) for each in reads)

    def _attention(self, node: fx.Node) -> None:
        is_call = node.op == "call_function" and node.target is ATTENTION
        given = {**dict(zip(ARGUMENTS, node.args, strict=False)), **node.kwargs}
        if not is_call or given.get("attn_mask") is not None or given.get("enable_gqa"):
            return
        scale, is_causal = given.get("scale"), given.get("is_causal", False)
        is_known = isinstance(scale, int | float | None) and isinstance(is_causal, bool)
        if given.get("dropout_p") or not is_known:
            return
        layer = Attention(scale, is_causal, self.tuner)
        with self.traced.graph.inserting_before(node):
            tensors = tuple(given[name] for name in ARGUMENTS[:3])
            made = self.traced.graph.call_module(self._add("attention", layer), tensors)
        self._swap([node], made)


ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _orders(factors: tuple[object, object] | None) -> list[tuple[object, object]]:
    return [] if factors is None else [factors, factors[::-1]]


def _stays_normal(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Return whether most products are normal numbers in FP16, which the module may be cast to."""
    products = weight.detach().double().abs().mean(1) * scale.detach().double().abs().flatten()
    return bool((products >= SMALLEST).double().mean() > MOST)


def _is_permuted(node: fx.Node, order: tuple[int, ...]) -> bool:
    is_method = node.op == "call_method" and node.target == "permute"
    is_function = node.op == "call_function" and node.target is torch.permute
    if not (is_method or is_function) or node.kwargs:
        return False
    given = node.args[1] if len(node.args) == 2 else node.args[1:]
    return isinstance(given, list | tuple) and tuple(given) == order


def _is_self_attention(module: nn.MultiheadAttention, node: fx.Node) -> bool:
    """Return whether it is plain attention of one tensor, batch first, without weights returned."""
    is_one = len(node.args) == 3 and node.args[0] is node.args[1] is node.args[2]
    given = dict(node.kwargs)
    # Weights that are asked for but not used need not be computed.
    given.pop("need_weights", None)
    given.pop("average_attn_weights", None)
    is_plain = not any(given.values()) and has_no_hooks(module) and module.batch_first
    is_whole = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    return is_one and is_plain and is_whole


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = _parameter(weight)
    linear.bias = None if bias is None else _parameter(bias)
    return linear


def _reshape(part: fx.Node) -> None:
    """Let whatever views a slice copy it if it must."""
    waiting = [part]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_method" and user.target in SHAPES:
                if user.target == "view" and not _is_dtype(user):
                    user.target = "reshape"
                waiting.append(user)


def _is_dtype(node: fx.Node) -> bool:
    return any(isinstance(each, torch.dtype) for each in (*node.args[1:], *node.kwargs.values()))
