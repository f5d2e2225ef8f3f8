"""What passes that write ONNX files share."""

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
# Of an image without the batch.
IMAGE_RANK = 3
# Around products in INT8, ONNX Runtime makes one operator of a layer normalisation and its
# residual, whose kernel for CPUs takes longer than the two.
LEFT_OUT = "optimization.disable_specified_optimizers"
SLOW_FUSION = "SkipLayerNormFusion"
# Makes bytes of a layer's weights, with one scale for all of them, where its neighbours compute in
# bytes: of just those layers that were kept in float.
FLOATS_TO_BYTES = "WeightBiasQuantization"
STAYS_ON_GPU = (
    "ONNX Runtime's GPU providers are not used here; the model stays PyTorch on the GPU "
    "(--device cpu tries it)"
)


def stays_on_gpu(config: ModelConfig) -> bool:
    """A PyTorch model that has a GPU: what is made for ONNX and CPUs is nothing for it."""
    return config.uses_gpu and config.backend == "pytorch"


def is_onnx(build: Build) -> bool:
    return build.config.backend in ("onnxruntime", "openvino") and build.artifact.suffix == ".onnx"


def write_onnx(parent: Build, model: Any, target: Path, config: ModelConfig | None = None) -> None:
    """The parent with this graph in place of its own."""
    old = onnx_model.external_files(onnx_model.read(parent.artifact, weights=False))
    version = folders.carry_over(parent, target, {parent.artifact.name, ONNX_FILE, *old})
    onnx_model.write(model, version / ONNX_FILE)
    folders.write_config(target, replace(config or parent.config, file=""))


@contextlib.contextmanager
def quiet_quantizer() -> Iterator[None]:
    """ONNX Runtime's tells everybody its opinion of single nodes; what counts is read back."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


def without_slow_fusion(config: ModelConfig) -> ModelConfig:
    """For transformers in INT8 on CPUs; what the operator has set himself stays."""
    providers = config.options.get("providers", "CPUExecutionProvider")
    if config.backend != "onnxruntime" or providers != "CPUExecutionProvider":
        return config
    return replace(config, options={LEFT_OUT: SLOW_FUSION, **config.options})


def with_floats_kept(config: ModelConfig) -> ModelConfig:
    """ONNX Runtime leaves in float what is float in the file."""
    if config.backend != "onnxruntime":
        return config
    left_out = [name for name in config.options.get(LEFT_OUT, "").split(";") if name]
    if FLOATS_TO_BYTES in left_out:
        return config
    text = ";".join([*left_out, FLOATS_TO_BYTES])
    return replace(config, options={**config.options, LEFT_OUT: text})
