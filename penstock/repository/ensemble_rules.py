"""Whether the steps of an ensemble fit together, and the models that they run. Pure.

The rules are Triton's. Shapes agree if their dimensions do, with or without the batch dimension; -1
agrees with any size, so the rest is checked when requests run.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

from penstock.config import EnsembleStep, ModelConfig
from penstock.types import TensorSpec, shape_fits

STEP = "ensemble_scheduling.step"
Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True, slots=True)
class EnsembleTensor:
    """One end of a tensor, with the words for it in a message."""

    spec: TensorSpec
    has_batch: bool
    where: str

    @property
    def full_shape(self) -> tuple[int, ...]:
        return (-1, *self.spec.shape) if self.has_batch else self.spec.shape

    def __str__(self) -> str:
        return f"{self.where} is {self.spec.datatype} {list(self.full_shape)}"


def graph_problems(config: ModelConfig) -> list[str]:
    """Return what is wrong with the steps by themselves, each with its path."""
    inputs = {spec.name for spec in config.inputs}
    problems: list[str] = []
    producers = _find_producers(config.steps, inputs, problems)
    for index, step in enumerate(config.steps):
        for name, tensor in step.inputs.items():
            if tensor not in inputs and tensor not in producers:
                what = f"'{name}' takes '{tensor}', which no step makes and no request brings"
                problems.append(f"{STEP}[{index}].input_map: {what}")
    for spec in config.outputs:
        if spec.name not in producers:
            problems.append(f"output: no step makes '{spec.name}'")
    if cycle := find_cycle(_needed(config.steps, producers)):
        order = " -> ".join(f"step {index} ({config.steps[index].model})" for index in cycle)
        problems.append(f"{STEP}: a cycle: {order}; each needs a tensor of the one before")
    return problems


def _find_producers(
    steps: Sequence[EnsembleStep], inputs: Collection[str], problems: list[str]
) -> dict[str, int]:
    """Return the step that makes each tensor; add a problem for what cannot be made twice."""
    producers: dict[str, int] = {}
    for index, step in enumerate(steps):
        for tensor in step.outputs.values():
            where = f"{STEP}[{index}].output_map: '{tensor}'"
            if tensor in inputs:
                problems.append(f"{where} is an input of the ensemble; no step can make it")
            elif tensor in producers:
                problems.append(f"{where} is made by step {producers[tensor]} already")
            else:
                producers[tensor] = index
    return producers


def unused_inputs(config: ModelConfig) -> list[str]:
    """Return a warning for each input that no step takes."""
    taken = {tensor for step in config.steps for tensor in step.inputs.values()}
    names = [spec.name for spec in config.inputs if spec.name not in taken]
    return [f"input: '{name}' has no effect; no step takes it" for name in names]


def _needed(steps: Sequence[EnsembleStep], producers: Mapping[str, int]) -> dict[int, set[int]]:
    """Return, by step, the steps whose tensors it needs."""
    return {
        index: {producers[tensor] for tensor in step.inputs.values() if tensor in producers}
        for index, step in enumerate(steps)
    }


def find_cycle(needed: Mapping[Node, Iterable[Node]]) -> list[Node]:
    """Return the nodes of a cycle, each needed by the next, with the first one again at the end;
    empty without any."""
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def member_problems(config: ModelConfig, members: Sequence[ModelConfig | None]) -> list[str]:
    """Return what is wrong with the models of the steps, as far as they are known."""
    problems: list[str] = []
    ends: dict[str, EnsembleTensor] = {}
    has_batch = config.max_batch_size > 0
    for spec in config.inputs:
        ends[spec.name] = EnsembleTensor(spec, has_batch, f"input '{spec.name}' of the ensemble")
    for index, (step, member) in enumerate(zip(config.steps, members, strict=True)):
        if member is not None:
            problems += [f"{STEP}[{index}]: {each}" for each in _misfits(config, step, member)]
            ends |= _outputs(step, member)
    for index, (step, member) in enumerate(zip(config.steps, members, strict=True)):
        if member is not None:
            problems += [f"{STEP}[{index}]: {each}" for each in _wrong_inputs(step, member, ends)]
    for spec in config.outputs:
        end = EnsembleTensor(spec, has_batch, f"output '{spec.name}' of the ensemble")
        if (made := ends.get(spec.name)) is not None and not _agree(made, end):
            problems.append(f"{end}, but {made}")
    return problems


def _misfits(config: ModelConfig, step: EnsembleStep, member: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with one member by itself."""
    name = f"model '{member.name}'"
    if member.max_batch_size < config.max_batch_size:
        text = f"the ensemble's of {config.max_batch_size}"
        yield f"{name} has max_batch_size {member.max_batch_size}, less than {text}"
    for kind, mapped, specs in (
        ("input", step.inputs, member.inputs),
        ("output", step.outputs, member.outputs),
    ):
        known = [spec.name for spec in specs]
        for unknown in sorted(mapped.keys() - set(known)):
            yield f"{name} has no {kind} '{unknown}'; it has {', '.join(known)}"
    optional = {spec.name for spec in config.inputs if spec.is_optional}
    for spec in member.inputs:
        if spec.is_optional:
            continue
        if spec.name not in step.inputs:
            yield f"input_map lacks '{spec.name}', which {name} needs"
        elif (tensor := step.inputs[spec.name]) in optional:
            yield f"input '{tensor}' of the ensemble is optional, but {name} needs '{spec.name}'"


def _outputs(step: EnsembleStep, member: ModelConfig) -> dict[str, EnsembleTensor]:
    """Return the ends at which a member makes the ensemble's tensors."""
    has_batch = member.max_batch_size > 0
    return {
        step.outputs[spec.name]: EnsembleTensor(
            spec, has_batch, f"output '{spec.name}' of model '{member.name}'"
        )
        for spec in member.outputs
        if spec.name in step.outputs
    }


def _wrong_inputs(
    step: EnsembleStep, member: ModelConfig, ends: Mapping[str, EnsembleTensor]
) -> Iterator[str]:
    for spec in member.inputs:
        made = ends.get(step.inputs.get(spec.name, ""))
        where = f"input '{spec.name}' of model '{member.name}'"
        taken = EnsembleTensor(spec, member.max_batch_size > 0, where)
        if made is not None and not _agree(made, taken):
            yield f"{taken}, but {made}"


def _agree(made: EnsembleTensor, taken: EnsembleTensor) -> bool:
    if made.spec.datatype != taken.spec.datatype:
        return False
    bare = _may_equal(made.spec.shape, taken.spec.shape)
    return bare or _may_equal(made.full_shape, taken.full_shape)


def _may_equal(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(
        a == b or -1 in (a, b) for a, b in zip(one, other, strict=True)
    )


def adapt_shape(shape: tuple[int, ...], spec: TensorSpec, has_batch: bool) -> tuple[int, ...]:
    """Return a tensor's shape as a model takes it that batches where the tensor's maker does not,
    or the contrary: with a batch of one row, or without. Others stay as they are."""
    rank = len(spec.shape) + has_batch
    if has_batch and len(shape) == rank - 1:
        return (1, *shape)
    if not has_batch and len(shape) == rank + 1 and shape[0] == 1:
        return shape[1:]
    return shape


def output_fits(shape: Sequence[int], spec: TensorSpec, has_batch: bool) -> bool:
    """Whether an answer's shape is what the ensemble declares."""
    return shape_fits(shape, (-1, *spec.shape) if has_batch else spec.shape)
