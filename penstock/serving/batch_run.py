"""A request of several rows to an ensemble with conditions: each row runs by itself.

Conditions may hold for some rows and not for others. Every row takes its own way through the steps
as a request of one row, members batch the rows of all requests again, and the answers are joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.serving.ensemble_plan import StepPlan
from penstock.serving.ensemble_run import EnsembleRun, add_times, inherit
from penstock.serving.ensemble_steps import named_error
from penstock.serving.fan_out import split_batch
from penstock.types import Request, Response

if TYPE_CHECKING:
    from penstock.serving.ensemble import Ensemble


class BatchRun:
    """Invariant: `_runs` has the rows that are not answered. It ends once: with the answers of all
    rows, the first error, or a cancel."""

    __slots__ = ("_fan", "_owner", "_plan", "_request", "_runs")

    def __init__(self, owner: Ensemble, request: Request, plan: StepPlan) -> None:
        self._owner = owner
        self._request = request
        self._plan = plan
        self._fan = split_batch(request.inputs)
        # By the request of a row: the number of the row, and its run.
        self._runs: dict[Request, tuple[int, EnsembleRun]] = {}
        request.inputs, request.rows = (), None

    def begin(self) -> None:
        while (row := self._fan.next_row()) is not None:
            part = self._make_request(row)
            run = EnsembleRun(self._owner, part, self._plan, self._end)
            self._runs[part] = row, run
        for _, run in list(self._runs.values()):
            if self._request.is_done:
                return
            run.begin()

    def stop(self) -> None:
        """Cancel the rows that run."""
        running, self._runs = self._runs, {}
        for _, run in running.values():
            run.stop()

    def respond(self, part: Request, answer: Response | PenstockError, final: bool) -> None:
        """Do nothing: `_end` has the answer of a row before its sink."""

    def _make_request(self, row: int) -> Request:
        request, inputs = self._request, self._fan.row(row, has_batch=True)
        part = type(request)(self, inputs, request.timings.received, id=request.id)
        inherit(request, part)
        part.timeout_s, part.steps = request.timeout_s, request.steps
        part.timings.queued = part.timings.dispatched = request.timings.queued
        return part

    def _end(self, part: Request, answer: Response | PenstockError) -> None:
        """Take the answer of a row, whose outputs are borrowed."""
        row, run = self._runs.pop(part, (0, None))
        if run is None:
            return
        part.respond(answer)
        run.stop()
        add_times(self._request, part)
        if not isinstance(answer, PenstockError):
            try:
                self._fan.take(row, answer.outputs, has_batch=True)
            except PenstockError as error:
                answer = named_error(f"ensemble '{self._owner.config.name}'", error)
        if isinstance(answer, PenstockError):
            self._owner.finish(self._request, answer)
        elif self._fan.is_complete:
            outputs = self._fan.join(())
            self._owner.finish(self._request, self._owner.answer(outputs, None))
