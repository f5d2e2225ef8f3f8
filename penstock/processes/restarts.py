"""Restart policy: back-off after consecutive deaths, deaths that do not count, and spare workers.

Knows no process and no clock. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
# An instance that has run this long has recovered; its next death restarts it at once.
HEALTHY_S = 10.0
# Loading fails after this many deaths in a row before the first time that it succeeds.
MAX_LOAD_DEATHS = 3
# Limit on the counted deaths of processes that ran longer than they took to start.
MAX_USEFUL_DEATHS = 3
# How long a spare is kept after the last death that a request caused.
SPARE_S = 600.0
MAX_SPARES = 4
# Window over which deaths per second are counted.
RATE_WINDOW_S = 10.0
# The share of the machine's memory that must stay free beside a new spare.
SPARE_RESERVE = 0.1


def deaths_in_a_row(before: int, well_s: float, start_s: float = math.inf) -> int:
    """Return the number of consecutive deaths, including that of a process that just died after it
    ran for `well_s`. If it ran longer than it took to start (`start_s`), the count is limited, so
    that back-off stays short."""
    if well_s >= HEALTHY_S:
        return 1
    return min(before + 1, MAX_USEFUL_DEATHS) if well_s > start_s else before + 1


def backoff_s(num_deaths: int) -> float:
    """Return the delay before a restart after this many deaths in a row; none after the first."""
    if num_deaths <= 1:
        return 0.0
    # The exponent is limited because a float overflows at 2**1024.
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_deaths - 2, 32))


@dataclass(slots=True)
class CrashLoop:
    """Consecutive deaths of one instance."""

    num_deaths: int = 0

    @property
    def delay_s(self) -> float:
        return backoff_s(self.num_deaths)

    def died(self, well_s: float, start_s: float = math.inf) -> None:
        self.num_deaths = deaths_in_a_row(self.num_deaths, well_s, start_s)

    def excuse(self) -> None:
        """Take back one death: a request caused it."""
        self.num_deaths = max(0, self.num_deaths - 1)

    def recovered(self) -> None:
        self.num_deaths = 0


def spare_fits(worker_bytes: int, available_bytes: int, total_bytes: int) -> bool:
    """Whether one more worker of this size leaves enough memory for everything else."""
    return available_bytes - worker_bytes >= SPARE_RESERVE * total_bytes


class SparePlan:
    """How many spare workers to keep: for SPARE_S after a request killed a worker, one, plus as
    many as die while a worker starts (Little's law)."""

    def __init__(self) -> None:
        self._until = 0.0
        self._deaths: deque[float] = deque()
        self._most = 0

    def killed(self, now: float) -> None:
        """Note that a request killed a worker; more may follow."""
        self._until = now + SPARE_S
        self._deaths.append(now)

    def num_wanted(self, now: float, start_s: float) -> int:
        """Return the number of spares to keep; `start_s` is a worker's start time. It never falls
        except to 0, so that a short pause does not waste loaded spares."""
        while self._deaths and self._deaths[0] <= now - RATE_WINDOW_S:
            self._deaths.popleft()
        if now >= self._until:
            self._most = 0
            return 0
        rate = len(self._deaths) / RATE_WINDOW_S
        self._most = max(self._most, min(MAX_SPARES, 1 + round(rate * start_s)))
        return self._most
