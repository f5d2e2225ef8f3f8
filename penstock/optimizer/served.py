"""Builds measured as they would be served: `python -m penstock serve` and the bench's conductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.benchmark.stats import Interval
from penstock.optimizer.candidates import Build
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Curve, Served

# What is being done, for the live view.
Watch = Callable[[str], None]


def measure(build: Build, plan: Plan, watch: Watch) -> Served:
    """At the load of the SLO."""
    raise NotImplementedError


def measure_alternately(builds: Sequence[Build], plan: Plan, watch: Watch) -> list[Served]:
    """The same for several, in turns (A B A B), so that a machine that changes changes for all."""
    raise NotImplementedError


def max_rates(builds: Sequence[Build], plan: Plan, watch: Watch) -> list[Interval]:
    """The highest rate of each that keeps the latency terms, in turns."""
    raise NotImplementedError


def curve(build: Build, plan: Plan, rates: Sequence[float], watch: Watch) -> Curve:
    raise NotImplementedError
