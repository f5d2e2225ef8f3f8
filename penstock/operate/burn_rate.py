"""How fast the error budget of an SLO burns, over several windows. Pure.

A burn rate of 1 uses up the budget exactly: with p99, one request in a hundred is bad. The windows
are those of the alerts in deploy/monitoring/alerts.yaml, which compute the same from the counters
`penstock_slo_requests` and `penstock_slo_bad_requests`.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.operate.sliding_sums import SlidingSums
from penstock.slo import Objective

WINDOWS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0, "6h": 21_600.0, "3d": 259_200.0}


class BurnRate:
    """The burn rates of one objective."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._sums = {name: SlidingSums(window_s, 2) for name, window_s in WINDOWS.items()}

    def add(self, now: float, num_requests: float, num_bad: float) -> None:
        """Count requests that ended since the last call."""
        for each in self._sums.values():
            each.add(now, num_requests, num_bad)

    def rates(self, now: float) -> dict[str, float]:
        """Return the burn rate of each window; 0 without requests. Before a window is full, it is
        that of the time so far."""
        budget = 1 - self.objective.share
        found = {}
        for name, each in self._sums.items():
            num_requests, num_bad = each.sums(now)
            found[name] = num_bad / num_requests / budget if num_requests else 0.0
        return found
