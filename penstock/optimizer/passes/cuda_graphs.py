"""CUDA graphs: launch a batch of one size at once instead of kernel by kernel. The backend captures
them itself, for every size that is warmed up."""

from __future__ import annotations

from pathlib import Path

from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import CUDA_GRAPHS, check_graphs, write_options

# Modes of torch.compile for which the backend captures graphs anyway.
WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CudaGraphs(Pass):
    name = "cuda-graphs"
    stage = "compile"
    is_config_only = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        if config.device == "cpu" or config.backend != "pytorch":
            return self.skip("not a PyTorch model on a GPU")
        if CUDA_GRAPHS in config.options:
            return self.skip("decided already")
        mode = config.options.get("penstock.compile", "")
        if mode in WITH_GRAPHS:
            return self.skip(f"penstock.compile {mode} has them already")
        if not all(spec.is_fixed for spec in config.model.inputs) and config.model.padding is None:
            reason = "inputs have any length: a graph is of one; buckets (penstock.pad) would do"
            return self.skip(reason)
        return [Step(self.name, {"graphs": "on"})]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        write_options(parent, {CUDA_GRAPHS: step.settings["graphs"]}, target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        return check_graphs(after)
