"""What is to be optimised, for what, and how far it may go: the wishes as one value."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.optimizer.budget import Budget
from penstock.slo import Slo


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `penstock optimize` was asked for; the command line and plan files make it."""

    # An .onnx or .pt2 file, a Hugging Face folder, a model's folder of a repository, or
    # package.module:factory.
    model: str
    name: str
    # The repository that gets the version.
    out: str
    slo: Slo | None = None
    # Representative inputs, as in bench; empty: drawn from the signature.
    data: str = ""
    # Which input a file without names is for.
    data_name: str = ""
    # The array or field of the data that holds the right answers; empty: none.
    labels: str = ""
    # package.module:function that scores examples; empty: by labels, or agreement.
    evaluator: str = ""
    # Data for calibration alone; empty: a part of `data`.
    calibration: str = ""
    # None: the default for what is known (see accuracy).
    accuracy: Budget | None = None
    # package.module:function from what users send to what the model takes.
    preprocess: str = ""
    # package.module:function from what the model gives to what users get.
    postprocess: str = ""
    price_per_hour: float | None = None
    # Wall-clock time for everything; None: as long as it takes.
    budget_s: float | None = None
    # auto, cpu, cuda (each GPU there is) or cuda:N: where the original and all candidates run.
    device: str = "auto"
    # Go on after the SLO is met, and try what the hardware should not profit from.
    is_exhaustive: bool = False
    # Longest time to measure one load of one candidate.
    duration_s: float = 10.0
    seed: int = 0
    # Outputs whose answers matter; empty: all of them.
    outputs: tuple[str, ...] = ()
    # Discard what an interrupted run of the same command has measured.
    is_fresh: bool = False
