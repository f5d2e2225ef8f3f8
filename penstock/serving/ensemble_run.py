"""One request of an ensemble, from its first step to its answer. `ensemble` owns the runs.

Decides nothing (`ensemble_plan` does) and holds tensors only as long as something needs them. The
outputs of members are borrowed memory: they go straight into the rows of the next model, and only
those that have to wait are copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config import ModelConfig, TensorDefault
from penstock.errors import BackendFailed, NotReady, PenstockError
from penstock.repository.ensemble_rules import adapt_shape, split_spec
from penstock.serving.ensemble_plan import PlannedStep, StepPlan, StepProgress
from penstock.serving.ensemble_steps import named_error
from penstock.serving.ensemble_values import make_default
from penstock.serving.fan_out import FanOut, split_rows
from penstock.serving.handed_over import HandedOver
from penstock.serving.model import Model
from penstock.serving.pipeline import PASSED_S
from penstock.serving.served import Served
from penstock.serving.tracer import member_step
from penstock.serving.traffic_split import TrafficSplit
from penstock.types import OutputKeeper, Request, Response, Tensor, TensorSpec

if TYPE_CHECKING:
    from penstock.serving.ensemble import Ensemble

log = logging.getLogger("penstock.model")


# Ends a client's request, unless it has ended.
End = Callable[[Request, Response | PenstockError], None]


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that runs, and the model that has its request; `row` of a step that fans out. `split`
    counts it, if the model has a rollout."""

    index: int
    member: Served
    split: TrafficSplit | None
    began: float
    row: int | None = None


@dataclass(frozen=True, slots=True)
class StepKeeper:
    """Keeps the answer of the last step, which is also the ensemble's."""

    inner: OutputKeeper
    answered: Request

    def keep(self, request: Request) -> Callable[[], None]:
        return self.inner.keep(self.answered)


class EnsembleRun:
    """One client request on its way through the steps; the sink of the steps' requests.

    Invariant: until it ends, `_open` has the requests of each step that runs, and `_progress` all
    tensors that steps to come and the answer need. It ends once: with all outputs there, the first
    error, or a cancel.
    """

    __slots__ = ("_end", "_fans", "_open", "_owner", "_plan", "_progress", "_request")

    def __init__(self, owner: Ensemble, request: Request, plan: StepPlan, end: End) -> None:
        self._owner = owner
        self._request = request
        self._plan = plan
        self._end = end
        self._progress = StepProgress(plan, {each.name: each for each in request.inputs})
        self._open: dict[Request, OpenStep] = {}
        # By step: the rows of those that fan out.
        self._fans: dict[int, FanOut] = {}
        request.inputs, request.rows = (), None

    def begin(self) -> None:
        with self._ending():
            ready = self._progress.begin()
            if self._progress.is_over:  # All outputs have their defaults.
                self._finish(None)
            else:
                self._start(ready, self._request.timings.received, is_borrowed=False)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        step = self._open.get(request)
        if step is None:
            return
        if (traced := self._request.steps) is not None:
            now = self._owner.clock()
            traced.append(member_step(step.member.config, request, step.began, now))
        with self._ending():
            if isinstance(answer, PenstockError):
                del self._open[request]
                self._fail(step.index, answer, step.row)
            elif not final:
                self._fail(step.index, BackendFailed("gives several answers to one request"))
            else:
                del self._open[request]
                self._owner.note(step, request)
                add_times(self._request, request)
                self._take(step, request, answer)

    def stop(self) -> None:
        """Cancel the steps that run, whose answers are not wanted any more. Not within the turn of
        the loop in which a member answers."""
        loop, running = asyncio.get_running_loop(), self._open
        self._open = {}
        self._fans.clear()
        self._progress.tensors.clear()
        for index in self._progress.skipped:
            self._owner.steps[index].num_skipped += 1
        for request, step in running.items():
            loop.call_soon(step.member.cancel, request)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End the request if it cannot go on."""
        name = self._owner.config.name
        try:
            yield
        except PenstockError as error:
            self._end(self._request, named_error(f"in ensemble '{name}'", error))
        except Exception:  # A request that cannot be handed on must still end.
            log.exception("%s: a request cannot be handed on", name)
            self._end(self._request, BackendFailed("internal error; this is a bug"))

    def _take(self, step: OpenStep, request: Request, answer: Response) -> None:
        """Take the outputs of a step, or of one of its rows; they are borrowed."""
        if step.row is None:
            keeper = None if answer.keeper is None else StepKeeper(answer.keeper, request)
            self._go_on(step.index, answer.outputs, keeper)
            return
        fan = self._fans[step.index]
        try:
            has_batch = step.member.config.max_batch_size > 0
            fan.take(step.row, answer.outputs, has_batch=has_batch)
        except PenstockError as error:
            self._fail(step.index, error)
            return
        self._send_rows(step.index, fan, self._owner.clock(), is_borrowed=False)

    def _go_on(self, index: int, outputs: Sequence[Tensor], keeper: OutputKeeper | None) -> None:
        """Hand on the outputs of a step."""
        names = self._owner.config.steps[index].outputs
        made = {
            names[each.name]: Tensor(names[each.name], each.datatype, each.shape, each.data)
            for each in outputs
            if each.name in names
        }
        if missing := self._progress.missing(index, made):
            self._fail(index, BackendFailed(f"gives no tensor '{missing}' to the ensemble"))
            return
        ready = self._progress.finish(index, made)
        if self._progress.is_over:
            is_whole = all(name in made for name in self._plan.outputs)
            self._finish(keeper if is_whole else None)
            return
        self._start(ready, self._owner.clock(), is_borrowed=True)
        held = {id(value) for value in self._progress.tensors.values()}
        for tensor in made.values():
            # What later steps and the answer need outlives the member's memory.
            if id(tensor) in held:
                tensor.data = bytes(tensor.data)

    def _start(self, steps: Sequence[int], now: float, *, is_borrowed: bool) -> None:
        """Start these steps. `is_borrowed`: tensors may be valid during this call only."""
        for index in steps:
            if self._request.is_done:
                return
            step = self._plan.steps[index]
            assert step is not None
            try:
                opened = self._choose(index, now)
                config = opened.member.config
                if step.fan_out:
                    fan = self._fans[index] = self._split(step, config)
                else:
                    inputs = [self._use(config, *names) for names in step.inputs]
            except PenstockError as error:
                self._fail(index, error)
                return
            if not step.fan_out:
                self._submit(opened, inputs, is_borrowed=is_borrowed)
                continue
            self._send_rows(index, fan, now, is_borrowed=is_borrowed)
            if is_borrowed:
                fan.keep()

    def _choose(self, index: int, now: float, row: int | None = None) -> OpenStep:
        """Choose the model of a step. Steps of mirrors are not split: a rollout counts what clients
        get."""
        members = self._owner.members
        if self._request.is_mirror:
            return OpenStep(index, members.find(index), None, now, row)
        return OpenStep(index, *members.choose(index), now, row)

    def _send_rows(self, index: int, fan: FanOut, now: float, *, is_borrowed: bool) -> None:
        """Send the rows that may be in flight; go on if all are answered."""
        if fan.is_sending:
            return
        fan.is_sending = True
        while not self._request.is_done and (row := fan.next_row()) is not None:
            try:
                step = self._choose(index, now, row)
            except NotReady as error:
                self._fail(index, error)
                return
            inputs = fan.row(row, has_batch=step.member.config.max_batch_size > 0)
            self._submit(step, inputs, is_borrowed=is_borrowed)
        fan.is_sending = False
        if fan.is_complete and not self._request.is_done:
            del self._fans[index]
            self._go_on(index, self._join(index, fan), None)

    def _submit(self, step: OpenStep, tensors: list[Tensor], *, is_borrowed: bool) -> None:
        request, member = self._request, step.member
        planned = self._plan.steps[step.index]
        assert planned is not None
        # A model copies what it queues into rows, if it has them; the others keep what they get.
        is_placed = isinstance(member, Model | HandedOver)
        if is_borrowed and not is_placed:
            _copy(tensors)
        inner = type(request)(self, tensors, step.began, id=request.id, outputs=planned.asked)
        member.metrics.has_mirrors |= request.is_mirror
        inherit(request, inner)
        inner.steps = None if request.steps is None else []
        if request.timeout_s is not None:
            left_s = request.timings.queued + request.timeout_s - self._owner.clock()
            inner.timeout_s = max(PASSED_S, left_s)
        self._open[inner] = step
        if step.split is not None:
            step.split.watch(inner, member)
        member.submit(inner)
        if is_borrowed and is_placed and not inner.is_done:
            _copy(inner.inputs)

    def _use(self, config: ModelConfig, name: str, tensor_name: str) -> Tensor:
        """Return a tensor as the member takes it; forget it if nothing else needs it."""
        value, spec = self._progress.use(tensor_name), _find_spec(config.inputs, name)
        has_batch = config.max_batch_size > 0
        if isinstance(value, TensorDefault):
            return make_default(value, spec, self._request.num_rows, has_batch=has_batch)
        shape = value.shape
        if not self._owner.config.max_batch_size:
            shape = adapt_shape(shape, spec, has_batch)
        return Tensor(name, value.datatype, shape, value.data)

    def _split(self, step: PlannedStep, config: ModelConfig) -> FanOut:
        """Return the rows of a step; forget the tensors that nothing else needs."""
        has_batch = self._owner.config.max_batch_size > 0
        inputs: list[tuple[TensorSpec, Tensor, bool]] = []
        for name, tensor_name in step.inputs:
            value, spec = self._progress.use(tensor_name), _find_spec(config.inputs, name)
            is_split = tensor_name in step.fan_out
            if isinstance(value, TensorDefault):
                like = replace(split_spec(spec) if is_split else spec, name=tensor_name)
                value = make_default(value, like, self._request.num_rows, has_batch=has_batch)
            inputs.append((spec, value, is_split))
        return split_rows(inputs, self._owner.config.fan_out_limits, has_batch=has_batch)

    def _join(self, index: int, fan: FanOut) -> list[Tensor]:
        if fan.num_rows:
            return fan.join(())
        planned, config = self._plan.steps[index], self._owner.members.find(index).config
        assert planned is not None
        return fan.join([_find_spec(config.outputs, each.name) for each in planned.asked])

    def _finish(self, keeper: OutputKeeper | None) -> None:
        config, outputs = self._owner.config, list[Tensor]()
        has_batch = config.max_batch_size > 0
        for name in self._plan.outputs:
            value, spec = self._progress.tensors[name], _find_spec(config.outputs, name)
            if isinstance(value, TensorDefault):
                made = make_default(value, spec, self._request.num_rows, has_batch=has_batch)
                outputs.append(made)
            else:
                shape = value.shape if has_batch else adapt_shape(value.shape, spec, has_batch)
                outputs.append(Tensor(name, value.datatype, shape, value.data))
        self._end(self._request, self._owner.answer(outputs, keeper))

    def _fail(self, index: int, error: PenstockError, row: int | None = None) -> None:
        """End the request with the error of a step."""
        config = self._owner.config
        where = f"in ensemble '{config.name}', model '{config.steps[index].model}'"
        if row is not None:
            where += f", row {row}"
        self._owner.steps[index].num_failed += 1
        self._end(self._request, named_error(where, error))


def inherit(request: Request, inner: Request) -> None:
    """Give a request of a step what the client's says about itself."""
    inner.caller, inner.priority = request.caller, request.priority
    inner.chain, inner.parameters = request.chain, request.parameters


def _find_spec(specs: Sequence[TensorSpec], name: str) -> TensorSpec:
    return next(each for each in specs if each.name == name)


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
