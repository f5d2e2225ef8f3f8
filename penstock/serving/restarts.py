"""When a process that died is started again, and whether a spare is kept for it.

Back-off after deaths in a row, deaths that do not count, and the memory a spare worker may take.
Knows no process and no clock. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
# An instance that has run this long has recovered; its next death restarts it at once.
HEALTHY_S = 10.0
# How long a spare is kept after the last death that a request caused.
SPARE_S = 600.0
# The share of the machine's memory that a spare leaves free.
SPARE_RESERVE = 0.1


def deaths_in_a_row(before: int, well_s: float) -> int:
    """The number of deaths in a row, with that of a process that just died after `well_s`."""
    return 1 if well_s >= HEALTHY_S else before + 1


def backoff_s(num_deaths: int) -> float:
    """How long to wait after so many deaths in a row: after the first not at all."""
    if num_deaths <= 1:
        return 0.0
    # Far beyond the limit, a float must still not overflow.
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_deaths - 2, 32))


@dataclass(slots=True)
class CrashLoop:
    """The deaths in a row of one instance."""

    num_deaths: int = 0

    @property
    def delay_s(self) -> float:
        return backoff_s(self.num_deaths)

    def died(self, well_s: float) -> None:
        self.num_deaths = deaths_in_a_row(self.num_deaths, well_s)

    def excuse(self) -> None:
        """One of the deaths turned out to be the fault of a request."""
        self.num_deaths = max(0, self.num_deaths - 1)

    def recovered(self) -> None:
        self.num_deaths = 0


def spare_fits(worker_bytes: int, available_bytes: int, total_bytes: int) -> bool:
    """Whether another worker of this size leaves enough memory for everything else."""
    return available_bytes - worker_bytes >= SPARE_RESERVE * total_bytes


class SpareWish:
    """Whether a spare is worth its memory: for a while after a request killed a worker."""

    def __init__(self) -> None:
        self._until = 0.0

    def killed(self, now: float) -> None:
        """A request killed a worker; more may follow."""
        self._until = now + SPARE_S

    def holds(self, now: float) -> bool:
        return now < self._until
