"""Progress of a run: what is being done, what is best, and what Ctrl-C would save. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.optimizer.candidates import STAGES, Stage
from penstock.optimizer.findings import Findings, Shaped
from penstock.optimizer.time_plan import MODEL_STAGES, TimeBudget

# On a GPU, FP16 halves the work and needs only a check. Compiled code is tuned for one precision,
# so precision comes first to avoid compiling twice.
ON_GPU: tuple[Stage, ...] = ("precision", "compile", "quantise")
# Estimated seconds to judge and save the choice.
SAVED_S = 5.0
UNLESS_REFUSED = " (unless the held-out examples refuse it)"


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


@dataclass(slots=True)
class ProgressReporter:
    """Calls `watch` with the state of the run. The evaluator says what is being done, the search
    for which candidate."""

    watch: Callable[[Progress], None]
    findings: Findings
    budget: TimeBudget
    # In the order in which they run.
    stages: tuple[Stage, ...]
    # Candidates that lose nothing are judged on the held-out set too.
    judges_lossless: bool
    _trying: str = ""
    _doing: str = "start"
    # Saved on an interruption once the choice is made; see `begin_proof`.
    _to_save: str = ""

    def begin(self, trying: object) -> None:
        self._trying = str(trying)

    def begin_proof(self, candidate: object, to_save: str = "") -> None:
        """Report the proof, after the search: of the candidate, and what an interruption would
        save; empty: the best that passes on the held-out set."""
        self.budget.stage = "proof"
        self._trying, self._to_save = str(candidate), to_save

    def refresh(self) -> None:
        """Report again: what Ctrl-C would do may have changed."""
        self.tell(self._doing)

    def tell(self, doing: str, note: str = "") -> None:
        """Report what is being done; the note stays on screen."""
        self._doing = doing
        findings, budget = self.findings, self.budget
        best = findings.best if findings.contenders else None
        left = to_measure(findings, budget) if budget.stage != "proof" else []
        self.watch(
            Progress(
                stage=budget.stage,
                candidate=self._trying,
                doing=doing,
                num_tried=len(findings.tries),
                best="" if best is None else str(best.candidate),
                best_text="" if best is None else best.speed_text,
                elapsed_s=budget.elapsed_s,
                left_s=budget.left_s,
                stages=self.stages,
                note=note,
                to_measure=", ".join(str(one.candidate.then(*steps)) for one, steps in left),
                to_save=self._to_save or self._first_finalist(),
                finish_s=SAVED_S + (budget.estimates.serve_s() if left else 0.0),
            )
        )

    def _first_finalist(self) -> str:
        """Return what is saved if nothing more is measured."""
        if not self.findings.finalists:
            return ""
        first = self.findings.finalists[0]
        candidate = first.build.candidate
        is_judged = first.contender.is_lossy or (bool(candidate.steps) and self.judges_lossless)
        return f"{candidate}{UNLESS_REFUSED if is_judged else ''}"


def stages_of(is_on_gpu: bool) -> tuple[Stage, ...]:
    """Return all stages in the order of a run."""
    order = iter(ON_GPU if is_on_gpu else MODEL_STAGES)
    return tuple(next(order) if each in MODEL_STAGES else each for each in STAGES)


def to_measure(findings: Findings, budget: TimeBudget) -> list[Shaped]:
    """Return what to serve after an interruption: the best, if it was not served and may be."""
    if len(findings.contenders) < 2:
        return []
    num_known = sum(one.served.is_met for one in findings.finalists[:1])
    if budget.num_measurable(num_known, 0.0, is_final=True) < 1:
        return []
    return [
        (contender, steps)
        for contender, steps in findings.nearest(1)
        if contender.candidate.then(*steps).key not in findings.served
    ]
