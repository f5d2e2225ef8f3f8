"""Finds the values of an imported graph that stay in FP32 when the rest is cast to 16 bits.

16 bits hold no integers above 2,048 (FP16) or 256 (BF16), and FP16 nothing above 65,504. So these
stay in FP32 up to where they meet a tensor of 16 bits: floats made of integers (positions, counts,
timesteps), angles that are computed from an input, and sums over axes that arithmetic follows,
such as those of a norm or of mean pooling. An input that becomes integers stays too, and so do
coordinates of images, whatever they are computed from, and numbers that a tiny constant keeps from
being zero before a logarithm, a root or a division. `casting` casts the graph around them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from enum import Flag, auto

import torch
from torch import fx, nn

from penstock.backends.onnx_import import (
    elementwise,
    images,
    indexing,
    matrices,
    reductions,
    shapes,
)
from penstock.backends.onnx_import.importer import DTYPE, ON_HOST, device_of, take_item
from penstock.backends.onnx_import.values import FLOAT_NUMBERS, Compute

# Numbers of integers that 16 bits do not hold: those of 16 bits and more.
WIDE_INTEGERS = (4, 5, 6, 7, 12, 13)
# Functions that choose and move values, and those among them that look them up in a table.
LOOKUPS = {indexing.OPERATORS[name].compute for name in ("Gather", "GatherElements", "GatherND")}
MOVES = {
    take_item,
    torch.permute,
    elementwise.where,
    *LOOKUPS,
    *(
        shapes.OPERATORS[name].compute
        for name in (
            *("CenterCropPad", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape"),
            *("ReverseSequence", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
        )
    ),
}
CASTS = {elementwise.cast, elementwise.cast_like}
MADE = {shapes.make_range, shapes.constant_of_shape, shapes.eye_like}
ARITHMETIC = {torch.clamp, *(each.compute for each in elementwise.ARITHMETIC.values())} - MOVES
REDUCTIONS = {
    reductions.OPERATORS[name].compute
    for name in ("CumSum", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")
}
# Sums of numbers that 16 bits hold are numbers that they may not hold.
COUNTS = {reductions.OPERATORS[name].compute for name in ("CumSum", "ReduceSum")}
# Outer products, such as that of positions and frequencies.
PRODUCTS = {torch.matmul, matrices.OPERATORS["Einsum"].compute}
MAX_PRODUCT = 1 << 16
PERIODIC = {torch.sin, torch.cos}
# What follows a sum in a norm or a mean.
AFTER_SUMS = {
    torch.clamp,
    *(
        elementwise.ARITHMETIC[name].compute
        for name in (
            *("Add", "Sub", "Mul", "Div", "Sqrt", "Pow", "Reciprocal", "Clip", "Max", "Min"),
            *("Abs", "Exp", "Log"),
        )
    ),
}
COMPARISONS = {
    elementwise.ARITHMETIC[name].compute
    for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
}
MEAN = reductions.OPERATORS["ReduceMean"].compute
SUM = reductions.OPERATORS["ReduceSum"].compute
OF_SQUARES: dict[Compute, Compute] = {
    MEAN: reductions.MEAN_OF_SQUARES,
    SUM: reductions.SUM_OF_SQUARES,
}
# Functions that keep numbers above a limit, and one whose results may be near zero.
FLOORS = {torch.clamp, *(elementwise.ARITHMETIC[name].compute for name in ("Add", "Clip", "Max"))}
# Functions that leave small numbers small.
PASS_ON = {torch.sqrt, *MOVES}
SOFTMAX = elementwise.OPERATORS["Softmax"].compute
# Functions that take coordinates, and scores to compare, at these positions. They compute in FP32.
TAKES_WIDE: dict[object, tuple[int, ...]] = {
    images.affine_grid: (0,),
    images.grid_sample: (1,),
    images.non_max_suppression: (0, 1),
    images.roi_align: (1,),
}
# Key of an input that the graph takes in its own datatype, in `meta`.
UNCAST = "penstock_uncast"


class Origin(Flag):
    """Where a float comes from, beside constants."""

    CONSTANT = 0
    INTEGER = auto()
    INPUT = auto()
    SUM = auto()
    # An input that went through small linear layers.
    LAYER = auto()


Origins = dict[fx.Node, Origin]


def is_float(node: fx.Node) -> bool:
    return node.meta.get(DTYPE) in FLOAT_NUMBERS


def may_be_float(node: fx.Node) -> bool:
    """Whether it is one, or of unknown datatype."""
    return node.meta.get(DTYPE) in (None, 0, *FLOAT_NUMBERS)


def read_constant(module: fx.GraphModule, node: object) -> torch.Tensor | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    found = getattr(module.get_submodule(owner), name)
    return found if isinstance(found, torch.Tensor) else None


def keep_wide(module: fx.GraphModule, dtype: torch.dtype) -> set[fx.Node]:
    """Return the nodes that stay in FP32, for a graph that is cast to a datatype of 16 bits; layers
    and sums among them become functions that compute so. Inputs among them are marked."""
    origins = _origins(module)
    wide = {node for node, origin in origins.items() if _is_spoilt(node, origin)}
    wide |= {source for node in module.graph.nodes for source in _rounded(node, origins)}
    wide |= {node for node in module.graph.nodes if _compares_inputs(node, origins)}
    computed = _sources(module, _after_floors(module, dtype, origins), origins)
    wide |= computed | _constant_coordinates(module)
    for node in reversed(module.graph.nodes):
        if node in wide and not _is_sum(module, node, origins):
            wide.update(each for each in node.all_input_nodes if each in origins)
    wide |= _widen_sources(module, computed - set(origins), wide)
    for node in list(module.graph.nodes):
        if node not in wide:
            continue
        if node.op == "placeholder":
            node.meta[UNCAST] = True
        elif node.op == "call_module":
            wide |= _as_product(module, node)
        elif _is_sum(module, node, origins):
            _widen_sum(node)
    return {node for node in module.graph.nodes if node in wide}


def find_limited(module: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs whose numbers beyond the range of 16 bits must stay finite, such as masks:
    those that reach more than layers and matrix products by arithmetic."""
    found: set[fx.Node] = set()
    followed = ARITHMETIC | MOVES | CASTS | {elementwise.widen, elementwise.cast_within}
    for node in reversed(module.graph.nodes):
        for user in node.users:
            is_layer = user.op == "call_module" or user.target in PRODUCTS
            if not is_layer and (user in found or user.target not in followed):
                found.add(node)
    return {node for node in found if node.op == "placeholder" and may_be_float(node)}


def _is_spoilt(node: fx.Node, origin: Origin) -> bool:
    if node.op == "placeholder":
        return False
    if Origin.INPUT in origin:
        return node.target in PERIODIC and Origin.SUM not in origin
    if Origin.SUM in origin:
        return node.target in AFTER_SUMS
    return Origin.INTEGER in origin


def _rounded(node: fx.Node, origins: Origins) -> Iterator[fx.Node]:
    """Yield what a cast to integers takes, if it follows from an input."""
    if node.target is elementwise.cast and node.meta.get(DTYPE) in WIDE_INTEGERS:
        for each in node.all_input_nodes:
            if _is_input(origins.get(each, Origin.CONSTANT)):
                yield each


def _is_input(origin: Origin) -> bool:
    """Whether it follows from an input by no more than arithmetic."""
    return Origin.INPUT in origin and Origin.LAYER not in origin


def _compares_inputs(node: fx.Node, origins: Origins) -> bool:
    """Whether it compares what follows from inputs by no more than arithmetic, such as numbers of
    classes that are floats, with each other or with constants or integers."""
    if node.target not in COMPARISONS or node.meta.get(ON_HOST):
        return False
    floats = [each for each in node.all_input_nodes if each.op != "get_attr" and is_float(each)]
    spoilt = Origin.SUM | Origin.LAYER
    is_known = all(not origins.get(each, spoilt) & spoilt for each in floats)
    return is_known and any(_is_input(origins[each]) for each in floats)


def takes_wide(user: fx.Node, node: fx.Node) -> bool:
    """Whether a function takes this value in FP32, whatever its other inputs are."""
    positions = TAKES_WIDE.get(user.target, ())
    return any(at < len(user.args) and user.args[at] is node for at in positions)


def is_tiny(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return whether a single number is an epsilon; among many, small ones may as well be zeros."""
    if tensor.numel() != 1:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    least = torch.finfo(dtype).smallest_normal
    return (tensor != 0) & (tensor.abs() < least)


def constants_of(module: fx.GraphModule, node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the floats that a node takes as constants."""
    for each in (*node.args, *node.kwargs.values()):
        if isinstance(each, float):
            yield torch.tensor(each)
    for each in node.all_input_nodes:
        tensor = read_constant(module, each)
        if tensor is not None and tensor.is_floating_point():
            yield tensor


def _after_floors(module: fx.GraphModule, dtype: torch.dtype, origins: Origins) -> set[fx.Node]:
    """Return logarithms, roots and inverses of numbers with a lower limit that 16 bits do not hold,
    and what multiplies by the inverses. Norms divide by sums over axes in 16 bits."""
    found: set[fx.Node] = set()
    # Nodes whose results may be as small as the limit, and as large as its inverse.
    small, large = set[fx.Node](), set[fx.Node]()
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_float(node) or node.meta.get(ON_HOST):
            continue
        sources = set(node.all_input_nodes)
        divisor = find_divisor(module, node)
        is_norm = Origin.SUM in origins.get(divisor, Origin.CONSTANT)
        is_inverse = divisor in small and not is_norm
        is_product = node.target is torch.mul and bool(sources & large)
        is_root = node.target in (torch.log, torch.sqrt) and bool(sources & small)
        if is_inverse or is_product or is_root:
            found.add(node)
        if _has_limit(module, node, dtype) or (node.target in PASS_ON and sources & small):
            small.add(node)
        if is_inverse or (node.target in MOVES and sources & large):
            large.add(node)
    return found


def _has_limit(module: fx.GraphModule, node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a tiny constant keeps the result from being zero."""
    constants = constants_of(module, node) if node.target in FLOORS else ()
    return any(bool(is_tiny(each, dtype).any()) for each in constants)


def find_divisor(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the value by which a node divides."""
    found: object = None
    if node.target is torch.reciprocal:
        found = node.args[0]
    elif node.target is elementwise.divide:
        found = node.args[1]
    elif node.target is elementwise.power:
        exponent = node.args[1]
        if not isinstance(exponent, float | int):
            exponent = read_constant(module, exponent)
        is_negative = exponent is not None and bool(torch.as_tensor(exponent < 0).all())
        found = node.args[0] if is_negative else None
    return found if isinstance(found, fx.Node) else None


def _sources(module: fx.GraphModule, wanted: set[fx.Node], origins: Origins) -> set[fx.Node]:
    """Return these nodes, the coordinates, and what they are computed from, back to the layers."""
    movable = set(origins)
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_float(node) or node.meta.get(ON_HOST):
            continue
        is_lookup = node.target in LOOKUPS and read_constant(module, node.args[0]) is not None
        is_item = node.target is take_item and node.args[0] not in movable
        known = ARITHMETIC | MOVES | {images.affine_grid, SOFTMAX}
        if node.target in known and not is_lookup and not is_item:
            movable.add(node)
    found = set(wanted)
    for node in reversed(module.graph.nodes):
        is_found = node.target is images.affine_grid or (node in found and node not in origins)
        if is_found:
            found.add(node)
        sources = [each for each in node.all_input_nodes if is_found or takes_wide(node, each)]
        found.update(each for each in sources if each in movable)
    return found


def _constant_coordinates(module: fx.GraphModule) -> set[fx.Node]:
    """Put a node after each constant that is a coordinate, so that it is not cast; return them."""
    made: set[fx.Node] = set()
    for node in [each for each in module.graph.nodes if each.target in TAKES_WIDE]:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and takes_wide(node, source):
                with module.graph.inserting_before(node):
                    kept = module.graph.call_function(elementwise.widen, (source,))
                kept.meta[DTYPE] = FLOAT_NUMBERS[2]
                node.replace_input_with(source, kept)
                made.add(kept)
    return made


def _widen_sources(module: fx.GraphModule, nodes: set[fx.Node], wide: set[fx.Node]) -> set[fx.Node]:
    """Let these nodes take activations of 16 bits in FP32; return the new nodes."""
    graph = module.graph
    made: dict[fx.Node, fx.Node] = {}
    for node in [each for each in graph.nodes if each in nodes]:
        for source in node.all_input_nodes:
            is_other = source.op == "get_attr" or source.target is device_of
            if source in wide or is_other or source.meta.get(ON_HOST) or not may_be_float(source):
                continue
            if source not in made:
                with graph.inserting_after(source):
                    made[source] = graph.call_function(elementwise.widen, (source,))
                made[source].meta[DTYPE] = FLOAT_NUMBERS[2]
            node.replace_input_with(source, made[source])
    return set(made.values())


def _origins(module: fx.GraphModule) -> Origins:
    found: Origins = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" and is_float(node):
            found[node] = Origin.INPUT
        elif node.op == "call_module" and (layer := _small_layer(module, node)) is not None:
            (source,) = node.all_input_nodes
            given = found.get(source, Origin.SUM)
            if layer.in_features == 1:
                # An outer product.
                found |= {} if Origin.SUM in given else {node: given}
            elif given | Origin.LAYER == Origin.INPUT | Origin.LAYER:
                found[node] = given | Origin.LAYER
        elif node.op == "call_function" and is_float(node) and not node.meta.get(ON_HOST):
            origin = _origin(module, node, found)
            if origin is None or Origin.INPUT in origin:
                # Else it would be a sum of integers.
                origin = Origin.SUM if _may_overflow(node) else origin
            if origin is not None:
                found[node] = origin
    return found


def _origin(module: fx.GraphModule, node: fx.Node, origins: Origins) -> Origin | None:
    """Return where the result of a function comes from; None for one of activations, or of more
    than arithmetic."""
    computes = ARITHMETIC | REDUCTIONS | PRODUCTS
    if node.target not in computes | MOVES | CASTS | MADE:
        return None
    constants = [each for each in node.all_input_nodes if each.op == "get_attr"]
    if node.target in LOOKUPS and node.args[0] in constants:
        return None
    if node.target in PRODUCTS and any(_size(module, each) > MAX_PRODUCT for each in constants):
        return None
    found = Origin.INTEGER if node.target is shapes.make_range else Origin.CONSTANT
    for each in node.all_input_nodes:
        if each in origins:
            found |= origins[each]
        elif each.meta.get(ON_HOST) or each in constants or each.target is device_of:
            continue
        elif may_be_float(each):
            return None
        elif node.target in computes | CASTS and each.meta.get(DTYPE) in WIDE_INTEGERS:
            found |= Origin.INTEGER
    if Origin.SUM in found and node.target not in AFTER_SUMS | MOVES:
        return None
    return found | Origin.INTEGER if node.target in COUNTS else found


def _size(module: fx.GraphModule, node: fx.Node) -> int:
    tensor = read_constant(module, node)
    return 0 if tensor is None else tensor.numel()


def _small_layer(module: fx.GraphModule, node: fx.Node) -> nn.Linear | None:
    """Return a linear layer that may be computed in FP32."""
    layer = module.get_submodule(str(node.target))
    if type(layer) is not nn.Linear or len(node.args) != 1:
        return None
    is_small = layer.in_features == 1 or layer.weight.numel() <= MAX_PRODUCT
    return layer if is_small and layer.weight.dtype == torch.float32 else None


def _square(node: object) -> fx.Node | None:
    """Return what a node squares."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.args) != 2:
        return None
    x, y = node.args
    is_power = node.target is elementwise.power and not isinstance(y, fx.Node) and y == 2
    is_square = is_power or (node.target in (torch.mul, operator.mul) and x is y)
    return x if is_square and isinstance(x, fx.Node) else None


def _may_overflow(node: fx.Node) -> bool:
    """Whether it sums up activations: many, or their squares."""
    is_plain_mean = node.target is MEAN and _square(node.args[0]) is None
    return node.target in reductions.WIDE and not is_plain_mean


def _is_sum(module: fx.GraphModule, node: fx.Node, origins: Origins) -> bool:
    """Whether a sum is the first of its kind: it takes activations."""
    if node.op != "call_function" or origins.get(node) != Origin.SUM or not _may_overflow(node):
        return False
    origin = _origin(module, node, origins)
    return origin is None or Origin.INPUT in origin


def _widen_sum(node: fx.Node) -> None:
    """Sum activations of 16 bits in FP32, without a tensor of their squares."""
    squared = _square(node.args[0]) if node.target in OF_SQUARES else None
    if squared is not None:
        node.target = OF_SQUARES[node.target]
        node.args = (squared, *node.args[1:])
    else:
        node.target = reductions.WIDE[node.target]


def _as_product(module: fx.GraphModule, node: fx.Node) -> set[fx.Node]:
    """Replace a linear layer by arithmetic; return the new nodes."""
    layer = _small_layer(module, node)
    assert layer is not None
    return set(_write_product(module, node, layer))


def _write_product(module: fx.GraphModule, node: fx.Node, layer: nn.Linear) -> Iterator[fx.Node]:
    graph, made = module.graph, node.args[0]
    is_outer = layer.in_features == 1
    weight = layer.weight[:, 0] if is_outer else layer.weight.t()
    parts = [(torch.mul if is_outer else torch.matmul, "weight", weight)]
    if layer.bias is not None:
        parts.append((torch.add, "bias", layer.bias))
    with graph.inserting_before(node):
        for function, kind, tensor in parts:
            name = f"{node.name}_{kind}"
            module.register_buffer(name, tensor.detach())
            made = graph.call_function(function, (made, graph.get_attr(name)))
            made.meta[DTYPE] = FLOAT_NUMBERS[2]
            yield made
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def recast_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """Return the floats that follow from integers and constants alone and become integers or truth
    values again."""
    derived: set[fx.Node] = set()
    wanted: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or node.meta.get(ON_HOST):
            continue
        if is_float(node) and _is_derived(node, derived):
            derived.add(node)
        elif not may_be_float(node):
            wanted.update(each for each in node.all_input_nodes if each in derived)
    for node in reversed(module.graph.nodes):
        if node in wanted:
            wanted.update(each for each in node.all_input_nodes if each in derived)
    return wanted


def _is_derived(node: fx.Node, derived: set[fx.Node]) -> bool:
    """Whether a float follows from integers, `derived` floats and constants."""
    has_source = node.target is shapes.make_range
    for each in node.all_input_nodes:
        if each in derived or not may_be_float(each):
            has_source = True
        elif each.op != "get_attr" and each.target is not device_of:
            return False
    return has_source
