"""Files by compute capability, passive groups, shape tensors and runtimes, as Triton has them."""

from pathlib import Path

import pytest

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import pbtxt
from penstock.system import devices
from penstock.system.devices import Gpu

TENSORS = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
FILES = 'cc_model_filenames { key: "8.0" value: "a100.onnx" } '
FILES += 'cc_model_filenames { key: "9.0" value: "h100.onnx" }'
ON_GPUS = "instance_group { kind: KIND_GPU }"


@pytest.fixture
def set_gpus(monkeypatch):
    def put(*capabilities: str) -> None:
        gpus = tuple(
            Gpu(index, f"GPU-{index}", "Made Up", 1 << 34, 1 << 34, compute_capability=each)
            for index, each in enumerate(capabilities)
        )
        monkeypatch.setattr(devices, "read_gpus", lambda: gpus)

    return put


def resolve(text: str, root: Path) -> ModelConfig:
    folder = root / "model" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.onnx", "a100.onnx", "h100.onnx"):
        (folder / name).write_text("")
    return pbtxt.resolve(pbtxt.parse(text), "model", folder)


def problems_of(text: str, root: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(text, root)
    return caught.value.problems


@pytest.mark.parametrize(
    ("capabilities", "group", "file"),
    [
        (["9.0"], ON_GPUS, "h100.onnx"),
        (["8.0", "8.0"], ON_GPUS, "a100.onnx"),
        (["8.0", "9.0"], "instance_group { gpus: 1 }", "h100.onnx"),
        (["7.5"], ON_GPUS, "model.onnx"),
        ([""], ON_GPUS, "model.onnx"),
        ([], ON_GPUS, "model.onnx"),
        (["9.0"], "instance_group { kind: KIND_CPU }", "model.onnx"),
    ],
)
def test_compute_capability_chooses_the_file(tmp_path, set_gpus, capabilities, group, file):
    set_gpus(*capabilities)
    config = resolve(f'platform: "onnxruntime_onnx" {TENSORS} {FILES} {group}', tmp_path)
    assert Path(config.artifact).name == file
    assert config.folder == tmp_path / "model" / "1"
    shown = pbtxt.to_served(config)
    assert dict(shown.cc_model_filenames) == {"8.0": "a100.onnx", "9.0": "h100.onnx"}
    assert shown.default_model_filename == ""
    assert "cc_model_filenames" not in pbtxt.write(config)


def test_gpus_that_need_different_files_are_refused(tmp_path, set_gpus):
    set_gpus("8.0", "9.0")
    [problem] = problems_of(f'platform: "onnxruntime_onnx" {TENSORS} {FILES} {ON_GPUS}', tmp_path)
    assert problem.startswith("cc_model_filenames: the GPUs differ (cuda:0 8.0, cuda:1 9.0)")


def test_file_for_a_gpu_stays_in_the_version_folder(tmp_path, set_gpus):
    set_gpus("9.0")
    outside = 'cc_model_filenames { key: "9.0" value: "../../other.onnx" }'
    [problem] = problems_of(f'platform: "onnxruntime_onnx" {TENSORS} {outside} {ON_GPUS}', tmp_path)
    assert "'../../other.onnx' leaves the version folder" in problem


def test_passive_groups_have_no_instances(tmp_path):
    base = 'backend: "null" ' + TENSORS
    groups = "instance_group { count: 2 kind: KIND_CPU } instance_group { count: 3 passive: true }"
    config = resolve(base + groups, tmp_path)
    assert config.devices == ("cpu", "cpu")
    assert "instance_group[1] is passive: it has no instances here" in config.notes
    assert [group.passive for group in pbtxt.to_served(config).instance_group] == [False, True]
    [problem] = problems_of(base + "instance_group { passive: true }", tmp_path)
    assert problem == ("instance_group: every group is passive, so no instance would take requests")


def test_secondary_devices_are_refused(tmp_path):
    group = "instance_group { secondary_devices { kind: KIND_NVDLA device_id: 1 } }"
    [problem] = problems_of(f'backend: "null" {TENSORS} {group}', tmp_path)
    assert problem.startswith("instance_group[0].secondary_devices: KIND_NVDLA is not supported")


@pytest.mark.parametrize(
    ("backend", "runtime", "is_fine"),
    [
        ("onnxruntime", "libtriton_onnxruntime.so", True),
        ("onnxruntime", "", True),
        ("onnxruntime", "model.py", False),
        ("onnxruntime", "libtriton_other.so", False),
    ],
)
def test_only_the_usual_library_is_a_runtime(tmp_path, backend, runtime, is_fine):
    text = f'backend: "{backend}" runtime: "{runtime}" {TENSORS}'
    if is_fine:
        assert resolve(text, tmp_path).backend == backend
        return
    [problem] = problems_of(text, tmp_path)
    assert problem.startswith(f"runtime: '{runtime}' runs the model in another way")


@pytest.mark.parametrize("kind", ["input", "output"])
def test_shape_tensors_are_served_without_batches_only(tmp_path, kind):
    shape = f'{kind} {{ name: "s" data_type: TYPE_INT32 dims: 2 is_shape_tensor: true }}'
    base = 'backend: "null" ' + TENSORS + shape
    [problem] = problems_of(base, tmp_path)
    assert problem.startswith(f"{kind}[1].is_shape_tensor: a shape tensor has no batch dimension")
    assert problem.endswith("expected max_batch_size 0, not 8")
    config = resolve(base.replace("max_batch_size: 8", ""), tmp_path)
    assert config.warnings == ()


def test_host_policies_are_of_devices(tmp_path):
    base = 'backend: "null" ' + TENSORS
    groups = (
        'instance_group { kind: KIND_CPU host_policy: "near" } '
        'instance_group { gpus: [ 0, 1 ] host_policy: "far" } instance_group { gpus: 2 }'
    )
    config = resolve(base + groups, tmp_path)
    assert config.host_policies == {"cpu": "near", "cuda:0": "far", "cuda:1": "far"}
    [problem] = problems_of(base + groups + " instance_group { kind: KIND_CPU }", tmp_path)
    assert problem == (
        "instance_group.host_policy: 'near' and '' on cpu; expected one host_policy for each device"
    )
