"""Texts for the figures of an optimisation, shared by table, page and first line. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from penstock import slo as promises
from penstock import units
from penstock.benchmark import verdicts
from penstock.benchmark.headline import term_text
from penstock.benchmark.stats import Interval
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Candidate, Step
from penstock.optimizer.phases import ARROW, AS_SERVED
from penstock.optimizer.results import NextOption, Optimization, TermVerdict
from penstock.profiling.results import NextStep

# Losses from this number on mean that there is no bound.
ANY_LOSS = 1e100
# A percentile of the latency beyond which too many requests failed.
INFINITE = "infinite"
TOO_MANY_FAILED = "too many requests failed"
# Metrics that are a share of the examples, shown as percent.
SHARES = re.compile(r"top\d+|agreement|accuracy")
# Passes that implement a profile's step, by its name.
WAYS = {
    "fusion": ("transformer-fusion", "conv-fusion", "openvino", "torch-compile"),
    "compile": ("onnx-export", "openvino", "onnxruntime-gpu", "torch-compile"),
    "cuda-graphs": ("cuda-graphs", "conv-fusion", "onnxruntime-gpu", "torch-compile"),
    "fp8": ("fp8",),
    "int8": ("int8-dynamic", "int8-static"),
    "batching": ("batching",),
    "instances": ("instances",),
}
HALVES = ("tf32", "bf16", "fp16")


def is_share(metric: str) -> bool:
    return SHARES.fullmatch(metric) is not None


def score(metric: str, value: float) -> str:
    """Format `91.2 %` for a share of examples, else the number itself."""
    if math.isnan(value):
        return units.UNKNOWN
    return f"{100 * value:.1f} %" if is_share(metric) else f"{value:.4g}"


def is_relative(budget: str) -> bool:
    """Return whether losses under this budget are shares of the original's score."""
    return budget.endswith(" relative")


def loss(metric: str, amount: float, budget: str) -> str:
    """Format `0.6 points` for a share of examples, `0.6 % relative`, else the number itself."""
    if not is_known(amount):
        return units.UNKNOWN
    percent = f"{100 * amount:.2f}".rstrip("0").rstrip(".")
    if is_relative(budget):
        return f"{percent} % relative"
    if is_share(metric):
        return f"{percent} point" + ("" if percent == "1" else "s")
    return f"{amount:.3g}"


def is_known(amount: float) -> bool:
    """Return whether the loss is known; a huge number stands for an unknown one."""
    return abs(amount) < ANY_LOSS


def accuracy(found: Judgement, budget: str = "") -> str:
    """Format `top1 91.2 % → 91.0 % (loss at most 0.6 points, limit 1 point)`."""
    both = f"{score(found.metric, found.original)} → {score(found.metric, found.candidate)}"
    limit = loss(found.metric, found.limit, budget)
    return f"{found.metric} {both} ({bound(found, budget)}, limit {limit})"


def bound(found: Judgement, budget: str = "") -> str:
    """Return the upper bound of the loss."""
    if not is_known(found.loss_bound):
        return "loss not known"
    if found.loss_bound <= 0:
        return "no loss"
    return f"loss at most {loss(found.metric, found.loss_bound, budget)}"


def last_step(candidate: Candidate) -> str:
    """Return the step that a candidate adds to its parent."""
    return str(candidate.steps[-1]) if candidate.steps else str(candidate)


def rate(per_s: float) -> str:
    return units.UNKNOWN if math.isnan(per_s) else f"{units.number(per_s)}/s"


def short_label(label: str) -> str:
    """Return a phase's label without settings, which are shown elsewhere."""
    if label.startswith(AS_SERVED):
        return AS_SERVED.rstrip(": ")
    return ARROW.join(part.partition("(")[0].strip() for part in label.split(ARROW)) or label


def place(optimization: Optimization) -> str:
    """Return the path of the version; empty without one."""
    if not optimization.version:
        return ""
    parts = (optimization.out.rstrip("/"), optimization.name, optimization.version)
    return "/".join(filter(None, parts))


def next_step(optimization: Optimization) -> str:
    """Return the step that the profile recommends, only if it profiled the chosen candidate's model
    and the step was neither applied nor tried; else empty."""
    profile, chosen = optimization.profile, optimization.chosen
    if profile is None or chosen is None or optimization.profiled != chosen.model.key:
        return ""
    done = [step for each in optimization.tries for step in each.candidate.steps]
    left = (each for each in profile.steps if not _is_done(each, [*done, *chosen.steps]))
    return next((each.text for each in left), "")


def _is_done(step: NextStep, done: Sequence[Step]) -> bool:
    if step.name in HALVES:
        return any(
            each.pass_name == "half" and each.settings.get("datatype", "").lower() == step.name
            for each in done
        )
    return any(each.pass_name in WAYS.get(step.name, ()) for each in done)


def times(ratio: float) -> str:
    """Format `1.08x`, `3.1x`, `35x`."""
    decimals = 2 if ratio < 1.95 else 1 if ratio < 9.95 else 0
    return f"{ratio:.{decimals}f}x"


def ratio(before: Interval | None, after: Interval | None) -> float | None:
    """Return after over before; None if either is zero or unknown."""
    if before is None or after is None:
        return None
    is_known = math.isfinite(before.value) and math.isfinite(after.value)
    return after.value / before.value if is_known and before.value > 0 < after.value else None


def latency(seconds: float) -> str:
    """Format `12.1 ms`; `infinite` if too many requests failed."""
    return INFINITE if math.isinf(seconds) else units.duration(seconds)


def latency_interval(found: Interval) -> str:
    """Format `12.1 ms (11.8-12.6)`; `infinite` if too many requests failed."""
    return INFINITE if math.isinf(found.value) else units.duration_interval(found)


def term(found: TermVerdict) -> str:
    """Format `p99 12.1 ms (11.8-12.6) < 20 ms`."""
    return term_text(verdicts.IntervalVerdict(promises.parse(found.term).terms[0], found.measured))


def metric_of(optimization: Optimization) -> str:
    """Return the accuracy metric; empty if accuracy is not judged."""
    found = [each.accuracy for each in optimization.tries] + [optimization.held_out]
    named = next((each.metric for each in found if each is not None), "")
    return named or optimization.accuracy_budget.partition(" ")[0]


def excess(found: TermVerdict) -> float | None:
    """Return how far a missed term is from its limit, as a share of the limit."""
    if found.measured is None or not math.isfinite(found.measured.value) or not found.limit:
        return None
    return abs(found.measured.value - found.limit) / found.limit


def span(seconds: float) -> str:
    """Format a duration: `42 s`, `6 min 52 s`, `1 h 3 min`."""
    if not math.isfinite(seconds):
        return units.UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if 0 < seconds < 0.5:
        return "< 1 s"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def next_options(optimization: Optimization) -> list[str]:
    """Return what could be done about a missed SLO, one sentence each: `more GPUs: 2 GPUs with ...
    (modelled 8,500/s, enough)`."""
    return [next_option(each) for each in optimization.next_options]


def next_option(option: NextOption) -> str:
    if option.rate is None:
        return f"{option.name}: {option.text}"
    how = "measured" if option.is_measured else "modelled"
    enough = ", enough" if option.is_enough else ""
    return f"{option.name}: {option.text} ({how} {units.number(option.rate)}/s{enough})"
