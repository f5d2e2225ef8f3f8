"""Signature and weight files of an ONNX model, read without loading its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.links import is_shared
from penstock.types import DATATYPES, Signature, TensorSpec

if TYPE_CHECKING:
    from onnx import GraphProto, TensorProto, ValueInfoProto

NAMES = {
    "FLOAT": "FP32",
    "DOUBLE": "FP64",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "STRING": "BYTES",
}


def read_signature(path: Path) -> Signature:
    """Read the signature; ConfigError, in one line, if it is not a model with tensors."""
    graph = _read_graph(path)
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    if not inputs or not graph.output:
        raise ConfigError(["cannot be read as ONNX: it declares no inputs or no outputs"])
    strange = [value.name for value in (*inputs, *graph.output) if not _datatype(value)]
    if strange:
        names = ", ".join(f"'{name}'" for name in strange)
        raise ConfigError([f"{names}: not a tensor of a datatype that the protocol has"])
    return Signature(tuple(map(_spec, inputs)), tuple(map(_spec, graph.output)))


def find_hard_links(path: Path, is_alone: bool = False) -> list[str]:
    """Return the model's weight files that have several hard links, by the names the model uses. A
    hard link can put any file of the file system into the model's folder. The model is parsed only
    if its folder has such a file, or if it is alone: its folder may then be of any size."""
    if not is_alone:
        linked = [file for file in path.parent.rglob("*") if is_shared(file)]
        if not linked or linked == [path]:
            return []
    return sorted(
        {
            entry.value
            for tensor in _tensors(_read_graph(path))
            for entry in tensor.external_data
            if entry.key == "location" and is_shared(path.parent / entry.value)
        }
    )


def _read_graph(path: Path) -> GraphProto:
    import onnx

    try:
        return onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # onnx and protobuf raise many types for a broken file.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([f"cannot be read as ONNX: {text}"]) from None


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
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else -1
        for dim in value.type.tensor_type.shape.dim
    )
    return TensorSpec(value.name, _datatype(value), shape)
