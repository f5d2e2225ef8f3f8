"""Serves contenders in their best configurations, in turns, and measures them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.backends.gpu_memory import tells_of_no_memory
from penstock.errors import BackendFailed, PenstockError
from penstock.optimizer import outcomes
from penstock.optimizer.attempts import pass_context
from penstock.optimizer.candidates import Build, Candidate, Skip, Step
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.findings import Contender, Finalist, Findings, Shaped
from penstock.optimizer.passes import Pass, PassContext
from penstock.optimizer.progress import ProgressReporter
from penstock.optimizer.results import Try
from penstock.optimizer.time_plan import TimeBudget

# Time to search for the highest rate of one finalist.
RATE_S = 30.0
NO_TIME = "out of time before it was tried"


@dataclass(slots=True)
class ServingRounds:
    evaluator: Evaluator
    findings: Findings
    budget: TimeBudget
    progress: ProgressReporter
    passes: Sequence[Pass]

    def measure_finalists(
        self, limit: int, *, is_fresh: bool = False, is_final: bool = True
    ) -> None:
        """Serve the finalists. If the SLO is out of reach, search for the highest rate that keeps
        its latency: overloaded servers all look the same. Predictions are off by more than builds
        differ, so several builds are served. If no rate is predicted to keep the SLO, none is
        searched for: the lowest latency wins."""
        findings, plan = self.findings, self.evaluator.run.plan
        has_rates = plan.slo.latency_s is not None and findings.best.rate > 0
        if findings.is_in_reach(plan) or not (has_rates and self.budget.estimates.has_rates):
            self.measure(findings.nearest(limit, is_fresh=is_fresh), is_final=is_final)
        else:
            self.measure(findings.leading(), RATE_S, is_final=is_final)

    def measure(
        self, chosen: Sequence[Shaped], search_s: float = 0.0, *, is_final: bool = True
    ) -> None:
        """Serve contenders in turns, in these serving configurations. The best that already keeps
        the SLO is measured along with them, if there is time. `search_s`: for the highest rate of
        each, too; `is_final`: no more steps follow."""
        budget, finalists = self.budget, self.findings.finalists
        known = [(one.contender, one.build) for one in finalists[:1] if one.served.is_met]
        stage = budget.stage
        budget.stage = "batching"
        fresh: list[tuple[Contender, Build]] = []
        shaped = self._shaped(chosen)
        # Build only as many as there is time to measure.
        while len(fresh) < budget.num_measurable(len(known), search_s, is_final=is_final):
            if (one := next(shaped, None)) is None:
                break
            fresh.append(one)
        # The builds may have used up the time to measure them.
        if fresh and budget.num_measurable(0, search_s, is_final=is_final):
            if not budget.num_measurable(len(known), search_s, is_final=is_final):
                known = []
            self.progress.begin(", ".join(str(build.candidate) for _, build in fresh))
            self._serve(known + fresh, search_s)
        budget.stage = stage

    def _serve(self, runners: Sequence[tuple[Contender, Build]], search_s: float = 0.0) -> None:
        """Serve in turns, and add each with its share of the time. If that fails, serve one by one,
        so that only the failing one is lost. `search_s`: for the highest rate of each; 0: none."""
        budget, findings, measurements = self.budget, self.findings, self.evaluator.measurements
        began = budget.clock()
        builds = [build for _, build in runners]
        try:
            if search_s:
                servings = measurements.with_rates(builds, search_s)
            else:
                servings = measurements.serve(builds)
        except PenstockError as error:
            if len(runners) > 1 and budget.has_time(budget.estimates.serve_s()):
                for runner in runners:
                    self._serve([runner], search_s)
                return
            seconds = (budget.clock() - began) / len(runners)
            outcome, reason = outcomes.outcome_of_error(error)
            reason = f"not served: {reason}"
            findings.tries += [
                Try(build.candidate, "batching", outcome, reason, seconds=seconds)
                for build in builds
                if build.candidate.key not in findings.served
            ]
            if smaller := self._halved(runners, error):
                self._serve(smaller, search_s)
            return
        seconds = (budget.clock() - began) / len(runners)
        for (contender, build), served in zip(runners, servings, strict=True):
            findings.add_served(contender, build, served)
            self.progress.refresh()
            findings.note_served(build, served, seconds)

    def _halved(
        self, runners: Sequence[tuple[Contender, Build]], error: PenstockError
    ) -> list[tuple[Contender, Build]]:
        """Return a build whose server ran out of memory with half of its largest batch; empty if
        that was not the reason, or there is no half or no time."""
        if len(runners) > 1 or not tells_of_no_memory(str(error), None):
            return []
        [(contender, build)] = runners
        steps = build.candidate.steps[len(contender.candidate.steps) :]
        size = build.config.max_batch_size // 2
        is_batched = any(step.settings.get("max_batch") for step in steps)
        if not is_batched or not size or not self.budget.has_time(self.budget.estimates.serve_s()):
            return []
        return list(self._shaped([(contender, tuple(_within(step, size) for step in steps))]))

    def _shaped(self, chosen: Sequence[Shaped]) -> Iterator[tuple[Contender, Build]]:
        """Yield those not served so far; each is built when it is needed."""
        for contender, steps in chosen:
            candidate = contender.candidate.then(*steps)
            if candidate.key in self.findings.served:
                continue
            try:
                yield contender, self._build_shape(contender, candidate, steps)
            except PenstockError as error:
                outcome = outcomes.outcome_of_error(error)
                self.findings.tries.append(Try(candidate, "batching", *outcome))

    def _build_shape(
        self, contender: Contender, candidate: Candidate, steps: Sequence[Step]
    ) -> Build:
        build = self.evaluator.builder.build(candidate)
        facts = self.evaluator.inspector.facts(build)
        for step in steps:
            made_by = next(each for each in self.passes if each.name == step.pass_name)
            problems = made_by.check(step, contender.facts, facts)
            if problems:
                raise BackendFailed(f"not what was asked for: {'; '.join(problems)}")
        return build

    def note_skipped(self) -> None:
        """Note why serving passes have nothing to offer."""
        context = pass_context(self.evaluator.run, self.findings.best)
        for each in self.passes:
            if each.is_config_only and each.stage != "memory":
                found = each.propose(context)
                self.findings.skipped += [one for one in found if isinstance(one, Skip)]

    def try_memory(self) -> None:
        """If the best misses only its memory limit, try it with less memory."""
        best = self.findings.finalists[0]
        missed = {each.unit for each in best.served.verdicts if each.outcome == "missed"}
        if missed != {"bytes"}:
            return
        self.budget.stage = "memory"
        for each in self.passes:
            if each.stage == "memory":
                context = pass_context(self.evaluator.run, best.contender)
                self._try_less(each, best, replace(context, build=best.build))

    def _try_less(self, each: Pass, best: Finalist, context: PassContext) -> None:
        contender, findings = best.contender, self.findings
        for step in each.propose(context):
            if isinstance(step, Skip):
                findings.skipped.append(step)
                continue
            if not self.budget.has_time(self.budget.estimates.in_turns_s(2)):
                findings.skipped.append(Skip(each.name, NO_TIME, step))
                continue
            candidate = best.build.candidate.then(step)
            self.progress.begin(candidate)
            try:
                build = self._build_shape(contender, candidate, [step])
            except PenstockError as error:
                findings.tries.append(Try(candidate, "memory", *outcomes.outcome_of_error(error)))
                continue
            self._serve([(contender, best.build), (contender, build)])


def _within(step: Step, size: int) -> Step:
    """Return a batching step with batches of at most this size; others as they are."""
    if "max_batch" not in step.settings:
        return step
    settings = {**step.settings, "max_batch": str(size)}
    sizes = [each for each in settings.pop("preferred", "").split(",") if each]
    if kept := [each for each in sizes if int(each) <= size]:
        settings["preferred"] = ",".join(kept)
    return Step(step.pass_name, settings)
