"""CUDA graphs: launch a batch of one size at once instead of kernel by kernel. The backend captures
them itself, for every size that is warmed up."""

from __future__ import annotations

from penstock.config import ModelConfig
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import CUDA_GRAPHS, check_graphs, with_options
from penstock.optimizer.plan import Plan

# Modes of torch.compile for which the backend captures graphs anyway.
WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CudaGraphs(Pass):
    name = "cuda-graphs"
    stage = "compile"
    is_for_gpus = True
    is_config_only = True

    def propose(self, context: PassContext) -> Proposals:
        config = context.build.config
        if config.device == "cpu" or config.engine != "pytorch":
            return self.skip("not on a GPU")
        if CUDA_GRAPHS in config.options:
            return self.skip("decided already")
        mode = config.options.get("penstock.compile", "")
        if mode in WITH_GRAPHS:
            return self.skip(f"penstock.compile {mode} has them already")
        if not all(spec.is_fixed for spec in config.model.inputs) and config.model.padding is None:
            reason = "inputs have any length: a graph is of one; buckets (penstock.pad) would do"
            return self.skip(reason)
        return [Step(self.name, {"graphs": "on"})]

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        return with_options(config, {CUDA_GRAPHS: step.settings["graphs"]})

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        return check_graphs(after)
