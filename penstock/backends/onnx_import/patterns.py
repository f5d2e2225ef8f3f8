"""Finds layers that exporters write as several operators, and makes one of each.

Layer norm, activations, attention and the bias of a linear layer become what torch has for them:
faster, known to fusion, and safe in FP16, where the squares of a decomposed layer norm overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends import torch_activations
from penstock.backends.onnx_import import elementwise, layers, reductions, shapes
from penstock.backends.onnx_import.importer import DTYPE, NODES, ON_HOST, RANK

MEAN = reductions.OPERATORS["ReduceMean"].compute
SOFTMAX = elementwise.OPERATORS["Softmax"].compute
MULTIPLY, ADD, SUBTRACT = torch.mul, torch.add, torch.sub
# Exporters write constants with seven digits or so.
RELATIVE = 1e-4
ATTENTION_RANK = IMAGE_RANK = 4
GLOBAL_POOL = layers.OPERATORS["GlobalAveragePool"].compute
PIXELS = ([2, 3], [-2, -1], [-1, -2])
# Factors of GELU in its tanh form.
TANH_FACTOR, CUBE_FACTOR = math.sqrt(2 / math.pi), 0.044715


def fuse_patterns(module: fx.GraphModule) -> dict[str, int]:
    """Replace every pattern; return how many of each kind were found."""
    counts = {}
    for name, find in (
        ("padding", _fuse_padding),
        ("linear_bias", _fuse_bias),
        ("layer_norm", _fuse_layer_norm),
        ("rms_norm", _fuse_rms_norm),
        ("transpose", _name_transpose),
        ("gelu", _fuse_gelu),
        ("gelu_tanh", _fuse_tanh_gelu),
        ("activation", _name_activation),
        ("hard_swish", _fuse_hard_swish),
        ("global_pool", _name_pool),
        ("keys", _name_keys),
        ("attention", _fuse_attention),
    ):
        counts[name] = sum(find(module, node) for node in list(module.graph.nodes))
        module.graph.eliminate_dead_code()
    counts["gated"] = torch_activations.restore(module)
    module.delete_all_unused_submodules()
    module.recompile()
    return counts


def _calls(node: object, *functions: Callable[..., object]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def _number(node: fx.Node, function: Callable[..., object]) -> tuple[fx.Node, float] | None:
    """Return the tensor and the number that a node combines."""
    if not _calls(node, function) or len(node.args) != 2:
        return None
    one, other = node.args
    if isinstance(one, fx.Node) and isinstance(other, int | float):
        return one, float(other)
    return None


def _factor(node: object) -> tuple[fx.Node, float] | None:
    """Return the tensor and the number it is multiplied by, for a product or a quotient."""
    if not isinstance(node, fx.Node):
        return None
    if (found := _number(node, MULTIPLY)) is not None:
        return found
    found = _number(node, elementwise.divide)
    return None if found is None or not found[1] else (found[0], 1 / found[1])


def _is_near(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=RELATIVE)


def _other(node: fx.Node, one: fx.Node) -> object:
    """Return the argument of a binary operator that is not this one."""
    first, second = node.args
    return second if first is one else first


def _weight(module: fx.GraphModule, node: object) -> torch.Tensor | None:
    """Return the constant that a node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = getattr(module, str(node.target), None)
    return found if isinstance(found, torch.Tensor) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _add_module(graph_module: fx.GraphModule, kind: str, layer: nn.Module) -> str:
    number = sum(name.startswith(f"{kind}_") for name, _ in graph_module.named_children())
    name = f"{kind}_{number}"
    graph_module.add_submodule(name, layer.eval())
    return name


def _replace(node: fx.Node, insert: Callable[[fx.Graph], fx.Node], rank: int | None = None) -> bool:
    with node.graph.inserting_before(node):
        made = insert(node.graph)
    made.meta[RANK], made.meta[DTYPE] = rank, node.meta.get(DTYPE)
    made.meta[NODES] = _names_between(made, node)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return True


def _names_between(made: fx.Node, node: fx.Node) -> tuple[str, ...]:
    """Return the names of the file's nodes that become one: from its inputs to the last."""
    stop, found, waiting = {*made.all_input_nodes}, {node: None}, [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            is_inside = each not in stop and each not in found and each.op.startswith("call")
            # Shapes of other tensors are on the host.
            if is_inside and not each.meta.get(ON_HOST):
                found[each] = None
                waiting.append(each)
    return tuple(name for each in found for name in each.meta.get(NODES, ()))


def _fuse_padding(module: fx.GraphModule, node: fx.Node) -> bool:
    """Zeros around an image, then a convolution that pads by itself."""
    if not _calls(node, shapes.pad) or node.kwargs.get("mode", "constant") != "constant":
        return False
    widths = node.args[1] if len(node.args) > 1 else node.kwargs.get("pads")
    filling = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0.0)
    x, is_whole = node.args[0], isinstance(widths, list | tuple) and len(node.args) < 4
    if not is_whole or filling not in (None, 0, 0.0, [0.0]):
        return False
    assert isinstance(widths, list | tuple)
    if not any(widths):
        node.replace_all_uses_with(x)
        return True
    user = _only_user(node)
    if user is None or user.op != "call_module":
        return False
    conv = module.get_submodule(str(user.target))
    half = len(widths) // 2
    is_same = widths[:half] == widths[half:] and not any(widths[:2]) and min(widths) >= 0
    if type(conv) is not nn.Conv2d or not is_same or half != len(conv.weight.shape):
        return False
    conv.padding = tuple(
        one + other for one, other in zip(conv.padding, widths[2:half], strict=True)
    )
    conv._reversed_padding_repeated_twice = [
        each for size in reversed(conv.padding) for each in (size, size)
    ]
    node.replace_all_uses_with(x)
    return True


def _fuse_bias(module: fx.GraphModule, node: fx.Node) -> bool:
    """MatMul with a constant, then Add of a constant row."""
    if not _calls(node, ADD):
        return False
    for one in node.args:
        if not isinstance(one, fx.Node) or one.op != "call_module" or len(one.users) != 1:
            continue
        linear = module.get_submodule(str(one.target))
        bias = _weight(module, _other(node, one))
        if type(linear) is not nn.Linear or linear.bias is not None or bias is None:
            continue
        if bias.shape == (linear.out_features,):
            linear.bias = nn.Parameter(bias, requires_grad=False)
            one.meta[NODES] = (*one.meta.get(NODES, ()), *node.meta.get(NODES, ()))
            node.replace_all_uses_with(one)
            return True
    return False


def _is_last_mean(node: object, rank_of: fx.Node) -> bool:
    if not _calls(node, MEAN):
        return False
    assert isinstance(node, fx.Node)
    axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("axes")
    is_last = axes in (-1, [-1]) and node.kwargs.get("keepdims", 1) == 1
    return is_last and node.args[0] is rank_of


def _fuse_layer_norm(module: fx.GraphModule, node: fx.Node) -> bool:
    """x - mean, divided by the root of the mean of its square plus epsilon, scaled and moved."""
    if not _calls(node, elementwise.divide) or len(node.args) != 2:
        return False
    centred, root = node.args
    if not _calls(centred, SUBTRACT) or not _calls(root, torch.sqrt):
        return False
    assert isinstance(centred, fx.Node) and isinstance(root, fx.Node)
    x, mean = centred.args
    if not isinstance(x, fx.Node) or not _is_last_mean(mean, x):
        return False
    spread = _number(root.args[0], ADD) if isinstance(root.args[0], fx.Node) else None
    if spread is None or not _calls(spread[0], MEAN):
        return False
    square = spread[0].args[0]
    if not isinstance(square, fx.Node) or not _is_last_mean(spread[0], square):
        return False
    if not _is_square(square, x, mean):
        return False
    scaled = _only_user(node)
    weight = _weight(module, _other(scaled, node)) if _calls(scaled, MULTIPLY) else None
    if scaled is None or weight is None or weight.dim() != 1 or len(weight) == 1:
        return False
    moved = _only_user(scaled)
    bias = _weight(module, _other(moved, scaled)) if _calls(moved, ADD) else None
    last = scaled if moved is None or bias is None or bias.shape != weight.shape else moved
    with torch.device("meta"):
        norm = nn.LayerNorm(len(weight), spread[1], bias=last is moved)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    norm.bias = nn.Parameter(bias, requires_grad=False) if last is moved else None
    name = _add_module(module, "layer_norm", norm)
    return _replace(last, lambda graph: graph.call_module(name, (x,)))


def _is_square(node: fx.Node, x: fx.Node, mean: object) -> bool:
    """Whether it is (x - mean) squared; the difference may be computed twice."""

    def is_centred(each: object) -> bool:
        return _calls(each, SUBTRACT) and isinstance(each, fx.Node) and each.args == (x, mean)

    if (power := _number(node, elementwise.power)) is not None:
        return power[1] == 2 and is_centred(power[0])
    return _calls(node, MULTIPLY) and all(map(is_centred, node.args))


def _fuse_rms_norm(module: fx.GraphModule, node: fx.Node) -> bool:
    """x over the root of the mean of its square plus epsilon, scaled."""
    if not _calls(node, elementwise.divide, MULTIPLY) or len(node.args) != 2:
        return False
    orders = [node.args] if node.target is elementwise.divide else [node.args, node.args[::-1]]
    is_inverse = node.target is MULTIPLY
    roots = [(x, _root(module, other, is_inverse=is_inverse)) for x, other in orders]
    found = [(x, root) for x, root in roots if root is not None and _is_mean_square(root[0], x)]
    scaled = _only_user(node)
    scale = _other(scaled, node) if scaled is not None and _calls(scaled, MULTIPLY) else None
    weight = _weight(module, scale)
    if not found or scaled is None or weight is None or weight.dim() != 1 or len(weight) == 1:
        return False
    x, (_, epsilon) = found[0]
    how = {"epsilon": epsilon}
    return _replace(scaled, lambda graph: graph.call_function(layers.rms_norm, (x, scale), how))


def _is_mean_square(node: fx.Node, x: object) -> bool:
    square = node.args[0] if _calls(node, MEAN) else None
    if not isinstance(square, fx.Node) or not _is_last_mean(node, square):
        return False
    is_product = _calls(square, MULTIPLY) and square.args == (x, x)
    return is_product or _number(square, elementwise.power) == (x, 2.0)


def _root(
    module: fx.GraphModule, node: object, *, is_inverse: bool
) -> tuple[fx.Node, float] | None:
    """Return the tensor and the epsilon whose sum a node takes the root of, or one over it."""
    if not isinstance(node, fx.Node):
        return None
    if is_inverse:
        power = _number(node, elementwise.power)
        if power is not None and power[1] == -0.5:
            return _number(power[0], ADD)
        one = _weight(module, node.args[0]) if _calls(node, elementwise.divide) else None
        if one is not None and one.numel() == 1 and one.item() == 1:
            node = node.args[1]
        elif _calls(node, torch.reciprocal):
            node = node.args[0]
        else:
            return None
    if not _calls(node, torch.sqrt):
        return None
    assert isinstance(node, fx.Node)
    total = node.args[0]
    return _number(total, ADD) if isinstance(total, fx.Node) else None


def _fuse_gelu(module: fx.GraphModule, node: fx.Node) -> bool:
    """x / 2 * (1 + erf(x / sqrt(2))), whichever product comes first."""
    if not _calls(node, torch.erf):
        return False
    inner = _factor(node.args[0])
    raised = _only_user(node)
    if inner is None or not _is_near(inner[1], math.sqrt(0.5)) or raised is None:
        return False
    x, plus = inner[0], _number(raised, ADD)
    if plus is None or plus[1] != 1:
        return False
    last = _last_product(raised, x, 0.5)
    if last is None:
        return False
    return _replace(last, lambda graph: graph.call_function(functional.gelu, (x,)))


def _last_product(start: fx.Node, x: fx.Node, factor: float) -> fx.Node | None:
    """Return the node that is `start` times x times the factor: these may be applied in any order,
    over one or two products."""
    product, number, has_x, last = _only_user(start), 1.0, False, start
    while product is not None and _calls(product, MULTIPLY, elementwise.divide):
        part = _factor(product)
        if part is not None and part[0] is last:
            number *= part[1]
        elif not has_x and _calls(product, MULTIPLY):
            rest = _other(product, last)
            part = _factor(rest)
            if rest is x:
                has_x = True
            elif part is not None and part[0] is x:
                has_x, number = True, number * part[1]
            else:
                return None
        else:
            return None
        last = product
        if has_x and _is_near(number, factor):
            return last
        product = _only_user(last)
    return None


def _name_transpose(module: fx.GraphModule, node: fx.Node) -> bool:
    """An order of dimensions that torch has a function for."""
    order = node.kwargs.get("perm")
    if not _calls(node, shapes.transpose) or not isinstance(order, list | tuple):
        return False
    x, rank = node.args[0], node.meta.get(RANK)
    _replace(node, lambda graph: graph.call_function(torch.permute, (x, list(order))), rank)
    return True


def _fuse_tanh_gelu(module: fx.GraphModule, node: fx.Node) -> bool:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x cubed)))."""
    if not _calls(node, torch.tanh):
        return False
    inner, raised = _factor(node.args[0]), _only_user(node)
    if inner is None or not _is_near(inner[1], TANH_FACTOR) or raised is None:
        return False
    plus, total = _number(raised, ADD), inner[0]
    if plus is None or plus[1] != 1 or not _calls(total, ADD):
        return False
    for x, cubic in (total.args, total.args[::-1]):
        cube = _factor(cubic)
        if cube is None or not _is_near(cube[1], CUBE_FACTOR) or not isinstance(x, fx.Node):
            continue
        if not _is_cube(cube[0], x):
            continue
        last = _last_product(raised, x, 0.5)
        if last is not None:
            return _replace(last, partial(_call_tanh_gelu, x=x))
    return False


def _call_tanh_gelu(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(functional.gelu, (x,), {"approximate": "tanh"})


def _is_cube(node: fx.Node, x: fx.Node) -> bool:
    if (power := _number(node, elementwise.power)) is not None:
        return power == (x, 3.0)
    if not _calls(node, MULTIPLY) or x not in node.args:
        return False
    square = _other(node, x)
    if not isinstance(square, fx.Node):
        return False
    power = _number(square, elementwise.power)
    return power == (x, 2.0) if power is not None else square.args == (x, x)


def _name_activation(module: fx.GraphModule, node: fx.Node) -> bool:
    """An operator of ONNX that torch has a function for."""
    given, x = dict(node.kwargs), node.args[0] if node.args else None
    made: tuple[Callable[..., object], tuple[object, ...], dict[str, object]] | None = None
    if _calls(node, elementwise.clip):
        bounds = [*node.args[1:], None, None][:2]
        names = ("min", "max")
        bounds = [given.get(n) if b is None else b for n, b in zip(names, bounds, strict=True)]
        if any(isinstance(each, fx.Node) for each in bounds) or bounds == [None, None]:
            return False
        made = torch.clamp, (x,), dict(zip(names, bounds, strict=True))
    elif _calls(node, elementwise.hard_sigmoid):
        is_torch = _is_near(given.get("alpha", 0.2), 1 / 6) and given.get("beta", 0.5) == 0.5
        made = (functional.hardsigmoid, (x,), {}) if is_torch else None
    elif _calls(node, elementwise.hard_swish):
        made = functional.hardswish, (x,), {}
    elif _calls(node, elementwise.leaky_relu):
        made = functional.leaky_relu, (x, given.get("alpha", 0.01)), {}
    elif _calls(node, elementwise.gelu):
        made = functional.gelu, (x,), {"approximate": given.get("approximate", "none")}
    elif _calls(node, elementwise.swish) and given.get("alpha", 1.0) == 1:
        made = functional.silu, (x,), {}
    if made is None:
        return False
    return _replace(node, lambda graph: graph.call_function(*made))


def _fuse_hard_swish(module: fx.GraphModule, node: fx.Node) -> bool:
    """x * clip(x + 3, 0, 6) / 6, in any order."""
    if not _calls(node, torch.clamp) or dict(node.kwargs) != {"min": 0, "max": 6}:
        return False
    moved = _number(node.args[0], ADD) if isinstance(node.args[0], fx.Node) else None
    if moved is None or moved[1] != 3:
        return False
    x = moved[0]
    last = _last_product(node, x, 1 / 6)
    if last is None:
        return False
    return _replace(last, lambda graph: graph.call_function(functional.hardswish, (x,)))


def _name_pool(module: fx.GraphModule, node: fx.Node) -> bool:
    """The mean over the pixels of images, before a convolution."""
    user = _only_user(node)
    if user is None or user.op != "call_module":
        return False
    if type(module.get_submodule(str(user.target))) is not nn.Conv2d:
        return False
    is_pool = _calls(node, GLOBAL_POOL)
    if _calls(node, MEAN):
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("axes")
        is_list = isinstance(axes, list | tuple)
        is_pool = is_list and list(axes) in PIXELS and node.kwargs.get("keepdims", 1) == 1
    if not is_pool or node.meta.get(RANK) != IMAGE_RANK:
        return False
    x = node.args[0]
    return _replace(node, lambda graph: graph.call_function(functional.adaptive_avg_pool2d, (x, 1)))


def attend(
    q: torch.Tensor,
    k_transposed: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    scores = (*q.shape[:-1], k_transposed.shape[-1])
    if mask is not None:
        mask = mask.to(q.dtype)
        if torch.broadcast_shapes(mask.shape, scores) != scores:
            # The mask adds rows or heads, which the fused kernel does not take.
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            return torch.softmax(q @ k_transposed * scale + mask, -1) @ v
    k = k_transposed.transpose(-1, -2)
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _fuse_attention(module: fx.GraphModule, node: fx.Node) -> bool:
    """Softmax of scaled products of heads, with or without a mask, times values."""
    if not _calls(node, torch.matmul) or not _calls(node.args[0], SOFTMAX):
        return False
    softmax, values = node.args
    assert isinstance(softmax, fx.Node)
    if not _is_over_last(softmax) or len(softmax.users) != 1:
        return False
    scores, mask = softmax.args[0], None
    if _calls(scores, ADD):
        assert isinstance(scores, fx.Node)
        scores, mask = _split_mask(scores)
    is_known = softmax.meta.get(RANK) == ATTENTION_RANK
    if isinstance(mask, fx.Node):
        is_known &= mask.meta.get(RANK) in (2, 3, ATTENTION_RANK)
    found = _heads(module, scores)
    if found is None or not (is_known or (mask is None and softmax.meta.get(RANK) is None)):
        return False
    q, k, scale = found
    if mask is None:
        return _replace(node, lambda graph: _plain_attention(graph, (q, k, values), scale))
    return _replace(node, lambda graph: graph.call_function(attend, (q, k, values, mask, scale)))


def _is_over_last(softmax: fx.Node) -> bool:
    """Return whether it goes over the last dimension; that of heads is the fourth."""
    is_new = softmax.kwargs["opset"] >= 13
    last = softmax.kwargs.get("axis", -1 if is_new else 1)
    is_fourth = last == ATTENTION_RANK - 1 and softmax.meta.get(RANK) == ATTENTION_RANK
    # Before opset 13 the dimensions were flattened, which needs them to be known.
    is_last = last == -1 and (is_new or softmax.meta.get(RANK) == ATTENTION_RANK)
    return bool(is_fourth or is_last)


def _heads(module: fx.GraphModule, scores: object) -> tuple[object, object, float | None] | None:
    """Return queries, transposed keys and the scale of their products; None: torch's own."""
    scale = 1.0
    while (part := _factor(scores)) is not None:
        if len(part[0].users) != 1:
            return None
        scores, scale = part[0], scale * part[1]
    if not isinstance(scores, fx.Node) or not _calls(scores, torch.matmul):
        return None
    if len(scores.users) != 1:
        return None
    q, k = scores.args
    if scale == 1 and (found := _head_scaled(module, q, k)) is not None:
        return found
    parts = []
    for each in (q, k):
        part = _scalar_factor(module, each)
        parts.append(each if part is None else part[0])
        scale *= 1.0 if part is None else part[1]
    return parts[0], parts[1], scale


def _scalar_factor(module: fx.GraphModule, node: object) -> tuple[fx.Node, float] | None:
    """Return the tensor and the number it is multiplied by, which may be a constant of one."""
    if not isinstance(node, fx.Node):
        return None
    if (found := _factor(node)) is not None:
        return found
    if not _calls(node, MULTIPLY) or len(node.args) != 2:
        return None
    x, factor = node.args
    value = _weight(module, factor)
    if value is None or value.numel() != 1 or value.dim() > 1 or not isinstance(x, fx.Node):
        return None
    return x, float(value)


def transpose_heads(x: torch.Tensor, flat: list[int], whole: list[int]) -> torch.Tensor:
    """Flatten heads, transpose the last two dimensions and restore them: a view if these are the
    heads that x has."""
    if list(x.shape[1:]) == [whole[1], whole[3], whole[2]]:
        return x.transpose(-1, -2)
    return shapes.reshape(shapes.reshape(x, flat).transpose(1, 2), whole)


def _name_keys(module: fx.GraphModule, node: fx.Node) -> bool:
    """Keys that an exporter transposes as a batch of matrices."""
    order = node.args[0] if node.args else None
    if not _calls(node, shapes.reshape) or not _calls(order, torch.permute):
        return False
    assert isinstance(order, fx.Node)
    flat, whole = order.args[0], node.args[1] if len(node.args) > 1 else None
    if order.args[1] != [0, 2, 1] or not _calls(flat, shapes.reshape):
        return False
    assert isinstance(flat, fx.Node)
    first = flat.args[1] if len(flat.args) > 1 else None
    if not isinstance(first, list) or not isinstance(whole, list):
        return False
    if len(first) != 3 or len(whole) != ATTENTION_RANK or min(whole[1:]) < 1:
        return False
    if len(order.users) != 1 or len(flat.users) != 1 or 0 in first or 0 in whole:
        return False
    if node.kwargs.get("allowzero") or flat.kwargs.get("allowzero"):
        return False
    x = flat.args[0]
    rank = node.meta.get(RANK)
    return _replace(
        node, lambda graph: graph.call_function(transpose_heads, (x, first, whole)), rank
    )


def _head_scaled(
    module: fx.GraphModule, q: object, k: object
) -> tuple[object, object, None] | None:
    """Return queries and keys without the factors that make up torch's own scale: the root of
    1 / sqrt(size of a head) for each, which an exporter computes from the shape of the queries."""
    if not _calls(q, MULTIPLY) or not _calls(k, MULTIPLY):
        return None
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node)
    (queries, one), (keys, other) = q.args, k.args
    if not _calls(one, torch.sqrt) or not _calls(other, torch.sqrt):
        return None
    assert isinstance(one, fx.Node) and isinstance(other, fx.Node)
    inverse = _uncast(one.args[0])
    if one.args != other.args or not _calls(inverse, elementwise.divide):
        return None
    assert isinstance(inverse, fx.Node)
    numerator, root = inverse.args
    value = _weight(module, numerator)
    is_one = numerator == 1 or (value is not None and value.numel() == 1 and float(value) == 1)
    root = _uncast(root)
    if not is_one or root is None or not _calls(root, torch.sqrt):
        return None
    return (queries, keys, None) if _is_head_size(_uncast(root.args[0]), queries) else None


def _is_head_size(node: fx.Node | None, queries: object) -> bool:
    """Return whether it is the last size of the queries."""
    if node is None or not _calls(node, shapes.take_slice) or list(node.args[1]) != [-1]:
        return False
    whole = node.args[0]
    if isinstance(whole, fx.Node) and whole.op == "call_module":
        # Moved to the device.
        whole = whole.args[0]
    if not isinstance(whole, fx.Node) or not _calls(whole, shapes.shape):
        return False
    return whole.args[0] is queries and not whole.kwargs


def _uncast(node: object) -> fx.Node | None:
    while _calls(node, elementwise.cast):
        assert isinstance(node, fx.Node)
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _plain_attention(
    graph: fx.Graph, tensors: tuple[object, object, object], scale: float | None
) -> fx.Node:
    """Attention without a mask, as torch writes it: fusion knows this function."""
    q, k, values = tensors
    keys = graph.call_function(torch.transpose, (k, -1, -2))
    function = functional.scaled_dot_product_attention
    return graph.call_function(function, (q, keys, values), {"scale": scale})


def _split_mask(added: fx.Node) -> tuple[object, object]:
    """Return the products and the mask of their sum: the products are those of a MatMul."""
    one, other = added.args
    for scores, mask in ((one, other), (other, one)):
        root = scores
        while (part := _factor(root)) is not None:
            root = part[0]
        if _calls(root, torch.matmul) and isinstance(mask, fx.Node):
            return scores, mask
    return added, None
