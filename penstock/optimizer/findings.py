"""Results of a search so far: contenders, finalists and attempts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock import units
from penstock.optimizer import goals
from penstock.optimizer.candidates import Build, Candidate, Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import ServedMeasurement, Try
from penstock.optimizer.shapes import alone_s
from penstock.optimizer.simulate import TimeTable
from penstock.profiling.results import Profile

# Maximum number of served candidates, besides the original.
MAX_FINALISTS = 3
# Maximum number of served candidates after a stage that may be the last.
NUM_SEMIFINALISTS = 2
# Arrangements of instances and threads in which one candidate may be served.
NUM_ARRANGEMENTS = 3
# A prediction above this share of the best is worth a served measurement.
NEAR = 0.85

# Steps of the serving passes.
ServingSteps = tuple[Step, ...]


@dataclass(slots=True)
class Contender:
    """A candidate that passed its gates, with its timings."""

    build: Build
    facts: Facts
    times: dict[tuple[int, int], TimeTable]
    # Steps of the serving passes with their predicted highest rates, best first.
    shapes: list[tuple[ServingSteps, float]]
    is_lossy: bool

    @property
    def candidate(self) -> Candidate:
        return self.build.candidate

    @property
    def rate(self) -> float:
        return self.shapes[0][1] if self.shapes else 0.0

    @property
    def alone_s(self) -> float:
        return min(alone_s(table) for table in self.times.values())

    @property
    def speed_text(self) -> str:
        if self.rate:
            shown = units.number(self.rate) if self.rate < 100 else f"{self.rate:,.0f}"
            return f"about {shown}/s"
        alone = f", {self.alone_s * 1e3:.3g} ms alone" if self.times else ""
        return f"no rate within the SLO{alone}"

    def is_ahead(self, other: Contender) -> bool:
        """Compare beyond the noise: by the predicted rate that keeps the SLO; if neither has one,
        by the latency of a single request."""
        if self.rate or other.rate:
            return goals.is_better(self.rate, other.rate)
        return goals.is_better(other.alone_s, self.alone_s)


# A contender and the steps of one way to serve it.
Shaped = tuple[Contender, ServingSteps]


@dataclass(slots=True)
class Finalist:
    """A contender in one serving configuration, served and measured."""

    contender: Contender
    build: Build
    served: ServedMeasurement

    @property
    def simplicity(self) -> int:
        """Lower is simpler: lossless before lossy, fewer steps before more."""
        return 100 * self.contender.is_lossy + len(self.build.candidate.steps)


@dataclass(slots=True)
class Findings:
    """Results of the search; the report is written from it."""

    tries: list[Try] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    contenders: list[Contender] = field(default_factory=list)
    # From the best to the worst.
    finalists: list[Finalist] = field(default_factory=list)
    # The finalists by their key, each with its last measurement.
    served: dict[str, Finalist] = field(default_factory=dict)
    original: ServedMeasurement | None = None
    # Profile of the best candidate before quantisation: shows the bottleneck.
    profile: Profile | None = None
    # Key of the profiled candidate.
    profiled: str = ""
    # Proof measurements by key.
    proofs: dict[str, ServedMeasurement] = field(default_factory=dict)
    is_interrupted: bool = False
    is_out_of_time: bool = False
    # Notes on what the time budget did not allow, one sentence each.
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Contender:
        """The best by prediction; of equal ones the simpler, which came earlier."""
        best = self.contenders[0]
        for contender in self.contenders[1:]:
            best = contender if contender.is_ahead(best) else best
        return best

    def is_met(self) -> bool:
        """Return whether the SLO is met for sure: one barely kept may be missed next time."""
        return bool(self.finalists) and self.finalists[0].served.is_sure

    def is_in_reach(self, plan: Plan) -> bool:
        return goals.is_within_reach(self.best.rate, plan.slo, plan.price_per_hour)

    def add_served(self, contender: Contender, build: Build, served: ServedMeasurement) -> None:
        """Add a measurement and rank the finalists again."""
        self.served[build.candidate.key] = Finalist(contender, build, served)
        pool = list(self.served.values())
        ranked = goals.order([one.served for one in pool], [one.simplicity for one in pool])
        self.finalists = [pool[index] for index in ranked]

    def note_served(self, build: Build, served: ServedMeasurement, seconds: float) -> None:
        """Record a serving configuration as a try. If it was measured before, the last figures
        count, and the time of both. Its comparison is added once the choice is made."""
        if not build.candidate.steps:
            return
        reason = f"served: {served.goodput:.1%} in time, {served.throughput.value:,.0f}/s answered"
        record = Try(build.candidate, "batching", "equal", reason, served=served, seconds=seconds)
        key = build.candidate.key
        record.seconds += sum(each.seconds for each in self.tries if each.candidate.key == key)
        self.tries = [*(each for each in self.tries if each.candidate.key != key), record]

    # What to serve next.

    def nearest(self, limit: int, *, is_fresh: bool = False) -> list[Shaped]:
        """Return what is predicted to come near the best: each contender in its best shape before
        any in its second; among equals, the simpler first. `is_fresh` skips what was served."""
        best = self.best.rate
        found = [
            (
                place,
                goals.is_better(best, rate),
                # If nothing keeps the SLO at any rate: by latency.
                0.0 if rate else contender.alone_s,
                (contender.is_lossy, len(contender.candidate.steps)),
                -rate,
                contender,
                steps,
            )
            for contender in self.contenders
            for place, (steps, rate) in enumerate(_different(contender.shapes))
            if rate >= NEAR * best
            and not (is_fresh and contender.candidate.then(*steps).key in self.served)
        ]
        found.sort(key=lambda each: each[:5])
        return [(contender, steps) for *_, contender, steps in found[:limit]]

    def leading(self) -> list[Shaped]:
        """Return the contenders with the highest predicted rates, the best one in a second
        arrangement of instances and threads too."""
        best, *_ = ranked = sorted(self.contenders, key=lambda one: -one.rate)
        found = [(one, one.shapes[0][0]) for one in ranked[:MAX_FINALISTS] if one.shapes]
        others = _different(best.shapes)[1:2]
        return found + [(best, steps) for steps, rate in others if rate >= NEAR * best.rate]

    def overlooked(self, plan: Plan) -> list[Shaped]:
        """Return the next contenders if all finalists miss the SLO: one with a wrong prediction
        must not hide those behind it."""
        if any(one.served.is_met for one in self.finalists):
            return []
        tried = {one.contender.candidate.key for one in self.served.values()}
        left = [
            one
            for one in sorted(self.contenders, key=lambda one: -one.rate)
            if one.candidate.key not in tried
            and one.rate
            and goals.is_within_reach(one.rate, plan.slo, plan.price_per_hour)
        ]
        return [(one, one.shapes[0][0]) for one in left[:NUM_SEMIFINALISTS]]


def arrangement(steps: Sequence[Step]) -> tuple[int, int]:
    """Return instances, and threads of each."""
    [settings] = [step.settings for step in steps if step.pass_name == "instances"]
    return int(settings["instances"]), int(settings["threads"])


def _different(ranked: Sequence[tuple[ServingSteps, float]]) -> list[tuple[ServingSteps, float]]:
    """Return the best shape of each of the best three arrangements of instances and threads:
    predictions are more certain about batches than about how instances affect each other."""
    best: dict[tuple[int, int], tuple[ServingSteps, float]] = {}
    for each in ranked:
        best.setdefault(arrangement(each[0]), each)
    return list(best.values())[:NUM_ARRANGEMENTS]
