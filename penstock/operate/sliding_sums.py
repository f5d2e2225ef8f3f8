"""Sums of figures over the last seconds, hours or days, in fixed memory. Pure.

Time is an argument and must not go back. Knows nothing of what is summed.
"""

from __future__ import annotations

# The beginning of a window is exact to this part of it.
NUM_SLOTS = 60


class SlidingSums:
    """A ring of slots, each with the sums of its part of the window."""

    def __init__(self, window_s: float, num_figures: int) -> None:
        self._slot_s = window_s / NUM_SLOTS
        self._slots = [[0.0] * num_figures for _ in range(NUM_SLOTS)]
        self._sums = [0.0] * num_figures
        # The number of the slot that is being filled, since the clock's beginning.
        self._at: int | None = None

    def add(self, now: float, *figures: float) -> None:
        slot = self._slot(now)
        for index, figure in enumerate(figures):
            slot[index] += figure
            self._sums[index] += figure

    def sums(self, now: float) -> tuple[float, ...]:
        self._slot(now)
        return tuple(self._sums)

    def _slot(self, now: float) -> list[float]:
        """Return the slot of this time, after emptying those that have left the window."""
        at = int(now / self._slot_s)
        first = at if self._at is None else self._at + 1
        for number in range(max(first, at - NUM_SLOTS + 1), at + 1):
            slot = self._slots[number % NUM_SLOTS]
            for index, figure in enumerate(slot):
                self._sums[index] -= figure
                slot[index] = 0.0
        if self._at is not None and at - self._at >= NUM_SLOTS:
            # All slots are empty; rounding of earlier sums must not stay.
            self._sums = [0.0] * len(self._sums)
        self._at = at if self._at is None else max(at, self._at)
        return self._slots[self._at % NUM_SLOTS]


class CounterStep:
    """The growth of counters between readings. A counter that is lower than before has started
    again, as when a model is reloaded: all of it is new."""

    def __init__(self) -> None:
        self._last: tuple[float, ...] | None = None

    def take(self, *values: float) -> tuple[float, ...]:
        """Return how much each has grown since the last call; all of it at the first."""
        last = self._last or (0.0,) * len(values)
        self._last = values
        has_restarted = any(new < old for new, old in zip(values, last, strict=True))
        if has_restarted:
            return values
        return tuple(new - old for new, old in zip(values, last, strict=True))
