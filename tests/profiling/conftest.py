"""A small encoder as a model's folder, a place where peaks are kept, and a made-up profile."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from made_profiles import gpu, peaks, profile
from onnx import helper, numpy_helper

__all__ = ["gpu", "peaks", "profile"]

WIDTH = 64
MakeFolder = Callable[[Path], Path]


@pytest.fixture(scope="session")
def write_encoder(write_onnx) -> MakeFolder:
    """A product with weights, a bias, an Erf and a Softmax, on any rows and lengths."""

    def write(path: Path) -> Path:
        random = np.random.default_rng(5)
        weights = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="/encoder/layer.3/dense/MatMul"),
            helper.make_node("Add", ["a", "b"], ["c"], name="/encoder/layer.3/dense/Add"),
            helper.make_node("Erf", ["c"], ["d"], name="/encoder/layer.3/Erf"),
            helper.make_node("Softmax", ["d"], ["y"], name="/head/Softmax"),
        ]
        return write_onnx(
            path,
            nodes,
            {"x": ("FP32", ("n", "s", WIDTH))},
            {"y": ("FP32", ("n", "s", WIDTH))},
            [
                numpy_helper.from_array(weights, "w"),
                numpy_helper.from_array(weights[0], "b"),
            ],
        )

    return write


@pytest.fixture
def encoder(tmp_path, write_encoder) -> Path:
    write_encoder(tmp_path / "models" / "encoder" / "1" / "model.onnx")
    return tmp_path / "models" / "encoder"


@pytest.fixture(scope="session")
def peaks_cache(tmp_path_factory) -> Path:
    """Measured once for all tests."""
    return tmp_path_factory.mktemp("cache")
