"""Triton's `optimization.execution_accelerators` as options of the ONNX Runtime backend. Pure.

Both ways to ask for ONNX Runtime's GPU providers end in the same options: this message, and the
parameters `penstock.gpu_engine`, `providers` and `provider_options.*`. Parameters override it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import GPU_ENGINE, ONNX_RUNTIME
from penstock.repository.pbtxt_fields import Proto

CUDA_PROVIDER, TENSORRT_PROVIDER = "CUDAExecutionProvider", "TensorrtExecutionProvider"
# In the order of preference that ONNX Runtime documents.
GPU_PROVIDERS = (TENSORRT_PROVIDER, CUDA_PROVIDER)
# Names of Triton's accelerators.
PROVIDERS = {"tensorrt": TENSORRT_PROVIDER, "cuda": CUDA_PROVIDER}
PATH = "optimization.execution_accelerators"
# Triton's names of TensorRT's parameters that are not those of the provider. All others start with
# trt_ and keep their names.
TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
BYTES = ("max_workspace_size_bytes", "trt_max_workspace_size")
PRECISION = "precision_mode"
PRECISIONS = {"FP32": "", "FP16": "trt_fp16_enable", "INT8": "trt_int8_enable"}
# The provider takes 1 and 0 for what Triton also spells so.
FLAGS = {"true": "1", "false": "0"}
Problem = Callable[[str, str], None]


def read(message: Proto, backend: str, problem: Problem) -> dict[str, str]:
    """Return the options for the accelerators of a config.pbtxt; empty without any. `problem` is
    called with the path and the text of each problem."""
    asked = message.optimization.execution_accelerators
    on_gpus, on_cpus = asked.gpu_execution_accelerator, asked.cpu_execution_accelerator
    if (on_gpus or on_cpus) and backend != ONNX_RUNTIME:
        problem(PATH, f"only for ONNX files; backend '{backend}' is not supported")
        return {}
    for each in on_cpus:
        advice = 'backend: "openvino" runs ONNX files with OpenVINO on CPUs'
        problem(f"{PATH}.cpu_execution_accelerator", f"'{each.name}' is not supported; {advice}")
    providers: list[str] = []
    options: dict[str, str] = {}
    for index, each in enumerate(on_gpus):
        path = f"{PATH}.gpu_execution_accelerator[{index}]"
        provider = PROVIDERS.get(each.name, "")
        if not provider:
            problem(f"{path}.name", f"'{each.name}' is not one of {', '.join(PROVIDERS)}")
        elif provider in providers:
            problem(f"{path}.name", f"'{each.name}' is given twice")
        else:
            providers.append(provider)
            options |= _options(each, provider, path, problem)
    if not providers:
        return {}
    if CUDA_PROVIDER not in providers:
        # For nodes that TensorRT does not take.
        providers.append(CUDA_PROVIDER)
    return {GPU_ENGINE: ONNX_RUNTIME, "providers": ",".join(providers), **options}


def _options(accelerator: Proto, provider: str, path: str, problem: Problem) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in sorted(accelerator.parameters.items()):
        name, text = _option(provider, key, value, path, problem)
        if name:
            found[f"provider_options.{provider}.{name}"] = text
    return found


def _option(provider: str, key: str, value: str, path: str, problem: Problem) -> tuple[str, str]:
    """Return a parameter's name and value as the provider has it; an empty name: no option."""
    where = f"{path}.parameters.{key}"
    if provider == CUDA_PROVIDER:
        return key, FLAGS.get(value.lower(), value)
    if key == PRECISION:
        if value.upper() not in PRECISIONS:
            problem(where, f"'{value}' is not one of {', '.join(PRECISIONS)}")
        return PRECISIONS.get(value.upper(), ""), "1"
    name = TENSORRT_NAMES.get(key, key)
    if key in BYTES and not (value.isascii() and value.isdigit()):
        problem(where, f"'{value}' is not a number of bytes")
    if not name.startswith("trt_"):
        known = ", ".join((PRECISION, *TENSORRT_NAMES))
        problem(where, f"unknown; expected {known} or an option of TensorRT's provider (trt_*)")
        return "", ""
    return name, FLAGS.get(value.lower(), value)
