"""How the figures of an optimisation are said, in the same words by table, page and first line.
Pure."""

from __future__ import annotations

import math
import re

from penstock import slo as promises
from penstock.benchmark import verdicts
from penstock.benchmark.report import units
from penstock.benchmark.report.headline import term_text
from penstock.benchmark.stats import Interval
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.results import Verdict

# Scores that are a share of the examples, and read as percent.
SHARES = re.compile(r"top\d+|agreement|accuracy")


def is_share(metric: str) -> bool:
    return SHARES.fullmatch(metric) is not None


def score(metric: str, value: float) -> str:
    """`91.2 %` of a share of examples, else the number itself."""
    if math.isnan(value):
        return units.UNKNOWN
    return f"{100 * value:.1f} %" if is_share(metric) else f"{value:.4g}"


def loss(metric: str, amount: float) -> str:
    """`0.6 points` of a share of examples, else the number itself."""
    if not math.isfinite(amount):
        return units.UNKNOWN
    if not is_share(metric):
        return f"{amount:.3g}"
    points = f"{100 * amount:.2f}".rstrip("0").rstrip(".")
    return f"{points} point" + ("" if points == "1" else "s")


def accuracy(found: Judgement) -> str:
    """`top1 91.2 % → 91.0 % (loss at most 0.6 points, limit 1 point)`."""
    both = f"{score(found.metric, found.original)} → {score(found.metric, found.candidate)}"
    return f"{found.metric} {both} ({bound(found)})"


def bound(found: Judgement) -> str:
    limit = f"limit {loss(found.metric, found.limit)}"
    if not math.isfinite(found.loss_bound):
        return f"loss not known, {limit}"
    if found.loss_bound <= 0:
        return f"no loss, {limit}"
    return f"loss at most {loss(found.metric, found.loss_bound)}, {limit}"


def last_step(candidate: Candidate) -> str:
    """What a candidate adds to its parent."""
    return str(candidate.steps[-1]) if candidate.steps else str(candidate)


def times(ratio: float) -> str:
    """`1.08x`, `3.1x`, `35x`."""
    decimals = 2 if ratio < 1.95 else 1 if ratio < 9.95 else 0
    return f"{ratio:.{decimals}f}x"


def ratio(before: Interval | None, after: Interval | None) -> float | None:
    """After over before; None where one of them is nothing, or not known."""
    if before is None or after is None:
        return None
    is_known = math.isfinite(before.value) and math.isfinite(after.value)
    return after.value / before.value if is_known and before.value > 0 < after.value else None


def term(found: Verdict) -> str:
    """`p99 12.1 ms (11.8-12.6) < 20 ms`."""
    return term_text(verdicts.Verdict(promises.parse(found.term).terms[0], found.measured))


def excess(found: Verdict) -> float | None:
    """How far a missed term is from its limit, as a share of the limit."""
    if found.measured is None or not math.isfinite(found.measured.value) or not found.limit:
        return None
    return abs(found.measured.value - found.limit) / found.limit


def span(seconds: float) -> str:
    """Of a run: `42 s`, `6 min 52 s`, `1 h 3 min`."""
    if not math.isfinite(seconds):
        return units.UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
