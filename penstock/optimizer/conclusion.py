"""What becomes of a search: the choice, held to examples that nobody has looked at; its proof, in
turns with the original; the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from penstock.errors import PenstockError
from penstock.optimizer import disturbance, goals
from penstock.optimizer.accuracy import Judgement, spent_alpha
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.examples import num_to_bring
from penstock.optimizer.journal import TIMINGS
from penstock.optimizer.lab import HELD_OUT, OF_SERVING, Lab
from penstock.optimizer.results import Optimization, Phase, Served
from penstock.optimizer.search import Finalist, Findings, Search

# Servers have to start, and each is measured twice.
MIN_LEFT_S = 20.0
MEMORY = "memory"


# A proof that contradicts itself or what was measured before is measured again, once.
MAX_PROOFS = 2


@dataclass(slots=True)
class Choice:
    finalist: Finalist
    held_out: Judgement | None
    # Faster ones that the held-out examples did not allow, in the order they were asked, by key.
    refused: dict[str, Judgement]
    # Why the verdict on it cannot stand.
    doubts: list[str] = field(default_factory=list)


def choose(lab: Lab, findings: Findings) -> Choice:
    """The first of the finalists that passes on the held-out part. Each look at it spends a part of
    what may be risked, so that asking often does not make passing likely."""
    refused: dict[str, Judgement] = {}
    for finalist in findings.finalists:
        choice = _admitted(lab, finalist, refused)
        if choice is not None:
            return choice
    raise AssertionError("the original is a finalist, and equals itself")


def _admitted(lab: Lab, finalist: Finalist, refused: dict[str, Judgement]) -> Choice | None:
    """None, and one more that is refused, where the held-out part does not allow it. That holds for
    every step, whatever it claims: only the original needs no leave."""
    if lab.examples is None:
        return Choice(finalist, None, refused)
    contender = finalist.contender
    key = contender.candidate.key
    if key in refused:
        # The same model, served in another way.
        return None
    judge = lab.judge if contender.is_lossy else lab.judge_lossless
    # As it would be served: batches and padding are part of what users get.
    judgement = judge(finalist.build, HELD_OUT, spent_alpha(len(refused)))
    if judgement.is_passed or not finalist.build.candidate.steps:
        return Choice(finalist, judgement, refused)
    refused[key] = judgement
    return None


def conclude(lab: Lab, search: Search, command: str, created: str) -> Optimization:
    """Everything that is known, but for the version's number."""
    findings = search.findings
    plan = lab.plan
    assert plan.slo is not None
    found = Optimization(
        name=plan.name,
        source=plan.model,
        source_text=lab.subject.text,
        source_digest=lab.subject.digest,
        slo=str(plan.slo),
        accuracy_budget="" if lab.examples is None else str(lab.budget),
        data_text=lab.data_text,
        machine=lab.machine,
        created=created,
        command=command,
        out=plan.out,
        price_per_hour=plan.price_per_hour,
        notes=_notes(lab, findings),
        tries=findings.tries,
        skipped=findings.skipped,
        profile=findings.profile,
        work=str(lab.journal.path.parent),
    )
    search.prove()
    choice = choose(lab, findings)
    found.notes += [f"on held-out examples: {each.text}" for each in choice.refused.values()]
    _prove(lab, search, choice, found)
    other = _better_proven(lab, findings, choice, found)
    if other is not None:
        choice = _proven_again(lab, search, choice, other, found)
    if _original_does(choice, found):
        found.notes.append("measured in turns, the original does as well as what was chosen")
        choice.finalist = next(one for one in findings.finalists if not one.build.candidate.steps)
        original = _admitted(lab, choice.finalist, choice.refused)
        choice.held_out = None if original is None else original.held_out
        found.after = found.before
        choice.doubts = [] if found.after is None else list(found.after.disturbances)
    found.chosen = choice.finalist.build.candidate
    for each in findings.tries:
        if each.candidate == found.chosen and each.served is not None:
            each.outcome = "kept"
    found.held_out = choice.held_out
    found.unchecked = lab.unchecked
    _note_refused(findings, choice)
    found.notes += [*_clipped(lab, choice), *_examples_wanted(lab, findings), *_failed(found)]
    found.outcome = _outcome(findings, choice, found)
    if choice.doubts and found.outcome in ("kept", "missed", "refused"):
        _disturb(lab, choice, found)
    if found.outcome != "kept" and found.after is not None:
        found.binding = goals.binding(found.after, plan.slo)
    found.phases = _phases(lab, findings, found)
    return found


def _note_refused(findings: Findings, choice: Choice) -> None:
    """What the held-out part refused is told as such, and no longer as kept."""
    for each in findings.tries:
        judgement = choice.refused.get(_model(each.candidate).key)
        if judgement is not None:
            each.outcome, each.reason = "rejected", f"on held-out examples: {judgement.text}"


def _model(candidate: Candidate) -> Candidate:
    """Without the last steps that only say how it is served."""
    while candidate.steps and candidate.steps[-1].pass_name in (*OF_SERVING, MEMORY):
        candidate = candidate.parent
    return candidate


def _clipped(lab: Lab, choice: Choice) -> list[str]:
    shares = lab.clipped(choice.finalist.build)
    return [
        f"input '{name}': {share:.2%} of held-out values lie outside of the calibrated range"
        for name, share in shares.items()
        if share > 0
    ]


def _failed(found: Optimization) -> list[str]:
    after = found.after
    if after is None or not after.num_failed:
        return []
    text = f"{after.num_failed:,} of {after.num_requests:,} requests were not answered well"
    return [f"{text}, most often: {after.failure}" if after.failure else text]


def _examples_wanted(lab: Lab, findings: Findings) -> list[str]:
    """How many examples would have to be brought for the gate to decide about what it could not."""
    wanted = [
        each.accuracy.num_needed
        for each in findings.tries
        if each.accuracy is not None and each.accuracy.num_needed
    ]
    if not wanted:
        return []
    total = num_to_bring(min(wanted), bool(lab.plan.calibration))
    return [f"some candidates could not be judged: bring about {total:,} examples in all"]


def _notes(lab: Lab, findings: Findings) -> list[str]:
    notes = list(lab.notes)
    if findings.is_interrupted:
        notes.append("interrupted: the best of what had been tried is kept")
    if findings.is_out_of_time:
        notes.append("the time was up before everything had been tried; the best so far is kept")
    return notes


def _prove(lab: Lab, search: Search, choice: Choice, found: Optimization) -> None:
    """Original and choice in turns: at the SLO's load, and up to the highest rate of each."""
    findings = search.findings
    original, chosen = lab.original, choice.finalist.build
    found.before, found.after = findings.original, choice.finalist.served
    if findings.is_interrupted:
        return
    if search.left_s is not None and search.left_s < MIN_LEFT_S:
        found.notes.append("no time was left to measure original and choice in turns")
        return
    builds = [original, chosen] if chosen.candidate.steps else [original]
    for attempt in range(MAX_PROOFS):
        try:
            measured = lab.prove(builds, search.left_s, attempt)
        except PenstockError as error:
            found.notes.append(f"the last measurement failed: {error}")
            return
        found.before, found.after = measured[0], measured[-1]
        _note_doubts(lab, findings, choice, found)
        has_doubts = bool(choice.doubts or found.before.disturbances)
        is_settled = not has_doubts and not disturbance.is_close(found.after)
        if is_settled or (search.left_s is not None and search.left_s < MIN_LEFT_S):
            return
        if attempt + 1 < MAX_PROOFS:
            doubts = [*choice.doubts, *found.before.disturbances, "close to the limit"]
            found.notes.append(f"measured again: {doubts[0]}")


def _note_doubts(lab: Lab, findings: Findings, choice: Choice, found: Optimization) -> None:
    """What contradicts the proof, of the choice and of the original."""
    assert found.before is not None and found.after is not None
    assert lab.plan.slo is not None
    rate = None if lab.plan.slo.rate is None else lab.plan.slo.rate.per_s
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


def _disturb(lab: Lab, choice: Choice, found: Optimization) -> None:
    """No verdict: what contradicts it, and what the machine did. Nothing of it is reused."""
    servings = [each for each in (found.before, found.after) if each is not None]
    found.outcome = "disturbed"
    found.disturbances = [*choice.doubts, *disturbance.disturbances(servings)]
    lab.journal.forget(TIMINGS)


def _better_proven(
    lab: Lab, findings: Findings, choice: Choice, found: Optimization
) -> Choice | None:
    """The next finalist that did better than the first does in its proof, when that misses the
    SLO."""
    if found.after is None or found.after.is_met or findings.is_interrupted:
        return None
    for finalist in findings.finalists:
        if finalist.build is choice.finalist.build:
            continue
        pair = [choice.finalist.simplicity, finalist.simplicity]
        if goals.order([found.after, finalist.served], pair)[0] == 1:
            other = _admitted(lab, finalist, choice.refused)
            if other is not None:
                return other
    return None


def _proven_again(
    lab: Lab, search: Search, first: Choice, other: Choice, found: Optimization
) -> Choice:
    """Whichever of the two has the better proof."""
    found.notes.append(f"proven once more with {other.finalist.build.candidate}: the first missed")
    before, after = found.before, found.after
    _prove(lab, search, other, found)
    assert after is not None and found.after is not None
    pair = [first.finalist.simplicity, other.finalist.simplicity]
    if goals.order([after, found.after], pair)[0] == 1:
        return other
    found.before, found.after = before, after
    return first


def _original_does(choice: Choice, found: Optimization) -> bool:
    """Whether the original turned out no worse, after all: it is the simplest."""
    if found.before is None or found.after is None or not choice.finalist.build.candidate.steps:
        return False
    return goals.order([found.before, found.after], [0, choice.finalist.simplicity])[0] == 0


def _outcome(findings: Findings, choice: Choice, found: Optimization) -> str:
    if found.after is not None and found.after.is_met:
        return "kept"
    if findings.is_interrupted:
        return "interrupted"
    return "refused" if _is_refused(findings, choice) else "missed"


def _is_refused(findings: Findings, choice: Choice) -> bool:
    """The gate let nothing pass that it was asked about, and something of that was faster."""
    if choice.finalist.contender.is_lossy:
        return False
    lossy = [each for each in findings.tries if each.accuracy is not None]
    if any(each.accuracy is not None and each.accuracy.is_passed for each in lossy):
        return bool(choice.refused)
    rate = choice.finalist.contender.rate
    return any(goals.is_better(each.predicted_rate or 0.0, rate) for each in lossy)


def _phases(lab: Lab, findings: Findings, found: Optimization) -> list[Phase]:
    """The waterfall: the original, the best after each stage where that changed, the choice. Scores
    are all of the examples that candidates were chosen by."""
    judged = {each.candidate.key: each.accuracy for each in findings.tries if each.accuracy}
    original = next((each.original for each in judged.values()), None)
    if original is None and found.held_out is not None:
        original = found.held_out.original
    phases: list[Phase] = []
    price = lab.plan.price_per_hour
    last = None
    for stage, contender in findings.by_stage:
        if contender is last:
            continue
        last = contender
        of_step = judged.get(contender.candidate.key)
        phases.append(
            Phase(
                label="original" if stage == "baseline" else str(contender.candidate.steps[-1]),
                p99_s=float("nan"),
                max_rate=contender.rate,
                accuracy=original if of_step is None else of_step.candidate,
                cost_per_million=None
                if price is None or not contender.rate
                else goals.cost_per_million(contender.rate, price),
                is_measured=False,
            )
        )
    if found.before is not None and phases:
        phases[0] = _measured_phase("original", found.before, original)
    if found.after is not None and found.chosen is not None and found.chosen.steps:
        label = f"as served: {' → '.join(str(step) for step in found.chosen.steps[-2:])}"
        score = _score(judged, found.chosen, original)
        phases.append(_measured_phase(label, found.after, score))
    return phases


def _score(
    judged: Mapping[str, Judgement], chosen: Candidate, original: float | None
) -> float | None:
    """Of the last step that was judged: those about serving are not."""
    candidate = chosen
    while candidate.steps:
        if candidate.key in judged:
            return judged[candidate.key].candidate
        candidate = candidate.parent
    return original


def _measured_phase(label: str, served: Served, score: float | None) -> Phase:
    rate = float("nan") if served.max_rate is None else served.max_rate.value
    return Phase(label, served.p99.value, rate, score, served.cost_per_million, True)
