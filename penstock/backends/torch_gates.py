"""Find gated linear units (GEGLU, SwiGLU) in a graph: a tensor in two halves, one times an
activation of the other; as functions, methods or exported operators, and as in ONNX files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from penstock.backends.onnx_import import shapes
from penstock.backends.torch_activations import MULTIPLY_IN_PLACE, activation_of, factors_of
from penstock.backends.torch_aliasing import called_module
from penstock.kernels.activation import Activation

CHUNK = {torch.chunk, torch.ops.aten.chunk.default, "chunk"}
CHUNK_NAMES = ("input", "chunks", "dim")
# Numbers of the halves.
BOTH = (0, 1)
LAST = -1


@dataclass(frozen=True, slots=True)
class Halves:
    """What multiplies the halves of x along an axis; the nodes are in order."""

    nodes: list[fx.Node]
    x: fx.Node
    axis: int
    activation: Activation
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Half:
    """One half of x; `nodes` make it, and no one else reads them."""

    x: fx.Node
    number: int
    axis: int
    nodes: list[fx.Node]


def find_halves(traced: nn.Module, node: fx.Node) -> Halves | None:
    """Return the gated linear unit that ends in this product."""
    factors = factors_of(node)
    if factors is None or node.target in MULTIPLY_IN_PLACE:
        return None
    for active, other in (factors, factors[::-1]):
        if not isinstance(active, fx.Node) or not isinstance(other, fx.Node):
            continue
        activation = activation_of(traced, active)
        if activation is None or len(active.users) != 1:
            continue
        gate, value = _half(traced, active.args[0]), _half(traced, other)
        if gate is None or value is None:
            continue
        if gate.x is value.x and gate.axis == value.axis and gate.number != value.number:
            first = dict.fromkeys((*gate.nodes, *value.nodes))
            nodes = [*first, active, node]
            return Halves(nodes, gate.x, gate.axis, activation, gate.number == 0)
    return None


def _half(traced: nn.Module, node: object) -> _Half | None:
    if not isinstance(node, fx.Node) or len(node.users) != 1 or len(node.args) < 2:
        return None
    if node.target is shapes.take_slice:
        return _sliced(traced, node)
    split, number = node.args[0], node.args[1]
    if not isinstance(split, fx.Node) or not isinstance(number, int) or number not in BOTH:
        return None
    axis = _axis_of(split)
    source = split.all_input_nodes
    if axis is None or len(source) != 1 or len(split.users) != len(BOTH):
        return None
    return _Half(source[0], number, axis, [split, node])


def _axis_of(split: fx.Node) -> int | None:
    """Return the axis along which a node makes two parts of the same length."""
    axis: object = None
    if split.op.startswith("call_") and split.target in CHUNK:
        given = dict(zip(CHUNK_NAMES, split.args, strict=False)) | dict(split.kwargs)
        axis = given.get("dim", 0) if given.get("chunks") == len(BOTH) else None
    elif split.target in (shapes.split, torch.split):
        default = split.kwargs.get("split", split.kwargs.get("split_size_or_sections"))
        sizes = split.args[1] if len(split.args) > 1 else default
        is_counted = sizes is None and split.kwargs.get("num_outputs") == len(BOTH)
        is_listed = isinstance(sizes, list | tuple) and len(sizes) == 2 and sizes[0] == sizes[1]
        if is_counted or is_listed:
            third = split.args[2] if len(split.args) > 2 else 0
            axis = split.kwargs.get("axis", split.kwargs.get("dim", third))
    return axis if isinstance(axis, int) else None


def _sliced(traced: nn.Module, node: fx.Node) -> _Half | None:
    """Return the half of a linear layer's result that a Slice of an ONNX file takes."""
    x = node.args[0]
    linear = called_module(traced, x) if isinstance(x, fx.Node) else None
    if not isinstance(linear, nn.Linear) or node.kwargs or len(node.args) != 4:
        return None
    begin, end, axes = node.args[1:]
    half = linear.out_features // 2
    if axes != [LAST] or linear.out_features % 2:
        return None
    for number in BOTH:
        if begin == [number * half] and end == [(number + 1) * half]:
            return _Half(x, number, LAST, [node])
    return None
