"""What is written and shown about a rollout: events, figures and metrics, and which versions can
share requests. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.config import LLM, ModelConfig
from penstock.errors import InvalidRequest
from penstock.operate.rollout_promise import RolloutPromise
from penstock.operate.rollout_state import RolloutPlan, RolloutState
from penstock.serving.metrics import Labels, ModelMetrics
from penstock.serving.scrape import ScrapeLines
from penstock.serving.split_counts import SplitCounts
from penstock.types import TensorSpec
from penstock.wire.version_rows import HistoryEvent

# Kinds of events.
CANARY, SHADOW, STEP, STOPPED = "canary started", "shadow started", "canary step", "rollout stopped"
# Those after which a rollout that had begun is over.
ENDS = ("promoted", "forced", "rolled back", STOPPED)


def check_alike(stable: ModelConfig, candidate: ModelConfig) -> None:
    """Raise InvalidRequest unless clients can use both versions in the same way."""
    name = stable.name
    if stable.version == candidate.version:
        raise InvalidRequest(f"{name}: version {stable.version} is served already")
    problems = [
        *_differences("input", stable.inputs, candidate.inputs),
        *_differences("output", stable.outputs, candidate.outputs),
    ]
    if (stable.max_batch_size > 0) != (candidate.max_batch_size > 0):
        problems.append("only one of them has a batch dimension")
    if (stable.backend == LLM) != (candidate.backend == LLM):
        problems.append("only one of them is a language model")
    if stable.sequences is not None or candidate.sequences is not None:
        problems.append("the requests of a sequence would go to both")
    if stable.is_decoupled or candidate.is_decoupled:
        problems.append("a decoupled model has any number of responses, which are not compared")
    if problems:
        raise InvalidRequest(
            f"{name}: versions {stable.version} and {candidate.version} cannot share requests: "
            f"{'; '.join(problems)}; promote without a rollout"
        )


def _differences(
    what: str, stable: Sequence[TensorSpec], candidate: Sequence[TensorSpec]
) -> list[str]:
    before, after = (
        {each.name: f"{each.datatype} {list(each.shape)}" for each in specs}
        for specs in (stable, candidate)
    )
    return [
        f"{what} {name} is {before.get(name, 'missing')} and {after.get(name, 'missing')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def describe_start(plan: RolloutPlan, promise: RolloutPromise) -> str:
    """Say what the candidate must keep."""
    kept = [each.text for each in promise.latencies] or ["latency as the stable version"]
    kept.append(f"errors <= {100 * promise.max_failed:.3g} %")
    if promise.max_disagreeing is not None:
        kept.append(f"disagreement <= {100 * promise.max_disagreeing:.3g} %")
    if promise.max_cost is not None:
        kept.append(f"compute time <= {promise.max_cost:.3g} x")
    steps = ", ".join(f"{100 * each:.3g} %" for each in plan.steps) or "none"
    begun = f"{plan.reason}: " if plan.reason else ""
    return f"{begun}{', '.join(kept)} ({promise.source}); steps: {steps}"


def figures_of(counts: SplitCounts, cost_ratio: float | None) -> dict[str, float]:
    """Return the counts behind the checks of a rollout."""
    found: dict[str, float] = {
        "stable_requests": counts.stable.num_requests,
        "candidate_requests": counts.candidate.num_requests,
        "compared_rows": counts.num_compared,
        "disagreeing_rows": round(counts.num_disagreeing, 3),
        "mirrored_requests": counts.num_mirrored,
        "dropped_mirrors": counts.num_dropped,
        "fallbacks": counts.num_fallbacks,
    }
    for name, output in counts.outputs.items():
        if output.num_rows:
            found[f"distance of {name}"] = round(output.distance / output.num_rows, 6)
            found[f"largest distance of {name}"] = round(output.max_distance, 6)
    if cost_ratio is not None:
        found["compute_time_ratio"] = round(cost_ratio, 4)
    return found


def event_figures(state: RolloutState) -> dict[str, object]:
    """Return the facts behind a decision, for the history."""
    checks = [
        {
            "name": each.name,
            "state": each.state,
            "live": each.live,
            "promised": each.promised,
            "e_value": each.e_value,
        }
        for each in state.checks
    ]
    return {"mode": state.mode, "share": state.share, **state.figures, "checks": checks}


def num_deaths(metrics: ModelMetrics) -> int:
    return sum(metrics.num_deaths.values())


def unfinished(events: Sequence[HistoryEvent]) -> HistoryEvent | None:
    """Return the event by which a rollout began that has no end; None if there is none."""
    begun: HistoryEvent | None = None
    for event in events:
        if event.kind in (CANARY, SHADOW):
            begun = event
        elif event.kind in ENDS:
            begun = None
    return begun


def labels_of(state: RolloutState) -> Labels:
    return {"model": state.model, "version": state.candidate}


def scrape(states: Collection[RolloutState]) -> Sequence[ScrapeLines]:
    """Return the metrics of rollouts that run, or ended since the server started."""
    running = [each for each in states if each.decision == "running"]
    decisions = [({**labels_of(each), "decision": each.decision}, 1) for each in states]
    text = "The last rollout of each model, by decision; always 1"
    families = [ScrapeLines.of("penstock_rollout_state", text, "gauge", decisions)]
    shares = [(labels_of(each), each.share) for each in running]
    text = "Share of the requests that the candidate answers"
    families.append(ScrapeLines.of("penstock_rollout_share", text, "gauge", shares))
    for name, text in (
        ("compared_rows", "Rows that both versions computed"),
        ("disagreeing_rows", "Rows on which the versions disagree"),
    ):
        samples = [(labels_of(each), each.figures.get(name, 0)) for each in running]
        families.append(ScrapeLines.of(f"penstock_rollout_{name}", text, "counter", samples))
    return [each for each in families if each.lines]
