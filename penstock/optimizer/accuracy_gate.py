"""The accuracy gate: compares a build's answers with the original's, and judges its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from penstock.optimizer import accuracy, numerics, scores
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.answer_source import COMPARED, AnswerSource
from penstock.optimizer.budget import Budget, default_budget
from penstock.optimizer.candidates import Build
from penstock.optimizer.columns import FLOOR
from penstock.optimizer.inspector import without_postprocess
from penstock.optimizer.numerics import Answers, Numerics
from penstock.optimizer.output_checks import OutputCheck, check_outputs
from penstock.optimizer.run_context import RunContext

# Tolerance for rounding by another order of operations, as a share of the range of a column.
TOLERANCE = 1e-3
# On a GPU the original already convolves in TF32, and another kernel rounds differently.
TF32_TOLERANCE = 5e-3


class Evaluation(msgspec.Struct):
    """One build on one part of the examples: a score per example, and a check per output."""

    scores: list[float]
    outputs: list[OutputCheck]
    # The outputs that the score reads.
    reads: list[str]


@dataclass
class AccuracyGate:
    """Judges builds by the examples of a run."""

    run: RunContext
    # Answers of the model, which are compared value by value.
    source: AnswerSource
    # Answers that clients get: the same, unless the model is a member of an ensemble.
    judged: AnswerSource

    @cached_property
    def scorer(self) -> scores.Scorer:
        run = self.run
        return scores.make_scorer(run.plan, run.samples, self.judged.original_answers(COMPARED))

    @cached_property
    def budget(self) -> Budget:
        return self.run.plan.accuracy or default_budget(self.scorer.metric)

    def numerics(self, build: Build, *, is_exact: bool) -> Numerics:
        """Compare with the original on the compared rows, before any postprocessing."""
        run, source = self.run, self.source

        def compare() -> Numerics:
            original = source.model_answers
            found = source.answers(without_postprocess(build), source.compared)
            tolerance = self._tolerance if is_exact else None
            # With a function or an ensemble around the model, --outputs names their outputs.
            is_inside = build.config.postprocess is not None or run.ensemble is not None
            names = () if is_inside else run.plan.outputs
            return self._compared(original, found, tolerance, names)

        run.tell("numerics")
        key = build.candidate.key
        return run.journal.remember("numerics", key, Numerics, compare, passing=run.passing)

    def judge(self, build: Build, part: str, alpha: float = accuracy.ALPHA) -> Judgement:
        """Judge one part by the score, and by every output that it does not read."""
        original, found = self.evaluate(self.run.original, part), self.evaluate(build, part)
        before, after = np.array(original.scores), np.array(found.scores)
        judgement = accuracy.judge(before, after, self.budget, alpha=alpha, part=part)
        return accuracy.with_outputs(judgement, found.outputs)

    def judge_lossless(self, build: Build, part: str, alpha: float) -> Judgement:
        """Apply the accuracy gate to a lossless step: answers are also compared value by value on
        all examples of the part, and on as many other rows as the survey has time for."""
        run, source = self.run, self.judged

        def compare() -> Numerics:
            run.tell(f"numerics, {part}")
            original = source.original_answers(part)
            found = source.answers(build, source.indices(part))
            pairs = list(zip(original, found, strict=True))
            if build.candidate.steps:
                pairs += source.survey(build, part)
            one, other = ([pair[place] for pair in pairs] for place in (0, 1))
            return self._compared(one, other, self._tolerance, run.plan.outputs)

        kind, key = "numerics of all rows", f"{build.candidate.key} {part}"
        equality = run.journal.remember(kind, key, Numerics, compare, passing=run.passing)
        return accuracy.with_equality(self.judge(build, part, alpha), equality)

    def evaluate(self, build: Build, part: str) -> Evaluation:
        run, source = self.run, self.judged

        def evaluate() -> Evaluation:
            run.tell(f"accuracy, {part}")
            original, indices = source.original_answers(part), source.indices(part)
            is_original = build.candidate == run.original.candidate
            found = original if is_original else source.answers(build, indices)
            scored = self.scorer.score(found, indices, original)
            checks = check_outputs(original, found, self._checked_outputs, self.scorer.reads)
            return Evaluation([float(each) for each in scored], checks, sorted(self.scorer.reads))

        key = f"{build.candidate.key} {part} {self.budget.metric}"
        return run.journal.remember("evaluation", key, Evaluation, evaluate, passing=run.passing)

    def served_difference(self, judged: Answers, found: Answers, *, is_lossy: bool) -> str:
        """Describe differences of served answers; lossy builds may differ between batches."""
        if is_lossy:
            checks = check_outputs(judged, found, self._checked_outputs)
            return "; ".join(each.problem for each in checks if each.problem)
        compared = self._compared(judged, found, self._tolerance, self.run.plan.outputs)
        return "; ".join(compared.problems)

    @property
    def _tolerance(self) -> float:
        return TF32_TOLERANCE if self.run.original.config.uses_gpu else TOLERANCE

    def _compared(
        self, one: Answers, other: Answers, tolerance: float | None, names: Sequence[str]
    ) -> Numerics:
        """Compare answers; on GPUs relative to values, not to ranges, because of TF32."""
        own_floor = 1.0 if self.run.original.config.uses_gpu else FLOOR
        return numerics.compare(one, other, tolerance=tolerance, names=names, own_floor=own_floor)

    @property
    def _checked_outputs(self) -> Sequence[str]:
        """The outputs named by --outputs, default all."""
        return self.run.plan.outputs or self.run.answered
