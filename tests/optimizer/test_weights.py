"""How large a model is, as its file says."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.errors import ConfigError
from penstock.optimizer import weights


def write_onnx(path: Path, *arrays: np.ndarray) -> Path:
    tensors = [numpy_helper.from_array(array, f"w{n}") for n, array in enumerate(arrays)]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    onnx.save(helper.make_model(helper.make_graph([], "graph", [value], [value], tensors)), path)
    return path


def test_parameters_of_onnx_are_its_numbers_and_not_its_shapes(tmp_path: Path) -> None:
    half, shape = np.zeros((50, 40), np.float16), np.array([1, 2])
    path = write_onnx(tmp_path / "model.onnx", half, np.zeros(3, np.float32), shape)
    assert weights.describe([path]) == "2.0 k parameters, FP16"


def test_parameters_of_several_safetensors_files_are_added(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    for name in ("a", "b"):
        arrays = {"w": np.zeros((1000, 700), np.float32)}
        numpy.save_file(arrays, tmp_path / f"{name}.safetensors", metadata={"format": "np"})
    assert weights.describe(sorted(tmp_path.iterdir())) == "1.4 M parameters, FP32"


def test_file_that_does_not_tell_has_a_size(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"0" * 2_500_000)
    assert weights.describe([tmp_path / "model.pt2"]) == "2.5 MB"


def test_file_that_only_claims_to_be_safetensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        weights.describe([path])
