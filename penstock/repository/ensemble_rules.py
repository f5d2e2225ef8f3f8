"""Whether the steps of an ensemble fit together, and the models that they run. Pure.

The rules are Triton's. Shapes agree if their dimensions do, with or without the batch dimension; -1
agrees with any size, so the rest is checked when requests run.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

import numpy as np

from penstock.config import EnsembleStep, ModelConfig, TensorDefault
from penstock.repository.ensemble_cases import (
    STEP,
    case_problems,
    dependencies,
    find_makers,
    has_cases,
    needed_tensors,
    try_cases,
)
from penstock.repository.ensemble_parameters import DEFAULT, FAN_OUT, IF, LIMITS
from penstock.types import DATATYPES, TensorSpec, num_elements, shape_fits

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
    makers = find_makers(config.steps)
    inputs = {spec.name for spec in config.inputs}
    problems = [*_wrong_makers(config, makers)]
    for index, step in enumerate(config.steps):
        for name, tensor in step.inputs.items():
            if tensor not in inputs and tensor not in makers:
                what = f"'{name}' takes '{tensor}', which no step makes and no request brings"
                problems.append(f"{STEP}[{index}].input_map: {what}")
    problems += [*_wrong_conditions(config, makers), *_wrong_defaults(config, makers)]
    for spec in config.outputs:
        if spec.name not in makers:
            problems.append(f"output: no step makes '{spec.name}'")
    if cycle := find_cycle(dependencies(config)):
        order = " -> ".join(_describe_cycle(config, cycle))
        problems.append(f"{STEP}: a cycle: {order}; each needs a tensor of the one before")
    if not problems and has_cases(config):
        problems = case_problems(config, try_cases(config))
    return problems


def _wrong_makers(config: ModelConfig, makers: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield a problem for what cannot be made, or not twice."""
    inputs = {spec.name for spec in config.inputs}
    for tensor, steps in makers.items():
        if tensor in inputs:
            text = f"'{tensor}' is an input of the ensemble; no step can make it"
            yield f"{STEP}[{steps[0]}].output_map: {text}"
    for index, step in enumerate(config.steps):
        for tensor in step.outputs.values():
            if list(step.outputs.values()).count(tensor) > 1:
                yield f"{STEP}[{index}].output_map: two outputs of the model are '{tensor}'"
                break
    if not has_cases(config):
        for tensor, steps in makers.items():
            for index in steps[1:] if tensor not in inputs else ():
                yield f"{STEP}[{index}].output_map: '{tensor}' is made by step {steps[0]} already"


def _wrong_conditions(config: ModelConfig, makers: Collection[str]) -> Iterator[str]:
    inputs = {spec.name: spec for spec in config.inputs}
    for index, step in enumerate(config.steps):
        for comparison in step.condition:
            path, tensor = f"parameters.{IF}{index}", comparison.tensor
            if tensor not in inputs and tensor not in makers:
                yield f"{path}: '{tensor}', which no step makes and no request brings"
            elif tensor in inputs and inputs[tensor].is_optional:
                yield f"{path}: input '{tensor}' is optional; a condition needs its value"
        for tensor in step.fan_out:
            if tensor in inputs and inputs[tensor].is_optional:
                text = f"input '{tensor}' is optional; its rows must be there to be counted"
                yield f"parameters.{FAN_OUT}{index}: {text}"


def _wrong_defaults(config: ModelConfig, makers: Collection[str]) -> Iterator[str]:
    inputs = {spec.name: spec for spec in config.inputs}
    for tensor, default in config.defaults.items():
        path, source = f"parameters.{DEFAULT}{tensor}", default.tensor
        if tensor not in makers:
            yield f"{path}: no step makes '{tensor}'"
        if source and source not in inputs and source not in makers:
            yield f"{path}: '{source}', which no step makes and no request brings"
        elif source in inputs and inputs[source].is_optional:
            yield f"{path}: input '{source}' is optional; a default must be there"


def unused_inputs(config: ModelConfig) -> list[str]:
    """Return a warning for each input that no step takes."""
    taken = {default.tensor for default in config.defaults.values()}
    taken = taken.union(*map(needed_tensors, config.steps))
    names = [spec.name for spec in config.inputs if spec.name not in taken]
    return [f"input: '{name}' has no effect; no step takes it" for name in names]


def idle_parameters(config: ModelConfig) -> list[str]:
    """Return a warning for each parameter of a sound ensemble that changes nothing."""
    unmade = try_cases(config).unmade if config.defaults else set()
    found = [
        f"parameters.{DEFAULT}{tensor}: has no effect; a step always makes '{tensor}'"
        for tensor in config.defaults
        if tensor not in unmade
    ]
    if not any(step.fan_out for step in config.steps):
        keys = [key for key in LIMITS if key in config.options]
        found += [f"parameters.{key}: has no effect; no step fans out" for key in keys]
    return found


def _describe_cycle(config: ModelConfig, cycle: Sequence[int | str]) -> Iterator[str]:
    """Yield the steps of a cycle, with the first one again at the end; its tensors if it has
    none."""
    steps = [node for node in cycle[1:] if isinstance(node, int)]
    if not steps:
        yield from (f"'{node}'" for node in cycle)
    for index in (*steps[-1:], *steps):
        yield f"step {index} ({config.steps[index].model})"


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
    ends: dict[str, list[EnsembleTensor]] = {}
    has_batch = config.max_batch_size > 0
    for spec in config.inputs:
        ends[spec.name] = [EnsembleTensor(spec, has_batch, f"input '{spec.name}' of the ensemble")]
    for index, (step, member) in enumerate(zip(config.steps, members, strict=True)):
        if member is not None:
            problems += [f"{STEP}[{index}]: {each}" for each in _misfits(config, step, member)]
            for tensor, end in _outputs(config, step, member):
                ends.setdefault(tensor, []).append(end)
    for index, (step, member) in enumerate(zip(config.steps, members, strict=True)):
        if member is not None:
            takers = [*_takers(config, step, member)]
            problems += [
                f"{STEP}[{index}]: {each}" for each in _disagreements(config, takers, ends)
            ]
        for each in _unfit_conditions(config, step, ends):
            problems.append(f"parameters.{IF}{index}: {each}")
    outputs = [
        (spec.name, EnsembleTensor(spec, has_batch, f"output '{spec.name}' of the ensemble"))
        for spec in config.outputs
    ]
    return problems + [*_disagreements(config, outputs, ends)]


def _misfits(config: ModelConfig, step: EnsembleStep, member: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with one member by itself."""
    name = f"model '{member.name}'"
    if step.fan_out and member.sequences is not None:
        yield f"{name} has sequence_batching, but the rows of '{step.fan_out[0]}' have no order"
    if not step.fan_out and member.max_batch_size < config.max_batch_size:
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


def _outputs(
    config: ModelConfig, step: EnsembleStep, member: ModelConfig
) -> Iterator[tuple[str, EnsembleTensor]]:
    """Yield the tensors of the ensemble that a member makes, and their ends."""
    has_batch = member.max_batch_size > 0
    for spec in member.outputs:
        if spec.name in step.outputs:
            where = f"output '{spec.name}' of model '{member.name}'"
            end = EnsembleTensor(spec, has_batch, where)
            yield step.outputs[spec.name], _of_rows(config, end) if step.fan_out else end


def _takers(
    config: ModelConfig, step: EnsembleStep, member: ModelConfig
) -> Iterator[tuple[str, EnsembleTensor]]:
    """Yield the tensors of the ensemble that a member takes, and the ends at which it does."""
    for spec in member.inputs:
        if (tensor := step.inputs.get(spec.name)) is not None:
            where = f"input '{spec.name}' of model '{member.name}'"
            end = EnsembleTensor(spec, member.max_batch_size > 0, where)
            yield tensor, _of_rows(config, end) if tensor in step.fan_out else end


def _of_rows(config: ModelConfig, end: EnsembleTensor) -> EnsembleTensor:
    """Return the end of the requests of all rows together."""
    where = f"{end.where}, for all rows,"
    return EnsembleTensor(split_spec(end.spec), config.max_batch_size > 0, where)


def split_spec(spec: TensorSpec) -> TensorSpec:
    """Return the rows that requests for a tensor like this one are made of."""
    return replace(spec, shape=(-1, *spec.shape))


def _disagreements(
    config: ModelConfig,
    takers: Iterable[tuple[str, EnsembleTensor]],
    ends: Mapping[str, Sequence[EnsembleTensor]],
) -> Iterator[str]:
    """Yield which takers do not agree with the ends at which their tensors are made."""
    for tensor, taken in takers:
        chain = _default_chain(config, tensor)
        for made in (end for name in chain for end in ends.get(name, ())):
            if not _agree(made, taken):
                yield f"{taken}, but {made}"
        default = config.defaults.get(chain[-1])
        if default is not None and (problem := _default_problem(taken.spec, default)):
            yield f"{taken}, but parameters.{DEFAULT}{chain[-1]} {problem}"


def _default_chain(config: ModelConfig, tensor: str) -> list[str]:
    """Return a tensor, the one that it defaults to, and so on."""
    chain = [tensor]
    while (default := config.defaults.get(chain[-1])) is not None and default.tensor:
        if default.tensor in chain:
            break
        chain.append(default.tensor)
    return chain


def _default_problem(spec: TensorSpec, default: TensorDefault) -> str:
    """Return why a tensor like this one cannot have this value; empty if it can."""
    value = default.value
    if default.tensor:
        return ""
    if value is None:
        return "" if -1 in spec.shape else "is [], which needs a variable dimension"
    if isinstance(value, str):
        return "" if spec.datatype == "BYTES" else "is a text"
    if spec.datatype == "BYTES":
        return "is a number"
    kind = "f" if spec.datatype == "BF16" else DATATYPES[spec.datatype].numpy.kind
    if kind == "b" and value not in (0, 1):
        return f"is {value:g}; expected true or false"
    if kind in "iu":
        limits = np.iinfo(DATATYPES[spec.datatype].numpy)
        if not value.is_integer() or not limits.min <= value <= limits.max:
            expected = f"expected a whole number from {limits.min} to {limits.max}"
            return f"is {value:g}; {expected}"
    return ""


def _unfit_conditions(
    config: ModelConfig, step: EnsembleStep, ends: Mapping[str, Sequence[EnsembleTensor]]
) -> Iterator[str]:
    """Yield what conditions cannot read."""
    for each in step.condition:
        is_text = isinstance(each.value, str)
        for end in ends.get(each.tensor, ()):
            if is_text != (end.spec.datatype == "BYTES"):
                kind = "text" if is_text else "number"
                yield f"'{each.tensor}' is compared with a {kind}, but {end}"
            elif -1 not in end.spec.shape and num_elements(end.spec.shape) != 1:
                yield f"'{each.tensor}' must have one element, but {end}"


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
