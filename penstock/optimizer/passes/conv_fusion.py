"""Fuse convolutions, and on GPUs the layers of transformers, with the operators after them, by the
fastest kernel on the GPU: cuDNN's, cuBLAS's or our own. The backend does it when it loads the
module.

CUDA graphs are turned on where possible: kernels are chosen by their own run time, and short ones
launched one by one from Python would be bound by launch overhead.
"""

from __future__ import annotations

import re

from penstock.config import ModelConfig
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import (
    CONVOLUTIONS,
    CUDA_GRAPHS,
    FUSE,
    check_graphs,
    has_images,
    has_open_layers,
    with_options,
)
from penstock.optimizer.plan import Plan

# Rank of a sequence of features without the batch dimension.
FEATURE_RANK = 2
FLOATS = ("FP16", "BF16", "FP32")
# Numbers of layers in the fact.
COUNTS = re.compile(r"(?:^|, )(\d+) ")


class ConvFusion(Pass):
    name = "conv-fusion"
    stage = "compile"

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        step = Step(self.name, _settings(config))
        if not has_open_layers(config):
            return self.skip("not a PyTorch module with its code, nor an ONNX file on a GPU")
        if FUSE in config.options:
            return self.skip("fused already")
        if "penstock.compile" in config.options:
            return self.skip("compiled already")
        if "penstock.keep_fp32" in config.options:
            return self.skip("layers are kept in FP32 by their names")
        if not has_images(config) and not _has_features(config):
            return self.skip("no images among the inputs, nor on a GPU features of fixed shape")
        if config.device == "cpu" and not context.plan.is_exhaustive:
            reason = "on CPUs only normalisation goes; ONNX Runtime is there and fuses more"
            return self.skip(reason, step)
        return [step]

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        names = {"fuse": FUSE, "graphs": CUDA_GRAPHS}
        return with_options(config, {names[key]: text for key, text in step.settings.items()})

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        found = after.built.get("fusion", "")
        if not any(int(count) for count in COUNTS.findall(found.partition(";")[0])):
            return [f"no layer was fused: {found or 'nothing'}"]
        return check_graphs(after) if "graphs" in step.settings else []


def _has_features(config: ModelConfig) -> bool:
    """Return whether a GPU model takes rows of features, as encoders of audio do."""
    rank = FEATURE_RANK + (config.max_batch_size == 0)
    is_fixed = all(spec.is_fixed for spec in config.model.inputs)
    is_float = any(
        len(spec.shape) == rank and spec.datatype in FLOATS for spec in config.model.inputs
    )
    return config.uses_gpu and is_fixed and is_float


def _settings(config: ModelConfig) -> dict[str, str]:
    what = CONVOLUTIONS if config.device == "cpu" else "on"
    has_graphs = config.device != "cpu" and all(spec.is_fixed for spec in config.model.inputs)
    if has_graphs and CUDA_GRAPHS not in config.options:
        return {"fuse": what, "graphs": "on"}
    return {"fuse": what}
