"""PyTorch models run by layers in this process: precision, batches, and what goes wrong."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from linear_models import SHAPE, TRANSFORMER, write_module
from suites.backend import model_config

from penstock.errors import BackendFailed
from penstock.optimizer import torch_layers
from penstock.types import TensorSpec


def config(tmp_path: Path):
    path = write_module(tmp_path, TRANSFORMER)
    inputs = [TensorSpec("x", "FP32", (-1, SHAPE[1]))]
    return model_config("pytorch", path, inputs, [TensorSpec("y", "FP32", (10,))])


def rows(*lengths: int):
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((n, SHAPE[1])).astype(np.float32)} for n in lengths]


def test_rows_of_equal_shapes_share_a_batch(tmp_path: Path) -> None:
    with torch_layers.opened(config(tmp_path), rows(7, 3, 7), {}) as trial:
        assert [tuple(batch["x"].shape) for batch in trial.batches] == [(2, 7, 64), (1, 3, 64)]
        assert [answer["y"].shape for answer in trial.answers()] == [(2, 10), (1, 10)]


def test_answers_are_of_the_precision_that_is_asked_for(tmp_path: Path) -> None:
    found = {}
    for dtype in ("fp32", "bf16"):
        with torch_layers.opened(config(tmp_path), rows(7), {"penstock.dtype": dtype}) as trial:
            found[dtype] = trial.answers()[0]["y"]
    assert found["bf16"].dtype == np.float32
    assert 0 < np.abs(found["bf16"] - found["fp32"]).max() < 0.05


def test_code_that_fails_is_a_failure_of_the_model(tmp_path: Path) -> None:
    wrong = [{"x": np.zeros((7, 63), np.float32)}]
    with (
        pytest.raises(BackendFailed, match="cannot be run by layers"),
        torch_layers.opened(config(tmp_path), wrong, {}) as trial,
    ):
        trial.answers()
