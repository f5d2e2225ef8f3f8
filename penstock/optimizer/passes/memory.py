"""Reduce the memory that an instance keeps: the runtime's arena, the server's buffers. Writes only
config.pbtxt, and is proposed only if the SLO limits memory or the search is exhaustive."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import MIB, ModelConfig
from penstock.optimizer.passes import Facts, Pass, PassContext, Proposals, Step
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
            return self.skip("the GPU's memory counts, and these are buffers of the host")
        found: Proposals = []
        if config.engine == "onnxruntime" and config.options.get(ARENA) != "0":
            found.append(Step(self.name, {"arena": "off"}))
        if config.memory.max_slabs > SMALL_SLABS or config.memory.spill_bytes > SMALL_SPILL:
            found.append(Step(self.name, {"buffers": "small"}))
        return found or self.skip("everything is as small as it can be")

    def configured(self, config: ModelConfig, step: Step, plan: Plan) -> ModelConfig:
        if step.settings.get("arena") == "off":
            # Memory patterns are plans for the arena.
            return replace(config, options={**config.options, ARENA: "0", PATTERN: "0"})
        slabs = min(config.memory.max_slabs, SMALL_SLABS)
        spill = min(config.memory.spill_bytes, SMALL_SPILL)
        return replace(config, memory=replace(config.memory, max_slabs=slabs, spill_bytes=spill))

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        found = after.built.get(ARENA)
        if step.settings.get("arena") == "off" and found != "0":
            return [f"asked for no arena, the runtime says {ARENA} {found}"]
        return []
