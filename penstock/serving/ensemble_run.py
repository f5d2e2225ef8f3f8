"""One request of an ensemble, from its first step to its answer. `ensemble` owns the runs.

Decides nothing (`ensemble_plan` does) and holds tensors only as long as something needs them. The
outputs of members are borrowed memory: they go straight into the rows of the next model, and only
those that have to wait are copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, NotReady, PenstockError
from penstock.repository.ensemble_rules import adapt_shape
from penstock.serving.ensemble_plan import StepPlan, StepProgress
from penstock.serving.ensemble_steps import member_error
from penstock.serving.handed_over import HandedOver
from penstock.serving.model import Model
from penstock.serving.pipeline import PASSED_S
from penstock.serving.served import Served
from penstock.serving.tracer import member_step
from penstock.serving.traffic_split import TrafficSplit
from penstock.types import OutputKeeper, Request, Response, Tensor

if TYPE_CHECKING:
    from penstock.serving.ensemble import Ensemble

log = logging.getLogger("penstock.model")


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that runs, and the model that has its request."""

    index: int
    member: Served
    began: float


@dataclass(frozen=True, slots=True)
class StepKeeper:
    """Keeps the answer of the last step, which is also the ensemble's."""

    inner: OutputKeeper
    answered: Request

    def keep(self, request: Request) -> Callable[[], None]:
        return self.inner.keep(self.answered)


class EnsembleRun:
    """One client request on its way through the steps; the sink of the steps' requests.

    Invariant: until it ends, `_open` has a request of each step that runs, and `_tensors` all that
    steps to come and the answer need. It ends once: with all steps done, the first error, or a
    cancel.
    """

    __slots__ = ("_left", "_open", "_owner", "_plan", "_progress", "_request", "_tensors")

    def __init__(self, owner: Ensemble, request: Request, plan: StepPlan) -> None:
        self._owner = owner
        self._request = request
        self._plan = plan
        self._progress = StepProgress(plan)
        self._tensors = {each.name: each for each in request.inputs if each.name in plan.uses}
        # By tensor: how often it is still needed.
        self._left = dict(plan.uses)
        self._open: dict[Request, OpenStep] = {}
        request.inputs, request.rows = (), None

    def begin(self) -> None:
        try:
            self._start(self._progress.begin(), self._request.timings.received, is_borrowed=False)
        except Exception:  # A request that cannot be handed on must still end.
            log.exception("%s: a request cannot be handed on", self._owner.config.name)
            self._owner.finish(self._request, BackendFailed("internal error; this is a bug"))

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        step = self._open.get(request)
        if step is None:
            return
        if (traced := self._request.steps) is not None:
            now = self._owner.clock()
            traced.append(member_step(step.member.config, request, step.began, now))
        try:
            if isinstance(answer, PenstockError):
                del self._open[request]
                self._fail(step.index, answer)
            elif not final:
                self._fail(step.index, BackendFailed("gives several answers to one request"))
            else:
                del self._open[request]
                self._owner.note(step, request)
                self._take(step.index, request, answer)
        except Exception:  # A request that cannot be handed on must still end.
            log.exception("%s: a step's answer cannot be handed on", self._owner.config.name)
            self._fail(step.index, BackendFailed("internal error; this is a bug"))

    def stop(self) -> None:
        """Cancel the steps that run, whose answers are not wanted any more. Not within the turn of
        the loop in which a member answers."""
        loop, running = asyncio.get_running_loop(), self._open
        self._open = {}
        self._tensors.clear()
        for request, step in running.items():
            loop.call_soon(step.member.cancel, request)

    def _take(self, index: int, request: Request, answer: Response) -> None:
        """Take the outputs of a step, which are borrowed, and go on."""
        add_times(self._request, request)
        names, fresh = self._owner.config.steps[index].outputs, []
        for each in answer.outputs:
            name = names.get(each.name)
            if name in self._left:
                self._tensors[name] = Tensor(name, each.datatype, each.shape, each.data)
                fresh.append(name)
        ready = self._progress.finish(index)
        if not self._progress.num_left:
            keeper = answer.keeper
            is_whole = all(name in fresh for name in self._plan.outputs)
            self._finish(StepKeeper(keeper, request) if is_whole and keeper else None)
            return
        self._start(ready, self._owner.clock(), is_borrowed=True)
        for name in fresh:
            # What later steps and the answer need outlives the member's memory.
            if (tensor := self._tensors.get(name)) is not None:
                tensor.data = bytes(tensor.data)

    def _start(self, steps: Sequence[int], now: float, *, is_borrowed: bool) -> None:
        """Start these steps. `is_borrowed`: tensors may be valid during this call only."""
        for index in steps:
            if self._request.is_done:
                return
            try:
                chosen = self._choose(index)
            except NotReady as error:
                self._fail(index, error)
                return
            self._submit(index, *chosen, now, is_borrowed=is_borrowed)

    def _choose(self, index: int) -> tuple[Served, TrafficSplit | None]:
        """Return the model of a step, and the split that counts it. Steps of mirrors are not split:
        a rollout counts what clients get."""
        members = self._owner.members
        return (members.find(index), None) if self._request.is_mirror else members.choose(index)

    def _submit(
        self,
        index: int,
        member: Served,
        split: TrafficSplit | None,
        now: float,
        *,
        is_borrowed: bool,
    ) -> None:
        request, step = self._request, self._plan.steps[index]
        assert step is not None
        tensors = [self._use(member.config, *names) for names in step.inputs]
        # A model copies what it queues into rows, if it has them; the others keep what they get.
        is_placed = isinstance(member, Model | HandedOver)
        if is_borrowed and not is_placed:
            _copy(tensors)
        inner = type(request)(self, tensors, now, id=request.id, outputs=step.asked)
        member.metrics.has_mirrors |= request.is_mirror
        inner.caller, inner.priority = request.caller, request.priority
        inner.chain = request.chain
        inner.parameters = request.parameters
        inner.steps = None if request.steps is None else []
        if request.timeout_s is not None:
            left_s = request.timings.queued + request.timeout_s - self._owner.clock()
            inner.timeout_s = max(PASSED_S, left_s)
        self._open[inner] = OpenStep(index, member, now)
        if split is not None:
            split.watch(inner, member)
        member.submit(inner)
        if is_borrowed and is_placed and not inner.is_done:
            _copy(inner.inputs)

    def _use(self, config: ModelConfig, name: str, tensor_name: str) -> Tensor:
        """Return a tensor as the member takes it; forget it if nothing else needs it."""
        tensor = self._tensors[tensor_name]
        self._left[tensor_name] -= 1
        if not self._left[tensor_name]:
            del self._tensors[tensor_name]
        shape = tensor.shape
        if not self._owner.config.max_batch_size:
            spec = next(each for each in config.inputs if each.name == name)
            shape = adapt_shape(shape, spec, config.max_batch_size > 0)
        return Tensor(name, tensor.datatype, shape, tensor.data)

    def _finish(self, keeper: OutputKeeper | None) -> None:
        outputs = [self._tensors[name] for name in self._plan.outputs]
        config = self._owner.config
        if not config.max_batch_size:
            specs = {spec.name: spec for spec in config.outputs}
            for each in outputs:
                each.shape = adapt_shape(each.shape, specs[each.name], has_batch=False)
        self._owner.finish(self._request, self._owner.answer(outputs, keeper))

    def _fail(self, index: int, error: PenstockError) -> None:
        """End the request with the error of a step."""
        config = self._owner.config
        model = config.steps[index].model
        self._owner.steps[index].num_failed += 1
        self._owner.finish(self._request, member_error(config.name, model, error))


def _copy(tensors: Sequence[Tensor]) -> None:
    for each in tensors:
        each.data = bytes(each.data)


def add_times(request: Request, inner: Request) -> None:
    """Add the times of a step to those of the client's request, as Triton does; steps that run at
    the same time add up to more than the request takes."""
    timings, own = inner.timings, request.timings
    if timings.dispatched:
        own.dispatched += timings.dispatched - timings.queued
        own.instance_wait_s += timings.instance_wait_s
        mine, added = own.compute_s, timings.compute_s
        own.compute_s = (mine[0] + added[0], mine[1] + added[1], mine[2] + added[2])
