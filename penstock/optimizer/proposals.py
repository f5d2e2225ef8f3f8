"""Steps that passes propose for each parent, and reasons not to try the rest. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.optimizer.candidates import Skip, Stage, Step
from penstock.optimizer.findings import Contender, Findings
from penstock.optimizer.passes import Pass, PassContext
from penstock.optimizer.results import Try

# Parents below this share of the best are not used in the stage: BF16 may double the rate, INT8
# more.
MIN_PARENT: Mapping[Stage, float] = {"precision": 0.6, "quantise": 0.4}
# Passes whose later steps, on a GPU, are at best as fast as the first: BF16 and TF32 after FP16,
# FP8 for some matmuls after FP8 for all.
ALTERNATIVES = ("half", "fp8")
# Starts again from the model's own operators, however far other passes have come.
COMPILER = "torch-compile"
FAR_BEHIND = "the candidates that it could build on are far slower than the best"
NEEDS_DATA = "needs data: without examples no loss of accuracy can be seen"


@dataclass(frozen=True, slots=True)
class Proposals:
    """Asks passes for steps. `context` describes a contender to them."""

    findings: Findings
    context: Callable[[Contender], PassContext]
    is_on_gpu: bool
    is_exhaustive: bool
    has_data: bool

    def propose(self, each: Pass) -> tuple[list[tuple[Contender, list[Step]]], list[Skip]]:
        """Return the steps that the pass proposes for the best contender of each family, or the
        reasons why it proposes none."""
        if each.changes_answers and not self.has_data:
            return [], [Skip(each.name, NEEDS_DATA)]
        proposals: dict[tuple[str, bool], tuple[Contender, list[Step]]] = {}
        skips: dict[str, Skip] = {}
        for parent in sorted(self.findings.contenders, key=_from_the_best):
            family = _family(parent.build.config)
            if family in proposals or _has_step(parent, each):
                continue
            if self._is_far_behind(parent, each):
                skips[FAR_BEHIND] = Skip(each.name, FAR_BEHIND)
                continue
            found = each.propose(self.context(parent))
            steps = [one for one in found if isinstance(one, Step)]
            skips.update({one.reason: one for one in found if isinstance(one, Skip)})
            if steps or self._stands_for_all(each):
                proposals[family] = (parent, steps)
        found_any = [each for each in proposals.values() if each[1]]
        return found_any, [] if found_any else list(skips.values())

    def reason_to_stop(self, each: Pass, step: Step, record: Try) -> str:
        """Return why to skip the remaining steps, on a GPU: the step passed and the others are its
        fallbacks, or the compiler's kernels are behind and it would only get more tuning time."""
        if not self.is_on_gpu or self.is_exhaustive:
            return ""
        is_passed = record.outcome not in ("rejected", "failed", "cut off")
        if each.name in ALTERNATIVES and is_passed:
            return f"{step} has passed, and this would be no faster"
        if each.name != COMPILER or "mode" not in step.settings:
            return ""
        if not is_passed:
            how = "failed" if record.outcome == "failed" else f"was {record.outcome}"
            return f"{step} {how}: the same compiler with more time is not tried"
        if record.outcome != "kept":
            best = self.findings.best.candidate
            return f"{step} is not ahead of {best}; tuning the same for longer would not bring it"
        return ""

    def _stands_for_all(self, each: Pass) -> bool:
        """Return whether only the best of a family is asked, even if the pass proposes nothing for
        it: on a GPU, passes that build on their parent are not tried on slower parents. Compilers
        start again from the model's own operators."""
        is_adding = each.stage == "compile" and each.name != COMPILER
        return self.is_on_gpu and is_adding and not self.is_exhaustive

    def _is_far_behind(self, parent: Contender, each: Pass) -> bool:
        """Return whether a parent is too slow for any precision to make it the best. A compiler
        might."""
        if each.stage == "compile" or self.is_exhaustive:
            return False
        return parent.rate < MIN_PARENT[each.stage] * self.findings.best.rate


def _from_the_best(contender: Contender) -> tuple[float, float]:
    """Sort key: by rate; without one that keeps the SLO, by the latency of a single request."""
    return -contender.rate, 0.0 if contender.rate else contender.alone_s


def _family(config: ModelConfig) -> tuple[str, bool]:
    """Return the family of a build, of which the best stands for all: builds of one backend. On a
    GPU, models compiled at load are a separate family: later steps may decide whether that pays."""
    return config.backend, config.uses_gpu and "penstock.compile" in config.options


def _has_step(contender: Contender, each: Pass) -> bool:
    return any(step.pass_name == each.name for step in contender.candidate.steps)
