"""Scales of plots: from values to pixels, and which ticks to draw. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.report.plots import Axis

# A log axis spans at least the square of this factor, so that noise does not look large.
NARROW = 1.5
# Room beyond the data, as a share of the span.
ROOM = 0.05
NUM_TICKS = 5
MANTISSAS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` as pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel, clamped to the plot."""
        if self.is_log:
            if value <= 0:
                return self.start
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, part))

    def is_inside(self, value: float) -> bool:
        slack = 1e-9 * (abs(self.low) + abs(self.high))
        return self.low - slack <= value <= self.high + slack


def scale(axis: Axis, values: Iterable[float], start: float, end: float) -> Scale:
    """Fit a scale to values, within the limits that the axis sets."""
    low, high = limits(axis, [value for value in values if math.isfinite(value)])
    if axis.is_reversed:
        start, end = end, start
    return Scale(low, high, start, end, axis.is_log)


def limits(axis: Axis, values: list[float]) -> tuple[float, float]:
    if axis.categories:
        return -0.5, len(axis.categories) - 0.5
    low, high = _log_limits(values) if axis.is_log else _linear_limits(axis, values)
    low = low if axis.low is None else axis.low
    high = high if axis.high is None else axis.high
    return (low, high) if high > low else (low, low + 1.0)


def _linear_limits(axis: Axis, values: list[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if axis.has_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low or abs(high) or 1.0) * ROOM
    return low if axis.has_zero and low == 0 else low - room, high if high == 0 else high + room


def _log_limits(values: list[float]) -> tuple[float, float]:
    positive = [value for value in values if value > 0]
    if not positive:
        return 1.0, 10.0
    low, high = math.log10(min(positive)), math.log10(max(positive))
    room = (high - low) * ROOM
    if high - low < math.log10(NARROW):
        low = high = (low + high) / 2
        room = math.log10(NARROW)
    return float(10 ** (low - room)), float(10 ** (high + room))


def ticks(axis: Axis, found: Scale) -> list[tuple[float, str]]:
    """Return the ticks inside the plot, with their labels."""
    if axis.categories:
        return [(float(index), text) for index, text in enumerate(axis.categories)]
    if axis.ticks:
        return [(value, text) for value, text in axis.ticks if found.is_inside(value)]
    values = _log_ticks(found) if axis.is_log else _linear_ticks(found)
    return [(value, _label(value)) for value in values]


def _linear_ticks(found: Scale) -> list[float]:
    raw = (found.high - found.low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in MANTISSAS if each * power >= raw * 0.999)
    first = math.ceil(found.low / step - 1e-9)
    last = math.floor(found.high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(found: Scale) -> list[float]:
    """Return 1, 2, 5, 10 …; powers of ten only over many decades, more over less than one."""
    decades = math.log10(found.high / found.low)
    steps: tuple[float, ...] = (1.0, 2.0, 5.0)
    if decades > 3.2:
        steps = (1.0,)
    elif decades < 0.75:
        steps = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    low, high = math.floor(math.log10(found.low)), math.ceil(math.log10(found.high))
    every = max(1, math.ceil(decades / 7)) if decades > 3.2 else 1
    values = [step * 10.0**power for power in range(low, high + 1, every) for step in steps]
    return [value for value in values if found.is_inside(value)]


def _label(value: float) -> str:
    """Format as `0.05`, `20`, `1.5k`, `2M`."""
    if value == 0:
        return "0"
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if suffix == "k" else 1):
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.0e}"
