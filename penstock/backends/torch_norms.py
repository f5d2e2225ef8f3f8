"""Fuse each group norm of a module with the layers around it (`penstock.fuse`).

A group norm is a module, a function, or what exporters write for it in ONNX files: a Reshape to
groups, InstanceNormalization, a Reshape back, and weights by channel. With an addition by channel
before it (the time of a diffusion model) and the activation after it, it becomes one `ImageNorm`.
Nodes are fused under the rules of `torch_fusion`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends.onnx_import import layers, shapes
from penstock.backends.torch_activations import activation_of, factors_of
from penstock.backends.torch_aliasing import (
    ADD_IN_PLACE,
    GraphMemory,
    called_module,
    has_no_hooks,
    operands_of,
    summands_of,
)
from penstock.kernels.activation import Activation
from penstock.kernels.convolution import IMAGE_RANK, Tuner
from penstock.kernels.image_norm import ImageNorm

aten = torch.ops.aten
UNSQUEEZE = {torch.unsqueeze, aten.unsqueeze.default, shapes.unsqueeze, "unsqueeze"}
RESHAPE = {torch.reshape, aten.view.default, aten.reshape.default, shapes.reshape}
RESHAPE |= {"reshape", "view"}
# Arguments of functions, and those of operators that may come after them.
NAMES = {
    functional.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    torch.group_norm: ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    aten.group_norm.default: ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    layers.group_norm: ("input", "weight", "bias"),
}
# ONNX has other names for them.
ONNX_NAMES = {"scale": "weight", "epsilon": "eps"}
# The input has groups as channels, [batch, groups, rest].
GROUPED_RANK = 3
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class _NormChain:
    """A group norm and the nodes fused with it, in order."""

    nodes: list[fx.Node]
    x: fx.Node
    num_groups: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    epsilon: float
    # What x is reshaped to, in ONNX files; None: it is an image already.
    shape: list[int] | None = None
    added: fx.Node | None = None
    activation: Activation | None = None
    # Whether the weights are those of groups, in ONNX files.
    is_by_group: bool = False


def fuse_norms(traced: fx.GraphModule, tuner: Tuner | None) -> None:
    """Fuse the group norms of a traced module, in place."""
    _NormFuser(traced, tuner).run()


def is_by_channel(node: object) -> bool:
    """Return whether a node makes images of one pixel of its input, [batch, channels, 1, 1]."""
    if not isinstance(node, fx.Node) or not node.op.startswith("call_") or len(node.args) < 1:
        return False
    given = node.args[1] if len(node.args) > 1 else None
    if node.target is operator.getitem:
        return isinstance(given, tuple) and len(given) > 2 and given[-2:] == (None, None)
    if node.target in RESHAPE:
        sizes = given if isinstance(given, list | tuple) else node.args[1:]
        return len(sizes) == IMAGE_RANK and tuple(sizes[2:]) == (1, 1)
    axes = _axes(node)
    if axes in ((3,), (-1,)):
        return _axes(node.args[0]) in ((2,), (-1,))
    return axes in ((2, 3), (-2, -1))


def _axes(node: object) -> tuple[object, ...]:
    """Return the axes that a node inserts."""
    if not isinstance(node, fx.Node) or node.target not in UNSQUEEZE:
        return ()
    given = [*node.args[1:], *node.kwargs.values()]
    if len(given) != 1:
        return ()
    return tuple(given[0]) if isinstance(given[0], list | tuple) else (given[0],)


@dataclass(slots=True)
class _NormFuser:
    traced: fx.GraphModule
    tuner: Tuner | None
    _memory: GraphMemory = field(init=False)
    # By the tensor they were: a norm that is called twice shares them.
    _weights: dict[torch.Tensor, nn.Parameter] = field(default_factory=dict)

    def run(self) -> None:
        self._memory = GraphMemory(self.traced)
        for number, node in enumerate(list(self.traced.graph.nodes)):
            chain = self._found(node) if node in self._memory.order else None
            if chain is None or not self._may_move(chain):
                continue
            for longer in (self._with_activation, self._with_addition):
                made = longer(chain)
                chain = made if made is not None and self._may_move(made) else chain
            self._replace(chain, f"penstock_group_norm_{number}")

    def _found(self, node: fx.Node) -> _NormChain | None:
        """Return the group norm that begins here."""
        module = called_module(self.traced, node)
        if type(module) is nn.GroupNorm and has_no_hooks(module):
            is_plain = len(node.args) == 1 and not node.kwargs
            values = module.num_groups, module.weight, module.bias, module.eps
            return _NormChain([node], node.args[0], *values) if is_plain else None
        if node.op != "call_function":
            return None
        return self._of_instances(node) if node.target is shapes.reshape else self._called(node)

    def _called(self, node: fx.Node) -> _NormChain | None:
        names = NAMES.get(node.target, ())
        given = dict(zip(names, node.args, strict=False))
        given |= {ONNX_NAMES.get(name, name): value for name, value in node.kwargs.items()}
        x, num_groups, epsilon = (given.get(name) for name in ("input", "num_groups", "eps"))
        if not isinstance(x, fx.Node) or not isinstance(num_groups, int):
            return None
        if not isinstance(epsilon, int | float | None):
            return None
        nodes = given.get("weight"), given.get("bias")
        weight, bias = (self._constant(each) for each in nodes)
        if [each is None for each in nodes] != [each is None for each in (weight, bias)]:
            return None
        # Opset 18 has a number for each group; ONNX has both weights always.
        is_by_group = False
        if node.target is layers.group_norm and weight is not None:
            is_by_group = len(weight) == num_groups
        epsilon = EPSILON if epsilon is None else epsilon
        chain = _NormChain([node], x, num_groups, weight, bias, float(epsilon))
        return replace(chain, is_by_group=is_by_group)

    def _constant(self, node: object) -> torch.Tensor | None:
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        found = operator.attrgetter(str(node.target))(self.traced)
        return found if isinstance(found, torch.Tensor) else None

    def _of_instances(self, node: fx.Node) -> _NormChain | None:
        """Return a group norm as exporters write it, from its first Reshape on."""
        norm = _only_user(node, layers.instance_norm)
        back = _only_user(norm, shapes.reshape)
        if norm is None or back is None or len(norm.args) != 3 or len(back.args) != 2:
            return None
        scale, shift = (self._constant(each) for each in norm.args[1:])
        if scale is None or shift is None or bool((scale != 1).any() or (shift != 0).any()):
            return None
        x, sizes = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(sizes, list) or not _is_grouped(sizes, back.args[1], x):
            return None
        # The batch is that of x, or Reshape raises.
        shape = [0, *back.args[1][1:]] if isinstance(back.args[1], list) else None
        epsilon = norm.kwargs.get("epsilon", EPSILON)
        chain = _NormChain([node, norm, back], x, sizes[1], None, None, epsilon, shape)
        weight = self._by_channel(chain, factors_of)
        if weight is not None:
            chain = replace(chain, nodes=[*chain.nodes, _only_user(back)], weight=weight)
        bias = self._by_channel(chain, summands_of)
        if bias is not None:
            chain = replace(chain, nodes=[*chain.nodes, _only_user(chain.nodes[-1])], bias=bias)
        counts = {len(each) for each in (weight, bias) if each is not None}
        counts |= {shape[1]} if shape is not None else set()
        return chain if len(counts) == 1 and counts.pop() % chain.num_groups == 0 else None

    def _by_channel(
        self, chain: _NormChain, parts: Callable[[fx.Node], tuple[object, object] | None]
    ) -> torch.Tensor | None:
        """Return the constant [channels] that the next node combines the result with."""
        result = chain.nodes[-1]
        user = _only_user(result)
        one, other = (None, None) if user is None else parts(user) or (None, None)
        value = self._constant(other if one is result else one)
        if value is None or not 3 <= value.dim() <= IMAGE_RANK:
            return None
        is_flat = value.shape[-2:] == (1, 1) and value.numel() == value.shape[-3]
        return value.flatten() if is_flat else None

    def _with_activation(self, chain: _NormChain) -> _NormChain | None:
        user = _only_user(chain.nodes[-1])
        if user is None or user.args[:1] != (chain.nodes[-1],):
            return None
        activation = activation_of(self.traced, user)
        if activation is None:
            return None
        return replace(chain, nodes=[*chain.nodes, user], activation=activation)

    def _with_addition(self, chain: _NormChain) -> _NormChain | None:
        total = chain.x
        one, other = summands_of(total) or self._summed_in_place(total) or (None, None)
        if is_by_channel(one) and total.target not in ADD_IN_PLACE:
            one, other = other, one
        is_whole = isinstance(one, fx.Node) and is_by_channel(other) and len(total.users) == 1
        if not is_whole or chain.shape is not None and len(chain.shape) != IMAGE_RANK:
            return None
        return replace(chain, nodes=[total, *chain.nodes], x=one, added=other)

    def _summed_in_place(self, node: fx.Node) -> tuple[object, object] | None:
        """Return what a node adds to memory that nothing else reads."""
        one, other = operands_of(node, ADD_IN_PLACE, ADD_IN_PLACE) or (None, None)
        is_alone = isinstance(one, fx.Node) and len(one.users) == 1 and self._memory.is_fresh(one)
        return (one, other) if is_alone else None

    def _may_move(self, chain: _NormChain) -> bool:
        """Return whether its inputs are unchanged at the end of the chain."""
        reads = [each for each in (chain.x, chain.added) if each is not None]
        first = chain.nodes[0]
        return not any(self._memory.is_written(each, first, chain.nodes) for each in reads)

    def _replace(self, chain: _NormChain, name: str) -> None:
        weight, bias = self._parameter(chain.weight), self._parameter(chain.bias)
        how = chain.epsilon, chain.activation, self.tuner
        made = ImageNorm(chain.num_groups, weight, bias, *how, chain.is_by_group)
        self.traced.add_submodule(name, made.eval())
        graph, last = self.traced.graph, chain.nodes[-1]
        with graph.inserting_before(last):
            x = chain.x
            if chain.shape is not None:
                x = graph.call_function(shapes.reshape, (x, chain.shape))
                self._memory.order[x] = self._memory.order[last]
            call = graph.call_module(name, (x,) if chain.added is None else (x, chain.added))
        self._memory.order[call] = self._memory.order[last]
        last.replace_all_uses_with(call)
        for node in reversed(chain.nodes):
            given = node.all_input_nodes
            read = [each for each in given if each.op == "get_attr" or each.target is shapes.shape]
            for each in (node, *read):
                if not each.users:
                    graph.erase_node(each)
                    del self._memory.order[each]

    def _parameter(self, tensor: torch.Tensor | None) -> nn.Parameter | None:
        if tensor is None:
            return None
        return self._weights.setdefault(tensor, nn.Parameter(tensor.detach(), requires_grad=False))


def _only_user(node: fx.Node | None, target: Callable[..., object] | None = None) -> fx.Node | None:
    """Return the one node that reads this one, if it calls the target."""
    if node is None or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if target is None or user.target is target else None


def _is_grouped(grouped: list[int], back: object, x: object) -> bool:
    """Return whether x becomes [batch, groups, rest], and images of the same batch again."""
    if len(grouped) != GROUPED_RANK or grouped[1] < 1:
        return False
    if isinstance(back, fx.Node):
        is_shape = back.target is shapes.shape and not back.kwargs
        return is_shape and back.args == (x,) and grouped[0] == 0
    if not isinstance(back, list) or len(back) != IMAGE_RANK or back[1] < 1 or 0 in back[2:]:
        return False
    if back[0] == -1:
        # Left out in both: the same if all other sizes multiply to the same.
        is_same = math.prod(grouped[1:]) == math.prod(back[1:]) > 0
        return is_same and grouped[0] in (0, -1)
    return grouped[0] in (0, back[0])
