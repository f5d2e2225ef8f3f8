"""Layers that stay in FP32 in a model of 16-bit floats (`penstock.keep_fp32`), and which must.

A layer is a submodule, by name; in an imported graph also a node of the file or a function. A
kept layer takes its inputs in FP32 and gives its results in FP32, and what is computed of them
stays FP32 up to the next layer with weights, so values beyond FP16 survive in between. Layers that
do not fit FP16 are found by running the model in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from penstock.backends.onnx_import import contrib, layers, matrices, patterns, recurrent
from penstock.backends.onnx_import.importer import NODES, ON_HOST, ToDevice
from penstock.backends.onnx_import.values import Compute
from penstock.backends.torch_linear import CastInputs, cast_floats, check_names, is_float

OPTION = "penstock.keep_fp32"
# Functions whose tensors must have one datatype.
PRODUCTS = {
    each.compute
    for table in (contrib, layers, matrices, recurrent)
    for each in table.OPERATORS.values()
} | {patterns.attend, torch.matmul}
Call = Callable[[], object]


def _floats(values: object) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if is_float(each)]


def find_kept(graph: fx.GraphModule, keep: Collection[str]) -> set[str]:
    """Return the layers and functions of an imported graph with these names: their own, or those of
    the file's nodes that they compute. ConfigError for a name that is unknown."""
    own: dict[str, set[str]] = {}
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_module") or node.meta.get(ON_HOST):
            continue
        name = str(node.target) if node.op == "call_module" else node.name
        for each in (name, *node.meta.get(NODES, ())):
            own.setdefault(each, set()).add(name)
    check_names(OPTION, keep, own)
    return {name for each in keep for name in own[each]}


def with_constants(graph: fx.GraphModule, keep: Collection[str]) -> set[str]:
    """Return these names, and those of the constants that only these nodes read."""
    constants = [node for node in graph.graph.nodes if node.op == "get_attr" and node.users]
    found = {str(n.target) for n in constants if all(user.name in keep for user in n.users)}
    return {*keep, *found}


def unmix(graph: fx.GraphModule, dtype: torch.dtype, keep: Collection[str]) -> None:
    """Let kept nodes compute in FP32, and products of mixed datatypes in `dtype`."""
    if not keep:
        return
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.meta.get(ON_HOST):
            continue
        if node.name in keep:
            node.target = _in_fp32(node.target)
        elif node.target in PRODUCTS:
            node.target = _in_one(node.target, dtype)
    graph.recompile()


def _in_fp32(function: Compute) -> Compute:
    def in_fp32(*args: object, **kwargs: object) -> object:
        return function(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))

    return in_fp32


def _in_one(function: Compute, dtype: torch.dtype) -> Compute:
    def in_one(*args: object, **kwargs: object) -> object:
        if len({each.dtype for each in _floats((args, kwargs))}) > 1:
            return function(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))
        return function(*args, **kwargs)

    return in_one


def cast_others(module: nn.Module, dtype: torch.dtype, keep: Collection[str]) -> None:
    """Cast all but these layers. ConfigError if a name is not that of a layer."""
    known = dict(module.named_modules())
    graph = module if isinstance(module, fx.GraphModule) else None
    nodes = {node.name for node in graph.graph.nodes} if graph is not None else set()
    check_names(OPTION, keep, [name for name in (*known, *nodes) if name])
    constants = with_constants(graph, keep) - {*keep} if graph is not None else set()
    kept = [known[name] for name in keep if name in known]
    tensors = [each for layer in kept for each in (*layer.parameters(), *layer.buffers())]
    tensors += [module.get_buffer(name) for name in constants]
    ids = {id(each) for each in tensors}
    inside = {id(each) for layer in kept for each in layer.modules()}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and id(tensor) not in ids else tensor

    for each in known.values():
        own = [*each._parameters.values(), *each._buffers.values()]
        if id(each) not in inside and each is not module and any(map(is_float, own)):
            each.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
    for layer in {id(each): each for each in kept}.values():
        layer.float()
        layer.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
    module._apply(cast)


@dataclass(slots=True)
class LayerWatch:
    """The layers that took or gave values that are not finite, in the order in which they ended."""

    took: dict[str, None] = field(default_factory=dict)
    gave: dict[str, None] = field(default_factory=dict)

    def note(self, name: str, given: object, found: object) -> None:
        for values, names in ((given, self.took), (found, self.gave)):
            if not all(bool(each.isfinite().all()) for each in _floats(values)):
                names[name] = None


class _Watcher(fx.Interpreter):  # type: ignore[misc]
    """Runs a graph and notes what its nodes give."""

    def __init__(self, module: fx.GraphModule, watch: LayerWatch) -> None:
        super().__init__(module)
        self._watch = watch

    def run_node(self, node: fx.Node) -> object:
        found = super().run_node(node)
        is_moved = node.op == "call_module" and isinstance(
            self.module.get_submodule(str(node.target)), ToDevice
        )
        if node.op in ("call_function", "call_module") and not node.meta.get(ON_HOST):
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            name = str(node.target) if node.op == "call_module" else node.name
            if not is_moved:
                self._watch.note(name, (args, kwargs), found)
        return found


def watched(module: nn.Module, positional: Mapping[str, torch.Tensor], call: Call) -> LayerWatch:
    """Run a model once and return what its layers took and gave: nodes of a graph that takes its
    inputs by position, else submodules while `call` runs."""
    watch = LayerWatch()
    with torch.no_grad():
        if isinstance(module, fx.GraphModule):
            _Watcher(module, watch).run(*positional.values())
            return watch
        hooks = [
            each.register_forward_hook(functools.partial(_after, watch, name), with_kwargs=True)
            for name, each in module.named_modules()
            if name
        ]
        try:
            call()
        finally:
            for hook in hooks:
                hook.remove()
    return watch


def _after(
    watch: LayerWatch, name: str, module: nn.Module, args: object, kwargs: object, found: object
) -> None:
    watch.note(name, (args, kwargs), found)


def overflowing(exact: LayerWatch, rounded: LayerWatch) -> list[str]:
    """Return the layers to keep in FP32, from a run in FP32 and one in FP16: those that give values
    beyond FP16; if none does, the first that takes such values."""
    gave = [name for name in rounded.gave if name not in exact.gave]
    took = [name for name in rounded.took if name not in exact.took]
    return [name for name in gave if name not in took] or took[:1]
