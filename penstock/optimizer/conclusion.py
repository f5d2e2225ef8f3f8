"""What becomes of a search: the choice, held to examples that nobody has looked at; its proof, in
turns with the original; the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.optimizer import goals
from penstock.optimizer.accuracy import Judgement, spent_alpha
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.examples import num_to_bring
from penstock.optimizer.lab import HELD_OUT, Lab
from penstock.optimizer.passes import shape_folding
from penstock.optimizer.results import Optimization, Phase, Served
from penstock.optimizer.search import Finalist, Findings, Search

# Servers have to start, and each is measured twice.
MIN_LEFT_S = 20.0


@dataclass(slots=True)
class Choice:
    finalist: Finalist
    held_out: Judgement | None
    # Faster ones that the held-out examples did not allow, in the order they were asked, by key.
    refused: dict[str, Judgement]


def choose(lab: Lab, findings: Findings) -> Choice:
    """The first of the finalists that passes on the held-out part. Each look at it spends a part of
    what may be risked, so that asking often does not make passing likely."""
    refused: dict[str, Judgement] = {}
    for finalist in findings.finalists:
        choice = _admitted(lab, finalist, refused)
        if choice is not None:
            return choice
    raise AssertionError("the original is a finalist, and lossless")


def _admitted(lab: Lab, finalist: Finalist, refused: dict[str, Judgement]) -> Choice | None:
    """None, and one more that is refused, where the held-out part does not allow it."""
    contender = finalist.contender
    if lab.examples is None or not contender.is_lossy:
        return Choice(finalist, _for_the_record(lab, finalist), refused)
    key = contender.candidate.key
    if key in refused:
        # The same model, served in another way.
        return None
    judgement = lab.judge(contender.build, HELD_OUT, spent_alpha(len(refused)))
    if judgement.is_passed:
        return Choice(finalist, judgement, refused)
    refused[key] = judgement
    return None


def _for_the_record(lab: Lab, finalist: Finalist) -> Judgement | None:
    """What loses nothing by its making needs no gate; its score is told all the same."""
    if lab.examples is None:
        return None
    return lab.judge(finalist.contender.build, HELD_OUT)


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
        choice.held_out = _for_the_record(lab, choice.finalist)
        found.after = found.before
    found.chosen = choice.finalist.build.candidate
    for each in findings.tries:
        if each.candidate == found.chosen and each.served is not None:
            each.outcome = "kept"
    found.held_out = choice.held_out
    found.notes += [*_clipped(lab, choice), *_examples_wanted(lab, findings), *_failed(found)]
    found.notes += _narrowed(lab, choice)
    found.outcome = _outcome(findings, choice, found)
    if found.outcome != "kept" and found.after is not None:
        found.binding = goals.binding(found.after, plan.slo)
    found.phases = _phases(lab, findings, found)
    return found


def _clipped(lab: Lab, choice: Choice) -> list[str]:
    shares = lab.clipped(choice.finalist.build)
    return [
        f"input '{name}': {share:.2%} of held-out values lie outside of the calibrated range"
        for name, share in shares.items()
        if share > 0
    ]


def _narrowed(lab: Lab, choice: Choice) -> list[str]:
    sizes = shape_folding.narrowing(choice.finalist.build.candidate)
    if not sizes:
        return []
    rows = f"the {len(lab.rows):,} rows of the data all have this size"
    return [f"the version accepts only {sizes}: {rows}, and the server refuses any other"]


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
    try:
        measured = lab.prove(builds, search.left_s)
    except PenstockError as error:
        found.notes.append(f"the last measurement failed: {error}")
        return
    found.before, found.after = measured[0], measured[-1]


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
