"""Facts of files, read back without loading the model."""

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from suites.onnx_models import build_of, cnn, opened, transformer

from penstock.errors import ConfigError
from penstock.optimizer.facts import describe_weights, file_facts, optimised_operators

PYTORCH = """
backend: "pytorch" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 3 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""


def test_operators_and_weights_are_counted(tmp_path: Path) -> None:
    facts = file_facts(build_of(cnn(), tmp_path / "m"))
    assert facts.backend == "onnxruntime"
    assert facts.operators["Conv"] == 2 and facts.operators["Gemm"] == 1
    num_parameters = 16 * 3 * 9 + 32 * 16 * 9 + 32 * 16
    assert facts.num_parameters == num_parameters
    assert facts.weight_bytes == {"FP32": 4 * num_parameters}
    assert facts.file_bytes == (tmp_path / "m/1/model.onnx").stat().st_size
    assert facts.quantised == {} and facts.quantisable == {"Conv": 2, "Gemm": 1}
    assert facts.operators["Conv"] > 0 and not facts.is_transformer


def test_products_of_two_activations_are_not_quantisable(tmp_path: Path) -> None:
    facts = file_facts(build_of(transformer(), tmp_path / "m"))
    assert facts.operators["MatMul"] == 2 * 8
    assert facts.quantisable == {"MatMul": 2 * 6}
    assert facts.is_transformer


def test_a_layer_that_no_output_needs_is_not_quantisable(tmp_path: Path) -> None:
    model = cnn()
    (gemm,) = (node for node in model.graph.node if node.op_type == "Gemm")
    unused = helper.make_node("Gemm", gemm.input, ["unused"], name="unused")
    unused.attribute.extend(gemm.attribute)
    model.graph.node.append(unused)
    facts = file_facts(build_of(model, tmp_path / "m"))
    assert facts.operators["Gemm"] == 2
    assert facts.quantisable == {"Conv": 2, "Gemm": 1}


def test_a_product_is_quantised_only_if_both_sides_are(tmp_path: Path) -> None:
    """Weights alone in INT8 are computed in float."""
    for name, source in (("both", "dequantised"), ("weights", "x")):
        scale = numpy_helper.from_array(np.array(0.1, np.float32), "scale")
        zero = numpy_helper.from_array(np.array(0, np.int8), "zero")
        weight = numpy_helper.from_array(np.ones((16, 16), np.int8), "w")
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["quantised"]),
            helper.make_node("DequantizeLinear", ["quantised", "scale", "zero"], ["dequantised"]),
            helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["weight"]),
            helper.make_node("MatMul", [source, "weight"], ["y"]),
        ]
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes,
            "g",
            [value("x", TensorProto.FLOAT, ["b", 16])],
            [value("y", TensorProto.FLOAT, ["b", 16])],
            [scale, zero, weight],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        facts = file_facts(build_of(model, tmp_path / name))
        assert facts.quantised == ({"MatMul": 1} if name == "both" else {})
        assert facts.weight_bytes["INT8"] == 257


def test_what_will_run_is_what_the_runtime_makes_of_it(tmp_path: Path) -> None:
    build = build_of(cnn(), tmp_path / "m")
    assert optimised_operators(build.artifact, {"graph_level": "disabled"})["Relu"] == 2
    assert "Relu" not in optimised_operators(build.artifact, {})


def test_weights_of_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "module.py").write_text("import torch\n\ndef factory(): ...\n")
    (folder / "config.pbtxt").write_text(PYTORCH)
    arrays = {"weight": np.zeros((2, 3), np.float32), "half": np.zeros(4, np.float16)}
    save_file(arrays, folder / "1" / "model.safetensors")
    facts = file_facts(opened(folder))
    assert facts.num_parameters == 10
    assert facts.weight_bytes == {"FP32": 24, "FP16": 8}
    (folder / "1" / "model.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(ConfigError, match="safetensors"):
        file_facts(opened(folder))


def test_weights_of_an_exported_program(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    rows = torch.export.Dim("rows", max=8)
    program = torch.export.export(
        torch.nn.Linear(3, 2), (torch.zeros(2, 3),), dynamic_shapes=({0: rows},)
    )
    torch.export.save(program, str(folder / "1" / "model.pt2"))
    facts = file_facts(opened(folder))
    assert facts.backend == "pytorch"
    assert facts.num_parameters == 8 and facts.weight_bytes == {"FP32": 32}


def test_weights_of_openvino(tmp_path: Path) -> None:
    build = build_of(cnn(), tmp_path / "source")
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    model = ov.convert_model(str(build.artifact))
    ov.save_model(model, str(folder / "1" / "model.xml"), compress_to_fp16=True)
    facts = file_facts(opened(folder))
    assert facts.backend == "openvino"
    assert facts.operators["Convolution"] == 2
    assert facts.weight_bytes["FP16"] == 2 * (16 * 3 * 9 + 32 * 16 * 9 + 32 * 16)


def test_parameters_are_numbers_and_not_shapes(tmp_path: Path) -> None:
    half, shape = np.zeros((50, 40), np.float16), np.array([1, 2])
    arrays = (half, np.zeros(3, np.float32), shape)
    tensors = [numpy_helper.from_array(array, f"w{n}") for n, array in enumerate(arrays)]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    model = helper.make_model(helper.make_graph([], "graph", [value], [value], tensors))
    assert describe_weights(build_of(model, tmp_path / "m")) == "2.0 k parameters, FP16"


def test_parameters_of_several_safetensors_files_are_added(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "module.py").write_text("import torch\n\ndef factory(): ...\n")
    (folder / "config.pbtxt").write_text(PYTORCH)
    assert describe_weights(opened(folder)) == "0.0 MB"
    for name in ("a", "b"):
        arrays = {"w": np.zeros((1000, 700), np.float32)}
        save_file(arrays, folder / "1" / f"{name}.safetensors", metadata={"format": "np"})
    assert describe_weights(opened(folder)) == "1.4 M parameters, FP32"
