"""Which steps of an ensemble run for a request, and which of them are ready. Pure.

A plan depends only on which inputs a request has and which outputs it wants, so it is cached. What
conditions and defaults make of it depends on the values of tensors, which `StepProgress` holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config import Comparison, EnsembleStep, ModelConfig, TensorDefault
from penstock.repository.ensemble_cases import find_makers
from penstock.serving.ensemble_values import TensorValue, all_hold
from penstock.types import RequestedOutput

MAX_PLANS = 256


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """`inputs` are pairs (input of the member, tensor of the ensemble), without optional inputs
    that the request lacks. `asked` are the outputs that are needed, and `makes` their tensors."""

    index: int
    inputs: tuple[tuple[str, str], ...]
    asked: tuple[RequestedOutput, ...]
    makes: tuple[str, ...]
    fan_out: tuple[str, ...] = ()
    condition: tuple[Comparison, ...] = ()

    @property
    def uses(self) -> list[str]:
        """The tensors that it reads, each as often as it does."""
        return [*(name for _, name in self.inputs), *(each.tensor for each in self.condition)]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """`steps` has an entry for each step of the ensemble: None for those that are not needed."""

    steps: tuple[PlannedStep | None, ...]
    outputs: tuple[str, ...]
    # By step: the number of tensors that it waits for. By tensor: the steps that wait for it, and
    # how many may make it.
    num_awaited: tuple[int, ...]
    takers: Mapping[str, tuple[int, ...]]
    num_makers: Mapping[str, int]
    # By tensor: what it is if no step makes it, and the tensors that are this one then.
    defaults: Mapping[str, TensorDefault]
    aliases: Mapping[str, tuple[str, ...]]
    # By tensor: how often it is read; the answer and each tensor that defaults to it count as one.
    uses: dict[str, int]

    @property
    def num_steps(self) -> int:
        return sum(step is not None for step in self.steps)

    @property
    def has_conditions(self) -> bool:
        return any(step is not None and step.condition for step in self.steps)


class EnsemblePlanner:
    """Makes plans for one ensemble; holds nothing but the cache."""

    def __init__(self, config: ModelConfig) -> None:
        self._steps = config.steps
        self._defaults = config.defaults
        self._inputs = frozenset(spec.name for spec in config.inputs)
        self._outputs = tuple(spec.name for spec in config.outputs)
        self._makers = find_makers(config.steps)
        self._plans: dict[tuple[tuple[str, ...], tuple[str, ...]], StepPlan] = {}

    def plan(self, inputs: Sequence[str], outputs: Sequence[str]) -> StepPlan:
        """Return the plan of a request with these inputs that wants these outputs, which exist;
        all, if it names none."""
        key = tuple(inputs), tuple(outputs)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make(frozenset(inputs), key[1] or self._outputs)
        return plan

    def _make(self, given: frozenset[str], outputs: tuple[str, ...]) -> StepPlan:
        absent = self._inputs - given
        needed, tensors = self._find_needed(outputs, absent)
        steps = [
            self._plan_step(index, step, absent, tensors) if index in needed else None
            for index, step in enumerate(self._steps)
        ]
        defaults = {name: self._defaults[name] for name in tensors if name in self._defaults}
        aliases: dict[str, tuple[str, ...]] = {}
        uses: dict[str, int] = dict.fromkeys(outputs, 1)
        for name, default in defaults.items():
            if default.tensor:
                aliases[default.tensor] = (*aliases.get(default.tensor, ()), name)
                uses[default.tensor] = uses.get(default.tensor, 0) + 1
        takers: dict[str, tuple[int, ...]] = {}
        for step in filter(None, steps):
            for name in step.uses:
                uses[name] = uses.get(name, 0) + 1
            for name in sorted(set(step.uses) & self._makers.keys()):
                takers[name] = (*takers.get(name, ()), step.index)
        awaited = [sum(i in each for each in takers.values()) for i in range(len(steps))]
        num_makers = {name: len(self._makers.get(name, ())) for name in tensors}
        return StepPlan(
            tuple(steps), outputs, tuple(awaited), takers, num_makers, defaults, aliases, uses
        )

    def _find_needed(
        self, outputs: Sequence[str], absent: frozenset[str]
    ) -> tuple[set[int], set[str]]:
        """Return the steps and the tensors that these outputs may need."""
        steps: set[int] = set()
        tensors: set[str] = set()
        waiting = [*outputs]
        while waiting:
            name = waiting.pop()
            if name in tensors or name in absent:
                continue
            tensors.add(name)
            if (default := self._defaults.get(name)) is not None and default.tensor:
                waiting.append(default.tensor)
            for index in self._makers.get(name, ()):
                if index not in steps:
                    steps.add(index)
                    step = self._steps[index]
                    waiting += [*step.inputs.values(), *(each.tensor for each in step.condition)]
        return steps, tensors

    @staticmethod
    def _plan_step(
        index: int, step: EnsembleStep, absent: frozenset[str], tensors: Iterable[str]
    ) -> PlannedStep:
        inputs = tuple(sorted(each for each in step.inputs.items() if each[1] not in absent))
        made = [(name, each) for name, each in step.outputs.items() if each in tensors]
        asked = tuple(RequestedOutput(name) for name, _ in made)
        makes = tuple(each for _, each in made)
        return PlannedStep(index, inputs, asked, makes, step.fan_out, step.condition)


class StepProgress:
    """How far one request is, and the tensors that are still needed.

    Invariant: each step is decided once, after all tensors that it reads: it is returned as ready,
    or skipped. A tensor is held until its last reader has taken it.
    """

    __slots__ = ("_awaited", "_decided", "_left", "_makers_left", "_num_outputs_left", "_plan",
                 "_resolved", "skipped", "tensors")  # fmt: skip

    def __init__(self, plan: StepPlan, given: Mapping[str, TensorValue]) -> None:
        """`given` are the tensors of the request."""
        self._plan = plan
        self._awaited = list(plan.num_awaited)
        self._left = dict(plan.uses)
        self._makers_left = dict(plan.num_makers)
        # By tensor: whether it exists; absent while that is open.
        self._resolved = dict.fromkeys(given, True)
        self._num_outputs_left = len(set(plan.outputs))
        self._decided: set[int] = set()
        self.tensors = {name: value for name, value in given.items() if name in plan.uses}
        # Steps that did not run because of a condition.
        self.skipped: list[int] = []

    @property
    def is_over(self) -> bool:
        """Whether all wanted outputs are there."""
        return not self._num_outputs_left

    def begin(self) -> list[int]:
        """Return the steps that need nothing but the request's own tensors. BackendFailed if a
        condition cannot be decided, here and in `finish`."""
        steps = enumerate(self._plan.steps)
        return self._settle(i for i, step in steps if step is not None and not self._awaited[i])

    def missing(self, index: int, made: Mapping[str, TensorValue]) -> str:
        """Name a tensor that a step should have made and did not; empty if there is none."""
        step = self._plan.steps[index]
        assert step is not None
        needed = (name for name in step.makes if name not in self._resolved)
        return next((name for name in needed if name not in made), "")

    def finish(self, index: int, made: Mapping[str, TensorValue]) -> list[int]:
        """Take the tensors of a step, and return the steps that are ready now."""
        step = self._plan.steps[index]
        assert step is not None
        waiting: deque[int] = deque()
        for name in step.makes:
            if name not in self._resolved:
                self._resolve(name, made[name], waiting)
        return self._settle(waiting)

    def use(self, name: str) -> TensorValue:
        """Return a tensor, and forget it if nothing else reads it."""
        value = self.tensors[name]
        self._release(name)
        return value

    def _settle(self, steps: Iterable[int]) -> list[int]:
        """Decide these steps, whose tensors are known, and those that can be decided then."""
        ready: list[int] = []
        waiting = deque(steps)
        while waiting:
            index = waiting.popleft()
            step = self._plan.steps[index]
            assert step is not None
            assert index not in self._decided
            self._decided.add(index)
            if self._is_to_run(step):
                for each in step.condition:
                    self._release(each.tensor)
                ready.append(index)
            else:
                self._skip(step, waiting)
        return ready

    def _is_to_run(self, step: PlannedStep) -> bool:
        is_wanted = any(self._left[name] for name in step.makes if name not in self._resolved)
        if not is_wanted or not all(self._resolved[name] for name in step.uses):
            return False
        return all_hold(step.condition, self.tensors)

    def _skip(self, step: PlannedStep, waiting: deque[int]) -> None:
        self.skipped.append(step.index)
        for name in step.uses:
            self._release(name)
        for name in step.makes:
            self._makers_left[name] -= 1
            if not self._makers_left[name] and name not in self._resolved:
                self._replace(name, waiting)

    def _replace(self, name: str, waiting: deque[int]) -> None:
        """Give a tensor that no step has made its default, as soon as that is known."""
        default = self._plan.defaults.get(name)
        if default is None:
            self._resolve(name, None, waiting)
        elif not default.tensor:
            self._resolve(name, default, waiting)
        elif (is_there := self._resolved.get(default.tensor)) is not None:
            value = self.tensors[default.tensor] if is_there else None
            self._resolve(name, value, waiting)

    def _resolve(self, name: str, value: TensorValue | None, waiting: deque[int]) -> None:
        """Note a tensor that exists, or that does not; `waiting` gets steps that can be decided."""
        self._resolved[name] = value is not None
        if value is not None and self._left[name]:
            self.tensors[name] = value
        if name in self._plan.outputs:
            self._num_outputs_left -= 1
        for index in self._plan.takers.get(name, ()):
            self._awaited[index] -= 1
            if not self._awaited[index]:
                waiting.append(index)
        for other in self._plan.aliases.get(name, ()):
            if other not in self._resolved and not self._makers_left[other]:
                self._resolve(other, self.tensors.get(name), waiting)
        default = self._plan.defaults.get(name)
        if default is not None and default.tensor:
            self._release(default.tensor)

    def _release(self, name: str) -> None:
        self._left[name] -= 1
        if not self._left[name]:
            self.tensors.pop(name, None)
