"""Triton's execution accelerators: the options they become, and what is refused."""

from pathlib import Path

import pytest

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import accelerators, pbtxt

BASE = """
platform: "onnxruntime_onnx"
max_batch_size: 16
input [{ name: "x", data_type: TYPE_FP32, dims: [4] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [4] }]
"""
ON_GPUS = "instance_group [{ count: 2, kind: KIND_GPU }]"
# As in the README of Triton's ONNX Runtime backend.
TENSORRT = """
optimization { execution_accelerators {
  gpu_execution_accelerator : [ {
    name : "tensorrt"
    parameters { key: "precision_mode" value: "FP16" }
    parameters { key: "max_workspace_size_bytes" value: "1073741824" }
    parameters { key: "trt_engine_cache_enable" value: "true" }
    parameters { key: "trt_engine_cache_path" value: "/caches/net" }
  } ]
}}
"""
CUDA = """
optimization { execution_accelerators {
  gpu_execution_accelerator : [ {
    name : "cuda"
    parameters { key: "cudnn_conv_use_max_workspace" value: "0" }
    parameters { key: "use_ep_level_unified_stream" value: "1" }
  } ]
}}
"""


def accelerated(content: str) -> str:
    return f"optimization {{ execution_accelerators {{ {content} }} }}"


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def resolve(text: str, folder: Path) -> ModelConfig:
    return pbtxt.resolve(pbtxt.parse(text), "m", folder / "1", folder / "1" / "model.onnx")


def problems(text: str, folder: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(text, folder)
    return caught.value.problems


def test_tensorrt_becomes_options_of_its_provider_with_cuda_behind_it(tmp_path: Path) -> None:
    config = resolve(BASE + ON_GPUS + TENSORRT, tmp_path)
    start = "provider_options.TensorrtExecutionProvider"
    assert config.options == {
        "penstock.gpu_engine": "onnxruntime",
        "providers": "TensorrtExecutionProvider,CUDAExecutionProvider",
        f"{start}.trt_fp16_enable": "1",
        f"{start}.trt_max_workspace_size": "1073741824",
        f"{start}.trt_engine_cache_enable": "1",
        f"{start}.trt_engine_cache_path": "/caches/net",
    }
    assert (config.engine, config.device, config.warnings) == ("onnxruntime", "cuda", ())


def test_without_effect_the_field_of_the_file_is_named(tmp_path: Path) -> None:
    own_engine = parameter("penstock.gpu_engine", "penstock")
    config = resolve(BASE + ON_GPUS + CUDA + own_engine, tmp_path)
    why = "has no effect; parameters.penstock.gpu_engine decides"
    assert config.warnings == (f"optimization.execution_accelerators: {why}",)
    given = parameter("providers", "CUDAExecutionProvider")
    assert resolve(BASE + ON_GPUS + given + own_engine, tmp_path).warnings == (
        f"parameters.providers: {why}",
    )


def test_parameters_of_cuda_are_those_of_the_provider(tmp_path: Path) -> None:
    config = resolve(BASE + ON_GPUS + CUDA, tmp_path)
    assert config.options == {
        "penstock.gpu_engine": "onnxruntime",
        "providers": "CUDAExecutionProvider",
        "provider_options.CUDAExecutionProvider.cudnn_conv_use_max_workspace": "0",
        "provider_options.CUDAExecutionProvider.use_ep_level_unified_stream": "1",
    }


@pytest.mark.parametrize(
    ("mode", "options"),
    [("FP32", {}), ("INT8", {"trt_int8_enable": "1"}), ("fp16", {"trt_fp16_enable": "1"})],
)
def test_precision_of_tensorrt(mode: str, options: dict[str, str]) -> None:
    message = pbtxt.parse(BASE + TENSORRT.replace('"FP16"', f'"{mode}"'))
    found = accelerators.read(message, "onnxruntime", lambda path, text: pytest.fail(text))
    enabled = {key.rpartition(".")[2]: text for key, text in found.items() if "8_en" in key}
    enabled |= {key.rpartition(".")[2]: text for key, text in found.items() if "16_en" in key}
    assert enabled == options


def test_parameters_override_accelerators(tmp_path: Path) -> None:
    key = "provider_options.TensorrtExecutionProvider.trt_max_workspace_size"
    config = resolve(BASE + ON_GPUS + TENSORRT + parameter(key, "7"), tmp_path)
    assert config.options[key] == "7"
    own = resolve(
        BASE + ON_GPUS + TENSORRT + parameter("penstock.gpu_engine", "penstock"), tmp_path
    )
    assert own.engine == "pytorch"
    assert any(
        warning.startswith(
            "optimization.execution_accelerators: has no effect; parameters.penstock"
        )
        for warning in own.warnings
    )


def test_written_and_read_again_it_is_the_same(tmp_path: Path) -> None:
    beside = "optimization { input_pinned_memory { enable: true }"
    text = BASE + ON_GPUS + TENSORRT.replace("optimization {", beside)
    config = resolve(text, tmp_path)
    # Among the parameters, so that an edit of those is not undone.
    edited = pbtxt.write(config, pbtxt.parse(text))
    assert "accelerator" not in edited and "input_pinned_memory" in edited
    assert resolve(edited, tmp_path).options == config.options
    assert resolve(pbtxt.describe(config), tmp_path).options == config.options
    shown = pbtxt.to_json(config)["optimization"]
    assert "gpu_execution_accelerator" in str(shown)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            'gpu_execution_accelerator { name: "gpu_io" }',
            ".gpu_execution_accelerator[0].name: 'gpu_io' is not one of tensorrt, cuda",
        ),
        (
            'gpu_execution_accelerator [{ name: "cuda" }, { name: "cuda" }]',
            ".gpu_execution_accelerator[1].name: 'cuda' is given twice",
        ),
        (
            'gpu_execution_accelerator { name: "tensorrt" '
            'parameters { key: "precision_mode" value: "FP8" } }',
            ".gpu_execution_accelerator[0].parameters.precision_mode: 'FP8' is not one of FP32, "
            "FP16, INT8",
        ),
        (
            'gpu_execution_accelerator { name: "tensorrt" '
            'parameters { key: "max_cached_engines" value: "1" } }',
            ".gpu_execution_accelerator[0].parameters.max_cached_engines: unknown; expected "
            "precision_mode",
        ),
        (
            'cpu_execution_accelerator { name: "openvino" }',
            ".cpu_execution_accelerator: 'openvino' is not supported; backend: \"openvino\" runs",
        ),
    ],
)
def test_unknown_accelerators_are_refused(content: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems(BASE + ON_GPUS + accelerated(content), tmp_path)
    assert found.startswith(f"optimization.execution_accelerators{problem}")


def test_other_backends_have_none(tmp_path: Path) -> None:
    text = BASE.replace('platform: "onnxruntime_onnx"', 'backend: "pytorch"') + CUDA
    assert any("only for ONNX files" in each for each in problems(text, tmp_path))


def test_empty_messages_ask_for_nothing(tmp_path: Path) -> None:
    assert resolve(BASE + ON_GPUS + accelerated(""), tmp_path).engine == "pytorch"


def test_the_engine_is_one_of_two(tmp_path: Path) -> None:
    chosen = resolve(BASE + ON_GPUS + parameter("penstock.gpu_engine", "onnxruntime"), tmp_path)
    assert chosen.engine == "onnxruntime"
    own = resolve(BASE + ON_GPUS + parameter("penstock.gpu_engine", "penstock"), tmp_path)
    assert own.engine == "pytorch"
    (problem,) = problems(BASE + parameter("penstock.gpu_engine", "tensorrt"), tmp_path)
    assert problem == (
        "parameters.penstock.gpu_engine: 'tensorrt' is not one of penstock, onnxruntime"
    )


def test_options_of_the_own_engine_have_no_effect(tmp_path: Path) -> None:
    text = BASE + ON_GPUS + parameter("penstock.gpu_engine", "onnxruntime")
    text += parameter("penstock.fuse", "convolutions") + parameter("penstock.cuda_graphs", "on")
    (warning,) = resolve(text, tmp_path).warnings
    assert warning.startswith("parameters.penstock.fuse: has no effect; ONNX Runtime runs")


def test_without_a_kind_a_chosen_gpu_provider_is_not_replaced_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.system.devices.read_gpus", lambda: (object(),))
    pytest.importorskip("torch")
    chosen = resolve(BASE + parameter("providers", "CUDAExecutionProvider"), tmp_path)
    assert (chosen.device, chosen.is_gpu_optional) == ("cuda", False)
    on_cpu = resolve(BASE + parameter("providers", "CPUExecutionProvider"), tmp_path)
    assert (on_cpu.device, on_cpu.is_gpu_optional) == ("cpu", False)
    assert resolve(BASE, tmp_path).is_gpu_optional


@pytest.mark.parametrize("group", ["", "instance_group [{ kind: KIND_CPU }]"])
@pytest.mark.parametrize("accelerator", [TENSORRT, CUDA])
def test_without_a_gpu_they_are_a_warning_of_their_own(
    tmp_path: Path, group: str, accelerator: str
) -> None:
    config = resolve(BASE + group + accelerator, tmp_path)
    assert (config.options, config.device, config.engine) == ({}, "cpu", "onnxruntime")
    why = "no instance is on a GPU, so ONNX Runtime runs the model on the CPU"
    assert config.warnings == (f"{accelerators.PATH}: has no effect; {why}",)
    # A version that is committed here keeps them for machines with a GPU.
    assert "execution_accelerators" in pbtxt.write(config, pbtxt.parse(config.written))


def test_a_workspace_is_a_number_of_bytes(tmp_path: Path) -> None:
    text = TENSORRT.replace("1073741824", "1G")
    (problem,) = problems(BASE + ON_GPUS + text, tmp_path)
    assert problem.endswith(".max_workspace_size_bytes: '1G' is not a number of bytes")
