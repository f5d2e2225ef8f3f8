"""When each request is due. Pure: the same load and seed always give the same times.

Arrivals are a renewal process of rate one (constant, Poisson, gamma), stretched by a rate profile
(flat, ramp, steps); a replay has its own times. Every process of a run computes the same times and
takes every n-th, so that together they form the requested process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec
import numpy as np

from penstock.slo import ARRIVALS, parse_duration
from penstock.types import Array

# Arrivals computed per chunk.
CHUNK = 4096


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Closed loop: keep `concurrency` requests in flight; each answer triggers the next request."""

    concurrency: int


class RateStep(msgspec.Struct, frozen=True):
    """One rate for a duration; a rate of 0 is a pause."""

    rate: float
    duration_s: float


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    rate: float


class Ramp(msgspec.Struct, frozen=True, tag="ramp"):
    first: float
    last: float
    duration_s: float


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    steps: tuple[RateStep, ...]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Open loop: requests arrive on schedule, whatever happened to the earlier ones."""

    profile: Flat | Ramp | Steps
    arrivals: str = "poisson"  # or constant, gamma
    cv: float = 1.0  # of gamma arrivals


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Arrival times of a recorded trace, in seconds; `scale` multiplies their rate."""

    times: tuple[float, ...]
    scale: float = 1.0
    name: str = ""
    # Or "replay", of a recording.
    kind: str = "trace"


Load = Closed | Open | Replay


def due_times(load: Open | Replay, seed: int) -> Iterator[Array]:
    """Yield ascending due times in chunks, in seconds from the start; endless for flat loads.

    Constant arrivals and replays begin at 0. The others begin in equilibrium, as if the process had
    always been running: an arrival is no more likely soon after the start than later.
    """
    if isinstance(load, Replay):
        times = np.sort(np.asarray(load.times, np.float64))
        for begin in range(0, len(times), CHUNK):
            yield (times[begin : begin + CHUNK] - times[0]) / load.scale
        return
    end = _num_expected(load.profile)
    last = 0.0
    for units in _unit_arrivals(load, seed):
        inside = units if units[-1] < end else units[units < end]
        if len(inside):
            # Rounding may swap two times that are almost equal.
            times = np.maximum.accumulate(np.maximum(_stretched(load.profile, inside), last))
            last = float(times[-1])
            yield times
        if len(inside) < len(units):
            return


def _unit_arrivals(load: Open, seed: int) -> Iterator[Array]:
    """Yield arrivals at a rate of one, without end."""
    if load.arrivals == "constant":
        begin = 0
        while True:
            yield np.arange(begin, begin + CHUNK, dtype=np.float64)
            begin += CHUNK
    if load.arrivals not in ARRIVALS:
        raise ValueError(f"'{load.arrivals}' is not known; expected one of {', '.join(ARRIVALS)}")
    random = np.random.default_rng(seed)
    shape = 1.0 if load.arrivals == "poisson" else load.cv**-2
    # The residual of the gap that a random moment falls into: long gaps are hit more often.
    last = random.uniform() * random.gamma(shape + 1) / shape
    yield np.array([last])
    while True:
        units = last + np.cumsum(random.gamma(shape, 1 / shape, CHUNK))
        yield units
        last = float(units[-1])


def _num_expected(profile: Flat | Ramp | Steps) -> float:
    """Return the rate integrated over the whole profile."""
    if isinstance(profile, Flat):
        return math.inf
    if isinstance(profile, Ramp):
        return (profile.first + profile.last) / 2 * profile.duration_s
    return sum(step.rate * step.duration_s for step in profile.steps)


def _stretched(profile: Flat | Ramp | Steps, units: Array) -> Array:
    """Return the times at which the integrated rate reaches each of `units`."""
    if isinstance(profile, Flat):
        return units / profile.rate
    if isinstance(profile, Ramp):
        slope = (profile.last - profile.first) / profile.duration_s
        # The larger root of a quadratic, in the form that also holds for a slope of 0.
        rates = np.sqrt(np.maximum(profile.first**2 + 2 * slope * units, 0.0))
        below = profile.first + rates
        ratios: Array = np.divide(2 * units, below, out=np.zeros_like(units), where=below > 0)
        return ratios
    rates = np.array([step.rate for step in profile.steps])
    durations = np.array([step.duration_s for step in profile.steps])
    sums = np.concatenate([[0.0], np.cumsum(rates * durations)[:-1]])
    starts = np.concatenate([[0.0], np.cumsum(durations)[:-1]])
    # Where several steps begin at the same sum, all but the last are pauses.
    index = np.searchsorted(sums, units, side="right") - 1
    since: Array = (units - sums[index]) / rates[index]
    return starts[index] + since


def duration_s(load: Load) -> float | None:
    """Return the length of a load; None if it has no end."""
    if isinstance(load, Replay):
        return (max(load.times) - min(load.times)) / load.scale if load.times else 0.0
    if isinstance(load, Closed) or isinstance(load.profile, Flat):
        return None
    if isinstance(load.profile, Ramp):
        return load.profile.duration_s
    return sum(step.duration_s for step in load.profile.steps)


def flat_rate(load: Load) -> float | None:
    """Return the rate of an open loop at a constant rate; None for other loads."""
    return load.profile.rate if isinstance(load, Open) and isinstance(load.profile, Flat) else None


def mean_rate(load: Open | Replay) -> float:
    """Return requests per second over the whole load; infinite for a trace without duration."""
    if (rate := flat_rate(load)) is not None:
        return rate
    total_s = duration_s(load) or 0.0
    num = len(load.times) if isinstance(load, Replay) else _num_expected(load.profile)
    return num / total_s if total_s > 0 else math.inf


def label(load: Load) -> str:
    """Describe a load in a few words: `concurrency 8`, `200/s poisson`."""
    if isinstance(load, Closed):
        return f"concurrency {load.concurrency}"
    if isinstance(load, Replay):
        scale = "" if load.scale == 1 else f" x {_text(load.scale)}"
        rate = mean_rate(load)
        each = "" if math.isinf(rate) else f", {rate:.3g}/s" if rate < 100 else f", {rate:.0f}/s"
        return f"{load.kind} {load.name}{scale} ({len(load.times)} requests{each})"
    arrivals = f"gamma {_text(load.cv)}" if load.arrivals == "gamma" else load.arrivals
    profile = load.profile
    if isinstance(profile, Flat):
        return f"{_text(profile.rate)}/s {arrivals}"
    if isinstance(profile, Ramp):
        ends = f"{_text(profile.first)}/s to {_text(profile.last)}/s"
        return f"ramp {ends} over {_text(profile.duration_s)} s, {arrivals}"
    steps = (f"{_text(step.rate)}/s for {_text(step.duration_s)} s" for step in profile.steps)
    return f"{', '.join(steps)}, {arrivals}"


def _text(number: float) -> str:
    return f"{number:.0f}" if number == int(number) or number >= 1000 else f"{number:.4g}"


def parse_concurrency(text: str) -> list[int]:
    """Parse `8`, `1,8,32`, or `1:64`, which doubles from 1 and ends with 64."""
    numbers = _parse_levels(text, "a concurrency like 8, 1,8,32 or 1:64")
    odd = [number for number in numbers if number != int(number)]
    if odd:
        raise ValueError(f"'{text}': {_text(odd[0])} is not a whole number of requests")
    return [int(number) for number in numbers]


def parse_rates(text: str) -> list[float]:
    """Parse requests per second: `200`, `200/s`, `100,200`, or `100:1000`, which doubles."""
    return _parse_levels(text, "a rate like 200, 100,200,400 or 100:1000")


def parse_ramp(text: str, duration_s: float) -> Ramp:
    """Parse `100:1000`: from the first rate to the last. One of them may be 0."""
    expected = "a ramp like 100:1000"
    ends = text.split(":")
    if len(ends) != 2:
        raise ValueError(f"'{text}' is not a ramp; expected two rates, as in 100:1000")
    first, last = (_parse_number(end, text, expected) for end in ends)
    if first == last == 0:
        raise ValueError(f"'{text}' sends nothing; expected {expected}")
    if not 0 < duration_s < math.inf:
        raise ValueError(f"'{text}': a ramp needs a duration above 0 s, not {duration_s}")
    return Ramp(first, last, duration_s)


def parse_steps(text: str) -> Steps:
    """Parse `100:10s,500:5s`: rates and their durations, in order. A rate of 0 is a pause."""
    steps = []
    for part in text.split(","):
        rate, colon, duration = part.partition(":")
        if not colon:
            expected = "expected a rate and a time, as in 100:10s"
            raise ValueError(f"'{text}': '{part}' is not a step; {expected}")
        number = _parse_number(rate, text, "a step like 100:10s")
        steps.append(RateStep(number, parse_duration(duration)))
    if not any(step.rate for step in steps):
        raise ValueError(f"'{text}' sends nothing; expected a rate above 0, as in 100:10s,0:5s")
    return Steps(tuple(steps))


def _parse_levels(text: str, expected: str) -> list[float]:
    ends = [_parse_number(end, text, expected) for end in re.split("[:,]", text)]
    if 0 in ends:
        raise ValueError(f"'{text}': 0 is not possible; expected {expected}")
    if ":" not in text:
        return ends
    if "," in text or len(ends) != 2:
        raise ValueError(f"'{text}' does not fit; expected {expected}")
    first, last = ends
    if first > last:
        turned = f"{last:g}:{first:g}"
        raise ValueError(f"'{text}' goes down; expected the lower end first, as in {turned}")
    levels = [first]
    while levels[-1] * 2 < last:
        levels.append(levels[-1] * 2)
    return levels if first == last else [*levels, last]


def _parse_number(part: str, text: str, expected: str) -> float:
    """Parse a number of 0 or more, with or without `/s`."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)(?:\s*/\s*s)?", part.strip(), re.A)
    number = float(match[1]) if match else math.inf
    if math.isinf(number):
        raise ValueError(f"'{text}': '{part.strip()}' is not a number; expected {expected}")
    return number
