"""The waterfall of a report: from the original to the chosen candidate, one bar per step. Pure.

Each step that makes another model has its own bar; all serving steps share the last bar. A bar has
measured figures if the candidate up to this step was served, else its predicted rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.optimizer import goals
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.results import Optimization, Phase, ServedMeasurement, try_of
from penstock.slo import cost_per_million

ARROW = " → "
AS_SERVED = "as served: "


def waterfall(found: Optimization) -> list[Phase]:
    """Return the bars, the original first, the chosen candidate last. A step with unknown figures
    is merged into the next bar. Empty if nothing is known of the original."""
    phases = []
    merged: list[str] = []
    chain = list(_chain(found))
    for place, (label, candidate) in enumerate(chain):
        phase = _phase(found, ARROW.join([*merged, label]), candidate)
        is_unknown = math.isnan(phase.p99_s) and math.isnan(phase.max_rate)
        if is_unknown and not candidate.steps:
            return []
        if is_unknown and place < len(chain) - 1:
            merged.append(label)
            continue
        phases.append(phase)
        merged.clear()
    return phases


def _chain(found: Optimization) -> Iterator[tuple[str, Candidate]]:
    """Yield the label of each bar and its candidate."""
    yield "original", Candidate()
    chosen = found.chosen
    if chosen is None:
        return
    # Each step of a language model was measured.
    model = chosen.steps if found.form == "text" else chosen.model.steps
    for place, step in enumerate(model, start=1):
        yield str(step), Candidate(model[:place])
    if len(model) < len(chosen.steps):
        yield AS_SERVED + ARROW.join(map(str, chosen.steps[len(model) :])), chosen


def _phase(found: Optimization, label: str, candidate: Candidate) -> Phase:
    served = _served(found, candidate)
    rate, is_predicted = _rate(found, candidate, served)
    own = try_of(found.tries, candidate.model.key)
    return Phase(
        label=label,
        p99_s=math.nan if served is None else served.p99.value,
        max_rate=rate,
        accuracy=_score(found, candidate),
        cost_per_million=_cost(found, served, rate, is_predicted=is_predicted),
        is_measured=served is not None,
        is_rate_predicted=served is not None and is_predicted,
        step_time=None if own is None else own.step_time,
    )


def _served(found: Optimization, candidate: Candidate) -> ServedMeasurement | None:
    """Return the proof of a candidate, else its figures of the search. An intermediate model
    counts as served in the best way that was measured; the chosen one has a separate bar for
    serving."""
    chosen = found.chosen
    proven = found.after if candidate == chosen else None
    if not candidate.steps:
        proven = proven or found.before
    own = try_of(found.tries, candidate.key)
    known = proven or (None if own is None else own.served)
    if known is not None or chosen is None or candidate == chosen.model:
        return known
    ways = [
        each.served
        for each in found.tries
        if each.served is not None and each.candidate.model == candidate
    ]
    return ways[goals.order(ways, [0] * len(ways))[0]] if ways else None


def _rate(
    found: Optimization, candidate: Candidate, served: ServedMeasurement | None
) -> tuple[float, bool]:
    """Return the highest rate, and whether it is predicted. The search of a language model
    leaves the rate out if it finds none, which counts as 0."""
    if served is not None and served.max_rate is not None:
        return served.max_rate.value, False
    if found.form == "text":
        return math.nan if served is None else 0.0, False
    own = try_of(found.tries, candidate.model.key)
    # The rate of an ensemble's member by itself says nothing of the ensemble.
    if own is None or own.predicted_rate is None or found.member:
        return math.nan, False
    return own.predicted_rate, True


def _cost(
    found: Optimization, served: ServedMeasurement | None, rate: float, *, is_predicted: bool
) -> float | None:
    if served is not None and served.cost_per_million is not None and not is_predicted:
        return served.cost_per_million
    price = found.price_per_hour
    return None if price is None or not rate > 0 else cost_per_million(rate, price)


def _score(found: Optimization, candidate: Candidate) -> float | None:
    """Return the score on the selection examples of the last step that was judged: lossless
    steps after it change nothing. If no step was judged, return the held-out score."""
    judged = [each.accuracy for each in found.tries if each.accuracy is not None]
    if not judged:
        if found.held_out is None:
            return None
        return found.held_out.candidate if candidate == found.chosen else found.held_out.original
    while candidate.steps:
        own = try_of(found.tries, candidate.key)
        if own is not None and own.accuracy is not None:
            return own.accuracy.candidate
        candidate = candidate.parent
    return judged[0].original
