"""Answers of builds to the rows of a run, computed in trials.

Answers are not recorded: they are large and quickly recomputed. Those of the original are kept in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from penstock.optimizer import influence, trials
from penstock.optimizer.candidates import Build
from penstock.optimizer.gpu_sessions import GpuProcesses
from penstock.optimizer.inspector import Inspector, without_postprocess
from penstock.optimizer.numerics import Answers
from penstock.optimizer.run_context import Row, RunContext

# Rows on which every candidate's answers are compared with the original's, value by value.
NUM_COMPARED = 64
# Share of a time budget for comparing answers on rows outside of the held-out part.
SURVEY_SHARE = 0.02
CHOICE, HELD_OUT, COMPARED = "choice", "held out", "compared"


@dataclass
class AnswerSource:
    """Answers to the parts of the examples."""

    run: RunContext
    gpu: GpuProcesses
    inspector: Inspector
    _original: dict[str, Answers] = field(default_factory=dict)
    # The original's answers to rows outside of a part; see `survey`.
    _survey: dict[str, Answers] = field(default_factory=dict)

    @property
    def compared(self) -> tuple[int, ...]:
        return self.run.samples.split.choice[:NUM_COMPARED]

    def indices(self, part: str) -> tuple[int, ...]:
        split = self.run.samples.split
        return {COMPARED: self.compared, CHOICE: split.choice, HELD_OUT: split.held_out}[part]

    def answers(
        self, build: Build, indices: tuple[int, ...], stop_after_s: float = math.inf
    ) -> Answers:
        """Return answers to these rows; empty ones where time ran out first."""
        run = self.run
        rows = [run.rows[index] for index in indices]
        tell = self._tell_share(indices)
        rules = replace(self.inspector.rules(build), stop_after_s=stop_after_s)

        def ask() -> Answers:
            session = self.gpu.session(build)
            if session is None:
                return trials.answers(build, rows, tell, rules)
            return session.answers(rows, tell, rules)

        return run.required(build, ask)()

    def original_answers(self, part: str) -> Answers:
        known = self._original.get(part)
        if known is None:
            self.run.tell(f"the original's answers, {part}")
            known = self._original[part] = self.answers(self.run.original, self.indices(part))
            if part == CHOICE:
                self._note_nan(known)
        return known

    @cached_property
    def model_answers(self) -> Answers:
        """The original's answers to the compared rows, without postprocessing."""
        if self.run.original.config.postprocess is None:
            return self.original_answers(COMPARED)
        return self.answers(without_postprocess(self.run.original), self.compared)

    def survey(self, build: Build, part: str) -> list[tuple[Row, Row]]:
        """Return both models' answers to rows outside of the part, as far as time allows."""
        run = self.run
        left = tuple(influence.survey_order(len(run.rows), self.indices(part)))
        if not left:
            return []
        run.tell("numerics, other rows")
        budget_s = math.inf if run.plan.budget_s is None else run.plan.budget_s
        survey_s = min(influence.SURVEY_S, SURVEY_SHARE * budget_s)
        if part not in self._survey:
            self._survey[part] = self.answers(run.original, left, survey_s)
        found = self.answers(build, left, survey_s)
        pairs = zip(self._survey[part], found, strict=True)
        return [(one, other) for one, other in pairs if one and other]

    def _note_nan(self, answers: Answers) -> None:
        """Note how many answers of the original have NaN: a candidate that answers NaN as well
        agrees with it, and no score shows that such answers are useless."""
        floats = ([v for v in answer.values() if v.dtype.kind == "f"] for answer in answers)
        num_nan = sum(any(np.isnan(each).any() for each in values) for values in floats)
        if num_nan:
            count = f"{num_nan:,} of {len(answers):,} examples"
            self.run.notes.append(f"the original answers {count} with NaN")

    def _tell_share(self, indices: tuple[int, ...]) -> Callable[[int], None] | None:
        if len(indices) <= NUM_COMPARED:
            return None
        total = f"{len(indices):,}"

        def tell(num_done: int) -> None:
            self.run.budget.check_part()
            self.run.tell(f"answers, {num_done:,} of {total}")

        return tell
