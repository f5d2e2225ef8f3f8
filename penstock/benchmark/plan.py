"""What is to be measured, and how long: the command line's wishes as one value."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.benchmark.inputs import InputSpec
from penstock.benchmark.pacer import Load
from penstock.benchmark.targets import TargetSpec
from penstock.slo import Latency, Slo


@dataclass(frozen=True, slots=True)
class Decides:
    """The figure whose interval ends a level: a percentile of a metric."""

    percent: float = 99.0
    metric: str = "latency"

    @property
    def name(self) -> str:
        return f"p{self.percent:g}" + ("" if self.metric == "latency" else f" {self.metric}")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and how long."""

    target: TargetSpec
    inputs: InputSpec
    # None for the questions that choose loads themselves.
    loads: tuple[Load, ...] = ()
    question: str = ""  # "", "knee" or "max rate"
    slo: Slo | None = None
    decides: Decides = Decides()
    # Of one level, at most; None: a trace or profile to its end.
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
    """The farthest tail an SLO speaks of: nearer ones are known when it is. p99 latency where it
    speaks of none."""
    tails = [
        Decides(float(term.statistic[1:]), term.metric)
        for term in (() if slo is None else slo.terms)
        if isinstance(term, Latency) and term.is_tail
    ]
    return max(tails, key=lambda each: each.percent, default=Decides())
