"""What to do next about an SLO that was missed: options that were not taken, each with the rate
that it would reach, measured or modelled. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock import units
from penstock.config import CPU
from penstock.optimizer import goals, outcomes
from penstock.optimizer.findings import Contender, Findings, arrangement
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import NextOption, Optimization, Try
from penstock.optimizer.shapes import further

# Share of its highest rate that each of several devices is planned with.
SCALING = 0.95
# Untried steps and layers that are listed by name.
MAX_NAMED = 3
MAX_OPTIONS = 5


@dataclass(frozen=True, slots=True)
class Missed:
    """A run whose choice misses its SLO."""

    found: Optimization
    findings: Findings
    plan: Plan
    # The chosen model, with its batch times.
    contender: Contender
    num_cores: int

    @property
    def required(self) -> float:
        return goals.required_rate(self.plan.slo, self.plan.price_per_hour)

    @property
    def rate(self) -> float:
        """The highest rate of the choice, measured if it was; else predicted."""
        after = self.found.after
        if after is not None and after.max_rate is not None:
            return 0.0 if math.isnan(after.max_rate.value) else after.max_rate.value
        return self.contender.rate

    @property
    def is_rate_measured(self) -> bool:
        return self.found.after is not None and self.found.after.max_rate is not None

    @property
    def is_too_slow_alone(self) -> bool:
        """Whether even a single request takes longer than the SLO allows."""
        limit_s = self.plan.slo.latency_s
        return (
            limit_s is not None and bool(self.contender.times) and self.contender.alone_s > limit_s
        )


def next_options(missed: Missed) -> list[NextOption]:
    """Return the options, those that would keep the SLO first; empty if none is known."""
    listed = [
        *_shapes(missed),
        *_instances(missed),
        *_precisions(missed),
        *_devices(missed),
        *_less_load(missed),
        *_smaller(missed),
        *_time(missed),
    ]
    required = missed.required
    for option in listed:
        option.is_enough = required > 0 and option.rate is not None and option.rate >= required

    def place(option: NextOption) -> tuple[bool, float]:
        return not option.is_enough, 0.0 if option.is_enough else -(option.rate or 0.0)

    return sorted(listed, key=place)[:MAX_OPTIONS]


def _shapes(missed: Missed) -> Iterator[NextOption]:
    """The best way to serve the chosen model that was not served."""
    contender, chosen = missed.contender, missed.found.chosen
    sizes = [step.settings.get("max_batch", "") for step in (chosen.steps if chosen else ())]
    now = next(filter(None, sizes), "")
    for steps, rate in contender.shapes:
        candidate = contender.candidate.then(*steps)
        if candidate.key in missed.findings.served or not rate > missed.rate:
            continue
        size = next((step.settings.get("max_batch", "1") for step in steps), "1")
        kind = "larger batch" if now and int(size) > int(now) else "smaller batch"
        name = "another batch" if not now or size == now else kind
        text = f"serve it as {', '.join(map(str, steps))}, which was not measured"
        yield NextOption(name, text, rate)
        return


def _instances(missed: Missed) -> Iterator[NextOption]:
    config = missed.contender.build.config
    pair = further(config, missed.contender.times, missed.num_cores)
    if pair is not None:
        known = sorted(missed.contender.times)
        gain = _gain(missed, known)
        text = f"{pair[0]} instances; the last ones brought {gain:.2g} times the rate"
        yield NextOption("more instances", text, missed.rate * max(1.0, gain))


def _gain(missed: Missed, known: list[tuple[int, int]]) -> float:
    """Return how much the largest number of instances that was timed gains over the one before."""
    rates: dict[int, float] = {}
    for steps, rate in missed.contender.shapes:
        count = arrangement(steps)[0]
        rates[count] = max(rate, rates.get(count, 0.0))
    counts = [pair[0] for pair in known if rates.get(pair[0])]
    return rates[counts[-1]] / rates[counts[-2]] if len(counts) > 1 else 1.0


def _precisions(missed: Missed) -> Iterator[NextOption]:
    """The fastest candidate that only the accuracy gate refused."""
    refused = [
        each
        for each in missed.found.tries
        if each.refusal is not None and each.predicted_rate and each.predicted_rate > missed.rate
    ]
    if refused:
        best = max(refused, key=lambda each: each.predicted_rate or 0.0)
        yield NextOption("another precision", _refusal_text(best), best.predicted_rate)


def _refusal_text(refused: Try) -> str:
    said = "" if refused.refusal is None else refused.refusal.text
    text = f"{refused.candidate}, which the accuracy gate refused ({said})"
    layers = [each.name for each in refused.fallback[:MAX_NAMED]]
    if layers:
        return f"{text}; with {', '.join(layers)} in float it came nearest"
    return (
        f"{text}: train with quantisation, allow a larger loss, or keep its worst layers in float"
    )


def _devices(missed: Missed) -> Iterator[NextOption]:
    rate, required = missed.rate, missed.required
    if not (0 < rate < required) or missed.is_too_slow_alone:
        return
    config = missed.contender.build.config
    num_now = len(set(config.devices))
    num = math.ceil(required / (SCALING * rate / num_now))
    kind = "machines" if config.device == CPU else "GPUs"
    num_machines = math.ceil(num / num_now) if config.device == CPU else num
    basis = "measured" if missed.is_rate_measured else "predicted"
    each = units.number(rate / num_now)
    text = f"{num_machines} {kind} with {SCALING:.0%} of the {basis} {each}/s each"
    yield NextOption(f"more {kind}", text, SCALING * rate / num_now * num)


def _less_load(missed: Missed) -> Iterator[NextOption]:
    if 0 < missed.rate < missed.required and missed.is_rate_measured:
        text = f"send at most {units.number(missed.rate)}/s: at that rate the latency is kept"
        yield NextOption("lower rate", text, missed.rate, is_measured=True)


def _smaller(missed: Missed) -> Iterator[NextOption]:
    """How much less work a model may be: another model, or this one pruned."""
    limit_s = missed.plan.slo.latency_s
    if missed.is_too_slow_alone and limit_s is not None:
        share = limit_s / missed.contender.alone_s
    elif 0 < missed.rate < missed.required:
        share = missed.rate / missed.required
    else:
        return
    most = _most_of_the_time(missed)
    text = f"a smaller model, or this one pruned, with at most {share:.0%} of the work{most}"
    yield NextOption("smaller model", text, missed.required or None)


def _most_of_the_time(missed: Missed) -> str:
    """Return the layers that take most of the GPU's time, if that was profiled."""
    known = {each.candidate.key: each.step_time for each in missed.found.tries}
    time = known.get(missed.contender.candidate.key)
    if time is None or not time.layers:
        return ""
    name, seconds = next(iter(time.layers.items()))
    return f"; {name}s take {units.share(seconds, sum(time.layers.values()))} of the kernels' time"


def _time(missed: Missed) -> Iterator[NextOption]:
    left = [*outcomes.unfinished(missed.found), *outcomes.untried(missed.found, "time")]
    if left:
        more = f" and {len(left) - MAX_NAMED} more" if len(left) > MAX_NAMED else ""
        text = f"a larger --budget, for {', '.join(left[:MAX_NAMED])}{more}"
        yield NextOption("more time", text)
