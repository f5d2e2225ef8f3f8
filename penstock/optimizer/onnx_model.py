"""ONNX graph utilities of the passes: read, inspect, prepare for quantisation, run, write.

Knows nothing of candidates; `facts`, `calibration` and the passes call it. onnx and onnxruntime are
imported where they are used.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.errors import BackendFailed, ConfigError, first_line
from penstock.repository.onnx_file import sort_model
from penstock.types import Array

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
    from onnxruntime import InferenceSession

T = TypeVar("T")

# Protobuf messages are limited to 2 GiB; larger weights go into a separate file.
MAX_INLINE_BYTES = 1_500_000_000
EXTERNAL_SUFFIX = ".data"
# Operators with weights that are worth quantising.
WEIGHTED = ("Conv", "Gemm", "MatMul")
# Matmuls with fewer rows or columns of weights lose more by converting datatypes than they gain.
MIN_SIDE = 16
# Datatypes that do not count as weights; 64-bit integers are shapes and indices.
NOT_WEIGHTS = ("INT64", "BOOL", "STRING", "UINT64")
NO_ENTRIES: Mapping[str, str] = {}


def read(path: Path, *, weights: bool = True) -> ModelProto:
    """Return the ModelProto, its nodes in order; BackendFailed says why it cannot be read."""
    import onnx

    try:
        model = onnx.load(str(path), load_external_data=weights)
        sort_model(model)
    except ConfigError as error:
        raise BackendFailed(f"{path.name}: {error.problems[0]}") from None
    except Exception as error:  # onnx and protobuf raise many types for a broken file.
        raise BackendFailed(f"{path.name}: cannot be read as ONNX: {first_line(error)}") from None
    return model


def write(model: ModelProto, path: Path) -> None:
    import onnx

    size = sum(weight_bytes(tensor) for tensor in model.graph.initializer)
    if size > MAX_INLINE_BYTES:
        location = path.name + EXTERNAL_SUFFIX
        onnx.save_model(model, str(path), save_as_external_data=True, location=location)
    else:
        onnx.save_model(model, str(path))


def nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield all nodes, including those of branches and loop bodies."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes(inner)


def opset(model: ModelProto) -> int:
    return int(max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx")))


def true_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """Return the inputs that callers provide; old files list weights among the inputs."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def has_weights_as_inputs(graph: GraphProto) -> bool:
    return len(true_inputs(graph)) < len(graph.input)


def constants(graph: GraphProto) -> dict[str, TensorProto]:
    """Return weights by name: initialisers, and values of Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for each in node.attribute if node.op_type == "Constant" else ():
            if each.name == "value":
                found[node.output[0]] = each.t
    return found


def add_constant(graph: GraphProto, name: str, array: Array) -> str:
    import onnx

    graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return name


def datatype(tensor: TensorProto) -> str:
    """Return the v2 name of a weight's datatype, or ONNX's own if there is no such name."""
    import onnx

    from penstock.repository.onnx_file import NAMES

    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    return str(NAMES.get(name, name))


def num_values(tensor: TensorProto) -> int:
    return math.prod(tensor.dims)


def weight_bytes(tensor: TensorProto) -> int:
    """Return the size of a weight, by the bits in the name of its datatype: FP32, FLOAT8E4M3FN."""
    bits = "".join(filter(str.isdigit, datatype(tensor).partition("E")[0]))
    return num_values(tensor) * int(bits or 8) // 8


def attribute(node: NodeProto, name: str, default: T) -> T:
    import onnx

    for each in node.attribute:
        if each.name == name:
            found: T = onnx.helper.get_attribute_value(each)
            return found
    return default


def product_sides(node: NodeProto, dims: Sequence[int]) -> tuple[int, int]:
    """Return K and N of the node's matmul: the length of a dot product, the number of columns."""
    if node.op_type == "Conv":
        return int(np.prod(dims[1:], dtype=np.int64)), dims[0]
    if node.op_type == "Gemm" and attribute(node, "transB", 0):
        return dims[1], dims[0]
    return dims[-2], dims[-1]


def can_gain(node: NodeProto, weights: Mapping[str, TensorProto]) -> bool:
    """Return whether INT8 can make this node faster: its weights are constant and large enough, or
    it is a depthwise convolution, around which converting datatypes would cost more."""
    if node.op_type not in WEIGHTED or len(node.input) < 2:
        return False
    weight = weights.get(node.input[1])
    if weight is None or len(weight.dims) < 2:
        return False
    if node.op_type == "Conv" and attribute(node, "group", 1) > 1:
        return True
    return min(product_sides(node, weight.dims)) >= MIN_SIDE


def session(
    model: ModelProto | Path, entries: Mapping[str, str] = NO_ENTRIES, **options: object
) -> InferenceSession:
    """Load a model in ONNX Runtime; BackendFailed says why not. `options` are attributes of
    SessionOptions, `entries` its configuration entries."""
    import onnxruntime as ort

    chosen = ort.SessionOptions()
    for name, option in {"log_severity_level": 4, **options}.items():
        setattr(chosen, name, option)
    for key, text in entries.items():
        chosen.add_session_config_entry(key, text)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    try:
        return ort.InferenceSession(source, chosen, providers=["CPUExecutionProvider"])
    except Exception as error:  # The library raises its own types, some of them bare.
        raise BackendFailed(f"ONNX Runtime cannot load it: {first_line(error)}") from None


def run(loaded: InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array]:
    names = [output.name for output in loaded.get_outputs()]
    try:
        return dict(zip(names, loaded.run(names, dict(feeds)), strict=True))
    except Exception as error:  # As above.
        raise BackendFailed(f"ONNX Runtime cannot run it: {first_line(error)}") from None


def is_close(answer: Array, wanted: Array, tolerance: float) -> bool:
    """Return whether two answers agree; floats within a share of the largest value."""
    if answer.shape != wanted.shape or wanted.dtype.kind != "f":
        return bool(np.array_equal(answer, wanted))
    scale = float(np.abs(wanted).max(initial=0.0)) or 1.0
    return bool(np.allclose(answer, wanted, rtol=0, atol=tolerance * scale))


def made_up(graph: GraphProto, num_rows: int, size: int, seed: int = 0) -> dict[str, Array]:
    """Draw random inputs; variable dimensions: `num_rows` for the first, `size` for others."""
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


def optimised(
    model: ModelProto | Path, level: str = "basic", entries: Mapping[str, str] = NO_ENTRIES
) -> ModelProto:
    """Return the model after ONNX Runtime's optimisation; "basic" gives plain ONNX."""
    from penstock.backends.onnxruntime import GRAPH_LEVELS

    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        target = Path(folder) / "optimised.onnx"
        options = {"graph_optimization_level": GRAPH_LEVELS[level]}
        session(model, entries, optimized_model_filepath=str(target), **options)
        return read(target)


def prepared(model: ModelProto) -> ModelProto:
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


def _tell_types(graph: GraphProto) -> None:
    """Declare types around matmuls: ONNX infers none after operators of other domains."""
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


def remove_dead(graph: GraphProto) -> None:
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
            node = producers[name]
            inner = [graph for each in node.attribute for graph in (each.g, *each.graphs)]
            users = [node, *(each for graph in inner for each in nodes(graph))]
            waiting += [name for user in users for name in user.input]
    for index in reversed(range(len(graph.node))):
        if not needed.intersection(graph.node[index].output):
            del graph.node[index]
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in needed:
            del graph.initializer[index]


def float_tensors(graph: GraphProto, op_types: Sequence[str]) -> list[str]:
    """Return FP32 activations around nodes of these types, in the order of the graph."""
    import onnx

    known = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    weights = constants(graph)
    around = [node for node in graph.node if node.op_type in op_types]
    names = dict.fromkeys(name for node in around for name in (*node.input, *node.output) if name)

    def is_float(name: str) -> bool:
        elem_type = known[name].type.tensor_type.elem_type if name in known else 0
        return elem_type in (0, onnx.TensorProto.FLOAT)

    return [name for name in names if name not in weights and is_float(name)]


def with_outputs(model: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return a copy that also outputs these tensors."""
    import onnx

    wider = copy.deepcopy(model)
    given = {value.name for value in wider.graph.output}
    for name in (name for name in names if name not in given):
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        wider.graph.output.append(value)
    return wider
