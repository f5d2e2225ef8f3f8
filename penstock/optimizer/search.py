"""The search loop: from the original, step by step, to the first candidate that keeps the SLO.

In each stage, passes propose steps (`attempts` tries them). Candidates that are predicted to come
near the SLO are served and measured; the search ends at the first stage that is enough, unless it
is exhaustive. The evaluator's results may come from the journal: the same results lead to the same
choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.optimizer import goals, time_plan, wording
from penstock.optimizer.attempts import Attempts, note_times, pass_context
from penstock.optimizer.candidates import Skip, Stage, Step
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.findings import MAX_FINALISTS, NUM_SEMIFINALISTS, Contender, Findings
from penstock.optimizer.passes import LayeredPass, Pass
from penstock.optimizer.progress import ProgressReporter, to_measure
from penstock.optimizer.results import Try
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.serving_rounds import NO_TIME, ServingRounds
from penstock.optimizer.time_plan import MODEL_STAGES, OutOfTime, TimeBudget

# Parents below this share of the best are not used in the stage: BF16 may double the rate.
MIN_PARENT: Mapping[Stage, float] = {"precision": 0.6, "quantise": 0.4}
# Passes whose later steps, on a GPU, are at best as fast as the first: BF16 and TF32 after FP16,
# FP8 for some matmuls after FP8 for all, launching kernel by kernel after CUDA graphs.
ALTERNATIVES = ("half", "fp8", "onnxruntime-gpu")
# Starts again from the model's own operators, however far other passes have come.
COMPILER = "torch-compile"
FAR_BEHIND = "the candidates that it could build on are far slower than the best"
NEEDS_DATA = "needs data: without examples no loss of accuracy can be seen"


@dataclass(frozen=True, slots=True)
class Proposals:
    findings: Findings
    run: RunContext

    @property
    def is_pruned(self) -> bool:
        """Whether steps that are unlikely to win are left out, on a GPU."""
        return self.run.original.config.uses_gpu and not self.run.plan.is_exhaustive

    def propose(self, each: Pass) -> tuple[list[tuple[Contender, list[Step]]], list[Skip]]:
        """Return the steps that the pass proposes for the best contender of each family, or the
        reasons why it proposes none."""
        if each.changes_answers and self.run.examples is None:
            return [], [Skip(each.name, NEEDS_DATA)]
        is_adding = each.stage == "compile" and not (each.name == COMPILER or each.starts_over)
        proposals: dict[tuple[str, bool], tuple[Contender, list[Step]]] = {}
        skips: dict[str, Skip] = {}
        for parent in sorted(self.findings.contenders, key=_from_the_best):
            family = _family(parent.build.config)
            has_step = any(step.pass_name == each.name for step in parent.candidate.steps)
            if family in proposals or has_step:
                continue
            if self._is_far_behind(parent, each):
                skips[FAR_BEHIND] = Skip(each.name, FAR_BEHIND)
                continue
            found = each.propose(pass_context(self.run, parent))
            steps = [one for one in found if isinstance(one, Step)]
            skips.update({one.reason: one for one in found if isinstance(one, Skip)})
            # On a GPU, passes that build on their parent are not tried on slower parents, even if
            # they propose nothing for the best.
            if steps or (is_adding and self.is_pruned):
                proposals[family] = (parent, steps)
        found_any = [each for each in proposals.values() if each[1]]
        return found_any, [] if found_any else list(skips.values())

    def reason_to_stop(self, each: Pass, step: Step, record: Try) -> str:
        """Return why to skip the remaining steps, on a GPU: the step passed and the others are its
        fallbacks, or the compiler's kernels are behind and it would only get more tuning time."""
        if not self.is_pruned:
            return ""
        is_passed = record.outcome not in ("rejected", "failed", "cut off")
        if each.name in ALTERNATIVES and is_passed:
            return f"{step} has passed, and this would be no faster"
        if each.name != COMPILER or "mode" not in step.settings or record.outcome == "kept":
            return ""
        if is_passed:
            best = self.findings.best.candidate
            return f"{step} is not ahead of {best}; tuning the same for longer would not bring it"
        how = "failed" if record.outcome == "failed" else f"was {record.outcome}"
        return f"{step} {how}: the same compiler with more time is not tried"

    def _is_far_behind(self, parent: Contender, each: Pass) -> bool:
        """Return whether no precision can make a parent the best. A compiler might."""
        if each.stage == "compile" or self.run.plan.is_exhaustive:
            return False
        return parent.rate < MIN_PARENT[each.stage] * self.findings.best.rate


def _gpu_seconds(each: Pass) -> float:
    return each.gpu_seconds or time_plan.LONG_ON_GPU_S.get(each.name, 0.0)


def _from_the_best(contender: Contender) -> tuple[float, float]:
    """Sort key: by rate; without one that keeps the SLO, by the latency of a single request."""
    return -contender.rate, 0.0 if contender.rate else contender.alone_s


def _family(config: ModelConfig) -> tuple[str, bool]:
    """Return the family of a build, of which the best stands for all: builds of one engine. On a
    GPU, models compiled at load are a separate family: later steps may decide whether that pays."""
    return config.engine, config.uses_gpu and "penstock.compile" in config.options


# Headroom: to be enough, the predicted rate must be this many times the required rate. Fully loaded
# servers keep an SLO on one day and not on the next.
ROOM = 1.3
# Seconds to ask the passes that had no time whether they had anything to try.
MAX_ASKING_S = 1.0
# Smallest time budget with room for a profile on a GPU, which measures the device first.
PROFILE_BUDGET_S = 900.0


class Search:
    """The search of one run. Does not measure or write anything itself."""

    def __init__(
        self,
        evaluator: Evaluator,
        findings: Findings,
        budget: TimeBudget,
        progress: ProgressReporter,
        passes: Sequence[Pass],
    ) -> None:
        self._evaluator = evaluator
        self._plan = evaluator.run.plan
        self.findings = findings
        self.budget = budget
        self.progress = progress
        self._passes = passes
        self._is_on_gpu = evaluator.run.original.config.uses_gpu
        # Names of the passes that ran to their end.
        self._asked: set[str] = set()
        self._proposals = Proposals(findings, evaluator.run)
        self._attempts = Attempts(evaluator, findings, budget, progress)
        self._rounds = ServingRounds(evaluator, findings, budget, progress, passes)

    def run(self) -> Findings:
        """Run the search. An interruption or the end of the time budget ends it but keeps its
        results; a second interruption ends everything."""
        findings = self.findings
        try:
            self._sequence()
        except KeyboardInterrupt:
            findings.is_interrupted = True
            self._note_left("interrupted before it was tried", "interrupt")
            self.progress.tell("finishing with the best so far")
        except OutOfTime:
            findings.is_out_of_time = True
            self._note_left(NO_TIME, "time")
            self._note_no_step()
        # Serve the best candidates so far in a short measurement, so that they have real figures;
        # time is reserved for this.
        if findings.is_interrupted and len(findings.contenders) > 1:
            self._rounds.measure(to_measure(findings, self.budget))
        elif findings.is_out_of_time and len(findings.contenders) > 1:
            # Those already served are skipped in favour of the next ones.
            self._rounds.measure_finalists(NUM_SEMIFINALISTS, is_fresh=True)
        return findings

    def _sequence(self) -> None:
        self._start()
        if self._is_enough():
            return
        for stage in self.progress.stages:
            if stage not in MODEL_STAGES:
                continue
            if stage == "quantise":
                self._profile()
            self.budget.stage = stage
            passes = [each for each in self._passes if each.stage == stage]
            if self._is_on_gpu:
                # Stable: passes of equal cost keep their order.
                passes.sort(key=_gpu_seconds)
            for each in passes:
                if each.name == COMPILER and self._is_on_gpu and self._ends_here():
                    return
                self._run_pass(each)
            if not self._is_followed_by_lossless(stage) and self._ends_here():
                return
        if self._is_on_gpu:
            self.budget.stage = "instances"
            self._attempts.refine(self.findings.best)
        self._rounds.measure_finalists(MAX_FINALISTS)
        self._rounds.measure(self.findings.overlooked(self._plan))
        self._rounds.note_skipped()
        self._rounds.try_memory()

    def _ends_here(self) -> bool:
        """Serve the best if they may be enough; return whether they are."""
        if not self._may_be_enough():
            return False
        self._rounds.measure_finalists(NUM_SEMIFINALISTS, is_final=False)
        return self._is_enough()

    def _is_followed_by_lossless(self, stage: Stage) -> bool:
        """Return whether the next stage has steps that lose nothing and take seconds: on a GPU they
        come before servers, which take longer to start."""
        return self._is_on_gpu and stage == "precision"

    # When to stop.

    def _is_enough(self) -> bool:
        """Return whether the SLO is met for sure, with headroom unless by the original."""
        if self._plan.is_exhaustive or not self.findings.is_met():
            return False
        best = self.findings.finalists[0]
        return not best.build.candidate.steps or self._has_room(best.contender)

    def _may_be_enough(self) -> bool:
        """Return whether a served run may show that the search can end. On a GPU, where servers
        start slowly, and with a small budget, the prediction must have headroom."""
        is_short = self.budget.estimates.is_short
        if (self._is_on_gpu or is_short) and not self._plan.is_exhaustive:
            return self._has_room(self.findings.best)
        return self.findings.is_in_reach(self._plan)

    def _has_room(self, contender: Contender) -> bool:
        required = goals.required_rate(self._plan.slo, self._plan.price_per_hour)
        return contender.rate >= ROOM * required

    # The stages.

    def _start(self) -> None:
        """Measure the original in its own configuration."""
        original, budget, findings = self._evaluator.run.original, self.budget, self.findings
        self.progress.begin(original.candidate)
        began = budget.clock()
        facts = self._evaluator.inspector.facts(original)
        contender = self._attempts.predict(original, facts, is_lossy=False)
        timed = budget.clock()
        reason = "the original, as it would be served"
        record = Try(original.candidate, "baseline", "kept", reason, facts=facts)
        # While it is loaded.
        self._attempts.profile_step(record, contender)
        profiled = budget.clock()
        record.served = served = self._evaluator.measurements.serve([original])[0]
        budget.learn_baseline(timed - began, budget.clock() - profiled)
        findings.contenders.append(contender)
        findings.original = served
        findings.add_served(contender, original, served)
        self.progress.refresh()
        record.seconds = budget.clock() - profiled
        note_times(record, contender)
        findings.tries.append(record)

    def _profile(self) -> None:
        """Find the bottleneck of the best. If this fails, only the report lacks a figure."""
        budget_s = self._plan.budget_s
        is_short = self._is_on_gpu and budget_s is not None and budget_s < PROFILE_BUDGET_S
        if is_short or not self.budget.has_search_time(time_plan.PROFILE_S):
            return
        best = self.findings.best
        self.progress.begin(best.candidate)
        with contextlib.suppress(PenstockError):
            self.findings.profile = self._evaluator.measurements.profile(best.build)
            self.findings.profiled = best.candidate.key

    def _run_pass(self, each: Pass) -> None:
        proposed, skipped = self._proposals.propose(each)
        self.findings.skipped += skipped
        for parent, steps in proposed:
            fresh = self._attempts.fresh(parent, steps)
            if isinstance(each, LayeredPass) and not each.steps_differ:
                self._attempts.try_variants(each, parent, fresh)
            else:
                self._try_each(each, parent, fresh)
        self._asked.add(each.name)

    def _try_each(self, each: Pass, parent: Contender, steps: Sequence[Step]) -> None:
        """Try all steps, until the rest cannot win any more."""
        for place, step in enumerate(steps):
            record = self._attempts.try_step(each, parent, step)
            if isinstance(each, LayeredPass) and record.is_inaccurate:
                record = self._attempts.try_with_floats(each, parent, record)
            reason = self._proposals.reason_to_stop(each, step, record)
            if reason:
                left = steps[place + 1 :]
                self.findings.skipped += [Skip(each.name, reason, other) for other in left]
                return

    # Notes.

    def _note_left(self, reason: str, cut_by: Literal["time", "interrupt"]) -> None:
        """Note the passes that did not run, or not to the end."""
        began = self.budget.clock()
        for each in self._passes:
            if each.stage not in MODEL_STAGES or each.name in self._asked:
                continue
            if each.is_for_gpus and not self._is_on_gpu:
                continue
            skips = [Skip(each.name, reason, cut_by=cut_by)]
            # An interruption ends at once.
            if cut_by == "time" and self.budget.clock() - began < MAX_ASKING_S:
                proposed, others = self._proposals.propose(each)
                # With more time, too, there would be nothing to try.
                skips = skips if proposed else others or skips
            self.findings.skipped += skips

    def _note_no_step(self) -> None:
        """If not even one step had time, say so and suggest a sufficient budget."""
        budget, budget_s = self.budget, self._plan.budget_s
        is_done = any(each.outcome != "cut off" for each in self.findings.tries[1:])
        if is_done or budget_s is None:
            return
        needed_s = budget.baseline_s + budget.step_s + budget.estimates.shortest_kept_s
        # More than the budget that was too small.
        suggested_s = time_plan.smallest_budget_s(max(needed_s, budget_s + 1))
        self.findings.notes.append(
            f"no step was completed: {wording.span(budget_s)} are enough for the "
            f"baseline and the proof of the original only; use --budget {suggested_s:.0f}s or more"
        )
