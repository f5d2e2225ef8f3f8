"""Wishes as text to a Plan: flags of the command line and plan files (TOML) alike, checked
together, with every problem at once.

    model = "model.onnx"
    slo = "p99 < 20 ms at 200/s"
    data = "data.npz"
    out = "models"
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from penstock import slo, versions
from penstock.errors import ConfigError
from penstock.optimizer import budget
from penstock.optimizer.llm.recognise import is_language_model
from penstock.optimizer.plan import Plan

# Wishes that name files; those of a plan file are looked for beside it.
PATHS = ("model", "data", "calibration", "out")
REQUIRED = ("model", "slo", "out")
TEXTS = ("model", "name", "out", "data", "data_name", "labels", "calibration")
FUNCTIONS = {"eval": "evaluator", "preprocess": "preprocess", "postprocess": "postprocess"}
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Minutes and hours, which no SLO needs.
LONG_DURATIONS = {"m": 60.0, "min": 60.0, "h": 3600.0}
MAX_SEED = 2**31 - 1


def read(path: Path) -> dict[str, object]:
    """The wishes of a plan file by name; paths are made absolute."""
    try:
        with open(path, "rb") as file:
            wishes = {key.replace("-", "_"): value for key, value in tomllib.load(file).items()}
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from None
    for key in PATHS:
        value = wishes.get(key)
        if isinstance(value, str) and value and not _is_reference(value):
            wishes[key] = os.path.join(path.parent, value)
    return wishes


def make_plan(wishes: Mapping[str, object]) -> Plan:
    """Raises ConfigError with every problem, each starting with the name of the wish."""
    problems: list[str] = []
    unknown = sorted(set(wishes) - set(READERS))
    problems += [f"{key}: not known; expected one of {', '.join(READERS)}" for key in unknown]
    found: dict[str, Any] = {}
    for key, (field, reader) in READERS.items():
        value = wishes.get(key)
        if value is None or (value == "" and key in REQUIRED):
            continue
        try:
            found[field] = reader(value)
        except ValueError as error:
            problems.append(f"{key}: {error}")
        except ConfigError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
    problems += [f"{key}: is missing" for key in REQUIRED if not wishes.get(key)]
    if problems:
        paths = {key: found.get(key, "") for key in PATHS}
        raise ConfigError([*problems, *_path_problems(Plan(name="", **paths))])
    plan = Plan(**{"name": "", **found})
    named = plan if plan.name else replace(plan, name=default_name(plan.model))
    _check(named)
    return named


def default_name(model: str) -> str:
    """What a model is called when nobody says: as its file, folder or function."""
    if _is_reference(model):
        return model.rpartition(".")[2].partition(":")[0]
    path = Path(os.path.abspath(model))
    if path.name.isdigit():
        path = path.parent
    return re.sub(r"[^\w.-]", "-", path.stem if path.is_file() else path.name)


def _check(plan: Plan) -> None:
    """What contradicts itself, or is not there."""
    problems = [versions.problem_of_name(plan.name)] if versions.problem_of_name(plan.name) else []
    problems += _path_problems(plan)
    if not plan.data:
        for key in ("labels", "evaluator", "calibration", "accuracy"):
            if getattr(plan, key):
                shown = "eval" if key == "evaluator" else key
                problems.append(f"{shown}: needs data, and none is given")
    wants_cost = plan.slo and any(isinstance(term, slo.Cost) for term in plan.slo.terms)
    if wants_cost and plan.price_per_hour is None:
        problems.append("slo: a term on cost needs the price of the machine per hour (price)")
    is_text = not problems and is_language_model(plan.model)
    if not is_text and _names_streams(plan.slo):
        problems.append("slo: ttft, tpot and itl are of streams; expected terms on latency")
    if problems:
        raise ConfigError(problems)


def _names_streams(promised: slo.Slo | None) -> bool:
    terms = () if promised is None else promised.terms
    return any(isinstance(term, slo.Latency) and term.metric != "latency" for term in terms)


def _path_problems(plan: Plan) -> list[str]:
    problems = []
    if plan.model and not _is_reference(plan.model) and not os.path.exists(plan.model):
        expected = "an .onnx, .pt2 or .gguf file, a model's folder or package.module:factory"
        problems.append(f"model: {plan.model}: no such file or folder; expected {expected}")
    if os.path.exists(plan.out) and not os.path.isdir(plan.out):
        problems.append(f"out: {plan.out}: is a file; expected a repository's folder")
    for key in ("data", "calibration"):
        path = getattr(plan, key)
        if path and not os.path.exists(path):
            problems.append(f"{key}: {path}: no such file or folder")
    return problems


def parse_time(text: str) -> float:
    """`90s`, `10m` or `1.5h` in seconds; ValueError says what was expected."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(m|min|h)\s*", text)
    if match is not None and float(match[1]) > 0:
        return float(match[1]) * LONG_DURATIONS[match[2]]
    try:
        return slo.parse_duration(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a time; expected one like 90s, 10m or 1h") from None


def _is_reference(text: str) -> bool:
    """package.module:name"""
    return REFERENCE.fullmatch(text) is not None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _reference(value: object) -> str:
    text = _text(value)
    if text and not _is_reference(text):
        raise ValueError(f"'{text}' is not of the form package.module:function")
    return text


def _device(value: object) -> str:
    text = _text(value)
    if DEVICE.fullmatch(text) is None:
        raise ValueError(f"'{text}' is no device; expected auto, cpu, cuda or cuda:N")
    return text


def _slo(value: object) -> slo.Slo:
    return slo.parse(_text(value))


def _accuracy(value: object) -> budget.Budget:
    return budget.parse(_text(value))


def _time(value: object) -> float:
    return parse_time(_text(value))


def _price(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{value!r} is not a price per hour above zero")
    return float(value)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _names(value: object) -> tuple[str, ...]:
    """A list of texts, or one text with commas."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ValueError(f"{value!r} is not a list of names")
    names = tuple(each.strip() for each in listed)
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{value!r}: names must be distinct and not empty")
    return names


def _seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
        raise ValueError(f"{value!r} is not a whole number from 0 to {MAX_SEED}")
    return value


# By the name of the wish: the field of a Plan and how it is read.
READERS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    **{key: (key, _text) for key in TEXTS},
    **{key: (field, _reference) for key, field in FUNCTIONS.items()},
    "slo": ("slo", _slo),
    "accuracy": ("accuracy", _accuracy),
    "price": ("price_per_hour", _price),
    "budget": ("budget_s", _time),
    "duration": ("duration_s", _time),
    "device": ("device", _device),
    "exhaustive": ("is_exhaustive", _switch),
    "seed": ("seed", _seed),
    "outputs": ("outputs", _names),
    "fresh": ("is_fresh", _switch),
}

assert {field for field, _ in READERS.values()} == {each.name for each in fields(Plan)}
