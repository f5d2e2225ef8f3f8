"""Reports the progress of a language model's run, and what Ctrl-C would save."""

from __future__ import annotations

from collections.abc import Callable

from penstock.optimizer import goals
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.llm.text_search import STAGES, TextFindings
from penstock.optimizer.llm.text_time import TextTime
from penstock.optimizer.progress import Progress
from penstock.optimizer.progress_reporter import UNLESS_REFUSED
from penstock.optimizer.results import ServedMeasurement


class TextProgress:
    """Calls `watch` with the state of the run."""

    def __init__(
        self, watch: Callable[[Progress], None], findings: TextFindings, time: TextTime
    ) -> None:
        self._watch = watch
        self._findings = findings
        self._time = time
        self._stage, self._candidate = "baseline", Candidate()

    def begin(self, stage: str, candidate: Candidate) -> None:
        """Set the stage and the candidate that the next reports are about."""
        self._stage, self._candidate = stage, candidate

    def tell(self, doing: str) -> None:
        findings, is_proof = self._findings, self._stage == "proof"
        best = findings.kept[-1] if findings.kept else None
        self._watch(
            Progress(
                stage=self._stage,
                candidate="" if is_proof else str(self._candidate),
                doing=f"original and choice in turns, {doing}" if is_proof else doing,
                num_tried=len(findings.tries),
                best="" if best is None else str(best.candidate),
                best_text="" if best is None else f"{best.rate:.3g}/s",
                elapsed_s=self._time.elapsed_s,
                left_s=self._time.left_s,
                stages=STAGES,
                to_save=self._to_save(self._candidate if is_proof else None),
            )
        )

    def _to_save(self, chosen: Candidate | None) -> str:
        """Return what an interruption would save, by the search's figures. `chosen` is None before
        the choice is made."""
        kept = self._findings.kept
        if not kept:
            return ""
        found = [each for each in kept if chosen in (None, each.candidate)][-1]
        if not found.candidate.steps or is_as_good(kept[0].served, found.served):
            return str(Candidate())
        is_judged = chosen is None and found.is_lossy
        return f"{found.candidate}{UNLESS_REFUSED if is_judged else ''}"


def is_as_good(original: ServedMeasurement | None, chosen: ServedMeasurement | None) -> bool:
    """Return whether the original is no worse after all; it wins ties because it is simplest."""
    if original is None or chosen is None:
        return False
    return goals.order([original, chosen], [0, 1])[0] == 0
