"""The TensorRT backend by TensorRT itself; `make test-gpu` on a machine that has it installed.

We have not run this: TensorRT's library is not available to us.
"""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from suites.backend import run
from suites.tensorrt import TensorRtContract, X

from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
pytest.importorskip("tensorrt", exc_type=ImportError, reason="TensorRT is not installed here")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class TestTensorRt(TensorRtContract):
    def test_layers_with_q_and_dq_run_in_int8(self, tmp_path: Path) -> None:
        weight = np.random.default_rng(0).integers(-9, 9, (64, 64)).astype(np.int8)
        scales = {"sx": np.float32(0.05), "sw": np.float32(0.02)}
        weights = [numpy_helper.from_array(np.array(s), name) for name, s in scales.items()]
        weights.append(numpy_helper.from_array(weight, "w"))
        weights.append(numpy_helper.from_array(np.array(0, np.int8), "zero"))
        nodes = [
            helper.make_node("QuantizeLinear", ["x0", "sx", "zero"], ["xq"]),
            helper.make_node("DequantizeLinear", ["xq", "sx", "zero"], ["xd"]),
            helper.make_node("DequantizeLinear", ["w", "sw", "zero"], ["wd"]),
            helper.make_node("MatMul", ["xd", "wd"], ["y0"]),
        ]
        x, y = TensorSpec("x0", "FP32", (64,)), TensorSpec("y0", "FP32", (64,))
        config = self.plan(tmp_path, nodes, [x], [y], weights=weights)
        runner = self.load(config)
        rows = np.random.default_rng(1).random((4, 64), np.float32)
        quantised = np.clip(np.round(rows / 0.05), -128, 127) * 0.05
        expected = quantised @ (weight.astype(np.float32) * 0.02)
        np.testing.assert_allclose(run(runner, {"x0": rows}, 4)["y0"], expected, rtol=1e-2)

    def test_fp16_of_the_file_is_fp16_in_the_plan(self, tmp_path: Path) -> None:
        weight = np.random.default_rng(0).random((3, 3)).astype(np.float16)
        nodes = [
            helper.make_node("Cast", ["x0"], ["half"], to=TensorProto.FLOAT16),
            helper.make_node("MatMul", ["half", "w"], ["product"]),
            helper.make_node("Cast", ["product"], ["y0"], to=TensorProto.FLOAT),
        ]
        y = TensorSpec("y0", "FP32", (3,))
        weights = [numpy_helper.from_array(weight, "w")]
        runner = self.load(self.plan(tmp_path, nodes, [X], [y], weights=weights))
        rows = np.random.default_rng(1).random((5, 3), np.float32)
        expected = rows @ weight.astype(np.float32)
        np.testing.assert_allclose(run(runner, {"x0": rows}, 5)["y0"], expected, rtol=1e-2)
        told = runner.built()["datatypes"].casefold()
        assert "half" in told or "fp16" in told
