"""Fused convolutions on a GPU: the answers of the plain module, in graphs too, and nothing is timed
a second time; `make test-gpu`. Without one: tests/backends/test_torch_fusion.py and
tests/kernels/test_convolution.py, and the kernels in tests/kernels/test_conv.py."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.optimizer import trials
from penstock.optimizer.candidates import Build, Candidate
from penstock.repository import layout, pbtxt
from penstock.serving.proof import prove
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, channels, middle, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, 4 * middle, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * middle)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride > 1 or channels != 4 * middle:
            self.down = nn.Sequential(
                nn.Conv2d(channels, 4 * middle, 1, stride, bias=False), nn.BatchNorm2d(4 * middle)
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.down is None else self.down(x)
        return self.relu(out)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Block(64, 32), Block(128, 32), Block(128, 64, 2))
        self.head = nn.Linear(256, 10)

    def forward(self, image):
        x = self.blocks(self.pool(self.stem(image)))
        return {"scores": self.head(x.mean((2, 3)))}

def factory():
    torch.manual_seed(0)
    return Net()
"""
NUM = 8
FUSED = {"penstock.fuse": "convolutions"}
GRAPHS = {"penstock.cuda_graphs": "on"}
TOLERANCE = {"fp32": 5e-3, "fp16": 1e-2, "bf16": 6e-2}


def rows(count: int, seed: int = 3) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, 3, 64, 64))
    return drawn.astype(np.float32)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "module.py").write_text(MODULE)
    space: dict[str, object] = {}
    exec(MODULE, space)
    module = space["factory"]()
    for each in module.modules():
        if isinstance(each, torch.nn.BatchNorm2d):
            each.running_mean.normal_(0, 0.2)
            each.running_var.uniform_(0.5, 1.5)
            each.weight.data.uniform_(0.5, 1.0)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    return ModelConfig(
        name="net",
        version="1",
        backend="pytorch",
        artifact=str(tmp_path / "module.py"),
        inputs=(TensorSpec("image", "FP32", (3, 64, 64)),),
        outputs=(TensorSpec("scores", "FP32", (10,)),),
        max_batch_size=NUM,
        batching=BatchPolicy(NUM, is_dynamic=True),
        device="cuda",
    )


def answer(runner, values: np.ndarray) -> np.ndarray:
    (outputs,) = runner.start(Batch({"image": values}, len(values))).wait()
    return outputs["scores"].copy()


def wanted(config: ModelConfig, values: np.ndarray) -> np.ndarray:
    return answer(backend("pytorch")(replace(config, device="cpu", options={})), values)


def assert_near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["without graphs", "graphs"])
def test_answers_are_those_of_the_plain_module(config, dtype, graphs):
    options = {**FUSED, **graphs, "penstock.dtype": dtype}
    runner = backend("pytorch")(replace(config, options=options))
    for seed in range(3):
        for count in (1, 3, NUM):
            values = rows(count, seed)
            assert_near(answer(runner, values), wanted(config, values), TOLERANCE[dtype])
    built = runner.built()
    assert built["fusion"].startswith("12 convolutions; batch 1: ")
    assert "; batch 8: " in built["fusion"]
    if graphs:
        assert built["cuda_graphs"] == "3" and "without_cuda_graph" not in built


def test_a_second_start_times_nothing(config):
    options = {**FUSED, **GRAPHS, "penstock.dtype": "fp16"}
    runner = backend("pytorch")(replace(config, options=options))
    values = rows(NUM)
    first = answer(runner, values)
    num_cases = int(runner.built()["fusion_timed"].split()[0])
    assert num_cases > 5
    for name, content in runner.compiled().items():
        (Path(config.artifact).parent / name).write_bytes(content)
    second = backend("pytorch")(replace(config, options=options))
    np.testing.assert_allclose(answer(second, values), first, atol=1e-3)
    assert second.built()["fusion_timed"] == "0 cases"
    assert second.built()["fusion"] == runner.built()["fusion"]


def test_choices_are_kept_with_a_build_and_not_with_the_one_it_was_linked_from(config, tmp_path):
    folder = tmp_path / "built" / "net"
    (folder / "1").mkdir(parents=True)
    for name in ("module.py", "model.safetensors"):
        (folder / "1" / name).write_bytes((Path(config.artifact).parent / name).read_bytes())
    parents = tmp_path / "fusion.json"
    parents.write_bytes(b"of another build")
    (folder / "1" / "fusion.json").hardlink_to(parents)
    options = {**FUSED, "penstock.dtype": "fp16"}
    fused = replace(config, file="module.py", options=options, tolerance=0.05)
    (folder / "config.pbtxt").write_text(pbtxt.write(fused))
    (read,) = layout.read(folder).configs
    build = Build(Candidate(), folder, replace(read, device="cuda"))
    assert trials.keep_compiled(build) > 1000
    assert (folder / "1" / "fusion.json").stat().st_size > 1000
    assert parents.read_bytes() == b"of another build"
    runner = backend("pytorch")(build.config)
    answer(runner, rows(NUM))
    assert runner.built()["fusion_timed"] == "0 cases"


def test_choices_of_another_gpu_are_not_taken(config):
    options = {**FUSED, "penstock.dtype": "fp16"}
    runner = backend("pytorch")(replace(config, options=options))
    answer(runner, rows(1))
    changed = msgspec.json.decode(runner.compiled()["fusion.json"])
    changed["made_for"]["device"] = "another"
    (Path(config.artifact).parent / "fusion.json").write_bytes(msgspec.json.encode(changed))
    second = backend("pytorch")(replace(config, options=options))
    answer(second, rows(1))
    assert second.built()["fusion_timed"] != "0 cases"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_no_kernel_of_ours_is_dropped(config, dtype):
    """Large and small, with sums that programs share and without."""
    pytest.importorskip("triton")
    from penstock.backends import torch_fusion
    from penstock.kernels import convolution

    space: dict[str, object] = {}
    exec(MODULE, space)
    device = torch.device("cuda")
    tuner = convolution.Tuner(convolution.GpuTimer(device), device)
    found = torch_fusion.fuse(space["factory"]().eval(), tuner)
    found.module.to(device, dtype).to(memory_format=torch.channels_last)
    for batch in (1, 128):
        x = torch.randn(batch, 3, 64, 64, device=device, dtype=dtype)
        found.prepare({"image": x}, lambda x=x: found.module(x))
    assert tuner.num_tuned > 10
    assert [problem for problem in tuner.problems.items() if "triton" in problem[0]] == []


def test_rows_are_proven_apart(config):
    options = {**FUSED, **GRAPHS, "penstock.dtype": "fp16"}
    changed = replace(config, options=options, tolerance=0.05)
    assert prove(changed, backend("pytorch")(changed)).unbatched == ""


def test_images_of_any_size_are_not_timed(config):
    free = replace(config, inputs=(TensorSpec("image", "FP32", (3, -1, -1)),))
    runner = backend("pytorch")(replace(free, options={**FUSED, "penstock.dtype": "fp16"}))
    values = rows(2)
    assert_near(answer(runner, values), wanted(config, values), TOLERANCE["fp16"])
    assert runner.built()["fusion"] == "12 convolutions: 10 cudnn, 2 torch"
