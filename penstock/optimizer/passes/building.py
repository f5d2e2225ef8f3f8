"""Helpers shared by passes: checks of models and builds, and writing of ONNX files."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import ModelConfig
from penstock.optimizer import folders, onnx_model, torch_source
from penstock.optimizer.candidates import Build
from penstock.optimizer.facts import INTEGER_OPERATORS, Facts
from penstock.optimizer.passes import PassContext
from penstock.repository import onnx_file

if TYPE_CHECKING:
    from onnx import ModelProto

ONNX_FILE = "model.onnx"
# Rank of an image without the batch dimension.
IMAGE_RANK = 3
# Fuses a layer normalisation with its residual, for which CPUs have a slower kernel.
LEFT_OUT = "optimization.disable_specified_optimizers"
SLOW_FUSION = "SkipLayerNormFusion"
# Quantises the weights of float layers between INT8 neighbours, which were kept in float.
FLOATS_TO_BYTES = "WeightBiasQuantization"
# Least share of the layers that can gain which must be INT8 in the built model.
MIN_SHARE = 0.9
NO_INT8 = "the processor has no instructions for INT8 products (VNNI, AMX)"
# Options of the PyTorch backend.
CUDA_GRAPHS = "penstock.cuda_graphs"
FUSE, CONVOLUTIONS = "penstock.fuse", "convolutions"
FACTORY = "penstock.factory"
# Between names of layers.
SEPARATOR = ","
STAYS_ON_GPU = "for CPUs only; on a GPU the PyTorch engine runs the model (--device cpu tries it)"


def has_images(config: ModelConfig) -> bool:
    """Return whether an input of the model is an image, or a batch of them."""
    rank = IMAGE_RANK + (config.max_batch_size == 0)
    return any(len(spec.shape) == rank for spec in config.model.inputs)


def with_options(config: ModelConfig, options: Mapping[str, str]) -> ModelConfig:
    return replace(config, options={**config.options, **options})


def tolerating(config: ModelConfig, tolerance: float) -> ModelConfig:
    """Let rows change each other's answers by at least this much, in the server's check at load."""
    return replace(config, tolerance=max(config.tolerance or 0.0, tolerance))


def has_open_layers(config: ModelConfig) -> bool:
    """Return whether the PyTorch engine sees the layers: a module with its code, or ONNX."""
    return config.engine == "pytorch" and config.artifact.endswith((".py", ".onnx"))


def stays_on_gpu(config: ModelConfig) -> bool:
    """Return whether the PyTorch engine or ONNX Runtime's providers run this on a GPU: passes for
    CPUs do not apply."""
    return config.uses_gpu and config.engine in ("pytorch", "onnxruntime")


def is_onnx(build: Build) -> bool:
    return build.config.backend in ("onnxruntime", "openvino") and build.artifact.suffix == ".onnx"


def can_export(config: ModelConfig) -> bool:
    """Return whether a PyTorch module on a GPU can become an ONNX file that runs there."""
    return stays_on_gpu(config) and config.artifact.endswith(".py") and has_images(config)


def onnx_artifact(parent: Build, cache: Path) -> Path:
    """Return the model as an ONNX file: its own, or what a module is exported to, once."""
    if is_onnx(parent):
        return parent.artifact
    from penstock.backends.pytorch import load_module
    from penstock.optimizer.torch_export import to_onnx

    digest = hashlib.sha256()
    for path in sorted(torch_source.own_files(parent.artifact)):
        if (file := parent.artifact.parent / path).is_file():
            digest.update(path.encode() + file.read_bytes())
    target = cache / f"exported-{digest.hexdigest()[:32]}.onnx"
    if not target.is_file():
        model = parent.config.model
        # In the precision of the weights; the file is computed in another one later.
        plain = {k: text for k, text in model.options.items() if k == FACTORY}
        loaded = load_module(replace(model, options=plain, device="cpu"))
        draft = target.with_suffix(".part")
        try:
            to_onnx(loaded, model, draft)
        finally:
            loaded.close()
        draft.rename(target)
    return target


def write_onnx(
    parent: Build, model: ModelProto, target: Path, config: ModelConfig | None = None
) -> None:
    """Write the parent with this graph in place of its own, or of its module."""
    config = config or parent.config
    if is_onnx(parent):
        old = set(onnx_file.weight_files(parent.artifact))
    else:
        old = torch_source.own_files(parent.artifact)
        options = {key: text for key, text in config.options.items() if key != FACTORY}
        config = replace(config, backend="onnxruntime", options=options)
    version = folders.carry_over(parent, target, {parent.artifact.name, ONNX_FILE, *old})
    onnx_model.write(model, version / ONNX_FILE)
    folders.write_config(target, replace(config, file=""))


@contextlib.contextmanager
def quiet_log(name: str | None = None) -> Iterator[None]:
    """Silence a library's messages about single nodes; the result is read back and checked."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def without_slow_fusion(config: ModelConfig) -> ModelConfig:
    """Turn off the slow fusion, for INT8 transformers on CPUs. The operator's own setting wins."""
    providers = config.options.get("providers", "CPUExecutionProvider")
    if config.engine != "onnxruntime" or providers != "CPUExecutionProvider":
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
    return with_options(config, {LEFT_OUT: text})


def fold_shapes(model: ModelProto, config: ModelConfig) -> ModelProto:
    """Fold everything that follows from the sizes that the model declares."""
    from penstock.optimizer import onnx_folding

    batch = (-1,) if config.max_batch_size else ()
    sizes = {spec.name: (*batch, *spec.shape) for spec in config.model.inputs}
    return onnx_folding.fold(model, sizes)


def check_graphs(after: Facts) -> list[str]:
    if after.built.get("cuda_graphs", "none") not in ("off", "none", "0"):
        return []
    reason = after.built.get("without_cuda_graph", "")
    return [f"no graph was captured{': ' if reason else ''}{reason}"]


def reason_not_to_quantise(context: PassContext) -> str:
    """Return why this model cannot be quantised; empty if it can."""
    facts = context.facts
    if not is_onnx(context.build):
        return (
            STAYS_ON_GPU if stays_on_gpu(context.build.config) else "the model is not an ONNX file"
        )
    if facts.quantised:
        names = ", ".join(f"{count} {name}" for name, count in sorted(facts.quantised.items()))
        return f"the model is quantised already: {names}"
    if not facts.quantisable:
        size = f"{onnx_model.MIN_SIDE} x {onnx_model.MIN_SIDE}"
        return f"no Conv, Gemm or MatMul has constant weights of at least {size}: nothing to gain"
    return ""


def check_quantised(before: Facts, after: Facts, num_kept: int = 0) -> list[str]:
    """Check that the build really is INT8: in its file, and after the runtime's optimisation."""
    layers = {*onnx_model.WEIGHTED, *INTEGER_OPERATORS} - {"DynamicQuantizeLinear"}
    counted = sum(after.quantised.get(name, 0) for name in layers)
    asked = sum(before.quantisable.values()) - num_kept
    if not counted:
        return ["not a single Conv, Gemm or MatMul is quantised: it was built in float"]
    problems = []
    if counted < MIN_SHARE * asked:
        problems.append(f"{counted} of {asked} layers are quantised; expected {MIN_SHARE:.0%}")
    if not after.weight_bytes.get("INT8") and not after.weight_bytes.get("UINT8"):
        problems.append("no weights are stored in INT8")
    ran = after.optimised_operators
    if ran and not any(name in ran for name in INTEGER_OPERATORS):
        problems.append("ONNX Runtime computes all of it in float: no integer operator is left")
    return problems
