"""Fuse each convolution with the operators after it, with the fastest kernel on the GPU: cuDNN's,
cuBLAS's or our own. The backend does it when it loads the module.

CUDA graphs are turned on where possible: kernels are chosen by their own run time, and short ones
launched one by one from Python would be bound by launch overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.config import ModelConfig
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Skip, Stage, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes import BuildContext, Pass, PassContext
from penstock.optimizer.passes.building import CUDA_GRAPHS, check_graphs

OPTION = "penstock.fuse"
# Rank of a batch of images.
IMAGE_RANK = 4


class ConvFusion(Pass):
    name = "conv-fusion"
    stage: Stage = "compile"

    def propose(self, context: PassContext) -> Sequence[Step | Skip]:
        config = context.build.config
        step = Step(self.name, _settings(config))
        if config.backend != "pytorch" or not config.artifact.endswith(".py"):
            return [Skip(self.name, "not a PyTorch module with its code")]
        if OPTION in config.options:
            return [Skip(self.name, "fused already")]
        if "penstock.compile" in config.options:
            return [Skip(self.name, "compiled already")]
        if not _has_images(config):
            return [Skip(self.name, "no images among the inputs")]
        if config.device == "cpu" and not context.plan.is_exhaustive:
            reason = "on CPUs only normalisation goes; ONNX Runtime is there and fuses more"
            return [Skip(self.name, reason, step)]
        return [step]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config = parent.config
        options = {**config.options, OPTION: step.settings["fuse"]}
        if "graphs" in step.settings:
            options[CUDA_GRAPHS] = step.settings["graphs"]
        folders.write(parent, replace(config, options=options), target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        found = after.built.get("fusion", "")
        if found.partition(" ")[0] in ("", "0"):
            return [f"no convolution was fused: {found or 'nothing'}"]
        return check_graphs(after) if "graphs" in step.settings else []


def _settings(config: ModelConfig) -> dict[str, str]:
    is_fixed = all(spec.is_fixed for spec in config.model.inputs)
    has_graphs = config.device != "cpu" and is_fixed and CUDA_GRAPHS not in config.options
    return {"fuse": "convolutions", **({"graphs": "on"} if has_graphs else {})}


def _has_images(config: ModelConfig) -> bool:
    rank = IMAGE_RANK - (config.max_batch_size > 0)
    return any(len(spec.shape) == rank for spec in config.model.inputs)
