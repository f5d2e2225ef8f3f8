"""From search results to the verdict: choose a finalist on the held-out set, prove it in turns with
the original, and conclude."""

from __future__ import annotations

from collections.abc import Iterator
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
from penstock.optimizer.passes import shape_folding
from penstock.optimizer.results import Optimization
from penstock.optimizer.search import Search
from penstock.optimizer.time_plan import CutOff

# A proof that contradicts itself or earlier measurements is repeated once.
MAX_PROOFS = 2
UNPROVEN = "was ahead in the search but was not proven"
BEST_MEASURED = "the best version measured so far"
INTERRUPTED_PROOF = "interrupted during the proof: the figures are those of the search"


@dataclass(slots=True)
class FinalChoice:
    finalist: Finalist
    held_out: Judgement | None
    # Better finalists that the held-out set rejected, in the order they were judged, by the key of
    # the model or of one way to serve it.
    refused: dict[str, Judgement]
    # Why the verdict on the finalist cannot stand.
    doubts: list[str] = field(default_factory=list)


def choose(evaluator: Evaluator, findings: Findings) -> FinalChoice:
    """Return the first finalist that passes on the held-out set. Each test of it spends a part of
    alpha, so that repeated testing does not inflate false positives."""
    refused: dict[str, Judgement] = {}
    for finalist in findings.finalists:
        choice = _admitted(evaluator, finalist, refused)
        if choice is not None:
            return choice
    raise AssertionError("the original is a finalist, and equals itself")


def _admitted(
    evaluator: Evaluator, finalist: Finalist, refused: dict[str, Judgement]
) -> FinalChoice | None:
    """Judge a finalist on the held-out set; if it fails, add it to `refused` and return None. This
    applies to every step, lossless or not; only the original is always admitted."""
    if evaluator.run.examples is None:
        return FinalChoice(finalist, None, refused)
    candidate, model = finalist.build.candidate, finalist.contender.candidate
    alpha = spent_alpha(len(refused))
    if not candidate.steps:
        return FinalChoice(
            finalist, evaluator.gate.judge_lossless(finalist.build, HELD_OUT, alpha), refused
        )
    if candidate.key in refused or model.key in refused:
        return None
    judge = evaluator.gate.judge if finalist.contender.is_lossy else evaluator.gate.judge_lossless
    # In its serving configuration: users get its batching and padding too.
    judgement = judge(finalist.build, HELD_OUT, alpha)
    if not judgement.is_passed:
        # Other ways to serve the same model fail too; but the original model itself is not refused.
        refused[model.key if model.steps else candidate.key] = judgement
        return None
    judgement = _held_to_server(evaluator, finalist, judgement)
    if not judgement.is_passed:
        refused[candidate.key] = judgement
        return None
    return FinalChoice(finalist, judgement, refused)


def _held_to_server(evaluator: Evaluator, finalist: Finalist, judgement: Judgement) -> Judgement:
    """Fail the judgement if the server's answers differ from those that were judged."""
    try:
        problem = evaluator.check_served(finalist.build, is_lossy=finalist.contender.is_lossy)
    except PenstockError as error:
        problem = str(error)
    if not problem:
        return judgement
    text = f"served answers differ from those of the trial: {problem}"
    return msgspec.structs.replace(judgement, is_passed=False, num_needed=None, text=text)


def conclude(evaluator: Evaluator, search: Search, found: Optimization) -> None:
    """Choose and prove; complete the record with everything but the version's number."""
    findings, run = search.findings, evaluator.run
    assert run.plan.slo is not None
    if run.examples is not None:
        found.accuracy_budget = str(evaluator.gate.budget)
    found.notes = [*run.notes, *found.notes, *findings.notes]
    found.profile, found.profiled = findings.profile, findings.profiled
    search.progress.begin_proof(findings.finalists[0].build.candidate)
    choice = finish(findings, lambda: choose(evaluator, findings))
    _prove(evaluator, search, choice, found)
    other = _better_proven(evaluator, search, choice, found)
    if other is not None:
        choice = _proven_again(evaluator, search, choice, other, found)
    if original_does(choice, found):
        return_to_original(choice, findings, found)
        original = _admitted(evaluator, choice.finalist, choice.refused)
        choice.held_out = None if original is None else original.held_out
        choice.doubts = [] if found.after is None else list(found.after.disturbances)
    found.chosen = choice.finalist.build.candidate
    found.notes += outcomes.mark_refused(findings.tries, choice.refused)
    outcomes.settle_served(findings.tries, found.chosen, findings.proofs)
    found.held_out = choice.held_out
    found.unchecked = [*evaluator.run.unchecked, *_not_compared(evaluator, choice)]
    found.notes += [
        *_clipped(evaluator, choice),
        *_examples_wanted(evaluator, findings),
        *_failed(found),
    ]
    found.notes += _narrowed(evaluator, choice)
    note_disturbances(run.journal, choice, found)
    found.outcome = outcomes.outcome_of(found, is_interrupted=findings.is_interrupted)
    if found.outcome != "kept" and found.after is not None:
        more = _can_add_instances(evaluator, choice)
        found.binding = goals.binding(found.after, run.plan.slo, can_add_instances=more)
    found.phases = phases.waterfall(found)


def _can_add_instances(evaluator: Evaluator, choice: FinalChoice) -> bool:
    """Return whether the machine has room for more instances than were timed."""
    config = choice.finalist.build.config
    timed = [number for number, _ in choice.finalist.contender.times]
    most = max(number for number, _ in shapes.arrangements(config, evaluator.run.machine.num_cores))
    return most > max([config.num_instances, *timed])


def _clipped(evaluator: Evaluator, choice: FinalChoice) -> list[str]:
    shares = evaluator.data.clipped(choice.finalist.build)
    return [
        f"input '{name}': {share:.2%} of held-out values lie outside of the calibrated range"
        for name, share in shares.items()
        if share > 0
    ]


def _narrowed(evaluator: Evaluator, choice: FinalChoice) -> list[str]:
    sizes = shape_folding.narrowing(choice.finalist.build.candidate)
    if not sizes:
        return []
    rows = f"the {len(evaluator.run.rows):,} rows of the data all have this size"
    return [f"the version accepts only {sizes}: {rows}, and the server refuses any other"]


def _not_compared(evaluator: Evaluator, choice: FinalChoice) -> list[str]:
    """Say on how many rows a lossless choice was compared, if not on all."""
    judged, total = choice.held_out, len(evaluator.run.rows)
    if judged is None or not 0 < judged.num_compared < total:
        return []
    if not choice.finalist.build.candidate.steps:
        return []
    return [
        f"{total - judged.num_compared:,} of {total:,} rows: lossless steps were compared with the "
        f"original on {judged.num_compared:,}"
    ]


def _failed(found: Optimization) -> list[str]:
    after = found.after
    if after is None or not after.num_failed:
        return []
    text = f"{after.num_failed:,} of {after.num_requests:,} requests were not answered well"
    return [f"{text}, most often: {after.failure}" if after.failure else text]


def _examples_wanted(evaluator: Evaluator, findings: Findings) -> list[str]:
    """Say how many examples the accuracy gate needs to decide on undecided candidates."""
    wanted = [
        each.accuracy.num_needed
        for each in findings.tries
        if each.accuracy is not None and each.accuracy.num_needed
    ]
    if not wanted:
        return []
    total = num_to_bring(min(wanted), bool(evaluator.run.plan.calibration))
    return [f"too few examples to judge some candidates: provide about {total:,} in total"]


def saved(choice: FinalChoice, found: Optimization) -> Candidate:
    """Return the candidate to save if nothing more is measured."""
    return Candidate() if original_does(choice, found) else choice.finalist.build.candidate


def _prove(
    evaluator: Evaluator,
    search: Search,
    choice: FinalChoice,
    found: Optimization,
    to_save: str = "",
) -> bool:
    """Measure original and choice in turns, at the SLO's load and up to the highest rate of each.
    Return False if that did not run: `found` then has the figures of the search. `to_save` names
    what an interruption would save; empty: the choice, or the original if that does as well."""
    findings = search.findings
    original, chosen = evaluator.run.original, choice.finalist.build
    found.before, found.after = findings.original, choice.finalist.served
    found.proof_failure = ""
    if findings.is_interrupted:
        return False
    builds = [original, chosen] if chosen.candidate.steps else [original]
    if not search.budget.has_time_to_prove(len(builds)):
        if not found.is_proven:
            found.notes.append(outcomes.NO_PROOF)
        return False
    is_proven = False
    for attempt in range(MAX_PROOFS):
        search.progress.begin_proof(chosen.candidate, to_save or str(saved(choice, found)))
        try:
            measured = evaluator.measurements.prove(builds, search.budget.left_s, attempt)
        except (PenstockError, KeyboardInterrupt) as error:
            findings.is_interrupted = isinstance(error, KeyboardInterrupt)
            note_end(error, chosen.candidate, found, is_proven=is_proven)
            return is_proven
        found.before, found.after = measured[0], measured[-1]
        found.is_proven = is_proven = True
        findings.proofs |= {original.candidate.key: measured[0], chosen.candidate.key: measured[-1]}
        _note_doubts(evaluator, findings, choice, found)
        doubts = [*choice.doubts, *found.before.disturbances]
        if disturbance.is_close(found.after):
            doubts.append("close to the limit")
        has_time = search.budget.has_time_to_prove(len(builds))
        if not doubts or not has_time or attempt + 1 == MAX_PROOFS:
            break
        found.notes.append(f"measured again: {doubts[0]}")
    return True


def note_end(
    error: PenstockError | KeyboardInterrupt,
    candidate: Candidate,
    found: Optimization,
    *,
    is_proven: bool,
) -> None:
    """Note what ended a proof. An earlier measurement of the same proof stands."""
    match error:
        case CutOff():
            found.notes += [] if is_proven else [outcomes.NO_PROOF]
        case KeyboardInterrupt():
            found.notes += [] if is_proven else [INTERRUPTED_PROOF]
        case _:
            found.notes.append(f"the proof of {candidate} failed: {error}")
            found.proof_failure = "" if is_proven else str(error)


def _note_doubts(
    evaluator: Evaluator, findings: Findings, choice: FinalChoice, found: Optimization
) -> None:
    """Collect what contradicts the proof, for the choice and for the original."""
    assert found.before is not None and found.after is not None
    assert evaluator.run.plan.slo is not None
    rate = None if evaluator.run.plan.slo.rate is None else evaluator.run.plan.slo.rate.per_s
    before = [] if findings.original is None else [findings.original]
    original = disturbance.BuildHistory("original", found.before, before)
    finalist = choice.finalist
    chosen = original
    if finalist.build.candidate.steps:
        predicted = finalist.contender.rate or None
        earlier = [finalist.served] if finalist.served is not found.after else []
        chosen = disturbance.BuildHistory("chosen", found.after, earlier, predicted)
        found.before = msgspec.structs.replace(
            found.before, disturbances=disturbance.original_doubts(original, rate)
        )
    choice.doubts = disturbance.doubts(chosen, original, rate)
    gap = disturbance.prediction_gap(chosen, rate)
    if gap and not choice.doubts:
        found.notes.append(gap)


def note_disturbances(journal: Journal, choice: FinalChoice, found: Optimization) -> None:
    """If the verdict cannot stand, record what contradicts it and what disturbed the machine, and
    drop all timings from the journal so that none is reused."""
    if not choice.doubts:
        return
    servings = [each for each in (found.before, found.after) if each is not None]
    found.disturbances = [*choice.doubts, *disturbance.disturbances(servings)]
    journal.forget(TIMINGS)


def _better_proven(
    evaluator: Evaluator, search: Search, choice: FinalChoice, found: Optimization
) -> FinalChoice | None:
    """If the first choice misses the SLO in its proof, return the next finalist that did better and
    is admitted, provided there is time to prove it."""
    for finalist in _ahead(search.findings, choice, found):
        if not search.budget.has_time_to_prove(2):
            if found.is_proven:
                found.notes.append(f"{finalist.build.candidate} {UNPROVEN}")
            return None
        other = _admitted(evaluator, finalist, choice.refused)
        if other is not None:
            return other
    return None


def _ahead(findings: Findings, choice: FinalChoice, found: Optimization) -> Iterator[Finalist]:
    """Yield finalists whose search figures beat the choice's proof, if that misses the SLO."""
    if found.after is None or found.after.is_met or findings.is_interrupted:
        return
    for finalist in findings.finalists:
        pair = [choice.finalist.simplicity, finalist.simplicity]
        is_other = finalist.build is not choice.finalist.build
        if is_other and goals.order([found.after, finalist.served], pair)[0] == 1:
            yield finalist


def _proven_again(
    evaluator: Evaluator,
    search: Search,
    first: FinalChoice,
    other: FinalChoice,
    found: Optimization,
) -> FinalChoice:
    """Prove the other choice too; return the one with the better proof, or the first if the other
    has none."""
    before, after, is_proven = found.before, found.after, found.is_proven
    failure = found.proof_failure
    candidate = other.finalist.build.candidate
    if not _prove(evaluator, search, other, found, BEST_MEASURED) and is_proven:
        found.notes.append(f"{candidate} {UNPROVEN}")
        found.before, found.after, found.proof_failure = before, after, failure
        return first
    if found.is_proven:
        found.notes.append(
            f"the first choice missed the SLO in its proof; {candidate} was proven too"
        )
    assert after is not None and found.after is not None
    pair = [first.finalist.simplicity, other.finalist.simplicity]
    if goals.order([after, found.after], pair)[0] == 1:
        return other
    found.before, found.after, found.is_proven = before, after, is_proven
    found.proof_failure = failure
    return first


def original_does(choice: FinalChoice, found: Optimization) -> bool:
    """Return whether the original is no worse after all: it is the simplest."""
    if found.before is None or found.after is None or not choice.finalist.build.candidate.steps:
        return False
    return goals.order([found.before, found.after], [0, choice.finalist.simplicity])[0] == 0


def return_to_original(choice: FinalChoice, findings: Findings, found: Optimization) -> None:
    """Choose the original instead: it does as well."""
    how = "measured in turns, " if found.is_proven else ""
    chosen = choice.finalist.build.candidate
    found.notes.append(f"{how}the original does as well as {chosen}, and is simpler")
    choice.finalist = next(one for one in findings.finalists if not one.build.candidate.steps)
    found.after = found.before
