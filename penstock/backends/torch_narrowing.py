"""Compute only the token that is read: a classifier takes the first token of its last layer, so the
layers after the last attention have to compute no other.

`x[:, 0]` of [batch, tokens, ...] is moved up, through linear layers, layer norms, activations, sums
and products, to where tokens are mixed. All users of a node must need only that token. Shapes are
computed on the meta device for sample inputs; without them nothing is changed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from penstock.backends.onnx_import import indexing
from penstock.backends.onnx_import.folding import record_shapes
from penstock.backends.torch_activations import MULTIPLY_IN_PLACE, activation_of, factors_of
from penstock.backends.torch_aliasing import GraphMemory, called_module, has_no_hooks
from penstock.backends.torch_tracing import TraceInputs

Shape = tuple[int, ...]
ALL = slice(None, None, None)
# Axis of tokens, and the ranks that have one beside the channels.
AXIS, MIN_RANK = 1, 3
FIRST = (ALL, slice(0, 1))


def narrow(traced: fx.GraphModule, sample: TraceInputs | None) -> int:
    """Move selections of the first token up; return how many were."""
    if sample is None or not any(_selected(node) is not None for node in traced.graph.nodes):
        return 0
    shapes = _shapes_of(traced, sample)
    return sum(_Narrower(traced, shapes).run(node) for node in list(traced.graph.nodes))


def _selected(node: fx.Node) -> fx.Node | None:
    """Return what a node reads only the first token of."""
    x = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    args, words = node.args[1:], node.kwargs
    if node.op == "call_function" and node.target is operator.getitem:
        index = args[0] if isinstance(args[0], tuple) else ()
        is_first = len(index) >= 2 and index[0] == ALL and index[1] == 0
        is_first = is_first and type(index[1]) is int and all(each == ALL for each in index[2:])
    elif node.target in (torch.select, torch.ops.aten.select.int, "select"):
        is_first = args == (AXIS, 0) and not words
    elif node.target is indexing.gather:
        is_first = args == (0,) and words == {"axis": AXIS}
    else:
        is_first = False
    return x if is_first else None


def _shapes_of(traced: fx.GraphModule, sample: TraceInputs) -> Mapping[fx.Node, Shape]:
    """Return the shapes of results; empty if they cannot be computed without data."""
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    given = sample.positional or [
        sample.keywords[each] for each in names if each in sample.keywords
    ]
    if len(given) != len(names):
        return {}
    # What code makes without a device is on the host in imported graphs, and beside its inputs in
    # others.
    for context in (nullcontext(), torch.device("meta")):
        try:
            with context:
                return record_shapes(traced, [each.to("meta") for each in given])
        except Exception:  # Data decide about shapes, or devices differ.
            continue
    return {}


@dataclass(slots=True)
class _Narrower:
    traced: fx.GraphModule
    shapes: Mapping[fx.Node, Shape]
    _memory: GraphMemory = field(init=False)

    def run(self, selection: fx.Node) -> bool:
        x = _selected(selection)
        if x is None or len(self.shapes.get(x, ())) < MIN_RANK or list(x.users) != [selection]:
            return False
        self._memory = GraphMemory(self.traced)
        chosen = self._chosen(x, selection)
        layers = [each for each in chosen if type(self._called(each)) is nn.Linear]
        if self.shapes[x][AXIS] < 2 or not layers:
            return False
        around = {each for node in chosen for each in node.all_input_nodes} - chosen
        if any(self._memory.is_written(each, each, [selection]) for each in around):
            return False
        for each in around:
            self._cut(each, chosen, self.shapes[x])
        return True

    def _called(self, node: fx.Node) -> nn.Module:
        return called_module(self.traced, node)

    def _chosen(self, x: fx.Node, selection: fx.Node) -> set[fx.Node]:
        """Return the nodes of which only the first token is needed."""
        found: set[fx.Node] = set()
        waiting = [x]
        while waiting:
            node = waiting.pop()
            if node not in found and self._keeps_tokens_apart(node, self.shapes[x]):
                found.add(node)
                waiting += node.all_input_nodes
        while True:
            others = {
                n for n in found if any(u not in found and u is not selection for u in n.users)
            }
            if not others:
                return found
            found -= others

    def _keeps_tokens_apart(self, node: fx.Node, wanted: Shape) -> bool:
        """Return whether each token of its result depends on the same token of its inputs only."""
        shape = self.shapes.get(node, ())
        if len(shape) != len(wanted) or shape[AXIS] != wanted[AXIS]:
            return False
        inputs = node.all_input_nodes
        if not all(each in self.shapes for each in inputs):
            return False
        module = self._called(node)
        if type(module) is nn.LayerNorm:
            return len(module.normalized_shape) == 1 and has_no_hooks(module)
        if type(module) is nn.Linear:
            return has_no_hooks(module)
        if activation_of(self.traced, node) is not None:
            return len(inputs) == 1 and not self._memory.writes(node)
        if self._memory.added(node) is not None:
            return True
        return factors_of(node) is not None and node.target not in MULTIPLY_IN_PLACE

    def _cut(self, node: fx.Node, chosen: set[fx.Node], wanted: Shape) -> None:
        """Let the chosen nodes read the first token of another node, if it has several."""
        # Shapes are aligned at their ends.
        shape = self.shapes[node]
        axis = AXIS - (len(wanted) - len(shape))
        if axis < 0 or shape[axis] != wanted[AXIS]:
            return
        with self.traced.graph.inserting_after(node):
            index = FIRST[AXIS - axis :]
            cut = self.traced.graph.call_function(operator.getitem, (node, index))
        for user in [each for each in node.users if each in chosen]:
            user.replace_input_with(node, cut)
