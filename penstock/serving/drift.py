"""Whether live inputs still are what a version was optimised on. Pure: time is an argument.

Workers count rows (`input_sketch`); here are the counts of a window, two figures for each quantity,
and the alarm. The figures are the share of rows with values outside of the known range, and the
Kolmogorov distance of the distributions, each row with the same weight. An alarm needs evidence: a
lower confidence bound above the limit. It ends when the figures themselves are within their limits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.serving.input_statistics import LENGTH, ReferenceQuantity
from penstock.types import Array
from penstock.units import number
from penstock.wire.frames import QuantityCounts, Sketched

# Rows are judged from this number on.
MIN_ROWS = 200
# The window: rows of the last minute, and at least WINDOW_ROWS, however old.
WINDOW_S = 60.0
WINDOW_ROWS = 400
# Limits. A share of rows outside of the range that follows from the size of the data set, because
# some rows lie outside of any range that comes from few rows, is no drift: see `share_limit`.
MIN_SHARE_LIMIT = 0.01
DISTANCE_LIMIT = 0.15
# Probability that the range of a data set is so narrow by chance that `share_limit` is exceeded.
CHANCE = 1e-4
# Standard errors of the lower bounds: of the share, and of the distance, which is the largest of
# many differences.
SHARE_ERRORS, DISTANCE_ERRORS = 3.0, 4.0


@dataclass(frozen=True, slots=True)
class InputDrift:
    """The state of one quantity. `num_rows` have been looked at since the load; the figures are of
    the window, and None before there are enough rows."""

    tensor: str
    quantity: str
    num_rows: int
    outside_share: float | None
    distance: float | None
    is_alarm: bool = False
    # One sentence on the alarm, with its figures.
    text: str = ""


def share_limit(num_rows: int) -> float:
    """Return the share of rows that may lie outside of the range of `num_rows` rows. A new
    row exceeds the largest of n with a probability p that is itself random: P(p > x) = (1 - x)^n,
    each side."""
    largest = 1 - math.exp(math.log(CHANCE) / max(1, num_rows))
    return max(MIN_SHARE_LIMIT, 2 * largest)


def lower_share(count: int, num_rows: int) -> float:
    """Return the lower confidence bound of a share (Wilson)."""
    z2, share = SHARE_ERRORS**2, count / num_rows
    centre = share + z2 / (2 * num_rows)
    spread = SHARE_ERRORS * math.sqrt(
        share * (1 - share) / num_rows + z2 / (4 * num_rows * num_rows)
    )
    return (centre - spread) / (1 + z2 / num_rows)


@dataclass(slots=True)
class WindowPart:
    """Counts of one report."""

    at: float
    num_rows: int
    num_outside: int
    sums: Array
    squares: Array


@dataclass(slots=True, eq=False)
class QuantityWatch:
    """The window of one quantity and its alarm."""

    reference: ReferenceQuantity
    num_seen: int = 0
    is_alarm: bool = False
    text: str = ""
    _parts: deque[WindowPart] = field(default_factory=deque)
    # Sums over the parts: with many workers, there are thousands.
    _num_rows: int = 0
    _num_outside: int = 0
    _sums: Array = field(init=False)
    _squares: Array = field(init=False)

    def __post_init__(self) -> None:
        self._sums, self._squares = (np.zeros(len(self.reference.edges)) for _ in range(2))

    def add(self, counts: QuantityCounts, now: float) -> None:
        if not counts.num_rows or len(counts.sums) != len(self.reference.edges):
            return
        part = WindowPart(
            now,
            counts.num_rows,
            counts.num_outside,
            np.array(counts.sums),
            np.array(counts.squares),
        )
        self._parts.append(part)
        self._count(part, 1)
        self.num_seen += part.num_rows
        while self._is_old(self._parts[0], now):
            self._count(self._parts.popleft(), -1)

    def _count(self, part: WindowPart, sign: int) -> None:
        self._num_rows += sign * part.num_rows
        self._num_outside += sign * part.num_outside
        self._sums += sign * part.sums
        self._squares += sign * part.squares

    def _is_old(self, part: WindowPart, now: float) -> bool:
        return part.at < now - WINDOW_S and self._num_rows - part.num_rows >= WINDOW_ROWS

    def judge(self) -> InputDrift:
        """Return the state, with the alarm of now."""
        name, quantity = self.reference.input.spec.name, self.reference.quantity
        if self._num_rows < MIN_ROWS:
            return InputDrift(name, quantity, self.num_seen, None, None)
        outside, distance = self._num_outside / self._num_rows, self._distance()
        texts = [*self._outside_text(self._num_outside), *self._distance_text(distance)]
        limit = share_limit(self.reference.num_range_rows)
        is_inside = outside <= limit and (distance is None or distance[0] <= DISTANCE_LIMIT)
        if texts:
            self.is_alarm, self.text = True, f"input '{name}': {'; '.join(texts)}"
        elif is_inside:
            self.is_alarm, self.text = False, ""
        figure = None if distance is None else distance[0]
        state = self.is_alarm, self.text
        return InputDrift(name, quantity, self.num_seen, outside, figure, *state)

    def _outside_text(self, num_outside: int) -> list[str]:
        limit = share_limit(self.reference.num_range_rows)
        if lower_share(num_outside, self._num_rows) <= limit:
            return []
        reference = self.reference
        what = "sizes" if reference.quantity == LENGTH else "values"
        source = "was calibrated on" if reference.is_calibrated else "was optimised on"
        share = num_outside / self._num_rows
        return [
            f"{share:.0%} of {self._num_rows:,} rows have {what} outside of {_text(reference.low)} "
            f"to {_text(reference.high)}, which the version {source} (limit {limit:.1%})"
        ]

    def _distance_text(self, distance: tuple[float, float] | None) -> list[str]:
        if distance is None or distance[1] <= DISTANCE_LIMIT:
            return []
        what = "sizes" if self.reference.quantity == LENGTH else "values"
        return [
            f"the distribution of {what} in {self._num_rows:,} rows differs from that of the data, "
            f"distance {distance[0]:.2f} (limit {DISTANCE_LIMIT})"
        ]

    def _distance(self) -> tuple[float, float] | None:
        """Return the distance and its lower bound; None if the distribution is not known."""
        known = self.reference.statistics
        if known is None or not known.edges:
            return None
        means = self._sums / self._num_rows
        variances = np.maximum(self._squares / self._num_rows - np.square(means), 0.0)
        apart = np.abs(means - np.array(known.shares))
        # A share of 0 or 1 in all rows has no variance; one row more could have had another.
        floor = 1 / (4 * self._num_rows)
        errors = np.sqrt(
            np.maximum(variances, floor) / self._num_rows
            + np.square(known.deviations) / known.num_rows
        )
        lower = apart - DISTANCE_ERRORS * errors
        return float(apart.max()), float(lower.max())


class DriftMonitor:
    """All quantities of one worker's model. Nothing is watched without evidence."""

    def __init__(self, references: Sequence[ReferenceQuantity] = ()) -> None:
        keys = [(each.input.spec.name, each.quantity) for each in references]
        self._watches = {
            key: QuantityWatch(each) for key, each in zip(keys, references, strict=True)
        }
        self.states: list[InputDrift] = []

    def add(self, sketched: Sketched, now: float) -> list[InputDrift]:
        """Take what a worker has counted. Return the quantities whose alarm has begun or ended."""
        for counts in sketched.quantities:
            watch = self._watches.get((counts.tensor, counts.quantity))
            if watch is not None:
                watch.add(counts, now)
        before = {key: watch.is_alarm for key, watch in self._watches.items()}
        self.states = [watch.judge() for watch in self._watches.values()]
        changed = zip(before.values(), self.states, strict=True)
        return [state for was_alarm, state in changed if state.is_alarm != was_alarm]

    @property
    def alarms(self) -> list[str]:
        return [f"inputs have drifted: {each.text}" for each in self.states if each.is_alarm]

    @property
    def notes(self) -> list[str]:
        """Return the alarms for `penstock explain`; without any, how many rows were compared."""
        if self.alarms or not self.states:
            return self.alarms
        num_rows = max(each.num_rows for each in self.states)
        if num_rows < MIN_ROWS:
            return [f"inputs are compared with the evidence from {MIN_ROWS} rows on: {num_rows:,}"]
        return [f"inputs are like those of the evidence: {num_rows:,} rows were compared"]


def _text(value: float) -> str:
    return number(value) if abs(value) < 1e6 else f"{value:.3g}"
