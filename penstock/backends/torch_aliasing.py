"""Which nodes of a graph share memory, and which write to it: a layer may move only past nodes that
do not write to what it reads."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends.torch_tracing import IN_PLACE_NAMES
from penstock.kernels.convolution import TunedLayer

# Functions and modules that return new memory, so that writes to it affect nothing else.
FRESH_FUNCTIONS = {functional.relu, torch.relu, operator.add, torch.add, torch.cat, torch.conv2d}
FRESH_FUNCTIONS |= {functional.conv2d, functional.linear, operator.sub, operator.mul, torch.mul}
FRESH_MODULES = ("conv", "batchnorm", "linear", "pooling", "normalization", "activation")
IN_PLACE_FUNCTIONS = {getattr(operator, name) for name in IN_PLACE_NAMES.split()}
IN_PLACE_FUNCTIONS |= {operator.setitem, operator.delitem}
ADD_FUNCTIONS: set[object] = {operator.add, torch.add}
ADD_METHODS: set[object] = {"add", "__add__"}
ADD_IN_PLACE: set[object] = {operator.iadd, "add_", "__iadd__"}
NO_MODULE = nn.Module()


def called_module(traced: nn.Module, node: fx.Node) -> nn.Module:
    """Return the module that a node calls; NO_MODULE if it calls none."""
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else NO_MODULE


def operands_of(
    node: fx.Node, functions: set[object], methods: set[object]
) -> tuple[object, object] | None:
    """Return both operands if the node calls one of these with two values."""
    is_function = node.op == "call_function" and node.target in functions
    is_method = node.op == "call_method" and node.target in methods
    if not (is_function or is_method) or node.kwargs or len(node.args) != 2:
        return None
    return node.args[0], node.args[1]


def summands_of(node: fx.Node) -> tuple[object, object] | None:
    """Return both summands if the node adds two values to new memory."""
    return operands_of(node, ADD_FUNCTIONS, ADD_METHODS)


def has_no_hooks(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)


@dataclass(slots=True)
class GraphMemory:
    """Who reads and writes what, in a graph that is being changed: whoever puts a node in the place
    of others gives it their place in `order`."""

    traced: fx.GraphModule
    order: dict[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.order = {node: index for index, node in enumerate(self.traced.graph.nodes)}

    def is_written(self, read: fx.Node, reader: fx.Node, chain: Sequence[fx.Node]) -> bool:
        """Return whether another node writes there between its reader and the end of the chain."""
        memory = self._memory(read)
        first, last = self.order[reader], self.order[chain[-1]]
        return any(
            memory & self._memory(written)
            for node, at in self.order.items()
            if first < at < last and node not in chain
            for written in self._written(node)
        )

    def added(self, node: object) -> tuple[fx.Node, fx.Node] | None:
        """Return what a node adds, if it writes to nothing that anybody else reads."""
        if not isinstance(node, fx.Node) or node.kwargs or len(node.args) != 2:
            return None
        one, other = node.args
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return None
        is_new = summands_of(node) is not None
        if not is_new and node.target in ADD_IN_PLACE and node.op.startswith("call"):
            is_new = len(one.users) == 1 and self.is_fresh(one)
        return (one, other) if is_new else None

    def writes(self, node: fx.Node) -> bool:
        return bool(self._written(node))

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose memory this one writes to, besides its own result."""
        given = node.all_input_nodes
        module = called_module(self.traced, node)
        if module is not NO_MODULE:
            return given if getattr(module, "inplace", False) else []
        if node.op == "call_method":
            is_so = node.target.endswith("_") and not node.target.endswith("__")
            return given if is_so or node.target == "__setitem__" else []
        if node.op != "call_function":
            return []
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            return given if schema.is_mutable else []
        name = getattr(node.target, "__name__", "")
        is_so = node.target in IN_PLACE_FUNCTIONS or name.endswith("_") or "out" in node.kwargs
        # `inplace` may be a positional argument.
        is_told = any(each is True for each in (*node.args, node.kwargs.get("inplace")))
        return given if is_so or is_told else []

    def _memory(self, node: fx.Node) -> set[fx.Node]:
        """Return the nodes whose memory this one may alias, including itself."""
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting += [] if self.is_fresh(current) else current.all_input_nodes
        return found

    def is_fresh(self, node: fx.Node) -> bool:
        """Return whether the node returns memory that nothing else holds."""
        if self._written(node):
            return False
        module = called_module(self.traced, node)
        if module is NO_MODULE:
            return node.op == "call_function" and node.target in FRESH_FUNCTIONS
        if isinstance(module, TunedLayer):
            return True
        where = type(module).__module__
        return where.startswith("torch.nn.") and where.endswith(FRESH_MODULES)
