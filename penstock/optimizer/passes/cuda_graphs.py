"""CUDA graphs: launch a batch of one size at once instead of kernel by kernel. The backend captures
them itself, for every size that is warmed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Skip, Stage, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes import BuildContext, Pass, PassContext
from penstock.optimizer.passes.building import CUDA_GRAPHS, check_graphs

# Modes of torch.compile for which the backend captures graphs anyway.
WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CudaGraphs(Pass):
    name = "cuda-graphs"
    stage: Stage = "compile"
    is_config_only = True

    def propose(self, context: PassContext) -> Sequence[Step | Skip]:
        config = context.build.config
        if config.device == "cpu" or config.backend != "pytorch":
            return [Skip(self.name, "not a PyTorch model on a GPU")]
        if CUDA_GRAPHS in config.options:
            return [Skip(self.name, "decided already")]
        mode = config.options.get("penstock.compile", "")
        if mode in WITH_GRAPHS:
            return [Skip(self.name, f"penstock.compile {mode} has them already")]
        model = config.model
        if not all(spec.is_fixed for spec in model.inputs) and model.padding is None:
            reason = "inputs have any length: a graph is of one; buckets (penstock.pad) would do"
            return [Skip(self.name, reason)]
        return [Step(self.name, {"graphs": "on"})]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        config = parent.config
        options = {**config.options, CUDA_GRAPHS: step.settings["graphs"]}
        folders.write(parent, replace(config, options=options), target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        return check_graphs(after)
