"""Operator times of OpenVINO: the backend's properties with performance counters on.

Counters have no shapes. These come from the graph that the library compiles for the same inputs
with fixed sizes, matched by node name.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.config import ModelConfig
from penstock.optimizer.facts import datatype_name
from penstock.profiling.work import BITS, Event, OperatorTime, Shaped, Timed
from penstock.types import Array

if TYPE_CHECKING:
    import openvino as ov

# ONNX names of OpenVINO operators. Whether weights are transposed does not matter for counting.
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("Convolution", "GroupConvolution"), "Conv"),
    **dict.fromkeys(("MVN", "RMSNorm"), "LayerNormalization"),
    **dict.fromkeys(("ScaledDotProductAttention", "ScaledAttn"), "MultiHeadAttention"),
    **dict.fromkeys(("Pooling", "AvgPool"), "AveragePool"),
    "FullyConnected": "MatMul",
    "Deconvolution": "ConvTranspose",
    "SoftMax": "Softmax",
    "Convert": "Cast",
    "Multiply": "Mul",
    "Divide": "Div",
    "Subtract": "Sub",
    "Power": "Pow",
    "ReLU": "Relu",
    "Clamp": "Clip",
    "FakeQuantize": "QuantizeLinear",
    "Subgraph": "Eltwise",
    "Select": "Where",
    "StridedSlice": "Slice",
    "Broadcast": "Expand",
}
NUM_WARM_UP = 2


def timed(config: ModelConfig, inputs: Mapping[str, Array], num_runs: int) -> Timed:
    import openvino as ov

    from penstock.backends.openvino import DEVICE, properties_of, read_model

    properties = properties_of(config) | {"PERF_COUNT": "YES"}
    path = Path(config.artifact)
    model = read_model(path, path.name)
    request = ov.Core().compile_model(model, DEVICE, properties).create_infer_request()
    feeds = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    for _ in range(NUM_WARM_UP):
        request.infer(feeds)
    seconds: dict[tuple[str, str, str], list[float]] = {}
    runs_s = []
    for _ in range(num_runs):
        began = time.perf_counter()
        request.infer(feeds)
        runs_s.append(time.perf_counter() - began)
        for entry in request.profiling_info:
            if entry.status == entry.Status.EXECUTED:
                key = (entry.node_name, entry.node_type, entry.exec_type)
                seconds.setdefault(key, []).append(entry.real_time.total_seconds())
    nodes = _fixed(model, feeds, properties)
    medians = {key: statistics.median(each) for key, each in seconds.items()}
    operators = [_operator(key, each, nodes.get(key[0])) for key, each in medians.items()]
    return Timed(operators, statistics.median(runs_s), _in_a_row(operators))


def _fixed(
    model: ov.Model, feeds: Mapping[str, Array], properties: Mapping[str, str]
) -> dict[str, ov.Node]:
    """Return the compiled graph's nodes by name, all sizes known; empty if it cannot be built."""
    import openvino as ov

    try:
        model.reshape({name: ov.PartialShape(list(array.shape)) for name, array in feeds.items()})
        graph = ov.Core().compile_model(model, "CPU", properties).get_runtime_model()
    except RuntimeError:
        return {}
    return {node.get_friendly_name(): node for node in graph.get_ops()}


def _operator(key: tuple[str, str, str], seconds: float, node: ov.Node | None) -> OperatorTime:
    name, kind, how = key
    kind = KINDS.get(kind, kind)
    # "brgemm_avx512_f32": the last part is the compute datatype.
    datatype = _datatype(how.rpartition("_")[2]).replace("uint8", "int8")
    if node is None or any(each.get_partial_shape().is_dynamic for each in node.inputs()):
        return OperatorTime(name, kind, seconds, datatype=datatype)
    inputs, outputs = (tuple(map(_shaped, ports)) for ports in (node.inputs(), node.outputs()))
    sources = [port.get_source_output().get_node() for port in node.inputs()]
    pairs = zip(inputs, sources, strict=True)
    weights = sum(shaped.num_bytes for shaped, source in pairs if _is_constant(source))
    return OperatorTime(name, kind, seconds, inputs, outputs, weights, datatype=datatype)


def _is_constant(node: ov.Node) -> bool:
    """Return whether this is constant, also if transposed or converted once, at compile time."""
    facts = node.get_rt_info()
    if "layerType" not in facts:
        return False
    kind = str(getattr(facts["layerType"], "value", facts["layerType"]))
    if kind in ("Reorder", "Transpose", "Convert"):
        return _is_constant(node.input(0).get_source_output().get_node())
    return kind == "Const"


def _shaped(port: ov.Input | ov.Output) -> Shaped:
    shape = port.get_partial_shape()
    sizes = () if shape.is_dynamic else tuple(size.get_length() for size in shape)
    return Shaped(_datatype(port.get_element_type().get_type_name()) or "fp32", sizes)


def _datatype(name: str) -> str:
    """Return the name of one of OpenVINO's datatypes here; empty if it has none."""
    found = "bool" if name == "boolean" else datatype_name(name).lower()
    return found if found in BITS else ""


def _in_a_row(operators: list[OperatorTime]) -> list[Event]:
    """Lay the operators end to end: counters have durations and order, but no start times."""
    events, start_s = [], 0.0
    for each in operators:
        shapes = {"input": str([list(tensor.shape) for tensor in each.inputs])}
        events.append(Event(each.name, each.kind, start_s, each.seconds, shapes))
        start_s += each.seconds
    return events
