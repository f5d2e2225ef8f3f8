"""Signature and weight files of an ONNX model, read without loading its weights.

Classifiers of scikit-learn come out of skl2onnx with a ZipMap node, which turns probabilities into
a sequence of maps. No protocol has such a type, so the probabilities are served instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, first_line
from penstock.repository.links import is_shared
from penstock.repository.signature import Signature
from penstock.types import DATATYPES, TensorSpec
from penstock.units import quoted

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

# Datatypes that have another name in v2.
NAMES = {"FLOAT16": "FP16", "FLOAT": "FP32", "DOUBLE": "FP64", "BFLOAT16": "BF16"}
NAMES["STRING"] = "BYTES"
# Classes that a note names.
MAX_CLASSES = 10


def read_signature(path: Path) -> Signature:
    """Read the signature; ConfigError, in one line, if it is not a model with tensors."""
    graph = _read_graph(path)
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    if not inputs or not graph.output:
        raise ConfigError("cannot be read as ONNX: it declares no inputs or no outputs")
    maps = _zip_maps(graph)
    outputs = [value for value in graph.output if value.name not in maps]
    strange = [value.name for value in (*inputs, *outputs) if not _datatype(value)]
    if strange:
        raise ConfigError(f"{quoted(strange)}: not a tensor of a datatype that the protocol has")
    answers = (_probabilities(maps[o.name]) if o.name in maps else _spec(o) for o in graph.output)
    notes = tuple(map(_zip_map_note, maps.values()))
    return Signature(tuple(map(_spec, inputs)), tuple(answers), notes=notes)


def without_zip_maps(path: Path) -> ModelProto:
    """Read a model, with the probabilities in place of each ZipMap output. External weights stay
    where they are."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    outputs = {value.name: value for value in model.graph.output}
    for name, node in _zip_maps(model.graph).items():
        sizes = [size if size > 0 else None for size in _probabilities(node).shape]
        made = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
        outputs[name].CopyFrom(made)
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
    return model


def has_zip_maps(path: Path) -> bool:
    return bool(_zip_maps(_read_graph(path)))


def find_scalars(path: Path) -> frozenset[str]:
    """Return the inputs and outputs that the file declares without dimensions. A tensor without a
    declared shape may have any."""
    graph = _read_graph(path)
    types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
    return frozenset(
        n for n, each in types.items() if each.HasField("shape") and not each.shape.dim
    )


def find_hard_links(path: Path, is_alone: bool = False) -> list[str]:
    """Return the model's weight files that have several hard links, by the names the model uses. A
    hard link can put any file of the file system into the model's folder. The model is parsed only
    if its folder has such a file, or if it is alone: its folder may then be of any size."""
    if not is_alone:
        linked = [file for file in path.parent.rglob("*") if is_shared(file)]
        if not linked or linked == [path]:
            return []
    return [name for name in weight_files(path) if is_shared(path.parent / name)]


def weight_files(path: Path) -> list[str]:
    """Return the files beside the model that hold its weights, by the names the model uses."""
    tensors = _tensors(_read_graph(path))
    entries = [entry for tensor in tensors for entry in tensor.external_data]
    return sorted({entry.value for entry in entries if entry.key == "location"})


def _read_graph(path: Path) -> GraphProto:
    import onnx

    try:
        return onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # onnx and protobuf raise many types for a broken file.
        raise ConfigError(f"cannot be read as ONNX: {first_line(error)}") from None


def sort_model(model: ModelProto) -> None:
    """Put each node behind those whose results it takes, in functions and branches too: some tools
    write them in another order. ConfigError for cycles, and for tensors that nothing makes."""
    for function in model.functions:
        _sort_nodes(function, set(function.input), function.output)
    sort_graph(model.graph)


def sort_graph(graph: GraphProto, outer: Collection[str] = ()) -> None:
    """Do so for one graph; `outer` are the names of the graphs around it."""
    given = {value.name for value in (*graph.input, *graph.initializer)}
    given.update(sparse.values.name for sparse in graph.sparse_initializer)
    _sort_nodes(graph, given.union(outer), [value.name for value in graph.output])


def _sort_nodes(
    body: GraphProto | FunctionProto, given: Collection[str], outputs: Collection[str]
) -> None:
    makers = {name: n for n, node in enumerate(body.node) for name in node.output if name}
    known = {*given, *makers}
    for node in body.node:
        for inner in _inner_graphs(node):
            sort_graph(inner, known)
    needed = [set(_names_read(node)) for node in body.node]
    for node, names in zip(body.node, needed, strict=True):
        if missing := sorted(names - known):
            raise ConfigError(
                f"{node.op_type} (node '{node.name}') takes the tensor '{missing[0]}', which is "
                "not an input, a weight or the result of a node"
            )
    if missing := [name for name in outputs if name not in known]:
        raise ConfigError(f"no node makes the output '{missing[0]}'")
    sources = {
        n: {makers[name] for name in names & makers.keys()} for n, names in enumerate(needed)
    }
    if all(n > max(each, default=-1) for n, each in sources.items()):
        return
    try:
        order = list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        node = body.node[error.args[1][0]]
        raise ConfigError(f"{node.op_type} (node '{node.name}') takes its own result") from None
    nodes = [body.node[n] for n in order]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del body.node[:]
    body.node.extend(copies)


def _inner_graphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _names_read(node: NodeProto) -> Iterator[str]:
    """Yield the names that a node takes from its graph, in its branches too."""
    yield from filter(None, node.input)
    for inner in _inner_graphs(node):
        own = {value.name for value in (*inner.input, *inner.initializer)}
        own.update(name for each in inner.node for name in each.output)
        own.update(sparse.values.name for sparse in inner.sparse_initializer)
        read = {name for each in inner.node for name in _names_read(each)}
        read.update(value.name for value in inner.output)
        yield from sorted(read - own)


def _zip_maps(graph: GraphProto) -> dict[str, NodeProto]:
    """Return the ZipMap nodes that make outputs of the model, by the outputs' names."""
    outputs = {value.name for value in graph.output}
    maps = [node for node in graph.node if node.op_type == "ZipMap"]
    return {node.output[0]: node for node in maps if node.output[0] in outputs}


def _classes(node: NodeProto) -> list[str]:
    for attribute in node.attribute:
        if attribute.name == "classlabels_strings" and attribute.strings:
            return [text.decode(errors="replace") for text in attribute.strings]
        if attribute.name == "classlabels_int64s" and attribute.ints:
            return [str(number) for number in attribute.ints]
    return []


def _probabilities(node: NodeProto) -> TensorSpec:
    return TensorSpec(node.output[0], "FP32", (-1, len(_classes(node)) or -1))


def _zip_map_note(node: NodeProto) -> str:
    classes = _classes(node)
    named = ", ".join(classes[:MAX_CLASSES]) + (", …" if classes[MAX_CLASSES:] else "")
    return (
        f"output '{node.output[0]}' is a sequence of maps (ZipMap); it is served as a tensor of "
        f"probabilities, one column for each class: {named}"
    )


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Yield all weights, including sparse ones, attributes, and those of nested graphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _datatype(value: ValueInfoProto) -> str:
    """Return the v2 name of the datatype; empty if it has none."""
    import onnx

    if value.type.WhichOneof("value") != "tensor_type":
        return ""
    name = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    datatype = NAMES.get(name, name)
    return datatype if datatype in DATATYPES else ""


def _spec(value: ValueInfoProto) -> TensorSpec:
    # Sizes without a value read as 0.
    dims = value.type.tensor_type.shape.dim
    shape = tuple(dim.dim_value if dim.dim_value > 0 else -1 for dim in dims)
    return TensorSpec(value.name, _datatype(value), shape)
