"""Stretches of overload, for the log: one line when a model starts to refuse requests for lack of
capacity and one when it stops, however many it refuses. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

# Overload is over when no request has been refused for this long.
QUIET_S = 5.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A finished stretch of overload."""

    num_refused: int
    duration_s: float


class Refusals:
    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        self._num_refused = 0

    def refused(self, now: float) -> bool:
        """Count a refused request; True if it starts a stretch of overload."""
        begins = self._began is None
        if self._began is None:
            self._began = now
            self._num_refused = 0
        self._last = now
        self._num_refused += 1
        return begins

    def ended(self, now: float) -> Stretch | None:
        """Return the stretch that has ended by now, once; call it periodically."""
        if self._began is None or now - self._last < QUIET_S:
            return None
        stretch = Stretch(self._num_refused, self._last - self._began)
        self._began = None
        return stretch
