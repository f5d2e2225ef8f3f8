"""Outcomes of each candidate and of the run, once the choice is made. Pure.

The report's wording comes from these outcomes: a candidate's in `Try`, the run's in
`Optimization.outcome`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.errors import PenstockError
from penstock.optimizer import goals
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Candidate, Skip
from penstock.optimizer.findings import Findings
from penstock.optimizer.results import Optimization, Outcome, ServedMeasurement, Try, try_of
from penstock.optimizer.shapes import alone_s
from penstock.optimizer.time_plan import CutOff

REFUSED_MODEL = "its model was refused on the held-out examples"
BUDGET_ENDED = "the time budget ended before every step was tried; raise --budget to try the rest"
NO_PROOF = (
    "no time was left to measure original and choice in turns: figures are those of the search"
)
PART_OF_CHOICE = "part of the chosen one; when it was tried"
CUT_OFF = "cut off by the time budget"
INTERRUPTED = "interrupted before every step was tried; run the same command again to resume"


# Candidates.


def outcome_of_error(error: PenstockError) -> tuple[Outcome, str]:
    """Return outcome and reason of a candidate that ended with this error."""
    if isinstance(error, CutOff):
        return "cut off", f"{CUT_OFF}: {error}"
    return "failed", str(error)


def mark_refused(tries: Sequence[Try], refused: Mapping[str, Judgement]) -> list[str]:
    """Reject what failed on the held-out set, by key: models, however they are served, or one way
    to serve a model. Return a note for each."""
    notes = []
    for each in tries:
        model = each.candidate if each.candidate.key in refused else each.candidate.model
        if model.key not in refused:
            continue
        each.outcome, each.reason = "rejected", REFUSED_MODEL
        if each.candidate == model:
            each.held_out = refused[model.key]
            each.reason = f"held-out examples: {each.held_out.text}"
            notes.append(f"{model} was refused on the held-out examples: {each.held_out.text}")
    return notes


def settle_served(
    tries: Sequence[Try], chosen: Candidate, proofs: Mapping[str, ServedMeasurement]
) -> None:
    """Set for every served candidate how it compares with the chosen one, and keep the steps that
    led to it, even if another was predicted to be faster. `proofs` are by key."""
    own = try_of(tries, chosen.key)
    for each in tries:
        if each.served is None and each.outcome in ("equal", "slower"):
            steps = each.candidate.steps
            if steps and steps == chosen.steps[: len(steps)]:
                each.outcome, each.reason = "kept", f"{PART_OF_CHOICE}: {each.reason}"
            continue
        if each.served is None or not each.candidate.steps or each.outcome == "rejected":
            continue
        if each.candidate == chosen:
            each.outcome = "kept"
        elif own is not None and own.served is not None:
            _settle(each, own.served, proofs.get(chosen.key), proofs.get(each.candidate.key))


def _settle(
    each: Try,
    chosen: ServedMeasurement,
    chosen_proof: ServedMeasurement | None,
    proof: ServedMeasurement | None,
) -> None:
    """Compare proof with proof and search with search. If the search had this candidate ahead of
    the chosen one, compare it with the proof of the chosen one."""
    assert each.served is not None
    one, other = each.served, chosen
    if proof is not None and chosen_proof is not None:
        one, other = proof, chosen_proof
    sign = goals.compare(one, other)
    if sign > 0 and chosen_proof is not None:
        other = chosen_proof
        sign = goals.compare(one, other)
    each.outcome = "slower" if sign < 0 else "equal"
    end = ("", ": no difference beyond the noise", ": ahead when it was tried, not proven")
    each.reason = against(one, other) + end[(sign >= 0) + (sign > 0)]


def against(one: ServedMeasurement, chosen: ServedMeasurement) -> str:
    """Return the figures in which they differ: `92 % in time, the chosen one 100 %`."""
    shares = [f"{100 * each.goodput:.0f} %" for each in (one, chosen)]
    # As `goals.compare` decides: a small difference in time decides only together with the SLO.
    is_telling = one.is_met != chosen.is_met and (one.goodput > chosen.goodput) == one.is_met
    is_telling |= abs(one.goodput - chosen.goodput) > goals.MIN_GOODPUT
    if is_telling and shares[0] != shares[1]:
        return f"{shares[0]} in time, the chosen one {shares[1]}"
    if one.is_met != chosen.is_met:
        return f"{'keeps' if one.is_met else 'misses'} the SLO, unlike the chosen one"
    if one.max_rate is not None and chosen.max_rate is not None:
        rates = [f"{each.value:,.4g}/s" for each in (one.max_rate, chosen.max_rate)]
        return f"up to {rates[0]}, the chosen one {rates[1]}"
    times = [_p99_text(each) for each in (one, chosen)]
    return f"p99 {times[0]}, the chosen one {times[1]}"


def _p99_text(served: ServedMeasurement) -> str:
    """Format p99, which is infinite if too many requests fail, and unknown without any."""
    value = served.p99.value
    if math.isinf(value):
        return "infinite (too many requests failed)"
    return "unknown (too few answers)" if math.isnan(value) else f"{value * 1e3:.3g} ms"


# The run.


def outcome_of(found: Optimization, *, is_interrupted: bool) -> str:
    is_met = found.after is not None and found.after.is_met
    if is_interrupted and not (is_met and found.is_proven):
        return "interrupted"
    if found.proof_failure:
        return "failed"
    if found.disturbances:
        return "disturbed"
    if is_met:
        return "kept"
    return "refused" if is_refused(found) else "missed"


def is_refused(found: Optimization) -> bool:
    """Return whether the accuracy gate prevents a better result: it refused every candidate that it
    judged, and one of them would be faster than the chosen one."""
    judged = [each for each in found.tries if each.accuracy is not None or each.held_out]
    refused = [each for each in judged if each.refusal is not None]
    if not refused or len(refused) < len(judged):
        return False
    return any(_is_faster(each, found) for each in refused)


def _is_faster(attempt: Try, found: Optimization) -> bool:
    """Return whether it is faster than the choice: by prediction, else as measured."""
    candidate = found.chosen or Candidate()
    model, own = (try_of(found.tries, key) for key in (candidate.model.key, candidate.key))
    if model is not None and model.predicted_rate is not None:
        if attempt.predicted_rate is None:
            return False
        if attempt.predicted_rate or model.predicted_rate:
            return goals.is_better(attempt.predicted_rate, model.predicted_rate)
        if not (attempt.times and model.times):
            return False
        return goals.is_better(min(map(alone_s, model.times)), min(map(alone_s, attempt.times)))
    rates = [_measured_rate(each) for each in (attempt, own)]
    return rates[0] is not None and goals.is_better(rates[0], rates[1] or 0.0)


def _measured_rate(attempt: Try | None) -> float | None:
    if attempt is None or attempt.served is None or attempt.served.max_rate is None:
        return None
    return attempt.served.max_rate.value


def named_skips(found: Optimization) -> list[tuple[Skip, str]]:
    """Return what was not tried, each with its name: the step, or the pass; `other settings of` a
    pass of which a step was tried."""
    tried = {step.pass_name for each in found.tries for step in each.candidate.steps}

    def name(skip: Skip) -> str:
        if skip.step is not None:
            return str(skip.step)
        is_tried = skip.pass_name in tried
        return f"other settings of {skip.pass_name}" if is_tried else skip.pass_name

    return [(each, name(each)) for each in found.skipped]


def untried(found: Optimization, cut_by: str) -> list[str]:
    """Return the steps that were not tried because time ran out or the run was interrupted."""
    names = [each[1] for each in named_skips(found) if each[0].cut_by == cut_by]
    return list(dict.fromkeys(names))


def unfinished(found: Optimization) -> list[str]:
    """Return the steps that the time budget cut off."""
    names = [str(each.candidate.steps[-1]) for each in found.tries if each.outcome == "cut off"]
    return list(dict.fromkeys(names))


def cut_notes(findings: Findings) -> list[str]:
    is_cut = findings.is_out_of_time or any(each.outcome == "cut off" for each in findings.tries)
    return [INTERRUPTED] * findings.is_interrupted + [BUDGET_ENDED] * is_cut
