"""Choice of the contenders to serve and measure, and of their serving configurations. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.optimizer import goals
from penstock.optimizer.candidates import Step
from penstock.optimizer.findings import Contender, Findings
from penstock.optimizer.plan import Plan

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


def nearest(
    findings: Findings, limit: int, *, is_fresh: bool = False
) -> list[tuple[Contender, ServingSteps]]:
    """Return what is predicted to come near the best: each contender in its best shape before any
    in its second; among equals, the simpler first. `is_fresh` skips what was served already."""
    best = findings.best.rate
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
        for contender in findings.contenders
        for place, (steps, rate) in enumerate(_different(contender.shapes))
        if rate >= NEAR * best
        and not (is_fresh and contender.candidate.then(*steps).key in findings.served)
    ]
    found.sort(key=lambda each: each[:5])
    return [(contender, steps) for *_, contender, steps in found[:limit]]


def leading(findings: Findings) -> list[tuple[Contender, ServingSteps]]:
    """Return the contenders with the highest predicted rates, the best one in a second arrangement
    of instances and threads too."""
    ranked = sorted(findings.contenders, key=lambda one: -one.rate)
    found = [(one, one.shapes[0][0]) for one in ranked[:MAX_FINALISTS] if one.shapes]
    others = _different(ranked[0].shapes)[1:2]
    return found + [(ranked[0], steps) for steps, rate in others if rate >= NEAR * ranked[0].rate]


def overlooked(findings: Findings, plan: Plan) -> list[tuple[Contender, ServingSteps]]:
    """Return the next contenders if all finalists miss the SLO: one with a wrong prediction must
    not hide those behind it."""
    if any(one.served.is_met for one in findings.finalists):
        return []
    assert plan.slo is not None
    tried = {one.contender.candidate.key for one in findings.served.values()}
    left = [
        contender
        for contender in findings.contenders
        if contender.candidate.key not in tried
        and contender.rate
        and goals.is_within_reach(contender.rate, plan.slo, plan.price_per_hour)
    ]
    left.sort(key=lambda contender: -contender.rate)
    return [(each, each.shapes[0][0]) for each in left[:NUM_SEMIFINALISTS]]


def arrangement(steps: Sequence[Step]) -> tuple[int, int]:
    """Return instances, and threads of each."""
    [settings] = [step.settings for step in steps if step.pass_name == "instances"]
    return int(settings["instances"]), int(settings["threads"])


def _different(ranked: Sequence[tuple[ServingSteps, float]]) -> list[tuple[ServingSteps, float]]:
    """Return the best shape of each of the best three arrangements of instances and threads:
    predictions are more certain about batches than about how instances affect each other and the
    server."""
    best: dict[tuple[int, int], tuple[ServingSteps, float]] = {}
    for each in ranked:
        best.setdefault(arrangement(each[0]), each)
    return list(best.values())[:NUM_ARRANGEMENTS]
