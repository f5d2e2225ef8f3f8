"""Which steps of an ensemble run for a request, and which of them are ready. Pure.

A plan depends only on which inputs a request has and which outputs it wants, so it is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import EnsembleStep, ModelConfig
from penstock.types import RequestedOutput

MAX_PLANS = 256


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """`inputs` are pairs (input of the member, tensor of the ensemble), without optional inputs
    that the request lacks. `asked` are the outputs that are needed."""

    index: int
    inputs: tuple[tuple[str, str], ...]
    asked: tuple[RequestedOutput, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """`steps` has an entry for each step of the ensemble: None for those that are not needed."""

    steps: tuple[PlannedStep | None, ...]
    outputs: tuple[str, ...]
    # By step: the number of steps that it waits for, and those that wait for it.
    num_awaited: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    # By tensor: how many steps take it; the answer counts as one.
    uses: dict[str, int]

    @property
    def num_steps(self) -> int:
        return sum(step is not None for step in self.steps)


class EnsemblePlanner:
    """Makes plans for one ensemble; holds nothing but the cache."""

    def __init__(self, config: ModelConfig) -> None:
        self._steps = config.steps
        self._inputs = frozenset(spec.name for spec in config.inputs)
        self._outputs = tuple(spec.name for spec in config.outputs)
        self._makers = {
            tensor: index
            for index, step in enumerate(config.steps)
            for tensor in step.outputs.values()
        }
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
        needed = self._find_needed(outputs)
        awaited: list[set[int]] = [set() for _ in self._steps]
        uses: dict[str, int] = dict.fromkeys(outputs, 1)
        for index in needed:
            for tensor in self._steps[index].inputs.values():
                if tensor not in absent:
                    uses[tensor] = uses.get(tensor, 0) + 1
                if tensor in self._makers:
                    awaited[index].add(self._makers[tensor])
        steps = [
            self._plan_step(index, step, absent, uses) if index in needed else None
            for index, step in enumerate(self._steps)
        ]
        followers = tuple(
            tuple(other for other in sorted(needed) if index in awaited[other])
            for index in range(len(self._steps))
        )
        return StepPlan(tuple(steps), outputs, tuple(map(len, awaited)), followers, uses)

    def _find_needed(self, outputs: Sequence[str]) -> set[int]:
        """Return the steps that these outputs need."""
        needed: set[int] = set()
        waiting = [self._makers[name] for name in outputs]
        while waiting:
            index = waiting.pop()
            if index not in needed:
                needed.add(index)
                tensors = self._steps[index].inputs.values()
                waiting += [self._makers[each] for each in tensors if each in self._makers]
        return needed

    @staticmethod
    def _plan_step(
        index: int, step: EnsembleStep, absent: frozenset[str], uses: dict[str, int]
    ) -> PlannedStep:
        inputs = tuple((name, each) for name, each in step.inputs.items() if each not in absent)
        asked = tuple(RequestedOutput(name) for name, each in step.outputs.items() if each in uses)
        return PlannedStep(index, inputs, asked)


class StepProgress:
    """How far one request is. Invariant: a step is returned as ready once, after all that it waits
    for; so every step of the plan has run when `num_left` is 0."""

    __slots__ = ("_awaited", "_plan", "num_left")

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._awaited = list(plan.num_awaited)
        self.num_left = plan.num_steps

    def begin(self) -> list[int]:
        """Return the steps that need nothing but the request's own tensors."""
        steps = enumerate(self._plan.steps)
        return [i for i, step in steps if step is not None and not self._awaited[i]]

    def finish(self, index: int) -> list[int]:
        """Return the steps that are ready now that this one has its outputs."""
        self.num_left -= 1
        ready: list[int] = []
        for follower in self._plan.followers[index]:
            self._awaited[follower] -= 1
            if not self._awaited[follower]:
                ready.append(follower)
        return ready
