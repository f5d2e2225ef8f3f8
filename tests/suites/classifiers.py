"""ONNX classifiers as skl2onnx writes them: their probabilities end in a ZipMap."""

from pathlib import Path

import onnx
from onnx import helper


def write_classifier(path: Path, **classes: list[str] | list[int]) -> Path:
    """Write a softmax over as many columns as `classlabels_strings` or `classlabels_int64s` name,
    with the outputs `label` and `probability`."""
    value, types = helper.make_tensor_value_info, onnx.TensorProto
    maps = helper.make_map_type_proto(
        types.STRING if "classlabels_strings" in classes else types.INT64,
        helper.make_tensor_type_proto(types.FLOAT, []),
    )
    (names,) = classes.values()
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"], axis=1),
        helper.make_node("ArgMax", ["p"], ["label"], axis=1, keepdims=0),
        helper.make_node("ZipMap", ["p"], ["probability"], domain="ai.onnx.ml", **classes),
    ]
    outputs = [
        value("label", types.INT64, [None]),
        helper.make_value_info("probability", helper.make_sequence_type_proto(maps)),
    ]
    inputs = [value("x", types.FLOAT, [None, len(names)])]
    graph = helper.make_graph(nodes, "made_by_a_test", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    model = helper.make_model(graph, ir_version=9, opset_imports=opsets)
    path.write_bytes(model.SerializeToString())
    return path
