"""Reduce the memory that an instance keeps: the runtime's arena, the server's buffers; on a GPU the
activations of the largest batch, and CUDA graphs. Writes only config.pbtxt, and is proposed only if
the SLO limits memory or the search is exhaustive."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import MIB, ModelConfig
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import CUDA_GRAPHS, with_options
from penstock.optimizer.plan import Plan
from penstock.slo import Memory

ARENA = "enable_mem_arena"
PATTERN = "enable_mem_pattern"
SMALL_SLABS = 4
SMALL_SPILL = 64 * MIB


class LessMemory(Pass):
    name = "memory"
    stage = "memory"
    is_config_only = True

    def propose(self, context: PassContext) -> Proposals:
        plan, config = context.plan, context.build.config
        terms = () if plan.slo is None else plan.slo.terms
        has_limit = any(isinstance(term, Memory) for term in terms)
        if not has_limit and not plan.is_exhaustive:
            return self.skip("the SLO says nothing of memory")
        if config.uses_gpu:
            return self._on_gpu(config)
        found: Proposals = []
        if config.engine == "onnxruntime" and config.options.get(ARENA) != "0":
            found.append(Step(self.name, {"arena": "off"}))
        if config.memory.max_slabs > SMALL_SLABS or config.memory.spill_bytes > SMALL_SPILL:
            found.append(Step(self.name, {"buffers": "small"}))
        return found or self.skip("everything is as small as it can be")

    def _on_gpu(self, config: ModelConfig) -> Proposals:
        """On a GPU its own memory counts. Graphs share a pool, but each keeps its outputs."""
        found: Proposals = []
        if config.max_batch_size > 1 and config.batching.is_dynamic:
            found.append(Step(self.name, {"max_batch": str(config.max_batch_size // 2)}))
        if config.options.get(CUDA_GRAPHS) == "on":
            found.append(Step(self.name, {"graphs": "off"}))
        return found or self.skip("everything is as small as it can be")

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        if "max_batch" in step.settings:
            most, batching = int(step.settings["max_batch"]), config.batching
            sizes = tuple(each for each in batching.preferred_batch_sizes if each <= most)
            batching = replace(batching, max_batch_size=most, preferred_batch_sizes=sizes)
            return replace(config, max_batch_size=most, batching=batching)
        if "graphs" in step.settings:
            return with_options(config, {CUDA_GRAPHS: step.settings["graphs"]})
        if step.settings.get("arena") == "off":
            # Memory patterns are plans for the arena.
            return replace(config, options={**config.options, ARENA: "0", PATTERN: "0"})
        slabs = min(config.memory.max_slabs, SMALL_SLABS)
        spill = min(config.memory.spill_bytes, SMALL_SPILL)
        return replace(config, memory=replace(config.memory, max_slabs=slabs, spill_bytes=spill))

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        graphs = after.built.get("cuda_graphs", "off")
        if step.settings.get("graphs") == "off" and graphs != "off":
            return [f"asked for no CUDA graphs, there are {graphs}"]
        found = after.built.get(ARENA)
        if step.settings.get("arena") == "off" and found != "0":
            return [f"asked for no arena, the runtime says {ARENA} {found}"]
        return []
