"""Options of functions and commands: fields of frozen dataclasses, each with the flag that sets it.

A field's default is the default of both. `penstock.cli.options` makes flags of the fields; Python
callers give them as keywords, through `from_keywords`. Knows no command line library.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, TypeVar, get_type_hints

from penstock.errors import CommandLineError

FLAG = "flag"
# The metavar of durations: Python callers may give seconds as numbers.
TIME = "TIME"


def text(metavar: str, default: str = "", value: str = "") -> Mapping[str, object]:
    """Return details of a flag with a text; `default` is the default in words."""
    return {"metavar": metavar, "default": default, "value": value}


def number(
    value: float | None, metavar: str, low: float, high: float | None = None, default: str = ""
) -> Mapping[str, object]:
    """Return details of a flag with a number from `low` to `high`."""
    return {"value": value, "metavar": metavar, "bounds": (low, high), "default": default}


# Flags of several commands.
DATA_NAME: Mapping[str, object] = {
    "summary": "Input that .npy files and images are for",
    "when": "Needed when the model has several inputs.",
    **text("INPUT", "the only input"),
}
PRICE: Mapping[str, object] = {
    "summary": "Price of the server per hour, in any currency",
    "when": "Give it to see the cost of a million answers, or when the SLO limits it.",
    **number(None, "NUMBER", 1e-9),
}

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class Flag:
    """How an option is written on the command line and explained in its help."""

    group: str
    # Less than 60 characters, without a full stop.
    summary: str
    # When to change it, in sentences.
    when: str
    metavar: str = ""
    # The default in words, where the value says too little; "-": none is shown.
    default: str = ""
    choices: tuple[str, ...] = ()
    # Lowest and highest number.
    bounds: tuple[float | None, float | None] = (None, None)
    # Further names: short ones, and hidden ones that older scripts use.
    short: str = ""
    aliases: tuple[str, ...] = ()
    # Environment variable that gives the value.
    variable: str = ""


def flags_of(group: str) -> Callable[..., Any]:
    """Return a function that makes dataclass fields, each with a flag of this group of the help:
    summary, when to change it, default value and details of its `Flag`."""

    def make(summary: str, when: str, value: object = "", **details: Any) -> Any:
        return field(default=value, metadata={FLAG: Flag(group, summary, when, **details)})

    return make


def options_of(kind: type) -> dict[str, tuple[Field[object], Flag]]:
    """Return the fields of a group of options, each with its flag, by name."""
    return {each.name: (each, each.metadata[FLAG]) for each in fields(kind)}


def same_flag(kind: type, name: str, summary: str = "", when: str = "") -> Any:
    """Make a field like that of another group of options, with other texts where those differ."""
    other, flag = options_of(kind)[name]
    flag = replace(flag, summary=summary or flag.summary, when=when or flag.when)
    return field(default=other.default, metadata={FLAG: flag})


def flag_name(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def from_keywords(kind: type[Options], given: Mapping[str, object]) -> Options:
    """Make options of a caller's keywords. TypeError for unknown ones, as of any function;
    CommandLineError for values that are not accepted."""
    known = options_of(kind)
    types = get_type_hints(kind)
    values: dict[str, object] = {}
    problems: list[str] = []
    for name, value in given.items():
        if name not in known:
            raise unknown_option(name, known)
        _, flag = known[name]
        values[name] = _plain(value, types[name], flag)
        if problem := _problem(values[name], types[name], flag):
            problems.append(f"{name}: {problem}")
    if problems:
        raise CommandLineError(problems)
    return kind(**values)


def unknown_option(name: str, known: Iterable[str]) -> TypeError:
    """Return the error for a keyword that is not one of these options."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}"
    return TypeError(f"unknown option {name}; {hint}")


def _plain(value: object, kind: object, flag: Flag) -> object:
    """Return the value in the option's type: numbers and paths are accepted for texts."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list) and kind == tuple[str, ...]:
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if kind in (str, str | None):
        return f"{value:g}s" if flag.metavar == TIME else f"{value}"
    return float(value) if kind in (float, float | None) else value


def _problem(value: Any, kind: Any, flag: Flag) -> str:
    """Return what is wrong with a value; empty if it is accepted."""
    accepted = tuple if kind == tuple[str, ...] else kind
    is_switch = kind in (bool, bool | None)
    if not isinstance(value, accepted) or (isinstance(value, bool) and not is_switch):
        return f"{value!r} is not of the type {getattr(kind, '__name__', kind)}"
    if flag.choices and value not in (*flag.choices, "", None):
        return f"{value!r} is not one of {', '.join(flag.choices)}"
    low, high = flag.bounds
    if not isinstance(value, int | float):
        return ""
    if (low is not None and value < low) or (high is not None and value > high):
        return f"{value!r} is not in the range {low} to {high}"
    return ""
