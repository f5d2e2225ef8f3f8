"""Trace a module's code to a graph, for rewriting (`torch_fusion`).

torch.fx runs `forward` once with proxies for tensors, which fails if code depends on shapes.
torch.export handles that, given sample inputs; the operators in its graph that matter here are
converted back to modules, so both ways give the same kind of graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from penstock.errors import ConfigError, first_line

IN_PLACE_NAMES = "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor"
# Module of checks that torch.export inserts.
GUARDS = "_guards_fn"


@dataclass(frozen=True, slots=True)
class TraceInputs:
    """Sample inputs of a batch; the first dimension is dynamic if `has_batch`."""

    positional: Sequence[torch.Tensor]
    keywords: Mapping[str, torch.Tensor]
    has_batch: bool


class _Traced(fx.Proxy):  # type: ignore[misc]
    """A proxy for a value. torch's own turns `x += y` into `x = x + y`, which differs if x is used
    elsewhere."""


def _in_place(function: Callable[..., object]) -> Callable[[_Traced, object], fx.Proxy]:
    def call(traced: _Traced, other: object) -> fx.Proxy:
        return traced.tracer.create_proxy("call_function", function, (traced, other), {})

    return call


for _name in IN_PLACE_NAMES.split():
    setattr(_Traced, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(fx.Tracer):  # type: ignore[misc]
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Traced(node, self)


def trace(module: nn.Module, sample: TraceInputs | None = None) -> fx.GraphModule:
    """Return a GraphModule that shares the module's weights; raise ConfigError if tracing fails."""
    if isinstance(module, fx.GraphModule):
        return module
    try:
        return fx.GraphModule(module, _Tracer().trace(module))
    except Exception as error:  # The tracer runs the model's code.
        problem = f"parameters.penstock.fuse: the module cannot be traced: {first_line(error)}"
        if sample is None:
            raise ConfigError(problem) from error
    try:
        return _exported(module, sample)
    except Exception as error:  # Exporting runs the model's code too.
        raise ConfigError(f"{problem}; nor exported: {first_line(error)}") from error


def _exported(module: nn.Module, sample: TraceInputs) -> fx.GraphModule:
    first = {0: torch.export.Dim.DYNAMIC} if sample.has_batch else None
    shapes = {name: first for name in sample.keywords} or tuple(first for _ in sample.positional)
    program = torch.export.export(
        module, tuple(sample.positional), dict(sample.keywords), dynamic_shapes=shapes, strict=False
    )
    exported = program.module()
    made = fx.GraphModule(exported, exported.graph)
    for node in list(made.graph.nodes):
        if "device" in node.kwargs:
            raise ValueError(f"{node.target} makes a tensor on a device of its own")
        if node.op == "call_module" and node.target == GUARDS:
            made.graph.erase_node(node)
        elif node.op == "call_function":
            _lift(made, node)
    for node in list(made.graph.nodes):
        if node.op == "get_attr" and not node.users:
            made.graph.erase_node(node)
    made.delete_all_unused_submodules()
    made.recompile()
    return made


def _lift(made: fx.GraphModule, node: fx.Node) -> None:
    """Convert one of torch's operators back to a module."""
    aten = torch.ops.aten
    known: dict[object, Callable[..., nn.Module]] = {
        aten.conv2d.default: _conv,
        aten.batch_norm.default: _norm,
        aten.relu.default: nn.ReLU,
        aten.relu_.default: lambda: nn.ReLU(inplace=True),
        aten.max_pool2d.default: nn.MaxPool2d,
        aten.linear.default: _linear,
        aten.layer_norm.default: _layer_norm,
        aten.dropout.default: lambda rate, is_on: nn.Dropout(rate) if is_on else nn.Identity(),
    }
    functions: dict[object, Callable[..., object]] = {
        aten.add.Tensor: operator.add,
        aten.add_.Tensor: operator.iadd,
        aten.mul.Tensor: operator.mul,
        aten.mul_.Tensor: operator.imul,
        # Views of what fusion changes may have to be copied.
        aten.view.default: torch.reshape,
        aten.permute.default: torch.permute,
    }
    if node.target in functions and not node.kwargs:
        node.target = functions[node.target]
    elif node.target is aten.scaled_dot_product_attention.default:
        node.target = nn.functional.scaled_dot_product_attention
    elif node.target in known and not node.kwargs:
        x, *others = node.args
        given = [_value(made, each) for each in others]
        if any(isinstance(each, fx.Node) for each in given):
            return
        name = f"penstock_{node.name}"
        made.add_submodule(name, known[node.target](*given).eval())
        with made.graph.inserting_after(node):
            called = made.graph.call_module(name, (x,))
        node.replace_all_uses_with(called)
        made.graph.erase_node(node)


def _value(made: fx.GraphModule, argument: object) -> object:
    """Return the tensor of a weight, or the argument itself."""
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        return operator.attrgetter(argument.target)(made)
    return tuple(argument) if isinstance(argument, list) else argument


def _conv(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> nn.Conv2d:
    out, channels, *size = weight.shape
    pairs = [_pair(each) for each in (stride, padding, dilation)]
    conv = nn.Conv2d(channels * groups, out, tuple(size), *pairs, groups, bias is not None)
    conv.weight = _parameter(weight)
    conv.bias = None if bias is None else _parameter(bias)
    return conv


def _pair(lengths: Sequence[int]) -> tuple[int, int]:
    """Return a pair; a single length is used for both."""
    return lengths[0], lengths[-1]


def _norm(
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    *others: float,
) -> nn.BatchNorm2d:
    is_training, _, epsilon, *_ = others
    norm = nn.BatchNorm2d(len(mean), epsilon, affine=weight is not None)
    norm.weight = None if weight is None else _parameter(weight)
    norm.bias = None if bias is None else _parameter(bias)
    norm.running_mean, norm.running_var = mean, var
    if is_training:
        raise ValueError("a normalisation takes the statistics of the batch")
    return norm


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = _parameter(weight)
    linear.bias = None if bias is None else _parameter(bias)
    return linear


def _layer_norm(
    shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    *others: bool,
) -> nn.LayerNorm:
    norm = nn.LayerNorm(tuple(shape), epsilon, elementwise_affine=weight is not None)
    norm.weight = None if weight is None else _parameter(weight)
    norm.bias = None if bias is None else _parameter(bias)
    return norm


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
