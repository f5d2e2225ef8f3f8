"""From search results to the verdict: choose a finalist on the held-out set, prove it in turns with
the original, and conclude."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import PenstockError
from penstock.optimizer import disturbance, goals, outcomes, phases, shapes
from penstock.optimizer.accuracy import Judgement, spent_alpha
from penstock.optimizer.answer_source import HELD_OUT
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.examples import num_to_bring
from penstock.optimizer.findings import Finalist, Findings
from penstock.optimizer.interruption import finish
from penstock.optimizer.journal import TIMINGS, Journal
from penstock.optimizer.next_options import Missed, next_options
from penstock.optimizer.passes import shape_folding
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import ProgressReporter
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.optimizer.search import Search
from penstock.optimizer.time_plan import CutOff, TimeBudget

UNPROVEN = "was ahead in the search but was not proven"
BEST_MEASURED = "the best version measured so far"
# Smaller shares of values outside of the calibrated range are not worth a warning.
MIN_CLIPPED = 1e-4
INTERRUPTED_PROOF = "interrupted during the proof: the figures are those of the search"


@dataclass(slots=True)
class FinalChoice:
    finalist: Finalist
    held_out: Judgement | None
    # Why the verdict on the finalist cannot stand.
    doubts: list[str] = field(default_factory=list)

    @property
    def candidate(self) -> Candidate:
        return self.finalist.build.candidate


@dataclass(slots=True)
class Conclusion(ABC):
    """The end of one run. Completes the record `found` with everything but the version's number."""

    plan: Plan
    journal: Journal
    findings: Findings
    budget: TimeBudget
    progress: ProgressReporter
    found: Optimization
    # Better finalists that the held-out set rejected, in the order they were judged, by the key of
    # the model or of one way to serve it.
    refused: dict[str, Judgement] = field(default_factory=dict)
    # A proof that contradicts itself or earlier measurements is repeated once.
    max_proofs: int = 2
    # Whether the search has measured at the SLO's load, so that its figures compare with a proof.
    has_slo_load: bool = True
    # Whether the simulation predicts what is served: not for an ensemble, of which it knows a
    # member only.
    has_predictions: bool = True

    @abstractmethod
    def admit(self, finalist: Finalist) -> FinalChoice | None:
        """Judge a finalist on the held-out set; if it fails, add it to `refused` and return None.
        Each test spends a part of alpha, so that repeated testing does not inflate false
        positives. The original is always admitted."""

    @abstractmethod
    def measure_proof(
        self, finalists: Sequence[Finalist], attempt: int
    ) -> list[ServedMeasurement]: ...

    def describe(self, choice: FinalChoice) -> None:  # noqa: B027
        """Add notes on the choice to the record."""

    def conclude(self) -> FinalChoice:
        findings, found = self.findings, self.found
        self.progress.begin_proof(findings.finalists[0].build.candidate)
        choice = finish(findings, self.choose)
        self._prove(choice)
        other = self._better_proven(choice)
        if other is not None:
            choice = self._proven_again(choice, other)
        if self._original_does(choice):
            choice = self._return_to_original(choice)
        found.chosen, found.held_out = choice.candidate, choice.held_out
        found.notes += outcomes.mark_refused(findings.tries, self.refused)
        self._note_disturbances(choice)
        found.outcome = outcomes.outcome_of(found, is_interrupted=findings.is_interrupted)
        self.describe(choice)
        found.phases = phases.waterfall(found)
        return choice

    def choose(self) -> FinalChoice:
        """Return the first finalist that passes on the held-out set."""
        choices = map(self.admit, self.findings.finalists)
        return next(choice for choice in choices if choice is not None)

    @property
    def _original_finalist(self) -> Finalist:
        return next(one for one in self.findings.finalists if not one.build.candidate.steps)

    def _prove(self, choice: FinalChoice, to_save: str = "") -> bool:
        """Measure original and choice in turns, at the SLO's load and up to the highest rate of
        each. Return False if that did not run: `found` then has the figures of the search.
        `to_save` names what an interruption would save; empty: the choice, or the original if that
        does as well."""
        findings, found = self.findings, self.found
        found.before, found.after = findings.original, choice.finalist.served
        found.proof_failure = ""
        if findings.is_interrupted:
            return False
        pair = [self._original_finalist, choice.finalist][: 2 if choice.candidate.steps else 1]
        if not self.budget.has_time_to_prove(len(pair)):
            found.notes += [] if found.is_proven else [outcomes.NO_PROOF]
            return False
        is_proven = False
        for attempt in range(self.max_proofs):
            saved = Candidate() if self._original_does(choice) else choice.candidate
            self.progress.begin_proof(choice.candidate, to_save or str(saved))
            try:
                measured = self.measure_proof(pair, attempt)
            except (PenstockError, KeyboardInterrupt) as error:
                findings.is_interrupted = isinstance(error, KeyboardInterrupt)
                self._note_end(error, choice.candidate, is_proven=is_proven)
                return is_proven
            found.before, found.after = measured[0], measured[-1]
            found.is_proven = is_proven = True
            findings.proofs |= {Candidate().key: measured[0], choice.candidate.key: measured[-1]}
            self._note_doubts(choice, found.before, found.after)
            doubts = [*choice.doubts, *found.before.disturbances]
            if disturbance.is_close(found.after):
                doubts.append("close to the limit")
            is_last = attempt + 1 == self.max_proofs
            if not doubts or is_last or not self.budget.has_time_to_prove(len(pair)):
                break
            found.notes.append(f"measured again: {doubts[0]}")
        return True

    def _note_end(
        self, error: PenstockError | KeyboardInterrupt, candidate: Candidate, *, is_proven: bool
    ) -> None:
        """Note what ended a proof. An earlier measurement of the same proof stands."""
        found = self.found
        match error:
            case CutOff():
                found.notes += [] if is_proven else [outcomes.NO_PROOF]
            case KeyboardInterrupt():
                found.notes += [] if is_proven else [INTERRUPTED_PROOF]
            case _:
                found.notes.append(f"the proof of {candidate} failed: {error}")
                found.proof_failure = "" if is_proven else str(error)

    def _note_doubts(
        self, choice: FinalChoice, before: ServedMeasurement, after: ServedMeasurement
    ) -> None:
        """Collect what contradicts the proof, for the choice and for the original."""
        rate = None if self.plan.slo.rate is None else self.plan.slo.rate.per_s
        known = [self.findings.original] if self.has_slo_load else []
        original = disturbance.BuildHistory("original", before, list(filter(None, known)))
        chosen = original
        if choice.candidate.steps:
            chosen = disturbance.BuildHistory("chosen", after)
            if self.has_slo_load:
                finalist = choice.finalist
                predicted = (finalist.contender.rate or None) if self.has_predictions else None
                chosen = disturbance.BuildHistory("chosen", after, [finalist.served], predicted)
            self.found.before = msgspec.structs.replace(
                before, disturbances=disturbance.own_doubts(original, rate)
            )
        choice.doubts = disturbance.doubts(chosen, original, rate)
        gap = disturbance.prediction_gap(chosen, rate)
        if gap and not choice.doubts:
            self.found.notes.append(gap)

    def _note_disturbances(self, choice: FinalChoice) -> None:
        """If the verdict cannot stand, record what contradicts it and what disturbed the machine,
        and drop all timings from the journal so that none is reused."""
        if not choice.doubts:
            return
        servings = [each for each in (self.found.before, self.found.after) if each is not None]
        self.found.disturbances = [*choice.doubts, *disturbance.disturbances(servings)]
        self.journal.forget(TIMINGS)

    def _better_proven(self, choice: FinalChoice) -> FinalChoice | None:
        """If the first choice misses the SLO in its proof, return the next finalist that did better
        and is admitted, provided there is time to prove it."""
        for finalist in self._ahead(choice):
            if not self.budget.has_time_to_prove(2):
                if self.found.is_proven:
                    self.found.notes.append(f"{finalist.build.candidate} {UNPROVEN}")
                return None
            other = self.admit(finalist)
            if other is not None:
                return other
        return None

    def _ahead(self, choice: FinalChoice) -> Iterator[Finalist]:
        """Yield finalists whose search figures beat the choice's proof, if that misses the SLO."""
        after = self.found.after
        is_settled = after is None or after.is_met or self.findings.is_interrupted
        if after is None or is_settled or not self.has_slo_load:
            return
        for finalist in self.findings.finalists:
            pair = [choice.finalist.simplicity, finalist.simplicity]
            is_other = finalist.build is not choice.finalist.build
            if is_other and goals.order([after, finalist.served], pair)[0] == 1:
                yield finalist

    def _proven_again(self, first: FinalChoice, other: FinalChoice) -> FinalChoice:
        """Prove the other choice too; return the one with the better proof, or the first."""
        found = self.found
        before, after, is_proven = found.before, found.after, found.is_proven
        failure = found.proof_failure
        if not self._prove(other, BEST_MEASURED) and is_proven:
            found.notes.append(f"{other.candidate} {UNPROVEN}")
            found.before, found.after, found.proof_failure = before, after, failure
            return first
        if found.is_proven:
            found.notes.append(
                f"the first choice missed the SLO in its proof; {other.candidate} was proven too"
            )
        assert after is not None and found.after is not None
        pair = [first.finalist.simplicity, other.finalist.simplicity]
        if goals.order([after, found.after], pair)[0] == 1:
            return other
        found.before, found.after, found.is_proven = before, after, is_proven
        found.proof_failure = failure
        return first

    def _original_does(self, choice: FinalChoice) -> bool:
        """Return whether the original is no worse after all: it is the simplest."""
        before, after = self.found.before, self.found.after
        if before is None or after is None or not choice.candidate.steps:
            return False
        return goals.order([before, after], [0, choice.finalist.simplicity])[0] == 0

    def _return_to_original(self, choice: FinalChoice) -> FinalChoice:
        found = self.found
        how = "measured in turns, " if found.is_proven else ""
        found.notes.append(f"{how}the original does as well as {choice.candidate}, and is simpler")
        found.after = found.before
        original = self.admit(self._original_finalist)
        assert original is not None, "the original is always admitted"
        original.doubts = [] if found.after is None else list(found.after.disturbances)
        return original


class TensorConclusion(Conclusion):
    def __init__(self, evaluator: Evaluator, search: Search, found: Optimization) -> None:
        run, findings = evaluator.run, search.findings
        super().__init__(run.plan, run.journal, findings, search.budget, search.progress, found)
        self._evaluator = evaluator
        self.has_predictions = run.ensemble is None
        if run.ensemble is not None:
            found.member = run.ensemble.member
        if run.examples is not None:
            found.accuracy_budget = str(evaluator.gate.budget)
        found.notes = [*run.notes, *found.notes, *findings.notes]
        found.profile, found.profiled = findings.profile, findings.profiled

    def admit(self, finalist: Finalist) -> FinalChoice | None:
        """Every step is judged, lossless or not."""
        gate, refused = self._evaluator.gate, self.refused
        if self._evaluator.run.examples is None:
            return FinalChoice(finalist, None)
        candidate, model = finalist.build.candidate, finalist.contender.candidate
        alpha = spent_alpha(len(refused))
        if not candidate.steps:
            return FinalChoice(finalist, gate.judge_lossless(finalist.build, HELD_OUT, alpha))
        if candidate.key in refused or model.key in refused:
            return None
        judge = gate.judge if finalist.contender.is_lossy else gate.judge_lossless
        # In its serving configuration: users get its batching and padding too.
        judgement = judge(finalist.build, HELD_OUT, alpha)
        if not judgement.is_passed:
            # Other ways to serve the same model fail too; but the original is not refused.
            refused[model.key if model.steps else candidate.key] = judgement
            return None
        judgement = self._held_to_server(finalist, judgement)
        if not judgement.is_passed:
            refused[candidate.key] = judgement
            return None
        return FinalChoice(finalist, judgement)

    def _held_to_server(self, finalist: Finalist, judgement: Judgement) -> Judgement:
        """Fail the judgement if the server's answers differ from those that were judged."""
        is_lossy = finalist.contender.is_lossy
        try:
            problem = self._evaluator.check_served(finalist.build, is_lossy=is_lossy)
        except PenstockError as error:
            problem = str(error)
        if not problem:
            return judgement
        text = f"served answers differ from those of the trial: {problem}"
        return msgspec.structs.replace(judgement, is_passed=False, num_needed=None, text=text)

    def measure_proof(self, finalists: Sequence[Finalist], attempt: int) -> list[ServedMeasurement]:
        builds = [self._evaluator.run.original, *(one.build for one in finalists[1:])]
        return self._evaluator.measurements.prove(builds, self.budget.left_s, attempt)

    def describe(self, choice: FinalChoice) -> None:
        found, run = self.found, self._evaluator.run
        outcomes.settle_served(self.findings.tries, choice.candidate, self.findings.proofs)
        found.unchecked += run.unchecked
        judged, total = choice.held_out, len(run.rows)
        if choice.candidate.steps and judged is not None and 0 < judged.num_compared < total:
            # A lossless choice was not compared on all rows.
            found.unchecked.append(
                f"{total - judged.num_compared:,} of {total:,} rows: lossless steps were compared "
                f"with the original on {judged.num_compared:,}"
            )
        found.notes += self._notes(choice)
        if found.outcome != "kept" and found.after is not None:
            # Whether the machine has room for more instances than were timed.
            contender, num_cores = choice.finalist.contender, run.machine.num_cores
            config, times = choice.finalist.build.config, contender.times
            possible = shapes.arrangements(config, num_cores)
            most = max([config.num_instances, *(number for number, _ in times)])
            has_room = max(number for number, _ in possible) > most
            found.binding = goals.binding(found.after, self.plan.slo, can_add_instances=has_room)
            if found.outcome in ("missed", "refused"):
                missed = Missed(found, self.findings, self.plan, contender, num_cores)
                found.next_options = next_options(missed)

    def _notes(self, choice: FinalChoice) -> Iterator[str]:
        for name, share in self._evaluator.data.clipped(choice.finalist.build).items():
            if share >= MIN_CLIPPED:
                outside = "of held-out values lie outside of the calibrated range"
                yield f"input '{name}': {share:.2%} {outside}"
        judged = [each.accuracy for each in self.findings.tries if each.accuracy is not None]
        if wanted := [each.num_needed for each in judged if each.num_needed]:
            total = num_to_bring(min(wanted), bool(self.plan.calibration))
            yield f"too few examples to judge some candidates: provide about {total:,} in total"
        after = self.found.after
        if after is not None and after.num_failed:
            text = f"{after.num_failed:,} of {after.num_requests:,} requests were not answered well"
            yield f"{text}, most often: {after.failure}" if after.failure else text
        if sizes := shape_folding.narrowing(choice.candidate):
            rows = f"the {len(self._evaluator.run.rows):,} rows of the data all have this size"
            yield f"the version accepts only {sizes}: {rows}, and the server refuses any other"
