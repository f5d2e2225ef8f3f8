"""ONNX files on ONNX Runtime, the default backend; threads and graph level are set explicitly.

docs/backends.md explains the options. The effective settings are read back and compared. On a GPU
Penstock's own engine runs the file, or, if chosen, the library's providers (`onnxruntime_cuda`).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

# Before the import: the only switch that disables the library's telemetry.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime as ort

from penstock.backends import GPU_FALLBACK, Batch, Execution, LoadRunner, Runner, backend
from penstock.backends.checks import (
    check_signature,
    log,
    num_threads,
    share_of_cores,
)
from penstock.backends.finished import Finished
from penstock.backends.onnxruntime_providers import (
    Providers,
    given_options,
    gpu_providers,
)
from penstock.config import CPU, ONNX_RUNTIME, ModelConfig
from penstock.errors import CANNOT_LOAD, BackendFailed, ConfigError, first_line
from penstock.repository import onnx_file
from penstock.repository.accelerators import CUDA_PROVIDER
from penstock.types import DATATYPES, Array, TensorSpec, num_elements

GRAPH_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
EXECUTION_MODES = {"0": ort.ExecutionMode.ORT_SEQUENTIAL, "1": ort.ExecutionMode.ORT_PARALLEL}
# The library's names of element types, where they are not numpy's.
OTHER_NAMES = {"FP32": "float", "FP64": "double", "BF16": "bfloat16", "BYTES": "string"}
ELEMENT_TYPES = {
    f"tensor({OTHER_NAMES.get(name, datatype.numpy.name)})": name
    for name, datatype in DATATYPES.items()
}
ONNX_BFLOAT16 = 16
# The type of a ZipMap output, and the option that says where a model from memory has its weights.
MAPS = "seq(map("
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# Source location in an error of the library, with the name or signature of the function.
_SOURCE = re.compile(
    r"(?:/[\w.+-]+)*/?\b[\w.+-]+\.(?:cc|cpp|cxx|cu|cuh|h|hpp):\d+ "
    r"(?:(?:[\w:<>~*&,]+ )*?[\w:<>~]+\([^()]*(?:\([^()]*\)[^()]*)*\)(?: const)? |\w+ )?"
)
_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
CPU_PROVIDER = "CPUExecutionProvider"


class OnnxRunner(Runner):
    def __init__(self, config: ModelConfig, fallback: str = "") -> None:
        self._config = config
        # Why the model does not run on a GPU, though it might have.
        self._fallback = fallback
        problems: list[str] = []
        options = session_options(config, problems)
        providers = providers_of(config, problems)
        if problems:
            raise ConfigError(problems)
        self._session = open_session(config, options, providers)
        self.inputs, self.outputs = read_signature(self._session)
        check_signature(config, self.inputs, self.outputs)
        self._output_names = [spec.name for spec in config.outputs]
        self._special = {
            spec.name: spec.datatype for spec in config.inputs if spec.datatype in ("BF16", "BYTES")
        }
        self._has_bf16 = any(s.datatype == "BF16" for s in (*config.inputs, *config.outputs))

    def built(self) -> Mapping[str, str]:
        fallback = {GPU_FALLBACK: self._fallback} if self._fallback else {}
        return read_settings(self._session) | fallback

    def start(self, batch: Batch) -> Execution:
        feeds = dict(batch.inputs)
        try:
            if self._has_bf16:
                return Finished(self._run_with_ort_values(feeds))
            if self._special:
                feeds = {name: _text(array) for name, array in feeds.items()}
            arrays = self._session.run(self._output_names, feeds)
        except Exception as error:  # The library raises its own types and plain Exception.
            raise BackendFailed(shown_error(error, self._config)) from error
        return Finished(dict(zip(self._output_names, arrays, strict=True)))

    def close(self) -> None:
        del self._session

    def _run_with_ort_values(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run a model with BF16, which has no numpy type: its bits go in and out as uint16."""
        values = {}
        for name, array in feeds.items():
            if self._special.get(name) == "BF16":
                bits = np.ascontiguousarray(array)
                values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ONNX_BFLOAT16)
            else:
                values[name] = ort.OrtValue.ortvalue_from_numpy(_text(array))
        answers = self._session.run_with_ort_values(self._output_names, values)
        outputs: dict[str, Array] = {}
        for spec, value in zip(self._config.outputs, answers, strict=True):
            outputs[spec.name] = _bits(value) if spec.datatype == "BF16" else value.numpy()
        return outputs


def open_session(
    config: ModelConfig, options: ort.SessionOptions, providers: Providers
) -> ort.InferenceSession:
    """Load the file; raise BackendFailed if that fails, ConfigError if a provider is missing."""
    try:
        session = _session(config.artifact, options, providers)
    except Exception as error:  # The library raises its own types and plain Exception.
        reason = shown_error(error, config)
        raise BackendFailed(f"ONNX Runtime {CANNOT_LOAD}: {reason}") from None
    got = session.get_providers()
    # ONNX Runtime falls back to the CPU silently.
    if missing := [name for name, _ in providers if name not in got]:
        problem = f"asked for {', '.join(missing)}, got {', '.join(got)}"
        if CUDA_PROVIDER in missing:
            needs = f"CUDA {getattr(ort, 'cuda_version', '')} and cuDNN 9"
            problem += f"; it needs {needs}, which torch for that CUDA brings"
        raise ConfigError(f"parameters.providers: {problem}")
    return session


def _session(path: str, options: ort.SessionOptions, providers: Providers) -> ort.InferenceSession:
    # Its own fallback prints to stdout and tries the CPU.
    how = {"providers": providers, "enable_fallback": 0}
    session = ort.InferenceSession(path, options, **how)
    if not any(node.type.startswith(MAPS) for node in session.get_outputs()):
        return session
    options.add_session_config_entry(WEIGHTS_FOLDER, str(Path(path).parent))
    model = onnx_file.without_zip_maps(Path(path)).SerializeToString()
    return ort.InferenceSession(model, options, **how)


def read_signature(
    session: ort.InferenceSession,
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs that the file declares."""
    return tuple(map(_spec, session.get_inputs())), tuple(map(_spec, session.get_outputs()))


def read_settings(session: ort.InferenceSession) -> dict[str, str]:
    """Return the effective settings of a session, for `Runner.built`."""
    options = session.get_session_options()
    settings = {
        "onnxruntime": ort.__version__,
        "providers": ",".join(session.get_providers()),
        "intra_op_thread_count": str(options.intra_op_num_threads),
        "inter_op_thread_count": str(options.inter_op_num_threads),
        "execution_mode": options.execution_mode.name,
        "graph_level": options.graph_optimization_level.name,
        "enable_mem_arena": str(int(options.enable_cpu_mem_arena)),
        "enable_mem_pattern": str(int(options.enable_mem_pattern)),
    }
    for provider, given in session.get_provider_options().items():
        for key, value in given.items():
            settings[f"provider_options.{provider}.{key}"] = value
    return settings


def load(config: ModelConfig) -> Runner:
    """Load the model: on the CPU by ONNX Runtime, on a GPU by Penstock's own engine or, if chosen,
    by ONNX Runtime's providers. A model without a kind in its instance_group that our engine cannot
    read runs on the CPU."""
    if config.engine == ONNX_RUNTIME and config.device == CPU:
        return OnnxRunner(config)
    if config.engine == ONNX_RUNTIME:
        return _load_on_gpu(config)
    try:
        return backend("pytorch")(config)
    except ConfigError as error:
        if not config.is_gpu_optional:
            raise
        log.warning("%s runs on the CPU: %s", config.name, "; ".join(error.problems))
        return OnnxRunner(replace(config, device=CPU), fallback="; ".join(error.problems))


def _load_on_gpu(config: ModelConfig) -> Runner:
    try:
        load_on_gpu: LoadRunner = importlib.import_module(f"{__name__}_cuda").load
    except ModuleNotFoundError as error:
        needs = f"ONNX Runtime's GPU providers need the package '{error.name}'"
        brings = 'pip install "penstock[onnxruntime-gpu]" brings it'
        raise ConfigError(f"device: {needs}, which is not installed; {brings}") from None
    return load_on_gpu(config)


def shown_error(error: Exception, config: ModelConfig) -> str:
    """Return an error of the library in one line, without source locations or local paths."""
    text = _CODE.sub("", _SOURCE.sub("", first_line(error)))
    version_folder, *outer = Path(config.artifact).parents
    text = text.replace(f"{version_folder}/", "")
    for folder in outer[:-1]:
        text = text.replace(str(folder), "…")
    return text.replace(" failed:", " failed: ")


def session_options(config: ModelConfig, problems: list[str]) -> ort.SessionOptions:
    options = ort.SessionOptions()
    settings = config.options
    options.intra_op_num_threads = num_threads(
        settings, "intra_op_thread_count", share_of_cores(config), problems
    )
    options.inter_op_num_threads = num_threads(settings, "inter_op_thread_count", 1, problems)
    mode = settings.get("execution_mode", "0")
    if mode not in EXECUTION_MODES:
        problems.append(f"parameters.execution_mode: '{mode}' is not 0 or 1")
    options.execution_mode = EXECUTION_MODES.get(mode, ort.ExecutionMode.ORT_SEQUENTIAL)
    level = settings.get("graph_level", "all")
    if level not in GRAPH_LEVELS:
        known = ", ".join(GRAPH_LEVELS)
        problems.append(f"parameters.graph_level: '{level}' is not one of {known}")
    options.graph_optimization_level = GRAPH_LEVELS.get(level, GRAPH_LEVELS["all"])
    options.enable_cpu_mem_arena = _flag(settings, "enable_mem_arena", problems)
    options.enable_mem_pattern = _flag(settings, "enable_mem_pattern", problems)
    options.log_severity_level = 3
    # Spinning threads would take the cores that the core and other instances need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for key, value in settings.items():
        if key.startswith(("session.", "optimization.")):
            options.add_session_config_entry(key, value)
    return options


def _flag(settings: Mapping[str, str], name: str, problems: list[str]) -> bool:
    text = settings.get(name, "1")
    if text not in ("0", "1"):
        problems.append(f"parameters.{name}: '{text}' is not 0 or 1")
    return text != "0"


def providers_of(config: ModelConfig, problems: list[str]) -> Providers:
    if config.device != CPU:
        providers = gpu_providers(config, problems)
    else:
        names = [name.strip() for name in config.options.get("providers", CPU_PROVIDER).split(",")]
        providers = [(name, given_options(config, name)) for name in names]
    available = ort.get_available_providers()
    unknown = [name for name, _ in providers if name not in available]
    if unknown:
        build = f"this build of ONNX Runtime, which has {', '.join(available)}"
        problems.append(f"parameters.providers: {', '.join(unknown)} not in {build}")
    return providers


def _spec(node: ort.NodeArg) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape)
    return TensorSpec(node.name, ELEMENT_TYPES.get(node.type, node.type), shape)


def _bits(value: ort.OrtValue) -> Array:
    """Return a copy of a BF16 tensor as uint16: OrtValue.numpy() does not support BF16."""
    shape = tuple(value.shape())
    nbytes = 2 * num_elements(shape)
    if nbytes == 0:
        return np.empty(shape, dtype=np.uint16)
    memory = ctypes.string_at(value.data_ptr(), nbytes)
    return np.frombuffer(memory, dtype=np.uint16).reshape(shape)


def _text(array: Array) -> Array:
    """Decode texts: ONNX Runtime wants str where the wire has bytes."""
    if array.dtype != np.object_:
        return array
    texts = np.array([item.decode() for item in array.ravel()], dtype=np.object_)
    return texts.reshape(array.shape)
