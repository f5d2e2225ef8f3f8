"""The first line of every report of an optimisation, and the exit code that matches it. Pure.

Every claim comes from a recorded outcome: of the run, of its candidates (`Try`), of what was left
out (`Skip`), and of whether the proof ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock import units
from penstock.optimizer import outcomes, wording
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.results import Optimization, ServedMeasurement, Try, try_of
from penstock.system.exit_codes import ExitCode

EXIT_CODES = {
    "kept": ExitCode.OK,
    "missed": ExitCode.MISSED,
    "refused": ExitCode.REFUSED,
    "disturbed": ExitCode.DISTURBED,
    "interrupted": ExitCode.INTERRUPTED,
    "failed": ExitCode.FAILED,
}

# Steps that are listed by name; the rest are counted.
MAX_UNTRIED = 4
NOT_PROVEN = "not proven: not measured in turns with the original"
ORIGINAL_NOT_PROVEN = "not proven: measured only in the search"


def exit_code(optimization: Optimization) -> ExitCode:
    return EXIT_CODES[optimization.outcome]


def headline(optimization: Optimization) -> str:
    """State the SLO, whether it is kept, what was gained and at what cost."""
    head, details = {
        "kept": _kept,
        "missed": _missed,
        "refused": _refused,
        "disturbed": _disturbed,
        "interrupted": _interrupted,
        "failed": _failed,
    }[optimization.outcome](optimization)
    text = "; ".join(filter(None, details))
    return f"{head}: {text}" if text else head


def _kept(optimization: Optimization) -> tuple[str, list[str]]:
    after = optimization.after or optimization.before
    kept = "" if after is None else _terms(after, "kept")
    word = "SLO kept" if optimization.slo else "No SLO was given"
    if is_original(optimization):
        word += " by the original" if optimization.slo else ""
        unproven = "" if optimization.is_proven or after is None else ORIGINAL_NOT_PROVEN
        return word, [kept, unproven, "no change needed", *_untried(optimization)]
    return word, [kept, *_gains(optimization), *_untried(optimization)]


def _missed(optimization: Optimization) -> tuple[str, list[str]]:
    after = optimization.after or optimization.before
    details = [*_gains(optimization), _rejected(optimization), *_untried(optimization)]
    if after is None:
        return "SLO missed", ["nothing could be served", *details]
    by = [wording.excess(each) for each in after.verdicts if each.outcome == "missed"]
    known = [each for each in by if each is not None]
    head = f"SLO missed by {units.share(max(known), 1.0)}" if known else "SLO missed"
    terms = _terms(after, "missed") or _terms(after, "not measured")
    bottleneck = optimization.binding and f"bottleneck: {optimization.binding}"
    options = wording.next_options(optimization)
    return head, [terms, bottleneck, *details, f"next: {options[0]}" if options else ""]


def _refused(optimization: Optimization) -> tuple[str, list[str]]:
    """Say that every candidate that was judged failed, and name the nearest one."""
    refused = [each for each in optimization.tries if each.refusal is not None]
    judged = "the one candidate" if len(refused) == 1 else f"all {len(refused)} candidates"
    budget = optimization.accuracy_budget or "the accuracy budget"
    details = [f"{judged} that it judged failed {budget}"] if refused else []
    nearest = decisive_refusal(optimization)
    if nearest is not None:
        said = nearest.text or wording.accuracy(nearest, optimization.accuracy_budget)
        details.append(said if len(refused) == 1 else f"nearest: {said}")
    return "Refused by the accuracy gate", [*details, *_untried(optimization)]


def _disturbed(optimization: Optimization) -> tuple[str, list[str]]:
    reasons = optimization.disturbances or ["the measurements contradict each other"]
    return "No verdict", [*reasons, *_unproven_best(optimization)]


def _failed(optimization: Optimization) -> tuple[str, list[str]]:
    return "Proof failed", [optimization.proof_failure, *_unproven_best(optimization)]


def _unproven_best(optimization: Optimization) -> list[str]:
    if optimization.chosen is None:
        return _untried(optimization)
    measured = "" if optimization.after is None else _measured(optimization.after)
    best = f"best candidate, not proven: {optimization.chosen}"
    return [best, measured, *_untried(optimization)]


def _interrupted(optimization: Optimization) -> tuple[str, list[str]]:
    head = f"Interrupted after {wording.span(optimization.elapsed_s)}"
    untried = _untried(optimization)
    if optimization.chosen is None:
        return head, ["nothing was found", *untried]
    best = f"best so far: {optimization.chosen}"
    if optimization.after is not None:
        measured = _measured(optimization.after)
        return head, [best, measured, *_gains(optimization), *untried]
    found = chosen_try(optimization)
    rate = None if found is None else found.predicted_rate
    predicted = "" if rate is None else f"predicted {units.number(rate)}/s, not served"
    return head, [best, predicted, *untried]


def _rejected(optimization: Optimization) -> str:
    """List the passes of which no candidate passed the accuracy gate."""
    judged = [each for each in optimization.tries if each.accuracy is not None or each.held_out]
    passed = {_pass_name(each) for each in judged if each.refusal is None}
    names = dict.fromkeys(_pass_name(each) for each in judged if each.refusal is not None)
    left = [name for name in names if name not in passed]
    return f"rejected by the accuracy gate: {', '.join(left)}" if left else ""


def _pass_name(attempt: Try) -> str:
    return attempt.candidate.steps[-1].pass_name if attempt.candidate.steps else "original"


def _untried(optimization: Optimization) -> list[str]:
    """List the steps left unfinished or untried by the end of the time or an interruption."""
    groups = {
        "not finished (cut off by the time budget)": outcomes.unfinished(optimization),
        "not tried (out of time)": outcomes.untried(optimization, "time"),
        "not tried (interrupted)": outcomes.untried(optimization, "interrupt"),
    }
    return [f"{head}: {_listed(names)}" for head, names in groups.items() if names]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_UNTRIED
    return ", ".join([*names[:MAX_UNTRIED], *([f"{more} more"] if more > 0 else [])])


def is_original(optimization: Optimization) -> bool:
    return optimization.chosen is not None and not optimization.chosen.steps


def chosen_try(optimization: Optimization) -> Try | None:
    """Return the try of the chosen candidate, or of its nearest ancestor: the last steps, such as
    serving settings, may have none."""
    candidate = optimization.chosen
    while candidate is not None:
        found = try_of(optimization.tries, candidate.key)
        if found is not None:
            return found
        candidate = candidate.parent if candidate.steps else None
    return None


def decisive_refusal(optimization: Optimization) -> Judgement | None:
    """Return the refusal nearest to passing; those that more examples could lift come first."""
    refused = [each.refusal for each in optimization.tries if each.refusal is not None]

    def distance(each: Judgement) -> tuple[bool, float]:
        # NaN means that there is no bound.
        bound = math.inf if math.isnan(each.loss_bound) else each.loss_bound
        return each.num_needed is None, bound

    return min(refused, key=distance, default=None)


def _terms(served: ServedMeasurement, outcome: str) -> str:
    """Return the terms with this outcome, and the load at which they were measured."""
    terms = [wording.term(each) for each in served.verdicts if each.outcome == outcome]
    return f"{', '.join(terms)} at {served.load}" if terms else ""


def _measured(served: ServedMeasurement) -> str:
    return "; ".join(filter(None, (_terms(served, "kept"), _terms(served, "missed"))))


def _gains(optimization: Optimization) -> list[str]:
    """Return the gains over the original: speed and accuracy."""
    found = [_speed(optimization)]
    if optimization.after is not None and not optimization.is_proven:
        found.append(ORIGINAL_NOT_PROVEN if is_original(optimization) else NOT_PROVEN)
    judged = optimization.held_out
    # A choice that differs only by rounding need not pass. With few examples its bound would exceed
    # the limit and read like a refusal.
    if judged is not None and judged.is_passed:
        found.append(wording.accuracy(judged, optimization.accuracy_budget))
    return found


def _speed(optimization: Optimization) -> str:
    before, after = optimization.before, optimization.after
    if before is None or after is None or is_original(optimization) or before.disturbances:
        return ""
    if before.max_rate is not None and after.max_rate is not None:
        ratio = wording.ratio(before.max_rate, after.max_rate)
        if ratio is not None:
            return f"{wording.times(ratio)} the original's highest rate"
        if before.max_rate.value == 0 and after.max_rate.value > 0:
            return f"up to {units.number(after.max_rate.value)}/s, the original keeps it at no rate"
    return ""
