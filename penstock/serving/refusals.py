"""When a model begins to refuse for lack of capacity, and when that is over, for the log: two lines
for each stretch of overload, however many requests it refuses. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

# Overload is over when nobody has been refused for this long.
QUIET_S = 5.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """One stretch of overload that is over."""

    num_refused: int
    duration_s: float


class Refusals:
    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        self._num_refused = 0

    def refused(self, now: float) -> bool:
        """One more was refused. True when that is how overload begins."""
        begins = self._began is None
        if self._began is None:
            self._began = now
            self._num_refused = 0
        self._last = now
        self._num_refused += 1
        return begins

    def ended(self, now: float) -> Stretch | None:
        """Asked now and then: the stretch that has ended by now, once."""
        if self._began is None or now - self._last < QUIET_S:
            return None
        stretch = Stretch(self._num_refused, self._last - self._began)
        self._began = None
        return stretch
