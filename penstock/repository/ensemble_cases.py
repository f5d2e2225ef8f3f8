"""Which steps of an ensemble run, in every case that its conditions distinguish. Pure.

A case gives each tensor that a condition looks at one value. Between the constants of conditions
nothing changes, so a few values of each tensor stand for all real numbers or texts. That proves
before the first request that no tensor is made twice and no output is missing.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from penstock.config import Comparison, EnsembleStep, ModelConfig
from penstock.repository.ensemble_parameters import DEFAULT, EQUALITY, IF

STEP = "ensemble_scheduling.step"
MAX_CASES = 1 << 14
# Begins the text that stands for all that no condition names.
ANOTHER = "\0"
Value = float | str
Case = Mapping[str, Value]
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(slots=True)
class CaseReport:
    """`absent` has, by tensor, the first case in which it does not exist; `doubles` the first in
    which a second step makes it. `runs` are steps that run in some case."""

    absent: dict[str, str] = field(default_factory=dict)
    doubles: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)
    # Tensors that no step makes in some case, with or without a default.
    unmade: set[str] = field(default_factory=set)
    problem: str = ""


def holds(comparison: Comparison, value: Value) -> bool:
    if isinstance(value, str) or isinstance(comparison.value, str):
        return (value == comparison.value) == (comparison.operator == "==")
    return _COMPARE[comparison.operator](value, comparison.value)


def needed_tensors(step: EnsembleStep) -> set[str]:
    """Return the tensors without which a step cannot begin."""
    return {*step.inputs.values(), *(each.tensor for each in step.condition)}


def find_makers(steps: Sequence[EnsembleStep]) -> dict[str, list[int]]:
    """Return the steps that make each tensor."""
    makers: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        for tensor in dict.fromkeys(step.outputs.values()):
            makers.setdefault(tensor, []).append(index)
    return makers


def dependencies(config: ModelConfig) -> dict[int | str, list[int | str]]:
    """Return what each step (a number) and each tensor (a name) waits for."""
    needed: dict[int | str, list[int | str]] = {}
    given = {spec.name for spec in config.inputs}
    for index, step in enumerate(config.steps):
        needed[index] = [*sorted(needed_tensors(step))]
    for tensor, makers in find_makers(config.steps).items():
        if tensor not in given:
            needed[tensor] = [*makers]
    for tensor, default in config.defaults.items():
        if default.tensor:
            needed.setdefault(tensor, []).append(default.tensor)
    return needed


def has_cases(config: ModelConfig) -> bool:
    return bool(config.defaults) or any(step.condition for step in config.steps)


def try_cases(config: ModelConfig) -> CaseReport:
    """Report what runs in each case. The graph must have no cycle."""
    report = CaseReport()
    try:
        values = _find_values(config.steps)
    except ValueError as error:
        report.problem = str(error)
        return report
    count = math.prod(len(each) for each in values.values())
    if count > MAX_CASES:
        report.problem = (
            f"the conditions distinguish {count} cases; at most {MAX_CASES} are checked: "
            "use fewer tensors or constants"
        )
        return report
    order = tuple(TopologicalSorter(dependencies(config)).static_order())
    makers = find_makers(config.steps)
    given = {spec.name for spec in config.inputs}
    for combination in itertools.product(*values.values()):
        case = dict(zip(values, combination, strict=True))
        _try_case(config, order, makers, given, case, report)
    return report


def _try_case(
    config: ModelConfig,
    order: Sequence[int | str],
    makers: Mapping[str, Sequence[int]],
    given: Collection[str],
    case: Case,
    report: CaseReport,
) -> None:
    there: set[str] = set(given)
    runs: set[int] = set()
    for node in order:
        if isinstance(node, int):
            step = config.steps[node]
            is_wanted = all(holds(each, case[each.tensor]) for each in step.condition)
            if is_wanted and needed_tensors(step) <= there:
                runs.add(node)
        elif node not in given:
            made = [index for index in makers.get(node, ()) if index in runs]
            if len(made) > 1:
                report.doubles.setdefault(node, (made[0], made[1], _describe(case)))
            if not made:
                report.unmade.add(node)
            default = config.defaults.get(node)
            is_replaced = default is not None and (not default.tensor or default.tensor in there)
            if made or is_replaced:
                there.add(node)
            else:
                report.absent.setdefault(node, _describe(case))
    report.runs |= runs


def _find_values(steps: Sequence[EnsembleStep]) -> dict[str, list[Value]]:
    """Return values of each tensor that stand for all others."""
    found: dict[str, list[Comparison]] = {}
    for step in steps:
        for each in step.condition:
            found.setdefault(each.tensor, []).append(each)
    return {tensor: list(_stand_ins(tensor, each)) for tensor, each in found.items()}


def _stand_ins(tensor: str, comparisons: Sequence[Comparison]) -> Iterator[Value]:
    constants = {each.value for each in comparisons}
    numbers = sorted(each for each in constants if not isinstance(each, str))
    texts = sorted(each for each in constants if isinstance(each, str))
    if numbers and texts:
        raise ValueError(f"'{tensor}' is compared with a number and with a text")
    if texts:
        yield from texts
        yield ANOTHER + " ".join(texts)
        return
    yield from numbers
    yield numbers[-1] + 1 + abs(numbers[-1])
    if any(each.operator not in EQUALITY for each in comparisons):
        yield numbers[0] - 1 - abs(numbers[0])
        yield from ((low + high) / 2 for low, high in itertools.pairwise(numbers))


def _describe(case: Case) -> str:
    shown = [f"{name} is {_show(value)}" for name, value in case.items()]
    return " and ".join(shown)


def _show(value: Value) -> str:
    if isinstance(value, str):
        return "another text" if value.startswith(ANOTHER) else f'"{value}"'
    return f"{value:g}"


def case_problems(config: ModelConfig, report: CaseReport) -> list[str]:
    """Return what is wrong with the conditions and defaults, each with its path."""
    if report.problem:
        return [f"parameters.{IF}*: {report.problem}"]
    problems: list[str] = []
    for tensor, (first, second, case) in report.doubles.items():
        when = f" when {case}" if case else ""
        problems.append(
            f"{STEP}[{second}].output_map: '{tensor}' is made by step {first} as well{when}; "
            f"only one of them may run: see parameters.{IF}{second}"
        )
    for spec in config.outputs:
        if (absent := report.absent.get(spec.name)) is not None:
            problems.append(
                f"output: '{spec.name}' does not exist when {absent}; expected a step that makes "
                f"it then, or parameters.{DEFAULT}{spec.name}"
            )
    for index, step in enumerate(config.steps):
        if index not in report.runs:
            problems.append(f"{STEP}[{index}]: model '{step.model}' never runs, in no case")
    return problems
