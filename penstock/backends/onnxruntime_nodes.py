"""Read back which provider runs each node of a session, and tell shape computations from layers.

ONNX Runtime computes shapes on the CPU by design: their results are needed there to launch kernels.
A layer on the CPU is a fallback that costs two copies of its tensors for each batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.repository.onnx_file import sort_graph

if TYPE_CHECKING:
    import onnxruntime as ort
    from onnx import GraphProto, NodeProto

CPU_PROVIDER = "CPUExecutionProvider"
# Session option that makes the library keep the assignment.
RECORD = "session.record_ep_graph_assignment_info"
# Results of these depend on the shapes of their inputs only.
SHAPES = ("Shape", "Size")
# Operators of shape computations, for nodes that the library made and the file does not have.
_SHAPE_OPERATORS = (
    "Shape Size Gather Slice Squeeze Unsqueeze Concat Cast Range ConstantOfShape ReduceProd Add "
    "Sub Mul Div Mod Floor Ceil Min Max Equal Greater Less Not And Or Where Identity Constant"
)
SHAPE_OPERATORS = frozenset(_SHAPE_OPERATORS.split())
# Keys of `Runner.built`.
FALLBACK, SHAPE_NODES = "nodes_fallen_back_to_cpu", "shape_nodes_on_cpu"


class AssignedNode(NamedTuple):
    provider: str
    name: str
    operator: str


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """How many nodes each provider runs. Those of the CPU are layers that fell back, by operator,
    and shape computations."""

    counts: Mapping[str, int]
    fallen_back: Mapping[str, int]
    num_shape_nodes: int

    def facts(self) -> dict[str, str]:
        facts = {f"nodes.{name}": str(count) for name, count in sorted(self.counts.items())}
        facts[SHAPE_NODES] = str(self.num_shape_nodes)
        facts[FALLBACK] = describe(self.fallen_back)
        return facts


def describe(operators: Mapping[str, int]) -> str:
    """Return "3: 2 Foo, 1 Bar"; "0" without any."""
    names = ", ".join(f"{count} {name}" for name, count in sorted(operators.items()))
    return f"{sum(operators.values())}: {names}" if operators else "0"


def read_placement(session: ort.InferenceSession, path: Path) -> NodePlacement | None:
    """Return where the nodes of a session with RECORD run; None if the library does not tell.
    `path` is the file that it was made from."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    nodes = [
        AssignedNode(group.ep_name, node.name, node.op_type)
        for group in session.get_provider_graph_assignment_info()
        for node in group.get_nodes()
    ]
    on_cpu = any(node.provider == CPU_PROVIDER for node in nodes)
    return judge(nodes, _kinds_in(path) if on_cpu else {})


def judge(nodes: Sequence[AssignedNode], kinds: Mapping[str, bool]) -> NodePlacement:
    """Return the placement. `kinds`: whether a node of the file, by name, computes shapes."""
    on_cpu = [node for node in nodes if node.provider == CPU_PROVIDER]
    fallen_back = [
        node.operator
        for node in on_cpu
        if not kinds.get(node.name, node.operator in SHAPE_OPERATORS)
    ]
    return NodePlacement(
        Counter(node.provider for node in nodes),
        Counter(fallen_back),
        len(on_cpu) - len(fallen_back),
    )


def _kinds_in(path: Path) -> dict[str, bool]:
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    sort_graph(graph)
    return shape_nodes(graph)


def shape_nodes(graph: GraphProto) -> dict[str, bool]:
    """Return for each node with a name whether it computes with shapes and constants only."""
    constants = {each.name for each in graph.initializer}
    data = {each.name for each in graph.input} - constants
    kinds: dict[str, bool] = {}
    for node in graph.node:
        is_shape = node.op_type in SHAPES or not data.intersection(_inputs(node))
        if not is_shape:
            data.update(node.output)
        if node.name:
            kinds[node.name] = is_shape
    return kinds


def _inputs(node: NodeProto) -> Iterable[str]:
    """Yield the names that a node reads, including those that its subgraphs take from outside."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _inputs(inner)


def num_fallen_back(built: Mapping[str, str]) -> int:
    """Return how many layers of a built model fell back to the CPU."""
    return int(built.get(FALLBACK, "0").partition(":")[0])
