"""Progress of a run, for display. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.benchmark.stats import Interval

Phase = Literal["warm-up", "measuring", "draining"]


@dataclass(frozen=True, slots=True)
class LevelProgress:
    """A level at one moment. `of_s` None: it ends with its trace or search."""

    level: str  # "concurrency 8"
    phase: Phase
    elapsed_s: float
    of_s: float | None
    # Over the last moments.
    rate: float
    p99_s: float
    # Over the level so far.
    num_requests: int
    num_failed: int
    # The statistic that decides when the level ends; None before it can be estimated.
    statistic: str = "p99"
    interval: Interval | None = None
    # This is level `index` (from 1) of `num_levels`; None when a search decides how many.
    index: int = 1
    num_levels: int | None = None
