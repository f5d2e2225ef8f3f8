"""The parameters of an ensemble in config.pbtxt that Triton does not have: steps that make one
request for each row, conditions, and defaults of tensors.

Texts to values. `ensemble_cases` checks what follows from conditions; servers that do not know the
parameters ignore them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from penstock.config import Comparison, EnsembleStep, TensorDefault

FAN_OUT, IF, DEFAULT = "penstock.fan_out.", "penstock.if.", "penstock.default."
LIMIT, IN_FLIGHT = "penstock.fan_out_limit", "penstock.fan_out_concurrency"
PREFIXES = (FAN_OUT, IF, DEFAULT)
LIMITS = (LIMIT, IN_FLIGHT)
EMPTY = "[]"
# A text in quotation marks, an operator, a single `=` (which is reported), or a word.
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[<>=!]=|[<>=!]|[^\s<>=!"]+|")')
EQUALITY = ("==", "!=")
_OPERATORS = ("<", "<=", ">", ">=", *EQUALITY)
_EXPECTED = (
    "expected comparisons like 'score > 0.5', 'lang == \"de\"', 'found' or 'not found', "
    "joined by 'and'"
)
Problem = Callable[[str, str], None]


def read_step_parameters(
    given: Mapping[str, str], steps: Sequence[EnsembleStep], problem: Problem
) -> tuple[EnsembleStep, ...]:
    """Return the steps with their conditions and the tensors that they split."""
    found = list(steps)
    for prefix, field in ((FAN_OUT, "fan_out"), (IF, "condition")):
        seen: set[int] = set()
        for key, index in _find_steps(given, prefix, steps, problem):
            if index in seen:
                problem(f"parameters.{key}", f"step {index} has one already")
            seen.add(index)
            try:
                if field == "fan_out":
                    split = _parse_split(given[key], index, steps[index])
                    found[index] = replace(found[index], fan_out=split)
                else:
                    condition = parse_condition(given[key])
                    found[index] = replace(found[index], condition=condition)
            except ValueError as error:
                problem(f"parameters.{key}", str(error))
    return tuple(found)


def read_defaults(given: Mapping[str, str], problem: Problem) -> dict[str, TensorDefault]:
    found: dict[str, TensorDefault] = {}
    for key, text in given.items():
        if key.startswith(DEFAULT):
            try:
                found[key.removeprefix(DEFAULT)] = parse_default(text)
            except ValueError as error:
                problem(f"parameters.{key}", str(error))
    return found


def parse_condition(text: str) -> tuple[Comparison, ...]:
    """Return the comparisons of a condition; ValueError if it is none."""
    groups: list[list[str]] = [[]]
    for token in _tokens(text):
        if token == "and":
            groups.append([])
        else:
            groups[-1].append(token)
    return tuple(_parse_comparison(group, text) for group in groups)


def parse_default(text: str) -> TensorDefault:
    """Return the default that a text stands for; ValueError if it is none."""
    if text.strip() == EMPTY:
        return TensorDefault()
    tokens = list(_tokens(text))
    if len(tokens) != 1 or tokens[0] in (*_OPERATORS, "=", "!", '"'):
        expected = (
            f'a number, true, false, a "text" in quotation marks, {EMPTY} or a tensor\'s name'
        )
        raise ValueError(f"'{text}': expected {expected}")
    value = _parse_value(tokens[0])
    return TensorDefault(tokens[0]) if value is None else TensorDefault(value=value)


def _find_steps(
    given: Mapping[str, str], prefix: str, steps: Sequence[EnsembleStep], problem: Problem
) -> Iterator[tuple[str, int]]:
    """Yield the keys with this prefix and their steps, by number or by the model's name."""
    for key in sorted(given):
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        found = [index for index, step in enumerate(steps) if step.model == name]
        if name.isdecimal() and int(name) < len(steps):
            found = [int(name)]
        if len(found) == 1:
            yield key, found[0]
        elif found:
            text = f"steps {', '.join(map(str, found))} run '{name}'; expected a step's number"
            problem(f"parameters.{key}", text)
        else:
            known = ", ".join(f"{index} ({step.model})" for index, step in enumerate(steps))
            problem(f"parameters.{key}", f"no step '{name}'; the steps are {known}")


def _parse_split(text: str, index: int, step: EnsembleStep) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    takes = ", ".join(sorted(set(step.inputs.values())))
    if not names:
        raise ValueError(f"'{text}': expected tensors that step {index} takes, of {takes}")
    for name in names:
        if name not in step.inputs.values():
            raise ValueError(
                f"step {index} ({step.model}) does not take '{name}'; it takes {takes}"
            )
    return names


def _parse_comparison(tokens: Sequence[str], text: str) -> Comparison:
    match tokens:
        case [name] if _is_name(name):
            return Comparison(name, "!=", 0.0)
        case ["not", name] if _is_name(name):
            return Comparison(name, "==", 0.0)
        case [name, operator, literal] if _is_name(name) and operator in _OPERATORS:
            value = _parse_value(literal)
        case _:
            raise ValueError(f"'{text}': {_EXPECTED}")
    if value is None:
        what = 'expected a number, true, false or a "text" in quotation marks'
        raise ValueError(f"'{text}': '{literal}' is no constant; {what}")
    if operator not in EQUALITY and (isinstance(value, str) or literal in ("true", "false")):
        raise ValueError(f"'{text}': {literal} can be compared by == and != only")
    if literal == "true":
        # Any value but 0 is true, so that the two sides of a condition leave no gap.
        operator, value = ("!=" if operator == "==" else "=="), 0.0
    known = cast(Literal["<", "<=", ">", ">=", "==", "!="], operator)
    return Comparison(name, known, value)


def _parse_value(token: str) -> float | str | None:
    """Return the number or text of a constant; None if it is a name."""
    if token.startswith('"'):
        try:
            return str(json.loads(token))
        except ValueError as error:
            raise ValueError(f"{token}: {error}") from None
    if token in ("true", "false"):
        return float(token == "true")
    try:
        value = float(token)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_name(token: str) -> bool:
    return token not in ("not", '"', *_OPERATORS, "=", "!") and _parse_value(token) is None


def _tokens(text: str) -> Iterator[str]:
    return iter(_TOKEN.findall(text))
