"""Checks the data of a run before anything is optimised with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.data.non_finite import NonFinite, describe
from penstock.errors import ConfigError
from penstock.optimizer import audit, calibration
from penstock.optimizer.accuracy_gate import AccuracyGate
from penstock.optimizer.answer_source import CHOICE, COMPARED, HELD_OUT, AnswerSource
from penstock.optimizer.candidates import Build
from penstock.optimizer.run_context import RunContext
from penstock.optimizer.scores import listed

# Maximum number of rows with NaN or infinity that the original is run on.
MAX_NON_FINITE = 64
NO_DATA = (
    "accuracy was not checked: without --data, answers are compared on random inputs only, and "
    "steps that may change answers are skipped"
)
ONLY_AGREEMENT = (
    "correctness was not checked: without labels or --eval, answers are only compared with the "
    "original's"
)


def check_output_names(outputs: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for outputs that the model does not have."""
    unknown = [name for name in outputs if name not in known]
    if unknown:
        wrong = f"the model has no output {listed(unknown)}; it has {listed(known)}"
        raise ConfigError([f"outputs: {wrong}"])


@dataclass(slots=True)
class DataChecks:
    """Reports data that would mislead calibration or the gate, as errors and notes."""

    run: RunContext
    source: AnswerSource
    gate: AccuracyGate

    def check(self) -> None:
        run, gate = self.run, self.gate
        self._check_output_names()
        if run.examples is None:
            run.unchecked.append(NO_DATA)
            self._evaluate_original()
            return
        self._check_finite(run.asked.non_finite)
        run.tell("audit of the data")
        if gate.scorer.is_agreement:
            run.unchecked.append(ONLY_AGREEMENT)
        found = run.journal.remember("audit", "", audit.Audit, self._audit)
        if found.problems:
            problems = [f"data: {each}" for each in found.problems]
            if run.ensemble is None:
                problems.append("or omit --data; steps that need data are then skipped")
            raise ConfigError(problems)
        run.notes += found.warnings
        # Fail now rather than at the end if answers cannot be scored or the evaluator fails.
        evaluated = gate.evaluate(run.original, CHOICE)
        scored = evaluated.scores
        if not np.isfinite(scored).any():
            where = f"eval: {run.plan.evaluator}" if run.plan.evaluator else "data"
            problem = f"not one of {len(scored)} answers of the original can be scored"
            raise ConfigError([f"{where}: {problem} by {gate.scorer.metric}"])
        self._evaluate_original()
        evaluator = run.plan.evaluator
        if evaluator and evaluated.reads:
            parts = f"parts of {listed(evaluated.reads)} that {evaluator} does not use"
            run.unchecked.append(f"{parts} were not checked beyond their scale")

    def _check_output_names(self) -> None:
        outputs = self.run.plan.outputs
        known = self.run.answered
        check_output_names(outputs, known)
        if left := listed([name for name in known if outputs and name not in outputs]):
            text = f"outputs {left} were not checked: --outputs leaves them out"
            self.run.unchecked.append(text)

    def _check_finite(self, found: Sequence[NonFinite]) -> None:
        """Check rows with NaN or infinity: an error if the original's answers, to compare with,
        are not finite either; otherwise they count as missing values."""
        if not found:
            return
        run = self.run
        run.tell("rows that are not finite")
        indices = tuple(dict.fromkeys(each.index for each in found))[:MAX_NON_FINITE]
        try:
            answers = self.source.answers(run.original, indices)
        except ConfigError as error:
            raise ConfigError([*describe(found), *error.problems]) from None
        pairs = zip(indices, answers, strict=True)
        unusable = {index for index, answer in pairs if not audit.is_finite(answer)}
        if unusable:
            texts = describe([each for each in found if each.index in unusable])
            advice = "leave such rows out, or fill in the missing values"
            problem = f"and the model's answer is not finite either; {advice}"
            raise ConfigError([f"{text}, {problem}" for text in texts])
        run.notes += [f"{text}; the model answers with finite values" for text in describe(found)]

    def _evaluate_original(self) -> None:
        """On a GPU, compute everything needed of the original while it is loaded."""
        if not self.run.original.config.uses_gpu:
            return
        if self.run.examples is None:
            self.source.original_answers(COMPARED)
        else:
            self.gate.evaluate(self.run.original, HELD_OUT)

    def _audit(self) -> audit.Audit:
        run, predict = self.run, self.gate.scorer.predict
        said = None if predict is None else predict(self.source.original_answers(CHOICE))
        is_separate = bool(run.plan.calibration)
        return audit.audit_examples(run.asked, said, is_separate=is_separate)

    def clipped(self, build: Build) -> dict[str, float]:
        """Return the share of held-out values outside of the calibrated range, by input."""
        path = build.version_folder / calibration.FILE
        if not path.is_file():
            return {}
        inputs = json.loads(path.read_bytes())["inputs"]
        ranges = {name: (each["min"], each["max"]) for name, each in inputs.items()}
        rows = [self.run.rows[index] for index in self.run.samples.split.held_out]
        names = [name for name in ranges if rows and name in rows[0]]
        floats = [name for name in names if rows[0][name].dtype.kind == "f"]
        values = {name: np.concatenate([np.ravel(row[name]) for row in rows]) for name in floats}
        return audit.clipped_share(ranges, values)
