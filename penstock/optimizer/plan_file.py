"""Options of `penstock optimize` to a Plan: flags and plan files (TOML) are checked together, and
every problem is reported at once, under the name that the user wrote.

    model = "model.onnx"
    slo = "p99 < 20 ms at 200/s"
    data = "data.npz"
    out = "models"
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from penstock import slo
from penstock.data.recordings import is_recording
from penstock.errors import CommandLineError, ConfigError
from penstock.optimizer import budget
from penstock.optimizer.plan import Plan
from penstock.repository import versions
from penstock.repository.model_source import is_language_model, resolve

# Options that are paths; in a plan file they are relative to it.
PATHS = ("model", "data", "from_live", "calibration", "out")
# Examples of required options, shown if they are missing.
REQUIRED = {"model": "model.onnx", "slo": "p99 < 20 ms at 200/s", "out": "models"}
TEXTS = (
    "model",
    "name",
    "out",
    "data",
    "from_live",
    "data_name",
    "labels",
    "calibration",
    "member",
)
FUNCTIONS = {"eval": "evaluator", "preprocess": "preprocess", "postprocess": "postprocess"}
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Minutes and hours, which SLOs do not have.
LONG_DURATIONS = {"m": 60.0, "min": 60.0, "h": 3600.0}
MAX_SEED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The options of a plan file by name; paths are absolute."""

    name: str
    options: Mapping[str, object]


def read(path: Path) -> PlanFile:
    try:
        with open(path, "rb") as file:
            options = {key.replace("-", "_"): value for key, value in tomllib.load(file).items()}
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from None
    for key in PATHS:
        value = options.get(key)
        if isinstance(value, str) and value and not _is_reference(value):
            options[key] = os.path.join(path.parent, value)
    return PlanFile(path.name, options)


@dataclass(slots=True)
class Problems:
    """Problems by where to fix them: on the command line, or in a file."""

    flags: Mapping[str, object]
    file: PlanFile | None
    of_command_line: list[str] = field(default_factory=list)
    of_files: list[str] = field(default_factory=list)

    def is_in_file(self, key: str) -> bool:
        return self.file is not None and key in self.file.options and key not in self.flags

    def label(self, key: str) -> str:
        """Return the option as the user wrote it: a flag, or a key of the plan file."""
        if self.file is not None and self.is_in_file(key):
            return f"{self.file.name}: {key}"
        return "MODEL" if key == "model" else f"--{key.replace('_', '-')}"

    def add(self, key: str, text: str) -> None:
        listed = self.of_files if self.is_in_file(key) else self.of_command_line
        listed.append(f"{self.label(key)}: {text}")

    def add_missing(self, key: str) -> None:
        label, example = self.label(key), REQUIRED[key]
        if self.file is not None:
            text = f'{self.file.name} has no {key}; add {key} = "{example}", or give {label}'
        elif key == "model":
            text = f"MODEL is required, e.g. penstock optimize {example}"
        else:
            text = f"{label} is required, e.g. {label} {shlex.quote(example)}"
        self.of_command_line.append(text)

    def check(self) -> None:
        """Raise CommandLineError, or ConfigError if only files are wrong, with all problems."""
        if self.of_command_line:
            raise CommandLineError([*self.of_command_line, *self.of_files])
        if self.of_files:
            raise ConfigError(self.of_files)


def make_plan(flags: Mapping[str, object], file: PlanFile | None = None) -> Plan:
    """Make a plan; flags override the file. CommandLineError or ConfigError has every problem."""
    options = {**(file.options if file is not None else {}), **flags}
    problems = Problems(flags, file)
    for key in sorted(set(options) - set(READERS)):
        problems.add(key, f"unknown option; expected one of {', '.join(READERS)}")
    values = _read_values(options, problems)
    for key in REQUIRED:
        if not options.get(key):
            problems.add_missing(key)
    _check_paths(Plan(name="", **{key: values.get(key, "") for key in PATHS}), problems)
    problems.check()
    plan = Plan(**{"name": "", **values})
    named = plan if plan.name else replace(plan, name=default_name(plan.model))
    if named.from_live:
        named = _with_live_data(named, problems)
    _check(named, problems)
    return named


def _with_live_data(plan: Plan, problems: Problems) -> Plan:
    """Take a recording as the data: that of the model, if the folder has several."""
    folder = Path(plan.from_live)
    own = folder / plan.name
    folder = own if own.is_dir() else folder
    if plan.data:
        problems.add("from_live", f"contradicts {problems.label('data')}; leave one of them out")
    elif not is_recording(folder):
        problems.add("from_live", f"{plan.from_live}: no recording of penstock serve --record")
    return replace(plan, data=plan.data or str(folder))


def _read_values(options: Mapping[str, object], problems: Problems) -> dict[str, Any]:
    """Return values by field of a Plan, without missing or invalid ones."""
    values: dict[str, Any] = {}
    for key, (name, reader) in READERS.items():
        value = options.get(key)
        if value is None or (value == "" and key in REQUIRED):
            continue
        try:
            values[name] = reader(value)
        except ValueError as error:
            problems.add(key, str(error))
        except ConfigError as error:
            for problem in error.problems:
                problems.add(key, problem)
    return values


def default_name(model: str) -> str:
    """Return the default name: that of the model's file, folder or module."""
    if _is_reference(model):
        return model.rpartition(".")[2].partition(":")[0]
    path = Path(os.path.abspath(model))
    if path.name.isdigit():
        path = path.parent
    return re.sub(r"[^\w.-]", "-", path.stem if path.is_file() else path.name)


def _check(plan: Plan, problems: Problems) -> None:
    """Raise for options that contradict each other."""
    if problem := versions.problem_of_name(plan.name):
        problems.add("name", problem.removeprefix("name: "))
    if not plan.data:
        for key in ("labels", "eval", "calibration", "accuracy"):
            if getattr(plan, READERS[key][0]):
                problems.add(key, f"needs {problems.label('data')}, which is not given")
    if any(isinstance(term, slo.Cost) for term in plan.slo.terms) and plan.price_per_hour is None:
        price = problems.label("price")
        problems.add("slo", f"a limit on cost needs {price}, the machine's price per hour")
    latencies = [term for term in plan.slo.terms if isinstance(term, slo.Latency)]
    names_streams = any(term.metric != "latency" for term in latencies)
    if names_streams and not is_language_model(plan.model):
        streams = "ttft, tpot and itl apply to language models only"
        problems.add("slo", f"'{plan.slo}': {streams}; expected terms on latency, e.g. p99 < 20 ms")
    problems.check()


def _check_paths(plan: Plan, problems: Problems) -> None:
    """Check that files exist; missing ones are problems of files, even if a flag names them."""
    if plan.model:
        try:
            resolve(plan.model)
        except ConfigError as error:
            label = problems.label("model")
            problems.of_files += [f"{label}: {problem}" for problem in error.problems]
    if os.path.exists(plan.out) and not os.path.isdir(plan.out):
        label = problems.label("out")
        problems.of_files.append(f"{label}: {plan.out}: is a file; expected a repository's folder")
    for key in ("data", "from_live", "calibration"):
        path = getattr(plan, key)
        if path and not os.path.exists(path):
            problems.of_files.append(f"{problems.label(key)}: {path}: no such file or folder")


def parse_time(text: str) -> float:
    """Parse `90s`, `10m` or `1.5h` to seconds; ValueError says what was expected."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(m|min|h)\s*", text)
    if match is not None and float(match[1]) > 0:
        return float(match[1]) * LONG_DURATIONS[match[2]]
    try:
        return slo.parse_duration(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a time; expected one like 90s, 10m or 1h") from None


def _is_reference(text: str) -> bool:
    """Return whether the text has the form package.module:name."""
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
    """Parse a list of names, or one string with commas."""
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


# By option name: the field of Plan and its parser.
READERS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    **{key: (key, _text) for key in TEXTS},
    **{key: (field, _reference) for key, field in FUNCTIONS.items()},
    "slo": ("slo", lambda value: slo.parse(_text(value))),
    "accuracy": ("accuracy", lambda value: budget.parse(_text(value))),
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
