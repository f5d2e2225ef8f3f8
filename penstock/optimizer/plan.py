"""The plan of a run as one value: the model, its goals and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.optimizer.budget import Budget
from penstock.slo import Cost, Slo


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `penstock optimize` was asked for, from the command line or a plan file."""

    # An .onnx or .pt2 file, a Hugging Face folder, a model's folder, or package.module:factory.
    model: str
    name: str
    # The repository that the version is committed to.
    out: str
    slo: Slo = Slo(())
    # Representative inputs, as in bench; empty: drawn from the signature.
    data: str = ""
    # The recording of live traffic that `data` is; empty: it is another file.
    from_live: str = ""
    # Input of the model for data files without names.
    data_name: str = ""
    # The array or field of the data that holds the labels; empty: none.
    labels: str = ""
    # Member of an ensemble to optimise; empty: the bottleneck.
    member: str = ""
    # package.module:function that scores examples; empty: use labels, or agreement.
    evaluator: str = ""
    # Separate data for calibration; empty: a part of `data`.
    calibration: str = ""
    # None: the default of the metric (see `budget.default_budget`).
    accuracy: Budget | None = None
    # package.module:function from a user's inputs to the model's.
    preprocess: str = ""
    # package.module:function from the model's outputs to the user's.
    postprocess: str = ""
    price_per_hour: float | None = None
    # Wall-clock time for everything; None: no limit.
    budget_s: float | None = None
    # auto, cpu, cuda (all GPUs) or cuda:N: where the original and all candidates run.
    device: str = "auto"
    # Continue after the SLO is met, and try steps that this hardware should not profit from.
    is_exhaustive: bool = False
    # Longest time to measure one load of one candidate.
    duration_s: float = 10.0
    seed: int = 0
    # Outputs whose answers matter; empty: all of them.
    outputs: tuple[str, ...] = ()
    # Discard the measurements of an interrupted run of the same command.
    is_fresh: bool = False

    @property
    def has_cost_limit(self) -> bool:
        """Whether judging the SLO needs highest rates."""
        has_cost = any(isinstance(term, Cost) for term in self.slo.terms)
        return has_cost and self.price_per_hour is not None
