"""Progress of an optimisation, for display. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.optimizer.candidates import STAGES, Stage


@dataclass(frozen=True, slots=True)
class Progress:
    stage: Stage | str
    # The candidate being tried, as text.
    candidate: str
    # build, read back, numerics, accuracy, batch times, served, ...; after a comma, the progress.
    doing: str
    num_tried: int
    best: str
    best_text: str  # "p99 12 ms, about 310/s"
    elapsed_s: float
    left_s: float | None
    # In the order in which they are run.
    stages: tuple[Stage, ...] = STAGES
    # Printed once and kept on screen; empty: none.
    note: str = ""
    # What Ctrl-C would still measure, empty: nothing; and what it would save if that is no better.
    to_measure: str = ""
    to_save: str = ""
    # Estimated seconds to measure and save that; None: unknown.
    finish_s: float | None = None
