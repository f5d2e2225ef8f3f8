"""Tries one candidate after the other: build, read back, compare, judge, time.

Every attempt is recorded with its outcome, failed and slower ones too. Which steps are tried is
decided elsewhere (`search`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.optimizer import goals, outcomes, time_plan
from penstock.optimizer.answer_source import CHOICE
from penstock.optimizer.candidates import Build, Skip, Step
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.facts import Facts, fallback_problem
from penstock.optimizer.findings import Contender, Findings, arrangement
from penstock.optimizer.passes import Pass, PassContext
from penstock.optimizer.progress import ProgressReporter
from penstock.optimizer.results import Try
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.shapes import arrangements, further, shapes, with_instances
from penstock.optimizer.simulate import TimeTable
from penstock.optimizer.time_plan import OutOfTime, TimeBudget
from penstock.slo import Memory

# On a GPU, a prediction for one instance below this share of the best ends the timing.
HOPELESS = 0.6
# Share of the machine's memory that instances of one candidate may take while they are timed.
MAX_MEMORY = 0.25


def pass_context(run: RunContext, contender: Contender) -> PassContext:
    """Describe a contender to passes."""
    build, facts, times = contender.build, contender.facts, contender.times
    return PassContext(run.plan, run.machine, build, facts, run.examples, times, run.rows)


@dataclass(slots=True)
class Attempts:
    """Tries steps on parents and adds the results to the findings."""

    evaluator: Evaluator
    findings: Findings
    budget: TimeBudget
    progress: ProgressReporter
    _seen: set[str] = field(default_factory=set)

    def predict(self, build: Build, facts: Facts, *, is_lossy: bool) -> Contender:
        """Make a contender of a build that passed its gates: measure batch times, as far as they
        matter and there is time, and simulate servers."""
        machine, budget = self.evaluator.run.machine, self.budget
        began = budget.clock()
        times: dict[tuple[int, int], TimeTable] = {}
        contender = Contender(build, facts, times, [], is_lossy)
        is_on_gpu = build.config.uses_gpu
        for pair in arrangements(build.config, machine.num_cores):
            memory_bytes = pair[0] * max((t.memory_bytes for t in times.values()), default=0)
            if memory_bytes > MAX_MEMORY * machine.memory_bytes and not is_on_gpu:
                break
            if times and not budget.has_search_time((budget.clock() - began) / len(times)):
                break
            times[pair] = self.evaluator.measurements.times(build, *pair)
            if budget.estimates.is_short and not is_on_gpu:
                break
            if is_on_gpu and self._is_hopeless(contender):
                # More instances only overlap copies with compute, which would not make it the best.
                break
        contender.shapes = self._within_memory(contender)
        return contender

    def refine(self, contender: Contender) -> None:
        """Time more instances of the best contender on a GPU, as long as each step is predicted to
        raise the rate; and search for queue delays and preferred sizes of batches."""
        run, budget = self.evaluator.run, self.budget
        config, num_cores = contender.build.config, run.machine.num_cores
        self.progress.begin(contender.candidate)
        contender.shapes = self._within_memory(contender, is_thorough=True)
        while (pair := further(config, contender.times, num_cores)) is not None:
            step = Step("instances", {"instances": str(pair[0]), "threads": str(pair[1])})
            if not budget.has_search_time(budget.step_s):
                reason = "out of time before it was tried"
                self.findings.skipped.append(Skip("instances", reason, step, cut_by="time"))
                return
            before = contender.rate
            try:
                contender.times[pair] = self.evaluator.measurements.times(contender.build, *pair)
            except PenstockError as error:
                self.findings.skipped.append(Skip("instances", str(error), step))
                return
            contender.shapes = self._within_memory(contender, is_thorough=True)
            if not goals.is_better(contender.rate, before):
                reason = f"{contender.speed_text} predicted, no more than with fewer instances"
                self.findings.skipped.append(Skip("instances", reason, step))
                return

    def _is_hopeless(self, contender: Contender) -> bool:
        """Compare with the best at the smallest number of instances."""
        if not self.findings.contenders or self.evaluator.run.plan.is_exhaustive:
            return False
        contender.shapes = shapes(pass_context(self.evaluator.run, contender))
        fewest = min(num_instances for num_instances, _ in contender.times)
        best = self.findings.best.shapes
        alone = [rate for steps, rate in best if arrangement(steps)[0] == fewest]
        return contender.rate < HOPELESS * max(alone, default=0.0)

    def _within_memory(
        self, contender: Contender, *, is_thorough: bool = False
    ) -> list[tuple[tuple[Step, ...], float]]:
        """Return the shapes within the SLO's memory limit; all if none is known to fit."""
        slo = self.evaluator.run.plan.slo
        found = shapes(pass_context(self.evaluator.run, contender), is_thorough=is_thorough)
        limits = [term.limit for term in slo.terms if isinstance(term, Memory)]
        if not limits:
            return found
        config = contender.build.config
        one = max(table.memory_bytes for table in contender.times.values())

        def needed(steps: Sequence[Step]) -> int:
            pair = arrangement(steps)
            known = contender.times.get(pair)
            memory_bytes = one if known is None else known.memory_bytes
            return len(with_instances(config, *pair).workers) * memory_bytes

        fitting = [each for each in found if needed(each[0]) <= min(limits)]
        return fitting or found

    def fresh(self, parent: Contender, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that were not tried on this parent."""
        return [one for one in steps if parent.candidate.then(one).key not in self._seen]

    def try_step(self, each: Pass, parent: Contender, step: Step) -> Try:
        with self._record(each, parent, step) as record:
            build = self._checked(each, parent, record)
            if build is not None:
                is_lossy = parent.is_lossy or each.changes_answers
                contender = self.predict(build, _facts(record), is_lossy=is_lossy)
                note_times(record, contender)
                if not is_lossy or self._is_accurate(build, record):
                    self._compare(contender, record)
        return record

    def try_variants(self, each: Pass, parent: Contender, steps: Sequence[Step]) -> None:
        """Try steps that build the same operators with other numbers: all are judged, and the best
        is timed for all of them. If none passes, fall back to float for some layers."""
        judged: list[Try] = []
        budget = self.budget
        try:
            for step in steps:
                with self._record(each, parent, step) as record:
                    build = self._checked(each, parent, record)
                    if build is not None:
                        self._is_accurate(build, record)
                        judged.append(record)
        except OutOfTime:
            # Steps that have passed are worth timing, if there is time.
            is_worth = any(record.outcome != "rejected" for record in judged)
            needed_s = budget.step_s + budget.estimates.shortest_kept_s
            if is_worth and budget.left_s is not None and budget.left_s >= needed_s:
                budget.is_finishing = True
                self._compare_variants(each, parent, judged)
            raise
        self._compare_variants(each, parent, judged)

    def _compare_variants(self, each: Pass, parent: Contender, judged: Sequence[Try]) -> None:
        best, contender = self._timed_best(judged)
        if best is None or contender is None:
            return
        for record in judged:
            note_times(record, contender)
        if best.outcome == "rejected":
            self._fall_back(each, parent, best, contender)
            return
        self._compare(contender, best)
        for record in judged:
            if record is not best and record.outcome != "rejected":
                record.outcome = "equal"
                record.reason = f"as fast as {best.candidate.steps[-1]}, which loses no more"

    def _timed_best(self, judged: Sequence[Try]) -> tuple[Try | None, Contender | None]:
        """Return the most accurate try that can be timed, and its contender."""
        for record in sorted(judged, key=_by_accuracy):
            try:
                build = self.evaluator.builder.build(record.candidate)
                return record, self.predict(build, _facts(record), is_lossy=True)
            except PenstockError as error:
                record.outcome, record.reason = outcomes.outcome_of_error(error)
        return None, None

    @contextlib.contextmanager
    def _record(self, each: Pass, parent: Contender, step: Step) -> Iterator[Try]:
        """Record a try; a candidate that fails is a result like others."""
        budget = self.budget
        budget.check(budget.step_s)
        began = budget.clock()
        candidate = parent.candidate.then(step)
        self._seen.add(candidate.key)
        self.progress.begin(candidate)
        record = Try(candidate, each.stage, "failed", "")
        try:
            yield record
        except OutOfTime:
            self.findings.skipped.append(Skip(step.pass_name, outcomes.CUT_OFF, step))
            raise
        except PenstockError as error:
            record.outcome, record.reason = outcomes.outcome_of_error(error)
        record.seconds = budget.clock() - began
        self.findings.tries.append(record)

    def _checked(self, each: Pass, parent: Contender, record: Try) -> Build | None:
        """Build, read back and compare with the original; None if one of these fails."""
        candidate = record.candidate
        build = self.evaluator.builder.build(candidate)
        record.facts = facts = self.evaluator.inspector.facts(build)
        # Rows influence each other at any precision: a tolerance for rounding must not hide it.
        facts.batching_problem = facts.batching_problem or parent.facts.batching_problem
        problems = each.check(candidate.steps[-1], parent.facts, facts)
        problems += filter(None, [fallback_problem(parent.facts, facts)])
        if problems:
            reason = f"not what was asked for: {'; '.join(problems)}"
        elif facts.repeat_problem:
            reason = f"the same rows give different answers each time: {facts.repeat_problem}"
        else:
            is_exact = not (parent.is_lossy or each.changes_answers)
            record.numerics = self.evaluator.gate.numerics(build, is_exact=is_exact)
            reason = "; ".join(record.numerics.problems)
        if reason:
            record.outcome, record.reason = "rejected", reason
            return None
        return build

    def _is_accurate(self, build: Build, record: Try) -> bool:
        began = self.budget.clock()
        record.accuracy = judged = self.evaluator.gate.judge(build, CHOICE)
        self.budget.learn_judging(self.budget.clock() - began)
        record.outcome = "equal" if judged.is_passed else "rejected"
        record.reason = "" if judged.is_passed else judged.text
        return judged.is_passed

    def _compare(self, contender: Contender, record: Try) -> None:
        best = self.findings.best
        self.findings.contenders.append(contender)
        against = f"{contender.speed_text} predicted, {best.candidate} {best.speed_text}"
        record.reason = against
        if contender.is_ahead(best):
            record.outcome = "kept"
            self.profile_step(record, contender)
        elif best.is_ahead(contender):
            record.outcome = "slower"
        else:
            record.outcome, record.reason = "equal", f"{against}: no difference beyond the noise"
        self.progress.refresh()

    def try_with_floats(self, each: Pass, parent: Contender, refused: Try) -> Try:
        """Try the step again with some layers in float; return the try that counts."""
        try:
            build = self.evaluator.builder.build(refused.candidate)
            timed = self.predict(build, _facts(refused), is_lossy=True)
        except PenstockError as error:
            refused.reason += f"; it could not be timed: {error}"
            return refused
        self._fall_back(each, parent, refused, timed)
        return self.findings.tries[-1]

    def profile_step(self, record: Try, contender: Contender) -> None:
        """On a GPU, find out where the time of a kept step goes, at the batch size of its best
        shape, if there is time. If this fails, only the report lacks a figure."""
        config = contender.build.config
        if not (config.uses_gpu and self.budget.has_search_time(time_plan.STEP_PROFILE_S)):
            return
        sizes = [
            step.settings.get("max_batch") for steps, _ in contender.shapes[:1] for step in steps
        ]
        num_rows = next((int(size) for size in sizes if size), 1)
        with contextlib.suppress(PenstockError):
            record.step_time = self.evaluator.measurements.step_time(contender.build, num_rows)

    def _fall_back(self, each: Pass, parent: Contender, refused: Try, timed: Contender) -> None:
        """If it would be the fastest, keep some layers in float: those that regain the most
        accuracy for the time they cost."""
        if not timed.is_ahead(self.findings.best):
            refused.reason += "; no faster either, so no layer was kept in float for it"
            return
        self.progress.begin(refused.candidate)
        try:
            step = refused.candidate.steps[-1]
            found = self.evaluator.fall_back(parent.build, step, self.budget.check)
        except PenstockError as error:
            refused.reason += f"; the sensitivity of layers could not be measured: {error}"
            return
        if found.step is None:
            refused.reason += "; keeping layers in float did not help"
            if found.layers:
                named = ", ".join(f"{x.name} ({x.regained:.0%})" for x in found.layers)
                refused.reason += f"; layers that cause most of the error: {named}"
            return
        self.try_step(each, parent, found.step).fallback = found.layers


def note_times(record: Try, contender: Contender) -> None:
    record.times = list(contender.times.values())
    record.predicted_rate = contender.rate
    if contender.shapes:
        record.predicted_shape = ", ".join(map(str, contender.shapes[0][0]))


def _by_accuracy(record: Try) -> tuple[bool, float]:
    """Sort key: passed first, then by the smallest loss bound."""
    assert record.accuracy is not None
    return not record.accuracy.is_passed, record.accuracy.loss_bound


def _facts(record: Try) -> Facts:
    assert record.facts is not None
    return record.facts
