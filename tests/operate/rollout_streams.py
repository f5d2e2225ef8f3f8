"""Simulated traffic of a rollout, second by second, for judges."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.operate.rollout_judge import RolloutJudge, RolloutVerdict
from penstock.operate.rollout_measures import RolloutReading
from penstock.operate.rollout_promise import LatencyPromise, RolloutPromise
from penstock.operate.rollout_state import RolloutPlan
from penstock.serving.split_counts import LATENCY, SideCounts, SplitCounts

P99 = RolloutPromise((LatencyPromise("p99 < 20ms", LATENCY, 0.02, 0.01),), "the SLO of the test")
PLAN = RolloutPlan(step_s=10.0)


@dataclass(slots=True)
class Behaviour:
    """One version in one second."""

    late: float = 0.002
    failed: float = 0.0
    disagree: float = 0.0
    infer_s: float = 0.004
    deaths: int = 0
    is_ready: bool = True
    median_s: float = 0.005


@dataclass
class Traffic:
    """A split server at `rate` requests a second; `stable` and `candidate` say how each version
    behaves by the second."""

    rate: float = 200.0
    stable: Callable[[int], Behaviour] = lambda second: Behaviour()
    candidate: Callable[[int], Behaviour] = lambda second: Behaviour()
    compared_per_s: int = 10
    seed: int = 3
    counts: SplitCounts = field(default_factory=SplitCounts)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._batches: tuple[dict, dict] = ({}, {})
        self._deaths = [0, 0]

    def second(self, number: int, share: float, limits: tuple) -> RolloutReading:
        requests = self._random.poisson(self.rate)
        num_candidate = self._random.binomial(requests, share)
        both = (self.stable(number), self.candidate(number))
        sides = (self.counts.stable, self.counts.candidate)
        for index, (side, how) in enumerate(zip(sides, both, strict=True)):
            count = num_candidate if index else requests - num_candidate
            self._add(side, how, count, limits)
            self._run(self._batches[index], how, count)
            self._deaths[index] += how.deaths
        num_compared = min(self.compared_per_s, requests)
        self.counts.num_compared += num_compared
        self.counts.num_disagreeing += int(self._random.binomial(num_compared, both[1].disagree))
        copies = [dict(each) for each in self._batches]
        return RolloutReading(self.counts, *copies, *self._deaths, both[1].is_ready, "it crashed")

    def _add(self, side: SideCounts, how: Behaviour, count: int, limits: tuple) -> None:
        for value in self._random.random(count):
            if value < how.failed:
                side.num_failed += 1
            elif value < how.failed + how.late:
                side.add(LATENCY, 0.05, limits)
            else:
                side.add(LATENCY, how.median_s * self._random.lognormal(0, 0.2), limits)

    def _run(self, batches: dict, how: Behaviour, count: int) -> None:
        for _ in range(count // 2):
            number, seconds = batches.get(2, (0, 0.0))
            batches[2] = number + 1, seconds + how.infer_s * self._random.lognormal(0, 0.3)


def follow(
    traffic: Traffic,
    plan: RolloutPlan = PLAN,
    promise: RolloutPromise = P99,
    num_seconds: int = 300,
) -> Iterator[tuple[int, RolloutVerdict]]:
    """Yield each second's verdict until the rollout ends."""
    judge = RolloutJudge(plan, promise, 0.0)
    for second in range(num_seconds):
        share = judge.share if judge.step >= 0 else 0.2
        verdict = judge.tick(traffic.second(second, share, promise.limits), second + 1.0)
        yield second, verdict
        if verdict.action in ("promote", "roll back"):
            return


def outcome(*args: object, **keywords: object) -> tuple[int, RolloutVerdict]:
    """The last second and its verdict."""
    *_, last = follow(*args, **keywords)
    return last
