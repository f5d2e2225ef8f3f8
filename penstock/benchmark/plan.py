"""What to measure, and for how long: the command line as one value; and the progress of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.benchmark.pacer import Load
from penstock.benchmark.stats import Interval
from penstock.benchmark.targets import TargetSpec
from penstock.data import InputSpec
from penstock.slo import Latency, Slo

Phase = Literal["warm-up", "measuring", "draining"]


@dataclass(frozen=True, slots=True)
class Decides:
    """The percentile of a metric whose confidence interval decides when a level ends."""

    percent: float = 99.0
    metric: str = "latency"

    @property
    def name(self) -> str:
        return f"p{self.percent:g}" + ("" if self.metric == "latency" else f" {self.metric}")


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """One benchmark run, as the command line asks for it."""

    target: TargetSpec
    inputs: InputSpec
    # Empty for questions that choose their own loads.
    loads: tuple[Load, ...] = ()
    question: str = ""  # "", "knee" or "max rate"
    slo: Slo | None = None
    decides: Decides = Decides()
    # Longest time of one level; None runs a trace or profile to its end.
    duration_s: float | None = 10.0
    precision: float = 0.05
    max_warm_up_s: float = 10.0
    num_processes: int = 1
    arrivals: str = "poisson"
    cv: float = 1.0
    seed: int = 0
    price_per_hour: float | None = None
    command: str = ""


def decides_for(slo: Slo | None) -> Decides:
    """Return the farthest tail of an SLO, which is known last; p99 latency if it has none."""
    tails = [
        Decides(float(term.statistic[1:]), term.metric)
        for term in (() if slo is None else slo.terms)
        if isinstance(term, Latency) and term.is_tail
    ]
    return max(tails, key=lambda each: each.percent, default=Decides())


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
