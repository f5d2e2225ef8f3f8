"""Repeated blocks are found and compiled, and the answers stay."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
regions = pytest.importorskip("penstock.backends.torch_regions")
nn = torch.nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x):
        return x + self.parts(x)


def test_the_largest_blocks_that_are_alike_are_found():
    blocks = [Block(4), Block(4), Block(4)]
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*blocks), Block(4), nn.Linear(4, 4))
    # Not their parts, nor plain layers.
    assert regions.repeated_blocks(network) == [*blocks, network[2]]


def test_blocks_of_other_sizes_are_another_kind():
    network = nn.Sequential(Block(4), Block(8), nn.Sequential(Block(6), Block(6)))
    assert regions.repeated_blocks(network) == list(network[2])


def test_stages_that_are_alike_are_compiled_whole():
    stages = [nn.Sequential(Block(4), Block(4)) for _ in range(2)]
    assert regions.repeated_blocks(nn.Sequential(*stages)) == stages


def test_without_any_it_says_what_to_do():
    with pytest.raises(ConfigError, match="no repeated blocks.*default compiles all of it"):
        regions.compile_regions(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lambda each: None)


MODULE = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return x + self.act(self.inner(x))

def factory():
    return nn.Sequential(Block(), Block(), Block())

def single():
    return nn.Linear(8, 8)
"""


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "module.py").write_text(MODULE)
    space: dict[str, object] = {}
    exec(MODULE, space)
    save_file(space["factory"]().state_dict(), tmp_path / "model.safetensors")
    return ModelConfig(
        name="net",
        version="1",
        backend="pytorch",
        artifact=str(tmp_path / "module.py"),
        inputs=(TensorSpec("x", "FP32", (8,)),),
        outputs=(TensorSpec("y", "FP32", (8,)),),
        max_batch_size=4,
        batching=BatchPolicy(4, is_dynamic=False),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_the_backend_compiles_one_kind_once(config: ModelConfig) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)

    def answer(runner):
        (outputs,) = runner.start(Batch({"x": rows}, 3)).wait()
        return outputs["y"]

    plain = backend("pytorch")(config)
    compiled = backend("pytorch")(replace(config, options={"penstock.compile": "regional"}))
    np.testing.assert_allclose(answer(compiled), answer(plain), atol=1e-5)
    built = compiled.built()
    assert built["compile"] == "regional" and int(built["compiled_graphs"]) == 1


def test_a_model_of_one_layer_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "model.safetensors")
    options = {"penstock.compile": "regional", "penstock.factory": "single"}
    with pytest.raises(ConfigError, match="penstock.compile: regional: the module has no repeated"):
        backend("pytorch")(replace(config, options=options))
