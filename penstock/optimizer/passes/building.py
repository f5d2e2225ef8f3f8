"""Helpers shared by passes that write ONNX files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import ModelConfig
from penstock.optimizer import folders, onnx_model
from penstock.optimizer.candidates import Build

ONNX_FILE = "model.onnx"
# Rank of an image without the batch dimension.
IMAGE_RANK = 3
# Around INT8 matmuls, ONNX Runtime fuses a layer normalisation with its residual into one operator,
# whose CPU kernel is slower than the two.
LEFT_OUT = "optimization.disable_specified_optimizers"
SLOW_FUSION = "SkipLayerNormFusion"
# Optimizer that quantises a float layer's weights, per tensor, between INT8 neighbours: exactly the
# layers that were kept in float.
FLOATS_TO_BYTES = "WeightBiasQuantization"
STAYS_ON_GPU = (
    "ONNX Runtime's GPU providers are not used here; the model stays PyTorch on the GPU "
    "(--device cpu tries it)"
)


def stays_on_gpu(config: ModelConfig) -> bool:
    """Return whether this is a PyTorch model on a GPU: passes for ONNX and CPUs do not apply."""
    return config.uses_gpu and config.backend == "pytorch"


def is_onnx(build: Build) -> bool:
    return build.config.backend in ("onnxruntime", "openvino") and build.artifact.suffix == ".onnx"


def write_onnx(parent: Build, model: Any, target: Path, config: ModelConfig | None = None) -> None:
    """Write the parent with this graph in place of its own."""
    old = onnx_model.external_files(onnx_model.read(parent.artifact, weights=False))
    version = folders.carry_over(parent, target, {parent.artifact.name, ONNX_FILE, *old})
    onnx_model.write(model, version / ONNX_FILE)
    folders.write_config(target, replace(config or parent.config, file=""))


@contextlib.contextmanager
def quiet_quantizer() -> Iterator[None]:
    """Silence ONNX Runtime's messages about single nodes; the result is read back and checked."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def without_slow_fusion(config: ModelConfig) -> ModelConfig:
    """Turn off the slow fusion, for INT8 transformers on CPUs. The operator's own setting wins."""
    providers = config.options.get("providers", "CPUExecutionProvider")
    if config.backend != "onnxruntime" or providers != "CPUExecutionProvider":
        return config
    return replace(config, options={LEFT_OUT: SLOW_FUSION, **config.options})


def with_floats_kept(config: ModelConfig) -> ModelConfig:
    """Make ONNX Runtime leave in float what is float in the file."""
    if config.backend != "onnxruntime":
        return config
    left_out = [name for name in config.options.get(LEFT_OUT, "").split(";") if name]
    if FLOATS_TO_BYTES in left_out:
        return config
    text = ";".join([*left_out, FLOATS_TO_BYTES])
    return replace(config, options={**config.options, LEFT_OUT: text})
