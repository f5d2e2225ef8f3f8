"""The first line of every report of an optimisation, and the exit code that says the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.benchmark.report import units
from penstock.exit_codes import ExitCode
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.report import wording
from penstock.optimizer.results import Optimization, Served, Try, Verdict

EXIT_CODES = {
    "kept": ExitCode.OK,
    "missed": ExitCode.MISSED,
    "refused": ExitCode.REFUSED,
    "disturbed": ExitCode.DISTURBED,
    "interrupted": ExitCode.INTERRUPTED,
}


def exit_code(optimization: Optimization) -> ExitCode:
    return EXIT_CODES[optimization.outcome]


def headline(optimization: Optimization) -> str:
    """What was promised, whether it is kept, what was gained and what that cost."""
    head, details = {
        "kept": _kept,
        "missed": _missed,
        "refused": _refused,
        "disturbed": _disturbed,
        "interrupted": _interrupted,
    }[optimization.outcome](optimization)
    text = "; ".join(filter(None, details))
    return f"{head}: {text}" if text else head


def _kept(optimization: Optimization) -> tuple[str, list[str]]:
    after = _last(optimization)
    kept = "" if after is None else _terms(after, "kept")
    if is_original(optimization):
        word = "SLO kept by the original" if optimization.slo else "No SLO was given"
        return word, [kept, "nothing had to be changed"]
    word = "SLO kept" if optimization.slo else "No SLO was given"
    return word, [kept, *_gains(optimization)]


def _missed(optimization: Optimization) -> tuple[str, list[str]]:
    after = _last(optimization)
    if after is None:
        return "SLO missed", ["nothing could be served", *_gains(optimization)]
    by = [wording.excess(each) for each in _of(after.verdicts, "missed")]
    known = [each for each in by if each is not None]
    head = f"SLO missed by {units.share(max(known), 1.0)}" if known else "SLO missed"
    terms = _terms(after, "missed") or _terms(after, "not measured")
    binding = optimization.binding and f"what binds is {optimization.binding}"
    return head, [terms, binding, *_gains(optimization)]


def _refused(optimization: Optimization) -> tuple[str, list[str]]:
    decisive = decisive_refusal(optimization)
    budget = optimization.accuracy_budget
    reason = f"nothing keeps {budget or 'the accuracy budget'} for sure"
    if decisive is None:
        return "Refused by the accuracy gate", [reason]
    return "Refused by the accuracy gate", [
        reason,
        decisive.text or wording.accuracy(decisive, budget),
    ]


def _disturbed(optimization: Optimization) -> tuple[str, list[str]]:
    return "No verdict: the measurements were disturbed", optimization.disturbances


def _interrupted(optimization: Optimization) -> tuple[str, list[str]]:
    head = f"Interrupted after {wording.span(optimization.elapsed_s)}"
    if optimization.chosen is None:
        return head, ["nothing was found by then"]
    best = f"the best by then is {optimization.chosen}"
    if optimization.after is not None:
        return head, [best, _terms(optimization.after, "kept"), *_gains(optimization)]
    found = chosen_try(optimization)
    rate = None if found is None else found.predicted_rate
    predicted = "" if rate is None else f"predicted to reach {units.number(rate)}/s, not yet served"
    return head, [best, predicted]


def is_original(optimization: Optimization) -> bool:
    """Chosen is what was given."""
    return optimization.chosen is not None and not optimization.chosen.steps


def try_of(tries: Sequence[Try], key: str) -> Try | None:
    return next((each for each in tries if each.candidate.key == key), None)


def chosen_try(optimization: Optimization) -> Try | None:
    """Of the chosen, or of that which it is but for its last steps, such as how it is served."""
    candidate = optimization.chosen
    while candidate is not None:
        found = try_of(optimization.tries, candidate.key)
        if found is not None:
            return found
        candidate = candidate.parent if candidate.steps else None
    return None


def decisive_refusal(optimization: Optimization) -> Judgement | None:
    """What the gate said of the candidate that came closest, best one that more examples would
    help. What is chosen was never refused, whatever its bound on the held-out part."""
    refused = [
        each.accuracy
        for each in optimization.tries
        if each.accuracy is not None and not each.accuracy.is_passed
    ]
    return min(refused, key=_distance, default=None)


def _distance(refused: Judgement) -> tuple[bool, float]:
    # NaN is no bound at all.
    bound = math.inf if math.isnan(refused.loss_bound) else refused.loss_bound
    return refused.num_needed is None, bound


def _last(optimization: Optimization) -> Served | None:
    return optimization.after or optimization.before


def _of(verdicts: Sequence[Verdict], outcome: str) -> list[Verdict]:
    return [each for each in verdicts if each.outcome == outcome]


def _terms(served: Served, outcome: str) -> str:
    """Terms of one outcome, and where they were measured."""
    terms = [wording.term(each) for each in _of(served.verdicts, outcome)]
    return f"{', '.join(terms)} at {served.load}" if terms else ""


def _gains(optimization: Optimization) -> list[str]:
    """Against the original: speed, and accuracy."""
    found = [_speed(optimization)]
    judged = optimization.held_out
    # A choice that only rounds otherwise does not have to pass; with few examples the bound of
    # anything is beyond the limit, and would read like a refusal.
    if judged is not None and judged.is_passed:
        found.append(wording.accuracy(judged, optimization.accuracy_budget))
    return found


def _speed(optimization: Optimization) -> str:
    before, after = optimization.before, optimization.after
    if before is None or after is None or is_original(optimization):
        return ""
    if before.max_rate is not None and after.max_rate is not None:
        ratio = wording.ratio(before.max_rate, after.max_rate)
        if ratio is not None:
            return f"{wording.times(ratio)} the original's highest rate"
        if before.max_rate.value == 0 and after.max_rate.value > 0:
            return f"up to {units.number(after.max_rate.value)}/s, the original at no rate"
    return ""
