"""Which activation a node of a graph is: as a module, a function, a method or an exported operator,
or written out as several of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional

from penstock.backends.torch_aliasing import operands_of
from penstock.kernels.activation import (
    GELU,
    GELU_TANH,
    HARD_SIGMOID,
    HARD_SWISH,
    RELU,
    RELU6,
    SIGMOID,
    SILU,
    Activation,
)

MULTIPLY: set[object] = {operator.mul, operator.imul, torch.mul}
MULTIPLY_METHODS: set[object] = {"mul", "mul_", "__mul__", "__imul__"}
MULTIPLY_IN_PLACE = {operator.imul, "mul_", "__imul__"}
IN_PLACE = "inplace"
MODULES: Mapping[type[nn.Module], Callable[[nn.Module], Activation | None]] = {
    nn.ReLU: lambda module: RELU,
    nn.ReLU6: lambda module: RELU6,
    nn.Hardtanh: lambda module: _clamp(module.min_val, module.max_val),
    nn.LeakyReLU: lambda module: Activation("leaky_relu", module.negative_slope),
    nn.Sigmoid: lambda module: SIGMOID,
    nn.SiLU: lambda module: SILU,
    nn.GELU: lambda module: _gelu(module.approximate),
    nn.Hardsigmoid: lambda module: HARD_SIGMOID,
    nn.Hardswish: lambda module: HARD_SWISH,
}


@dataclass(frozen=True, slots=True)
class _ActivationCall:
    """How a function is called after its input, and the activation of these values."""

    make: Callable[..., Activation | None]
    names: tuple[str, ...] = ()
    defaults: tuple[object, ...] = ()


def _clamp(low: object, high: object) -> Activation | None:
    numbers = [each for each in (low, high) if isinstance(each, int | float)]
    if len(numbers) == 2:
        return Activation("clamp", float(numbers[0]), float(numbers[1]))
    return RELU if low == 0 and high is None and isinstance(low, int | float) else None


def _leaky(slope: object) -> Activation | None:
    return Activation("leaky_relu", float(slope)) if isinstance(slope, int | float) else None


def _gelu(approximate: object) -> Activation | None:
    return {"none": GELU, "tanh": GELU_TANH}.get(str(approximate))


def _fixed(activation: Activation) -> _ActivationCall:
    return _ActivationCall(lambda: activation)


CLAMP = _ActivationCall(_clamp, ("min", "max"), (None, None))
HARDTANH = _ActivationCall(_clamp, ("min_val", "max_val"), (-1.0, 1.0))
LEAKY = _ActivationCall(_leaky, ("negative_slope",), (0.01,))
GELUS = _ActivationCall(_gelu, ("approximate",), ("none",))
aten = torch.ops.aten
CALLS: Mapping[object, _ActivationCall] = {
    **dict.fromkeys((functional.relu, functional.relu_, torch.relu, torch.relu_), _fixed(RELU)),
    **dict.fromkeys((aten.relu.default, aten.relu_.default, "relu", "relu_"), _fixed(RELU)),
    functional.relu6: _fixed(RELU6),
    **dict.fromkeys((aten.relu6.default, aten.relu6_.default), _fixed(RELU6)),
    **dict.fromkeys((functional.hardtanh, functional.hardtanh_), HARDTANH),
    **dict.fromkeys((aten.hardtanh.default, aten.hardtanh_.default), HARDTANH),
    **dict.fromkeys((torch.clamp, torch.clip, torch.clamp_), CLAMP),
    **dict.fromkeys((aten.clamp.default, aten.clamp_.default), CLAMP),
    **dict.fromkeys(("clamp", "clamp_", "clip", "clip_"), CLAMP),
    **dict.fromkeys((functional.leaky_relu, functional.leaky_relu_), LEAKY),
    **dict.fromkeys((aten.leaky_relu.default, aten.leaky_relu_.default), LEAKY),
    **dict.fromkeys((torch.sigmoid, torch.sigmoid_, functional.sigmoid), _fixed(SIGMOID)),
    **dict.fromkeys((aten.sigmoid.default, "sigmoid", "sigmoid_"), _fixed(SIGMOID)),
    **dict.fromkeys((functional.silu, aten.silu.default, aten.silu_.default), _fixed(SILU)),
    **dict.fromkeys((functional.gelu, aten.gelu.default), GELUS),
    **dict.fromkeys((functional.hardsigmoid, aten.hardsigmoid.default), _fixed(HARD_SIGMOID)),
    **dict.fromkeys((functional.hardswish, aten.hardswish.default), _fixed(HARD_SWISH)),
    aten.hardswish_.default: _fixed(HARD_SWISH),
}
# By the function that multiplies a value by itself.
PRODUCTS = {SIGMOID: functional.silu, HARD_SIGMOID: functional.hardswish}


def activation_of(module: nn.Module, node: fx.Node) -> Activation | None:
    """Return the activation that a node computes of its first argument, or None."""
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        make = MODULES.get(type(called))
        has_hooks = called._forward_hooks or called._forward_pre_hooks
        return make(called) if make is not None and not has_hooks else None
    call = CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
    if call is None or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    values = dict(zip(call.names, call.defaults, strict=True))
    names = (*call.names, IN_PLACE)
    if len(node.args) - 1 > len(names) or not set(node.kwargs) <= set(names):
        return None
    values |= dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    values.pop(IN_PLACE, None)
    return call.make(*values.values())


def factors_of(node: fx.Node) -> tuple[object, object] | None:
    """Return both factors if the node multiplies two values."""
    return operands_of(node, MULTIPLY, MULTIPLY_METHODS)


def restore(module: fx.GraphModule) -> int:
    """Replace x * sigmoid(x) by SiLU and x * hard_sigmoid(x) by hard-swish; return how many."""
    count = 0
    for node in list(module.graph.nodes):
        factors = factors_of(node)
        if factors is None or node.target in MULTIPLY_IN_PLACE:
            continue
        for x, gate in (factors, factors[::-1]):
            made = _product(module, x, gate)
            if made is not None:
                with module.graph.inserting_before(node):
                    node.replace_all_uses_with(module.graph.call_function(made, (x,)))
                module.graph.erase_node(node)
                assert isinstance(gate, fx.Node)
                if not gate.users:
                    module.graph.erase_node(gate)
                count += 1
                break
    return count


def _product(
    module: nn.Module, x: object, gate: object
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that x times its gate is."""
    if not isinstance(x, fx.Node) or not isinstance(gate, fx.Node) or x is gate:
        return None
    found = activation_of(module, gate)
    is_same = bool(gate.args) and gate.args[0] is x
    values = [*gate.args[1:], gate.kwargs.get(IN_PLACE)]
    if gate.op == "call_module":
        values.append(getattr(module.get_submodule(str(gate.target)), IN_PLACE, False))
    is_in_place = str(gate.target).endswith("_") or any(each is True for each in values)
    return PRODUCTS.get(found) if found is not None and is_same and not is_in_place else None
