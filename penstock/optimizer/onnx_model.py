"""ONNX graph utilities of the passes: read, inspect, prepare for quantisation, run, write.

Knows nothing of candidates; `facts`, `calibration` and the passes call it. onnx and onnxruntime are
imported where they are used.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.checks import first_line
from penstock.errors import BackendFailed
from penstock.types import Array

# Protobuf messages are limited to 2 GiB; larger weights go into a separate file.
MAX_INLINE_BYTES = 1_500_000_000
EXTERNAL_SUFFIX = ".data"
# Operators with weights that are worth quantising.
WEIGHTED = ("Conv", "Gemm", "MatMul")
# Matmuls with fewer rows or columns of weights lose more by converting datatypes than they gain.
MIN_SIDE = 16
# Datatypes that do not count as weights; 64-bit integers are shapes and indices.
NOT_WEIGHTS = ("INT64", "BOOL", "STRING", "UINT64")


def read(path: Path, *, weights: bool = True) -> Any:
    """Return the ModelProto; BackendFailed says why it cannot be read."""
    import onnx

    try:
        return onnx.load(str(path), load_external_data=weights)
    except Exception as error:  # onnx and protobuf raise many types for a broken file.
        raise BackendFailed(f"{path.name}: cannot be read as ONNX: {first_line(error)}") from None


def write(model: Any, path: Path) -> None:
    import onnx

    size = sum(weight_bytes(tensor) for tensor in model.graph.initializer)
    if size > MAX_INLINE_BYTES:
        location = path.name + EXTERNAL_SUFFIX
        onnx.save_model(model, str(path), save_as_external_data=True, location=location)
    else:
        onnx.save_model(model, str(path))


def external_files(model: Any) -> set[str]:
    """Return the external weight files, relative to the model's folder."""
    import onnx

    return {
        entry.value
        for tensor in tensors(model.graph)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }


def tensors(graph: Any) -> Iterator[Any]:
    """Yield all weights, including those of branches and loop bodies."""
    yield from graph.initializer
    for node in nodes(graph):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from inner.initializer


def nodes(graph: Any) -> Iterator[Any]:
    """Yield all nodes, including those of branches and loop bodies."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes(inner)


def opset(model: Any) -> int:
    return int(max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")))


def true_inputs(graph: Any) -> list[Any]:
    """Return the inputs that callers provide; old files list weights among the inputs."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def constants(graph: Any) -> dict[str, Any]:
    """Return weights by name: initialisers, and values of Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    found[node.output[0]] = attribute.t
    return found


def datatype(tensor: Any) -> str:
    """Return the v2 name of a weight's datatype, or ONNX's own if there is no such name."""
    import onnx

    from penstock.repository.onnx_file import NAMES

    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    return str(NAMES.get(name, name))


def num_values(tensor: Any) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64)) if tensor.dims else 1


def weight_bytes(tensor: Any) -> int:
    bits = {"INT4": 4, "UINT4": 4, "STRING": 8}.get(name := datatype(tensor), 0)
    if not bits:
        digits = "".join(filter(str.isdigit, name.partition("E")[0]))
        bits = int(digits or 8)
    return num_values(tensor) * bits // 8


def attribute(node: Any, name: str, default: Any = None) -> Any:
    import onnx

    for each in node.attribute:
        if each.name == name:
            return onnx.helper.get_attribute_value(each)
    return default


def product_sides(node: Any, dims: Sequence[int]) -> tuple[int, int]:
    """Return K and N of the node's matmul: the length of each dot product, and the number of
    columns."""
    if node.op_type == "Conv":
        return int(np.prod(dims[1:], dtype=np.int64)), dims[0]
    if node.op_type == "Gemm" and attribute(node, "transB", 0):
        return dims[1], dims[0]
    return dims[-2], dims[-1]


def can_gain(node: Any, weights: Mapping[str, Any]) -> bool:
    """Return whether INT8 can make this node faster: its weights are constant and large enough.
    Depthwise convolutions are small but lie between others, where converting datatypes costs
    more."""
    if node.op_type not in WEIGHTED or len(node.input) < 2:
        return False
    weight = weights.get(node.input[1])
    if weight is None or len(weight.dims) < 2:
        return False
    if node.op_type == "Conv" and attribute(node, "group", 1) > 1:
        return True
    return min(product_sides(node, weight.dims)) >= MIN_SIDE


def session(model: Any, *, num_threads: int = 0, entries: Mapping[str, str] | None = None) -> Any:
    """Load a model, given as a message or a path, in ONNX Runtime; BackendFailed says why not."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = num_threads
    for key, text in (entries or {}).items():
        options.add_session_config_entry(key, text)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # The library raises its own types, some of them bare.
        raise BackendFailed(f"ONNX Runtime cannot load it: {first_line(error)}") from None


def run(loaded: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
    names = [output.name for output in loaded.get_outputs()]
    try:
        return dict(zip(names, loaded.run(names, dict(feeds)), strict=True))
    except Exception as error:  # As above.
        raise BackendFailed(f"ONNX Runtime cannot run it: {first_line(error)}") from None


def made_up(graph: Any, num_rows: int, size: int, seed: int = 0) -> dict[str, Array]:
    """Draw random inputs from the signature: `num_rows` for a variable first dimension, `size` for
    any other."""
    import onnx

    random = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for value in true_inputs(graph):
        shape = [
            dim.dim_value if dim.dim_value > 0 else (num_rows if axis == 0 else size)
            for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        ]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        drawn = random.normal(size=shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        if dtype.kind != "f" and shape:
            # It may be a mask, and a fully masked row has no meaningful answer.
            drawn[..., 0] = 1
        feeds[value.name] = np.asarray(drawn).astype(dtype)
    return feeds


def optimised(model: Any, level: str = "basic", entries: Mapping[str, str] | None = None) -> Any:
    """Return the model after ONNX Runtime's graph optimisation. Level "basic" is plain ONNX, for
    any machine."""
    import onnxruntime as ort

    from penstock.backends.onnxruntime import GRAPH_LEVELS

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = GRAPH_LEVELS[level]
    for key, text in (entries or {}).items():
        options.add_session_config_entry(key, text)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        target = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(target)
        source = str(model) if isinstance(model, Path) else model.SerializeToString()
        try:
            ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # As above.
            raise BackendFailed(f"ONNX Runtime cannot load it: {first_line(error)}") from None
        return read(target)


def prepared(model: Any) -> Any:
    """Prepare for quantisation: fold constants and batch normalisation, infer shapes, and give
    every node a unique name (without commas, which separate names)."""
    import onnx

    ready = optimised(model)
    _tell_types(ready.graph)
    ready = onnx.shape_inference.infer_shapes(ready)
    taken = Counter(node.name for node in ready.graph.node)
    for index, node in enumerate(ready.graph.node):
        if not node.name or taken[node.name] > 1:
            node.name = f"{node.op_type}_{index}"
        node.name = node.name.replace(",", ".")
    return ready


def _tell_types(graph: Any) -> None:
    """Declare types around matmuls, from their weights: ONNX infers none after operators of other
    domains."""
    import onnx

    known = {value.name for value in (*graph.value_info, *graph.input, *graph.output)}
    weights = constants(graph)
    for node in graph.node:
        if node.op_type not in WEIGHTED or node.input[1] not in weights:
            continue
        for name in (node.input[0], node.output[0]):
            if name not in known:
                known.add(name)
                elem_type = weights[node.input[1]].data_type
                graph.value_info.append(onnx.helper.make_tensor_value_info(name, elem_type, None))


def remove_dead(graph: Any) -> None:
    """Remove nodes and weights that no output needs; ONNX Runtime would compute them anyway."""
    producers = {name: node for node in graph.node for name in node.output if name}
    needed: set[str] = set()
    waiting = [value.name for value in graph.output]
    while waiting:
        name = waiting.pop()
        if not name or name in needed:
            continue
        needed.add(name)
        if name in producers:
            waiting += inputs_of(producers[name])
    alive = [node for node in graph.node if needed.intersection(node.output)]
    kept = [type(node).FromString(node.SerializeToString()) for node in alive]
    del graph.node[:]
    graph.node.extend(kept)
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in needed:
            del graph.initializer[index]


def inputs_of(node: Any) -> list[str]:
    """Return all inputs of a node, including those of its branches and loop bodies."""
    inner = [
        name
        for attribute in node.attribute
        for graph in (attribute.g, *attribute.graphs)
        for each in nodes(graph)
        for name in each.input
    ]
    return [*node.input, *inner]


def float_tensors(graph: Any, op_types: Sequence[str]) -> list[str]:
    """Return FP32 activations around nodes of these types, in the order of the graph."""
    import onnx

    known = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    weights = constants(graph)
    names = dict.fromkeys(
        name
        for node in graph.node
        if node.op_type in op_types
        for name in (*node.input, *node.output)
        if name and name not in weights
    )
    return [
        name
        for name in names
        if name not in known
        or known[name].type.tensor_type.elem_type in (0, onnx.TensorProto.FLOAT)
    ]


def with_outputs(model: Any, names: Sequence[str]) -> Any:
    """Return a copy that also outputs these tensors."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    given = {value.name for value in copy.graph.output}
    for name in names:
        if name not in given:
            copy.graph.output.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            )
    return copy
