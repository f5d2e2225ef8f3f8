"""Which layers stay in float when INT8 loses too much: asks the lab what `fallback` wants to
know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import PenstockError
from penstock.optimizer import fallback
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.fallback import Effect, Group, Layer
from penstock.optimizer.lab import CHOICE, COMPARED, Lab
from penstock.optimizer.numerics import Answers
from penstock.optimizer.passes import int8_static
from penstock.optimizer.results import FallbackLayer

# Of the layers, so many must be found in the profile for its times to be used.
MIN_KNOWN = 0.5


class Sensitivity(msgspec.Struct):
    """An Effect, as the journal has it."""

    name: str
    layers: list[tuple[str, str, float]]
    error: float


@dataclass(frozen=True, slots=True)
class Kept:
    step: Step
    layers: Sequence[FallbackLayer]


class KeptLayers:
    """For one candidate that the gate refused. `check_time` raises when there is none left."""

    def __init__(self, lab: Lab, parent: Build, step: Step, check_time: Callable[[], None]) -> None:
        self._lab = lab
        self._parent = parent
        self._step = step
        self._check_time = check_time

    def find(self) -> Kept | None:
        """None: no set of layers that was tried passes the gate."""
        ranked = self._ranked()
        kept = fallback.find_fallback(ranked, self._passes)
        if kept is None:
            return None
        names = [name for effect in kept for name in effect.group.names]
        step = int8_static.with_kept(self._step, names)
        return Kept(step, fallback.described(kept, ranked))

    def _candidate(self, keep: Sequence[str]) -> Candidate:
        return self._parent.candidate.then(int8_static.with_kept(self._step, sorted(keep)))

    def _ranked(self) -> list[Effect]:
        key = self._candidate(()).key
        found = self._lab.journal.remember(
            "sensitivity", key, list[Sensitivity], self._sensitivities
        )
        return [
            Effect(Group(each.name, tuple(Layer(*layer) for layer in each.layers)), each.error)
            for each in found
        ]

    def _sensitivities(self) -> list[Sensitivity]:
        original = self._lab.original_answers(COMPARED)
        found = fallback.sensitivity(self._layers(), self._answers, original)
        return [
            Sensitivity(
                effect.group.name,
                [(layer.name, layer.operator, layer.cost) for layer in effect.group.layers],
                effect.error,
            )
            for effect in found
        ]

    def _answers(self, keep: tuple[str, ...]) -> Answers:
        self._check_time()
        candidate = self._candidate(keep)
        self._lab.watch(f"sensitivity, {len(keep)} layers in float")
        try:
            return self._lab.answers(self._lab.build(candidate), self._lab.compared)
        finally:
            self._lab.forget(candidate)

    def _passes(self, keep: tuple[str, ...]) -> bool:
        self._check_time()
        candidate = self._candidate(keep)
        self._lab.watch(f"accuracy with {len(keep)} layers in float")
        return self._lab.judge(self._lab.build(candidate), CHOICE).is_passed

    def _layers(self) -> list[Layer]:
        """With what each costs in float: by the profile where that knows them, else by size."""
        known = int8_static.weighed_layers(int8_static.prepared(self._parent))
        seconds = self._seconds()
        num_known = sum(name in seconds for name, _, _ in known)
        return fallback.with_costs(known, seconds if num_known >= MIN_KNOWN * len(known) else None)

    def _seconds(self) -> dict[str, float]:
        try:
            profile = self._lab.profile(self._parent)
        except PenstockError:
            return {}
        return {operator.name: operator.seconds for operator in profile.operators}
