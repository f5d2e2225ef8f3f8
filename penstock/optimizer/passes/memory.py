"""Reduce the memory that an instance keeps: the runtime's arena, the server's buffers. Writes only
config.pbtxt, and is proposed only if the SLO limits memory or the search is exhaustive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.config import MIB, ModelConfig
from penstock.optimizer import folders
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
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
        if config.backend == "onnxruntime" and config.options.get(ARENA) != "0":
            found.append(Step(self.name, {"arena": "off"}))
        if config.memory.max_slabs > SMALL_SLABS or config.memory.spill_bytes > SMALL_SPILL:
            found.append(Step(self.name, {"buffers": "small"}))
        return found or self.skip("everything is as small as it can be")

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        folders.write(parent, with_memory(parent.config, step), target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        asked = "0" if step.settings.get("arena") == "off" else None
        found = after.built.get(ARENA)
        if asked is not None and found != asked:
            return [f"asked for no arena, the runtime says {ARENA} {found}"]
        return []


def with_memory(config: ModelConfig, step: Step) -> ModelConfig:
    if step.settings.get("arena") == "off":
        # Memory patterns are plans for the arena.
        return replace(config, options={**config.options, ARENA: "0", PATTERN: "0"})
    memory = config.memory
    return replace(
        config,
        memory=replace(
            memory,
            max_slabs=min(memory.max_slabs, SMALL_SLABS),
            spill_bytes=min(memory.spill_bytes, SMALL_SPILL),
        ),
    )
