"""Facts about a model's files and its loaded form, read back rather than assumed."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.onnxruntime_nodes import FALLBACK, num_fallen_back
from penstock.errors import ConfigError
from penstock.optimizer import onnx_model
from penstock.optimizer.candidates import Build
from penstock.repository import pretrained, pt2_file
from penstock.types import DATATYPES

if TYPE_CHECKING:
    from onnx import NodeProto

QUANTISE, DEQUANTISE = "QuantizeLinear", "DequantizeLinear"
# Operators that compute in INT8 whatever surrounds them.
INTEGER_OPERATORS = frozenset(
    {"ConvInteger", "DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"}
    | {"MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QAttention", "QGemm"}
    | {"QEmbedLayerNormalization", "QLinearAdd", "QLinearAveragePool", "QLinearConcat"}
    | {"QLinearConv", "QLinearGlobalAveragePool", "QLinearMatMul", "QLinearMul"}
)
# Names of datatypes in the v2 protocol, by those in safetensors (F32) and OpenVINO (f32).
KINDS = {"bf": "BF", "f": "FP", "i": "INT", "u": "UINT"}


class Facts(msgspec.Struct):
    """Facts of one build. Counts are of the file; `built` is what the backend reports."""

    backend: str
    # Nodes of ONNX graphs by operator type.
    operators: dict[str, int] = {}
    # Bytes of weights by datatype (FP32, FP16, INT8, ...).
    weight_bytes: dict[str, int] = {}
    # Nodes between DequantizeLinear and QuantizeLinear, by operator type; dynamic forms
    # (MatMulInteger, DynamicQuantizeLinear and contrib twins) count too.
    quantised: dict[str, int] = {}
    # Nodes with constant weights that are large enough to gain from INT8, by operator type.
    quantisable: dict[str, int] = {}
    # Nodes that really run, after the runtime's own optimisation, by operator type.
    optimised_operators: dict[str, int] = {}
    # Runner.built(): providers, threads, precision, compiled graphs.
    built: dict[str, str] = {}
    num_parameters: int = 0
    file_bytes: int = 0
    # Why rows must not share a batch, by the check at load or by real rows; empty: they may.
    batching_problem: str = ""
    # Why sequences are not padded although so configured; empty: they are, or it is not configured.
    padding_problem: str = ""
    # How answers to the same real rows differ between runs; empty: they do not.
    repeat_problem: str = ""

    @property
    def is_transformer(self) -> bool:
        return any(name in self.operators for name in ("Attention", "MultiHeadAttention")) or (
            self.operators.get("Softmax", 0) >= 1 and self.operators.get("MatMul", 0) >= 8
        )


def file_facts(build: Build) -> Facts:
    """Read the facts that need no loaded model."""
    path = build.artifact
    facts = Facts(backend=build.config.engine)
    readers = {".onnx": _read_onnx, ".xml": _read_openvino, ".pt2": _read_pt2}
    readers.get(path.suffix, _read_safetensors)(path, facts)
    files = (each for each in build.version_folder.rglob("*") if each.is_file())
    facts.file_bytes = sum(each.stat().st_size for each in files)
    return facts


def fallback_problem(before: Facts, after: Facts) -> str:
    """Return which layers a step has moved from a GPU to the CPU, where every batch is copied to
    and fro; empty without any. Shapes are computed there by design."""
    if num_fallen_back(after.built) <= num_fallen_back(before.built):
        return ""
    return f"nodes fell back to the CPU: {after.built[FALLBACK]}"


def describe_weights(build: Build) -> str:
    """Return "22.7 M parameters, FP32", or the size of the file if their number is unknown."""
    facts = file_facts(build)
    if not facts.num_parameters:
        return f"{build.artifact.stat().st_size / 1e6:.1f} MB"
    datatypes = [name for name in facts.weight_bytes if name not in onnx_model.NOT_WEIGHTS]
    datatype = max(datatypes, key=lambda name: facts.weight_bytes[name])
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if facts.num_parameters >= limit:
            return f"{facts.num_parameters / limit:.1f}{unit} parameters, {datatype}"
    return f"{facts.num_parameters} parameters, {datatype}"


def optimised_operators(path: Path, options: Mapping[str, str]) -> dict[str, int]:
    """Return how many nodes of each type ONNX Runtime runs for this file and these backend options.
    Loads the model, so call it in a separate process."""
    prefixes = ("session.", "optimization.")
    entries = {key: text for key, text in options.items() if key.startswith(prefixes)}
    model = onnx_model.optimised(path, options.get("graph_level", "all"), entries)
    return dict(Counter(node.op_type for node in onnx_model.nodes(model.graph)))


def _read_onnx(path: Path, facts: Facts) -> None:
    graph = onnx_model.read(path, weights=False).graph
    facts.operators = dict(Counter(node.op_type for node in onnx_model.nodes(graph)))
    weights = onnx_model.constants(graph)
    found = (
        (onnx_model.datatype(each), onnx_model.num_values(each), onnx_model.weight_bytes(each))
        for each in weights.values()
    )
    _count_weights(facts, found)
    # Layers that no output needs are never quantised: preparation for INT8 removes them.
    onnx_model.remove_dead(graph)
    alive = list(onnx_model.nodes(graph))
    facts.quantised = _quantised(alive)
    quantisable = (node.op_type for node in alive if onnx_model.can_gain(node, weights))
    facts.quantisable = dict(Counter(quantisable))


def _quantised(nodes: list[NodeProto]) -> dict[str, int]:
    dequantised = {node.output[0] for node in nodes if node.op_type == DEQUANTISE}
    consumers: dict[str, set[str]] = {}
    for node in nodes:
        for name in node.input:
            consumers.setdefault(name, set()).add(node.op_type)
    counts: Counter[str] = Counter()
    for node in nodes:
        is_quantised = node.op_type in INTEGER_OPERATORS
        if node.op_type in onnx_model.WEIGHTED:
            is_quantised = all(name in dequantised for name in node.input[:2])
        elif node.op_type not in (QUANTISE, DEQUANTISE) and node.input:
            between = node.input[0] in dequantised and all(
                consumers.get(name) == {QUANTISE} for name in node.output
            )
            is_quantised = is_quantised or between
        counts[node.op_type] += is_quantised
    return {name: count for name, count in counts.items() if count}


def _count_weights(facts: Facts, weights: Iterable[tuple[str, int, int]]) -> None:
    """Sum up the (datatype, number of values, bytes) of each weight."""
    total: Counter[str] = Counter()
    for datatype, num_values, num_bytes in weights:
        total[datatype] += num_bytes
        if datatype not in onnx_model.NOT_WEIGHTS:
            facts.num_parameters += num_values
    facts.weight_bytes = dict(total)


def datatype_name(name: str) -> str:
    """Return the v2 name of a datatype of safetensors or OpenVINO; others stay as they are."""
    match = re.fullmatch(r"(bf|f|i|u)(\d+)", name.lower())
    return f"{KINDS[match[1]]}{match[2]}" if match else name


def _read_openvino(path: Path, facts: Facts) -> None:
    from penstock.repository import openvino_file

    layers = openvino_file.read_xml(path).findall("layers/layer")
    facts.operators = dict(Counter(layer.get("type", "") for layer in layers))
    found = []
    for layer in layers:
        values = layer.find("data")
        if layer.get("type") != "Const" or values is None:
            continue
        count = math.prod(int(size) for size in values.get("shape", "").split(",") if size.strip())
        name = datatype_name(values.get("element_type", ""))
        found.append((name, count, int(values.get("size", "0"))))
    _count_weights(facts, found)
    if "FakeQuantize" in facts.operators:
        facts.quantised = {"FakeQuantize": facts.operators["FakeQuantize"]}


def _read_pt2(path: Path, facts: Facts) -> None:
    """Read the list of weights. A compiled package has none, so only its size is known."""
    with zipfile.ZipFile(path) as archive:
        lists = [name for name in archive.namelist() if name.endswith("_weights_config.json")]
        entries = json.loads(archive.read(lists[0]))["config"].values() if lists else ()
    found = []
    for meta in (entry["tensor_meta"] for entry in entries):
        count = math.prod(size["as_int"] for size in meta["sizes"])
        name = pt2_file.SCALARS.get(meta["dtype"], str(meta["dtype"]))
        item_bytes = (DATATYPES[name].itemsize if name in DATATYPES else None) or 1
        found.append((name, count, count * item_bytes))
    _count_weights(facts, found)


def _read_safetensors(artifact: Path, facts: Facts) -> None:
    found = []
    folder = artifact if artifact.is_dir() else artifact.parent
    for path in sorted(folder.glob("*.safetensors")):
        tensors = pretrained.read_header(path)
        if tensors is None:
            raise ConfigError([f"{path.name}: cannot be read as safetensors: no header"])
        for each in tensors:
            start, end = each.data_offsets
            found.append((datatype_name(each.dtype), math.prod(each.shape), end - start))
    _count_weights(facts, found)
