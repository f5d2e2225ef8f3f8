"""Simplifies an imported graph for the shapes it will get.

Shapes are computed without data, on torch's meta device, for a few sizes of the dynamic dimensions.
A host value that is the same for all of them becomes a constant. A size that a Reshape or an Expand
copies from its input is written as such, and one that Reshape can work out becomes -1. What is left
is computed on the host at each run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx, nn

from penstock.backends.onnx_import import shapes
from penstock.backends.onnx_import.elementwise import cast, cast_like
from penstock.backends.onnx_import.importer import (
    DTYPE,
    HOST,
    ON_HOST,
    ImportedGraph,
    ToDevice,
    device_of,
    parameter_names,
)
from penstock.backends.onnx_import.quantised import dequantize, quantize
from penstock.backends.onnx_import.values import ints
from penstock.errors import ConfigError, first_line

# What a size is written as that is copied from the input, by the function whose second argument is
# a shape.
COPIED = {shapes.reshape: 0, shapes.expand: 1}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# ONNX's numbers of these datatypes.
FLOAT_NUMBERS = (10, 16, 1, 11)
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
NUMBERS = dict(zip(FLOATS, FLOAT_NUMBERS, strict=True))
INTEGER_OPERATORS = {
    "ConvInteger",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QLinearConv",
    "QLinearMatMul",
}
# Share of the samples that must run for anything to be folded. The network does not take the sizes
# of the others; if those are many, the rest may agree by chance.
MIN_SHARE = 0.7
log = logging.getLogger("penstock.onnx")
# Datatype and shape of each input.
Sample = Mapping[str, tuple[torch.dtype, Sequence[int]]]


class _Recorder(fx.Interpreter):  # type: ignore[misc]
    """Runs a graph on the meta device and keeps the values on the host."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.host: dict[fx.Node, torch.Tensor] = {}
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, node: fx.Node) -> object:
        found = super().run_node(node)
        if isinstance(found, torch.Tensor):
            self.shapes[node] = tuple(found.shape)
            if found.device.type == "cpu" and node.op == "call_function":
                self.host[node] = found
        return found

    def call_module(
        self, target: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        module = self.fetch_attr(target)
        if isinstance(module, ToDevice):
            value = args[0]
            assert isinstance(value, torch.Tensor)
            return value.to("meta")
        with torch.device("meta"):
            return torch.func.functional_call(
                module,
                {name: each.to("meta") for name, each in module.state_dict().items()},
                args,
                kwargs,
            )

    def get_attr(self, target: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        found = super().get_attr(target, args, kwargs)
        return found.to("meta") if isinstance(found, torch.Tensor) else found


def fold_shapes(model: ImportedGraph, samples: Sequence[Sample]) -> int:
    """Fold what is the same for all samples of input shapes that the graph takes; return how many
    nodes were. A graph whose shapes depend on data stays as it is."""
    module = model.module
    records = []
    for sample in samples:
        recorder = _Recorder(module)
        given = [
            torch.empty(tuple(shape), dtype=dtype, device="meta")
            for dtype, shape in (sample[name] for name in model.inputs)
        ]
        try:
            with torch.no_grad():
                recorder.run(*given)
        except ConfigError:  # Something that this engine does not have.
            raise
        except Exception as error:
            # The network does not take these sizes, or a shape depends on data, which is not there.
            log.debug("shapes of %s: %s", sample, first_line(error))
            continue
        records.append(recorder)
    if len(records) < max(1, MIN_SHARE * len(samples)):
        return 0
    count = 0
    for node in list(module.graph.nodes):
        values = [record.host[node] for record in records if node in record.host]
        if len(values) == len(records) > 0 and all(torch.equal(values[0], v) for v in values):
            count += _fold(module, node, values[0])
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in COPIED:
            count += _make_free(node, records)
    module.graph.eliminate_dead_code()
    module.recompile()
    return count


def _fold(module: fx.GraphModule, node: fx.Node, value: torch.Tensor) -> int:
    """Replace a host value: by numbers where an operator takes them, by a weight on the device."""
    graph, count = module.graph, 0
    for user in list(node.users):
        is_moved = user.op == "call_module" and isinstance(
            module.get_submodule(str(user.target)), ToDevice
        )
        if is_moved:
            name = f"folded_{user.name}"
            module.register_buffer(name, value)
            with graph.inserting_before(user):
                constant = graph.get_attr(name)
            user.replace_all_uses_with(constant)
            graph.erase_node(user)
            count += 1
        positions = user.meta.get(HOST, ())
        if any(each is node and n in positions for n, each in enumerate(user.args)):
            user.args = tuple(
                value.tolist() if each is node and n in positions else each
                for n, each in enumerate(user.args)
            )
            count += 1
    return count


def _make_free(node: fx.Node, records: Sequence[_Recorder]) -> int:
    """Write a shape that differs between the samples without computing it, if that is possible."""
    x, wanted = node.args[:2] if len(node.args) > 1 else (None, None)
    if not isinstance(wanted, fx.Node) or not isinstance(x, fx.Node):
        return 0
    if not all(wanted in record.host and x in record.shapes for record in records):
        return 0
    given = [record.shapes[x] for record in records]
    rows = [ints(record.host[wanted]) for record in records]
    if len({len(row) for row in rows}) != 1 or any(0 in row for row in rows):
        return 0
    shape: list[int] = []
    for place, column in enumerate(zip(*rows, strict=True)):
        if len(set(column)) == 1:
            shape.append(column[0])
        elif _is_copied(node, place, column, given, len(rows[0])):
            shape.append(COPIED[node.target])
        elif node.target is shapes.reshape and -1 not in (*shape, *rows[0]):
            shape.append(-1)
        else:
            return 0
    node.args = (x, shape, *node.args[2:])
    return 1


def _is_copied(
    node: fx.Node,
    place: int,
    column: Sequence[int],
    given: Sequence[tuple[int, ...]],
    rank: int,
) -> bool:
    """Whether a size is always that of the input: at the same place, for Expand from the right."""
    at = place if node.target is shapes.reshape else place - rank + len(given[0])
    if node.kwargs.get("allowzero") or not 0 <= at < min(map(len, given)):
        return False
    return all(shape[at] == size for shape, size in zip(given, column, strict=True))


def retype(model: ImportedGraph, dtype: torch.dtype, keep: Collection[str] = ()) -> None:
    """Let the graph compute in another floating datatype.

    Casts to a float become casts to it, but not those of sizes on the host, nor of integers that
    become integers or truth values again: these stay as they are. Finite constants beyond
    its range, such as those that mask, become half its largest number, so that scores can be added;
    those too small for it, such as an epsilon, become its smallest. Nodes and layers in `keep`
    stay as they are. Raise ConfigError for graphs that compute with integers, whose sums 16 bits do
    not hold.
    """
    quantised = sorted(INTEGER_OPERATORS & set(model.counts))
    if quantised and dtype.itemsize < torch.float32.itemsize:
        raise ConfigError(
            [f"{', '.join(quantised)}: the model is quantised; {dtype} does not hold its sums"]
        )
    exact = _exact_nodes(model.module)
    for node in model.module.graph.nodes:
        if (
            node.op != "call_function"
            or node.meta.get(ON_HOST)
            or node in exact
            or node.name in keep
        ):
            continue
        node.args = tuple(_fitted(each, dtype) for each in node.args)
        node.kwargs = _retyped(node, dtype)
    if dtype.itemsize < torch.float32.itemsize:
        _keep_scales(model.module, exact, dtype, keep)
    _keep_exact(model.module, exact, dtype)
    named = [*model.module.named_buffers(), *model.module.named_parameters()]
    for name, tensor in named:
        if tensor.dtype in FLOATS and tensor.numel():
            owner, _, attribute = name.rpartition(".")
            if owner in keep or name in keep:
                continue
            _limit(model.module.get_submodule(owner), attribute, tensor, dtype)
    model.module.recompile()


def _retyped(node: fx.Node, dtype: torch.dtype) -> dict[str, object]:
    """Return the attributes of a node that computes in this datatype."""
    found = {key: _fitted(each, dtype) for key, each in node.kwargs.items()}
    types = found.get("types")
    if node.target is cast and found.get("to") in FLOAT_NUMBERS:
        found["to"] = dtype
    if node.target is cast_like and isinstance(types, list) and types[1] in FLOAT_NUMBERS:
        # The other tensor's datatype, which is changed as well.
        found["types"] = []
    if node.target is shapes.make_range and isinstance(types, list):
        found["types"] = [NUMBERS[dtype] if each in FLOAT_NUMBERS else each for each in types]
    if "output_datatype" in parameter_names(node.target):
        # FLOAT unless the file says otherwise.
        found.setdefault("output_datatype", 1)
    if found.get("dtype") in FLOATS:
        found["dtype"] = dtype
    numbers = [key for key in ("dtype", "output_datatype") if found.get(key) in FLOAT_NUMBERS]
    return found | dict.fromkeys(numbers, NUMBERS[dtype])


def _exact_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """Return the floats that follow from integers and constants alone and become integers or truth
    values again, such as positions: sixteen bits hold no integers above 2,048."""
    derived: set[fx.Node] = set()
    wanted: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or node.meta.get(ON_HOST):
            continue
        if node.meta.get(DTYPE) in FLOAT_NUMBERS and _is_derived(module, node, derived):
            derived.add(node)
        elif node.meta.get(DTYPE) not in (None, 0, *FLOAT_NUMBERS):
            wanted.update(each for each in node.all_input_nodes if each in derived)
    for node in reversed(module.graph.nodes):
        if node in wanted:
            wanted.update(each for each in node.all_input_nodes if each in derived)
    return wanted


def _is_derived(module: fx.GraphModule, node: fx.Node, derived: set[fx.Node]) -> bool:
    """Whether a float follows from integers, `derived` floats and constants."""
    has_source = node.target is shapes.make_range
    for each in node.all_input_nodes:
        if each in derived or each.meta.get(DTYPE) not in (None, 0, *FLOAT_NUMBERS):
            has_source = True
        elif each.op != "get_attr" and each.target is not device_of:
            return False
    return has_source


def _keep_exact(module: fx.GraphModule, exact: set[fx.Node], dtype: torch.dtype) -> None:
    """Let these nodes compute in the precision of the file: their constants are not cast with the
    other weights, and their results are cast where others use them."""
    graph = module.graph
    for node in list(graph.nodes):
        if node not in exact:
            continue
        _keep_constants(module, node)
        others = [
            user
            for user in node.users
            if user not in exact and user.meta.get(DTYPE) in (None, 0, *FLOAT_NUMBERS)
        ]
        if others:
            with graph.inserting_after(node):
                narrow = graph.call_function(cast, (node,), {"to": dtype})
            for user in others:
                user.replace_input_with(node, narrow)
    graph.eliminate_dead_code()


def _keep_scales(
    module: fx.GraphModule, exact: set[fx.Node], dtype: torch.dtype, keep: Collection[str]
) -> None:
    """Keep constant scales of Q/DQ nodes in the precision of the file: 16 bits hold none below
    6e-5. What a node makes of integers is of the new datatype all the same."""
    for node in list(module.graph.nodes):
        is_known = node.op == "call_function" and node.target in (quantize, dequantize)
        if not is_known or node in exact or node.name in keep:
            continue
        _keep_constants(module, node)
        if node.target is dequantize:
            node.kwargs = {**node.kwargs, "output_dtype": NUMBERS[dtype]}


def _keep_constants(module: fx.GraphModule, node: fx.Node) -> None:
    """Keep the constants of a node as bits, which stay the same when the module is cast."""
    graph = module.graph
    for each in node.all_input_nodes:
        tensor = _attribute(module, each)
        if tensor is not None and tensor.dtype in BITS:
            name = f"exact_{each.name}"
            module.register_buffer(name, tensor.detach().clone().view(BITS[tensor.dtype]))
            with graph.inserting_before(node):
                stored = graph.get_attr(name)
                whole = graph.call_function(torch.Tensor.view, (stored, tensor.dtype))
                node.replace_input_with(each, whole)


def _attribute(module: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    if node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    found = getattr(module.get_submodule(owner), name)
    return found if isinstance(found, torch.Tensor) else None


def _fitted(value: object, dtype: torch.dtype) -> object:
    """Return a number as one that the datatype has; anything else as it is."""
    if not isinstance(value, float) or not math.isfinite(value) or value == 0:
        return value
    limits = torch.finfo(dtype)
    size = max(abs(value), limits.smallest_normal)
    return math.copysign(limits.max / 2 if size > limits.max else size, value)


def _limit(module: nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    is_large = tensor.isfinite() & (tensor.abs() > limits.max)
    # A single number is an epsilon or a mask; among many, small ones may as well be zeros.
    is_small = (tensor != 0) & (tensor.abs() < limits.smallest_normal) & (tensor.numel() == 1)
    if not bool((is_large | is_small).any()):
        return
    limited = torch.where(is_large, tensor.sign() * (limits.max / 2), tensor)
    limited = torch.where(is_small, tensor.sign() * limits.smallest_normal, limited)
    if isinstance(tensor, nn.Parameter):
        limited = nn.Parameter(limited, requires_grad=False)
    setattr(module, name, limited)
