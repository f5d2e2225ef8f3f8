"""Simplifies an imported graph for the shapes it will get.

Shapes are computed without data, on torch's meta device, for a few sizes of the dynamic dimensions.
A host value that is the same for all of them becomes a constant. A size that a Reshape or an Expand
copies from its input is written as such, and one that Reshape can work out becomes -1. What is left
is computed on the host at each run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from penstock.backends.onnx_import import shapes
from penstock.backends.onnx_import.importer import HOST, ImportedGraph, ToDevice
from penstock.backends.onnx_import.values import ints
from penstock.errors import ConfigError, first_line

# What a size is written as that is copied from the input, by the function whose second argument is
# a shape.
COPIED = {shapes.reshape: 0, shapes.expand: 1}
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
        if type(module) is torch.nn.LayerNorm:
            # Its meta function is a composition in Python, and slow.
            return torch.empty_like(args[0])
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


def record_shapes(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> dict[fx.Node, tuple[int, ...]]:
    """Return the shapes of all tensors of a graph, for inputs on the meta device."""
    recorder = _Recorder(module)
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder.shapes


def _record(model: ImportedGraph, samples: Sequence[Sample]) -> list[_Recorder]:
    """Run the graph without data for all samples of input shapes that it takes. Return nothing if
    these are few, or if shapes depend on data."""
    records = []
    for sample in samples:
        recorder = _Recorder(model.module)
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
    return records if len(records) >= max(1, MIN_SHARE * len(samples)) else []


def find_agreed(model: ImportedGraph, samples: Sequence[Sample]) -> list[torch.Tensor] | None:
    """Return the outputs of a graph that follow from shapes alone, if they are the same for all
    samples of input shapes that the graph takes."""
    (output,) = (node for node in model.module.graph.nodes if node.op == "output")
    # Each is computed on the host, then moved to the device.
    nodes = [each.args[0] for each in output.args[0]]
    records = _record(model, samples)
    if not records or not all(node in record.host for node in nodes for record in records):
        return None
    first = records[0].host
    if all(torch.equal(first[node], each.host[node]) for node in nodes for each in records):
        return [first[node] for node in nodes]
    return None


def fold_shapes(model: ImportedGraph, samples: Sequence[Sample]) -> int:
    """Fold what is the same for all samples of input shapes that the graph takes; return how many
    nodes were. A graph whose shapes depend on data stays as it is."""
    module = model.module
    records = _record(model, samples)
    if not records:
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
