"""Facts about a model's files and its loaded form, read back rather than assumed."""

from __future__ import annotations

import json
import struct
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError
from penstock.optimizer import onnx_model
from penstock.optimizer.candidates import Build
from penstock.repository import pt2_file

QUANTISE, DEQUANTISE = "QuantizeLinear", "DequantizeLinear"
# Operators that compute in INT8 whatever surrounds them.
INTEGER_OPERATORS = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLinear",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QAttention",
        "QEmbedLayerNormalization",
        "QGemm",
        "QLinearAdd",
        "QLinearAveragePool",
        "QLinearConcat",
        "QLinearConv",
        "QLinearGlobalAveragePool",
        "QLinearMatMul",
        "QLinearMul",
    }
)
# Datatypes of safetensors and of OpenVINO, by their names in the v2 protocol.
TORCH_DATATYPES = {
    "F64": "FP64",
    "F32": "FP32",
    "F16": "FP16",
    "BF16": "BF16",
    "I64": "INT64",
    "I32": "INT32",
    "I16": "INT16",
    "I8": "INT8",
    "U8": "UINT8",
}
OPENVINO_DATATYPES = {
    "f64": "FP64",
    "f32": "FP32",
    "f16": "FP16",
    "bf16": "BF16",
    "i64": "INT64",
    "i32": "INT32",
    "i16": "INT16",
    "i8": "INT8",
    "u8": "UINT8",
    "i4": "INT4",
    "u4": "UINT4",
}
MAX_HEADER_BYTES = 100 << 20


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

    @property
    def is_convolutional(self) -> bool:
        return self.operators.get("Conv", 0) > 0


def file_facts(build: Build) -> Facts:
    """Read the facts that need no loaded model."""
    path = build.artifact
    facts = Facts(backend=build.config.backend)
    if path.suffix == ".onnx":
        _read_onnx(path, facts)
    elif path.suffix == ".xml":
        _read_openvino(path, facts)
    elif path.suffix == ".pt2":
        _read_pt2(path, facts)
    else:
        _read_safetensors(path if path.is_dir() else path.parent, facts)
    facts.file_bytes = sum(
        each.stat().st_size for each in build.version_folder.rglob("*") if each.is_file()
    )
    return facts


def optimised_operators(path: Path, options: Mapping[str, str]) -> dict[str, int]:
    """Return how many nodes of each type ONNX Runtime runs for this file and these backend options.
    Loads the model, so call it in a separate process."""
    prefixes = ("session.", "optimization.")
    entries = {key: text for key, text in options.items() if key.startswith(prefixes)}
    model = onnx_model.optimised(path, options.get("graph_level", "all"), entries)
    return dict(Counter(node.op_type for node in onnx_model.nodes(model.graph)))


def _read_onnx(path: Path, facts: Facts) -> None:
    graph = onnx_model.read(path, weights=False).graph
    nodes = list(onnx_model.nodes(graph))
    facts.operators = dict(Counter(node.op_type for node in nodes))
    weights = onnx_model.constants(graph)
    _count_weights(
        facts,
        (
            (onnx_model.datatype(each), onnx_model.num_values(each), onnx_model.weight_bytes(each))
            for each in weights.values()
        ),
    )
    # Layers that no output needs are never quantised: preparation for INT8 removes them.
    onnx_model.remove_dead(graph)
    alive = list(onnx_model.nodes(graph))
    facts.quantised = _quantised(alive)
    facts.quantisable = dict(
        Counter(node.op_type for node in alive if onnx_model.can_gain(node, weights))
    )


def _quantised(nodes: list[Any]) -> dict[str, int]:
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


def _count_weights(facts: Facts, weights: Any) -> None:
    """Sum up the (datatype, number of values, bytes) of each weight."""
    total: Counter[str] = Counter()
    for datatype, num_values, num_bytes in weights:
        total[datatype] += num_bytes
        if datatype not in onnx_model.NOT_WEIGHTS:
            facts.num_parameters += num_values
    facts.weight_bytes = dict(total)


def _read_openvino(path: Path, facts: Facts) -> None:
    from penstock.repository import openvino_file

    layers = openvino_file.read_layers(path)
    facts.operators = dict(Counter(layer.get("type", "") for layer in layers))
    found = []
    for layer in layers:
        values = layer.find("data")
        if layer.get("type") != "Const" or values is None:
            continue
        shape = [int(size) for size in values.get("shape", "").split(",") if size.strip()]
        count = 1
        for size in shape:
            count *= size
        name = values.get("element_type", "")
        found.append((OPENVINO_DATATYPES.get(name, name), count, int(values.get("size", "0"))))
    _count_weights(facts, found)
    if "FakeQuantize" in facts.operators:
        facts.quantised = {"FakeQuantize": facts.operators["FakeQuantize"]}


def _read_pt2(path: Path, facts: Facts) -> None:
    """Read the list of weights. A compiled package has none, so only its size is known."""
    with zipfile.ZipFile(path) as archive:
        lists = [name for name in archive.namelist() if name.endswith("_weights_config.json")]
        entries = json.loads(archive.read(lists[0]))["config"].values() if lists else ()
    found = []
    for entry in entries:
        meta = entry["tensor_meta"]
        count = 1
        for size in meta["sizes"]:
            count *= size["as_int"]
        name = pt2_file.SCALARS.get(meta["dtype"], str(meta["dtype"]))
        found.append((name, count, count * _item_bytes(name)))
    _count_weights(facts, found)


def _read_safetensors(folder: Path, facts: Facts) -> None:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _safetensors_header(path).items():
            if name == "__metadata__":
                continue
            count = 1
            for size in entry["shape"]:
                count *= size
            start, end = entry["data_offsets"]
            datatype = TORCH_DATATYPES.get(entry["dtype"], entry["dtype"])
            found.append((datatype, count, end - start))
    _count_weights(facts, found)


def _safetensors_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if size > MAX_HEADER_BYTES:
            raise ConfigError([f"{path.name}: cannot be read as safetensors: no header"])
        header: dict[str, Any] = json.loads(file.read(size))
        return header


def _item_bytes(datatype: str) -> int:
    from penstock.types import DATATYPES

    return (DATATYPES[datatype].itemsize if datatype in DATATYPES else None) or 1
