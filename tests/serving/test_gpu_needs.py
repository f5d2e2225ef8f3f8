"""What an instance will take of a GPU, by whoever knows best."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.repository import layout, versions
from penstock.serving.fleet import CONTEXT_BYTES, WORKSPACE_BYTES, need_of, weight_bytes
from penstock.serving.placement import Need
from penstock.types import TensorSpec

CUDA = "CUDAExecutionProvider"
FIXED_BYTES = CONTEXT_BYTES + WORKSPACE_BYTES


def write_safetensors(path: Path, **tensors: tuple[str, list[int], int]) -> int:
    """By name: datatype, shape, bytes. Returns the bytes of all."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return end


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "module.py").write_text("def factory(): ...\n")
    (tmp_path / "notes.txt").write_bytes(bytes(100_000))
    return ModelConfig(
        name="m",
        version="1",
        backend="pytorch",
        artifact=str(tmp_path / "module.py"),
        inputs=(TensorSpec("x", "FP32", (1,)),),
        outputs=(TensorSpec("y", "FP32", (1,)),),
        max_batch_size=4,
        batching=BatchPolicy(4),
        device="cuda:0",
    )


def test_an_estimate_is_the_weights_and_a_fixed_sum(config: ModelConfig, tmp_path: Path):
    for part, size in (("model-1.safetensors", 1000), ("model-2.safetensors", 500)):
        (tmp_path / part).write_bytes(bytes(size))
    assert need_of(config) == Need(1500 + FIXED_BYTES, "estimated")


def test_a_file_that_holds_its_weights_is_all_that_counts(config: ModelConfig, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "model.pt2").write_bytes(bytes(3000))
    assert weight_bytes(replace(config, artifact=str(tmp_path / "model.pt2"))) == 3000


def test_weights_that_are_halved_count_half(config: ModelConfig, tmp_path: Path):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, w=("F32", [10, 20], 800), b=("F16", [20], 40), ids=("I64", [3], 24))
    half = replace(config, options={"penstock.dtype": "bf16"})
    assert weight_bytes(half) == 400 + 40 + 24
    assert weight_bytes(config) == file.stat().st_size
    full = replace(config, options={"penstock.dtype": "fp32"})
    assert weight_bytes(full) == 800 + 80 + 24


@pytest.mark.parametrize(
    "data", [b"", b"short", (1 << 62).to_bytes(8, "little"), bytes(8), bytes(7) + b"\x01{}"]
)
def test_a_file_that_is_none_counts_by_its_size(config: ModelConfig, tmp_path: Path, data: bytes):
    (tmp_path / "model.safetensors").write_bytes(data)
    half = replace(config, options={"penstock.dtype": "fp16"})
    assert weight_bytes(half) == len(data)


def test_a_link_to_nowhere_counts_nothing(config: ModelConfig, tmp_path: Path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    for dtype in ("", "fp16"):
        assert weight_bytes(replace(config, options={"penstock.dtype": dtype})) == 0


def test_a_model_without_files_needs_the_fixed_sum(config: ModelConfig):
    assert need_of(replace(config, artifact="")) == Need(FIXED_BYTES, "estimated")


def test_what_the_configuration_says_holds(config: ModelConfig, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert need_of(replace(config, gpu_memory_bytes=7)) == Need(7, "configured")


@pytest.mark.parametrize("key", ["gpu_mem_limit", f"provider_options.{CUDA}.gpu_mem_limit"])
def test_a_limit_of_onnx_runtime_is_what_it_takes(config: ModelConfig, key: str):
    options = {"penstock.gpu_engine": "onnxruntime", key: "5000"}
    limited = replace(config, backend="onnxruntime", options=options, device="cuda:0")
    assert need_of(limited) == Need(5000 + CONTEXT_BYTES, "configured")
    # Our own engine has no such limit.
    own = replace(limited, options={**options, "penstock.gpu_engine": "penstock"})
    assert need_of(own).source == "estimated"


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        ({"gpu_memory_bytes": 5000}, Need(5000 + CONTEXT_BYTES, "evidence")),
        ({"gpu_memory_bytes": 0}, Need(FIXED_BYTES, "estimated")),
        ({"gpu_memory_bytes": "5000"}, Need(FIXED_BYTES, "estimated")),
        ({}, Need(FIXED_BYTES, "estimated")),
    ],
)
def test_what_was_measured_for_a_version_comes_before_an_estimate(
    tmp_path: Path, evidence: dict[str, object], expected: Need
):
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "repository").mkdir()
    made = ModelConfig(
        name="m",
        version="1",
        backend="null",
        artifact="",
        inputs=(TensorSpec("x", "FP32", (1,)),),
        outputs=(TensorSpec("y", "FP32", (1,)),),
        max_batch_size=4,
        batching=BatchPolicy(4),
        device="cuda:0",
    )
    versions.commit(tmp_path / "repository", "m", source, made, evidence)
    [config] = layout.read(tmp_path / "repository").configs
    assert config.device == "cuda:0"
    assert need_of(config) == expected
