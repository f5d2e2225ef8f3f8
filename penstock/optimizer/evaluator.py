"""Evaluation of candidates for the search; every result comes from the journal if already known.

Puts its parts together: builds, facts, answers, the accuracy gate, checks of the data, and
measurements. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.errors import PenstockError
from penstock.optimizer import passes
from penstock.optimizer.accuracy_gate import AccuracyGate
from penstock.optimizer.answer_source import CHOICE, HELD_OUT, AnswerSource
from penstock.optimizer.builder import Builder
from penstock.optimizer.candidates import Build, Step
from penstock.optimizer.data_checks import DataChecks
from penstock.optimizer.ensemble_answers import EnsembleAnswers
from penstock.optimizer.gpu_sessions import GpuProcesses
from penstock.optimizer.inspector import Inspector
from penstock.optimizer.measurements import Measurements
from penstock.optimizer.results import FallbackLayer
from penstock.optimizer.run_context import RunContext

# Time for requesting answers to held-out rows from a server.
SERVED_ANSWERS_S = 8.0


class KeptLayers(msgspec.Struct):
    """A step that passes the gate with these layers in float. No step: none passes, and these
    layers lose most."""

    step: Step | None = None
    layers: list[FallbackLayer] = []


class Evaluator:
    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._gpu = GpuProcesses(run.machine, run.deadline)
        self.builder = Builder(run, self._gpu)
        self.inspector = Inspector(run, self._gpu, self.builder)
        self.source = AnswerSource(run, self._gpu, self.inspector)
        # The answers that clients get, which the gate judges.
        self.judged = self.source
        if run.ensemble is not None:
            self.judged = EnsembleAnswers(run, self._gpu, self.inspector)
        self.gate = AccuracyGate(run, self.source, self.judged)
        self.data = DataChecks(run, self.judged, self.gate)
        self.measurements = Measurements(run, self._gpu, self.inspector)

    def close(self) -> None:
        """Stop all processes that this run keeps on GPUs."""
        self._gpu.close()

    def check_served(self, build: Build, *, is_lossy: bool) -> str:
        """Return why the server's answers are not those that the gate judged; empty if they are."""
        run, source = self.run, self.judged

        def check() -> str:
            run.tell("answers of the server")
            indices = source.indices(HELD_OUT)
            judged = source.answers(build, indices)
            rows = [run.asked.rows[index] for index in indices]
            left_s = run.budget.stage_left_s
            seconds = SERVED_ANSWERS_S if left_s is None else min(SERVED_ANSWERS_S, left_s / 4)
            found = self.measurements.served_answers(build, rows, seconds)
            if not found:
                return "the server refused every row of the held-out examples"
            pairs = [judged[place] for place, _ in found], [answer for _, answer in found]
            return self.gate.served_difference(*pairs, is_lossy=is_lossy)

        self._gpu.settle()
        key = build.candidate.key
        return run.journal.remember("served answers", key, str, check, passing=(PenstockError,))

    def fall_back(self, parent: Build, step: Step, check_time: Callable[[], None]) -> KeptLayers:
        """Find the layers that must stay in float for the gate to pass."""
        run, made_by = self.run, passes.find(step.pass_name)
        assert isinstance(made_by, passes.LayeredPass)

        def passes_gate(other: Step) -> bool:
            check_time()
            run.tell("layers in float")
            build = self.builder.build(parent.candidate.then(other))
            if self.gate.numerics(build, is_exact=False).problems:
                return False
            return self.gate.judge(build, CHOICE).is_passed

        def find() -> KeptLayers:
            run.tell("sensitivity of layers")
            seconds = self.measurements.operator_seconds(parent)
            context = self.builder.context
            return KeptLayers(*made_by.fall_back(parent, step, context, passes_gate, seconds))

        key = parent.candidate.then(step).key
        return run.journal.remember("fallback", key, KeptLayers, find)
