"""Why a model would be refused at load, found without loading it or a GPU: for `penstock inspect`.

Values of options are checked when config.pbtxt is read. What is checked here needs the engine's own
code: options that exclude each other, providers, names of layers, and operators of ONNX files.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from penstock.backends.onnxruntime_providers import gpu_providers
from penstock.config import CPU, ONNX_RUNTIME, ModelConfig
from penstock.errors import ConfigError


def find_problems(config: ModelConfig) -> list[str]:
    """Return the problems of a model on GPUs; of one without, those of its providers. A model that
    would run on the CPU instead has none. Without torch, only ONNX Runtime's options are
    checked."""
    on_gpus = [device for device in config.devices if device != CPU]
    if not on_gpus:
        return _provider_problems(config)
    if config.is_gpu_optional:
        return []
    model = config.model.of_worker(on_gpus[0], len(on_gpus))
    problems: list[str] = []
    if config.backend == ONNX_RUNTIME and config.engine == ONNX_RUNTIME:
        gpu_providers(model, problems)
    elif config.engine == "pytorch" and find_spec("torch") is not None:
        try:
            importlib.import_module("penstock.backends.pytorch").check(model)
        except ConfigError as error:
            problems += error.problems
    return problems


def _provider_problems(config: ModelConfig) -> list[str]:
    """Return the providers that the installed ONNX Runtime lacks, if some are chosen."""
    problems: list[str] = []
    is_chosen = config.engine == ONNX_RUNTIME and "providers" in config.options
    if is_chosen and find_spec("onnxruntime") is not None:
        importlib.import_module("penstock.backends.onnxruntime").providers_of(config, problems)
    return problems
