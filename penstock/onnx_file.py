"""What an ONNX file says about its tensors, read without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.types import DATATYPES, Signature, TensorSpec

if TYPE_CHECKING:
    from onnx import ValueInfoProto

NAMES = {
    "FLOAT": "FP32",
    "DOUBLE": "FP64",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "STRING": "BYTES",
}


def read_signature(path: Path) -> Signature:
    """ConfigError, in one line, for whatever is not a model with tensors in and out."""
    import onnx

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # onnx and protobuf raise many types for a broken file.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([f"cannot be read as ONNX: {text}"]) from None
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    if not inputs or not graph.output:
        raise ConfigError(["cannot be read as ONNX: it declares no inputs or no outputs"])
    strange = [value.name for value in (*inputs, *graph.output) if not _datatype(value)]
    if strange:
        names = ", ".join(f"'{name}'" for name in strange)
        raise ConfigError([f"{names}: not a tensor of a datatype that the protocol has"])
    return Signature(tuple(map(_spec, inputs)), tuple(map(_spec, graph.output)))


def _datatype(value: ValueInfoProto) -> str:
    """The v2 name of the datatype; empty if it has none."""
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
