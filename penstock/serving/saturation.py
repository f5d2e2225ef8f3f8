"""Time during which no instance of a model was idle: separates waiting for an instance from waiting
for a batch to fill. Pure: time is an argument."""

from __future__ import annotations


class Saturation:
    """A clock that runs only while no instance is idle, as at the start. The difference of two
    readings is the part of the time between them in which nothing could have been started."""

    __slots__ = ("_base_s", "is_saturated")

    def __init__(self, now: float) -> None:
        self.is_saturated = True
        # Accumulated time; while the clock runs, minus the time at which it started.
        self._base_s = -now

    def at(self, now: float) -> float:
        return self._base_s + now if self.is_saturated else self._base_s

    def note(self, is_saturated: bool, now: float) -> None:
        if is_saturated is not self.is_saturated:
            self.is_saturated = is_saturated
            self._base_s += -now if is_saturated else now
