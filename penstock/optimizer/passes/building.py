"""How passes write a model's folder from their parent's."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import pbtxt
from penstock.config import ModelConfig
from penstock.manifest import NAME as MANIFEST
from penstock.optimizer import onnx_model
from penstock.optimizer.candidates import Build
from penstock.repository import CONFIG

ONNX_FILE = "model.onnx"
# Around products in INT8, ONNX Runtime makes one operator of a layer normalisation and its
# residual, whose kernel for CPUs takes longer than the two.
LEFT_OUT = "optimization.disable_specified_optimizers"
SLOW_FUSION = "SkipLayerNormFusion"
# Makes bytes of a layer's weights, with one scale for all of them, where its neighbours compute in
# bytes: of just those layers that were kept in float.
FLOATS_TO_BYTES = "WeightBiasQuantization"
# Made for one version by whoever commits it.
OF_A_COMMIT = (CONFIG, MANIFEST, "history.jsonl")


def is_onnx(build: Build) -> bool:
    return build.config.backend in ("onnxruntime", "openvino") and build.artifact.suffix == ".onnx"


def copy_files(parent: Build, target: Path, *, leave_out: Collection[str] = ()) -> None:
    """All files of the parent but its configuration and what is named (in its version folder)."""
    version = target / "1"
    version.mkdir(parents=True)
    for path in parent.folder.iterdir():
        if path.is_file() and path.name not in OF_A_COMMIT:
            shutil.copy2(path, target / path.name)
    # Of the version that the parent is, whatever its number.
    for path in _version_folder(parent).iterdir():
        if path.name in OF_A_COMMIT or path.name in leave_out:
            continue
        if path.is_dir():
            shutil.copytree(path, version / path.name)
        else:
            shutil.copy2(path, version / path.name)


def write_config(config: ModelConfig, target: Path) -> None:
    config = replace(config, name=target.name, version="1")
    (target / CONFIG).write_text(pbtxt.write(config))


def write_onnx(parent: Build, model: Any, target: Path, config: ModelConfig | None = None) -> None:
    """The parent with this graph in place of its own."""
    old = parent.artifact.name
    copy_files(parent, target, leave_out=(old, *_external_files(parent.artifact)))
    onnx_model.write(model, target / "1" / ONNX_FILE)
    write_config(replace(config or parent.config, file=""), target)


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


def _version_folder(parent: Build) -> Path:
    return parent.folder / parent.config.version


def _external_files(path: Path) -> set[str]:
    model = onnx_model.read(path, weights=False)
    return {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
