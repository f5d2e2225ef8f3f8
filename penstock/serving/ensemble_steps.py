"""What an ensemble tells of its steps: their times, and the errors of members. Pure."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.serving.explain import Explanation, StepState
from penstock.serving.metrics import ModelMetrics


@dataclass(slots=True)
class StepFigures:
    """Sums over the requests of one step."""

    num_answered: int = 0
    num_failed: int = 0
    # Requests of the ensemble that went on without it, because of a condition.
    num_skipped: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    total_s: float = 0.0

    def add(self, queue_s: float, compute_s: float, total_s: float) -> None:
        self.num_answered += 1
        self.queue_s += queue_s
        self.compute_s += compute_s
        self.total_s += total_s


def explain_ensemble(
    config: ModelConfig, state: str, metrics: ModelMetrics, figures: Sequence[StepFigures]
) -> Explanation:
    """Explain an ensemble; its members are explained by themselves."""
    names = ", ".join(dict.fromkeys(step.model for step in config.steps))
    steps = [
        StepState(
            step.model,
            step.version,
            each.num_answered,
            each.num_failed,
            each.queue_s,
            each.compute_s,
            each.total_s,
            each.num_skipped,
        )
        for step, each in zip(config.steps, figures, strict=True)
    ]
    return Explanation(
        model=config.name,
        version=config.version,
        state=state,
        mode="ensemble",
        mode_reason=f"its steps run other models, which batch: {names}",
        policy={"max_batch_size": str(config.max_batch_size)},
        instances=[],
        refused={name: count for name, count in metrics.num_refused.items() if count},
        notes=[*config.warnings, *config.notes],
        verdicts=[slowest(steps)],
        steps=steps,
    )


def slowest(steps: Sequence[StepState]) -> str:
    """Say which step takes the most time."""
    ran = [step for step in steps if step.num_answered]
    if not ran:
        return "No step has run yet."
    most = max(ran, key=lambda step: step.total_s / step.num_answered)
    mean_s = most.total_s / most.num_answered
    what = f"{mean_s * 1e3:.3g} ms a request on average"
    return f"The slowest step is '{most.model}' with {what}: see penstock explain {most.model}."


def named_error(where: str, error: PenstockError) -> PenstockError:
    """Return the error of a member as the ensemble's, of the same kind, naming both in `where`."""
    found = copy.copy(error)
    found.args = (f"{where}: {error}",)
    return found
