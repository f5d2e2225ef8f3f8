"""A model whose steps are other models, as a Servable: it passes tensors on and computes nothing.

A step starts as soon as its tensors exist, so independent steps run at the same time. Members are
models of their own, found in the process's table of models: they batch the requests of all
ensembles with those of clients. Belongs to the event loop that has its members' requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from penstock.config import ENSEMBLE, ModelConfig
from penstock.errors import BackendFailed, Cancelled, NotReady, PenstockError
from penstock.repository.ensemble_rules import output_fits
from penstock.serving.batch_run import BatchRun
from penstock.serving.called_models import check_chain
from penstock.serving.drift import InputDrift
from penstock.serving.ensemble_members import EnsembleMembers
from penstock.serving.ensemble_plan import EnsemblePlanner, StepPlan
from penstock.serving.ensemble_run import EnsembleRun, OpenStep
from penstock.serving.ensemble_steps import StepFigures, explain_ensemble
from penstock.serving.explain import Explanation
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model_table import ModelTable
from penstock.serving.plan import Planner
from penstock.serving.request_recorder import RequestRecorder
from penstock.serving.served import ModelProcess, Served
from penstock.types import CANCELLED, OutputKeeper, Request, Response, Tensor

log = logging.getLogger("penstock.model")


class Ensemble:
    """Invariant: a request that it admitted is in `_runs` until it is answered. Its statistics
    count the requests of clients; those of the members count steps as well."""

    mode = ENSEMBLE

    def __init__(
        self, config: ModelConfig, table: ModelTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`table` has the members."""
        self.config = config
        self.clock = clock
        self.members = EnsembleMembers(config, table)
        self.metrics = ModelMetrics.from_config(config)
        self.steps = [StepFigures() for _ in config.steps]
        # Set by the owner if requests are recorded.
        self.recorder: RequestRecorder | None = None
        self.processes: Sequence[ModelProcess] = ()
        self.drift: Sequence[InputDrift] = ()
        self._planner = Planner(config, 0)
        self._plans = EnsemblePlanner(config)
        self._specs = {spec.name: spec for spec in config.outputs}
        self._runs: dict[Request, EnsembleRun | BatchRun] = {}
        self._is_closing = False
        self._drained: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        """Check that all members are loaded and fit. ConfigError, with all problems, if not."""
        self.members.check()

    async def refresh(self) -> None:
        """Do nothing: all figures are here."""

    async def drain(self) -> None:
        """Wait until everything admitted has been answered."""
        if self._runs:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(waiter)
            await waiter

    async def close(self) -> None:
        self._is_closing = True
        for request in list(self._runs):
            self.finish(request, self._unloading())
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    @property
    def is_ready(self) -> bool:
        return not self._is_closing and not self.members.reason

    @property
    def shown_state(self) -> str:
        if self._is_closing:
            return "UNLOADING"
        return "UNAVAILABLE" if self.members.reason else "READY"

    @property
    def reason(self) -> str:
        return self.members.reason

    @property
    def num_waiting(self) -> int:
        """Always 0: requests wait in the members' queues."""
        return 0

    def explain(self) -> Explanation:
        return explain_ensemble(self.config, self.shown_state, self.metrics, self.steps)

    def submit(self, request: Request) -> None:
        if self.recorder is not None:
            self.recorder.see(request)
        try:
            plan = self._admit(request)
        except PenstockError as error:
            if not request.is_mirror:
                self.refused(error, request.timings.received)
            request.respond(error)
            return
        request.timings.queued = request.timings.dispatched = self.clock()
        run = self._runs[request] = self._make_run(request, plan)
        run.begin()

    def _make_run(self, request: Request, plan: StepPlan) -> EnsembleRun | BatchRun:
        """Rows decide conditions each for itself, so they run by themselves."""
        if plan.has_conditions and request.num_rows > 1:
            return BatchRun(self, request, plan)
        return EnsembleRun(self, request, plan, self.finish)

    def cancel(self, request: Request) -> None:
        """Cancel a request, with all steps that run."""
        if request in self._runs:
            self.finish(request, CANCELLED)

    def refused(self, error: PenstockError, received: float) -> None:
        self.metrics.refused(error)
        self.metrics.fail_s += max(0.0, self.clock() - received)

    def _admit(self, request: Request) -> StepPlan:
        """Check a request against the ensemble's own tensors, and that its members are there."""
        if self._is_closing:
            raise self._unloading()
        fit = self._planner.known.get(request.form) or self._planner.fit(request)
        request.num_rows = fit.plan.num_rows
        inputs = [each.name for each in request.inputs]
        plan = self._plans.plan(inputs, [each.name for each in request.outputs])
        for step in plan.steps:
            if step is not None:
                member = self._find_member(step.index)
                # A member whose code waits for this request could not run a step of it.
                check_chain(request.chain, f"{member.config.name}/{member.config.version}")
        return plan

    def _find_member(self, index: int) -> Served:
        try:
            return self.members.find(index)
        except NotReady as error:
            raise NotReady(f"ensemble '{self.config.name}' is not ready: {error}") from None

    def _unloading(self) -> NotReady:
        return NotReady(f"model '{self.config.name}' is being unloaded")

    def note(self, step: OpenStep, request: Request) -> None:
        """Count an answered step."""
        timings = request.timings
        queue_s = max(0.0, timings.dispatched - timings.queued) if timings.dispatched else 0.0
        figures = self.steps[step.index]
        figures.add(queue_s, sum(timings.compute_s), self.clock() - step.began)

    def answer(
        self, outputs: list[Tensor], keeper: OutputKeeper | None
    ) -> Response | BackendFailed:
        """Return the answer, or an error if a member's outputs have other shapes than declared."""
        has_batch = self.config.max_batch_size > 0
        for each in outputs:
            spec = self._specs[each.name]
            if not output_fits(each.shape, spec, has_batch):
                return BackendFailed(
                    f"output '{each.name}' of ensemble '{self.config.name}' has shape "
                    f"{list(each.shape)}; declared are dims {list(spec.shape)}"
                )
        return Response(self.config.name, self.config.version, outputs, keeper=keeper)

    def finish(self, request: Request, answer: Response | PenstockError) -> None:
        """End a client's request, unless it has ended."""
        run = self._runs.pop(request, None)
        if run is None:
            return
        request.timings.completed = now = self.clock()
        if isinstance(answer, PenstockError):
            self._count_failure(request, answer, now)
        else:
            if request.is_mirror:
                self.metrics.has_mirrors = True
            self.metrics.fold([request], request.num_rows, request.timings)
        request.respond(answer)
        run.stop()
        if not self._runs:
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self._drained.clear()

    def _count_failure(self, request: Request, error: PenstockError, now: float) -> None:
        if request.is_mirror:
            return
        waited_s = now - request.timings.received
        self.metrics.fail_s += waited_s
        if isinstance(error, Cancelled):
            self.metrics.failed("CANCELED", error, self.metrics.is_late(waited_s))
        elif isinstance(error, BackendFailed):
            self.metrics.failed("BACKEND", error)
        else:
            self.metrics.refused(error)
