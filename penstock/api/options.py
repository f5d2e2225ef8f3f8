"""Options of functions and commands: fields of frozen dataclasses, each with the flag that sets it.

A field's default is the default of both. `penstock.cli.options` makes flags of the fields; Python
callers give them as keywords, through `from_keywords`. Knows no command line library.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

from penstock.errors import CommandLineError

FLAG = "flag"
# The metavar of durations: Python callers may give seconds as numbers.
TIME = "TIME"

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
    low: float | None = None
    high: float | None = None
    # Further names: short ones, and hidden ones that older scripts use.
    short: str = ""
    aliases: tuple[str, ...] = ()
    # Environment variable that gives the value.
    variable: str = ""
    # The flag, where it is not the field's name.
    name: str = ""


def option(default: Any, flag: Flag) -> Any:
    """Return a dataclass field with its flag."""
    return field(default=default, metadata={FLAG: flag})


def flag_of(each: Field[Any]) -> Flag:
    found = each.metadata[FLAG]
    assert isinstance(found, Flag)
    return found


def flag_name(each: Field[Any]) -> str:
    return f"--{flag_of(each).name or each.name.replace('_', '-')}"


def from_keywords(kind: type[Options], given: Mapping[str, object]) -> Options:
    """Make options of a caller's keywords. TypeError for unknown ones, as of any function;
    CommandLineError for values that are not accepted."""
    known: dict[str, Field[Any]] = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise TypeError(f"unknown option {name}; {hint}")
        flag = flag_of(known[name])
        values[name] = _plain(value, types[name], flag)
        problems += [f"{name}: {text}" for text in _problems(values[name], types[name], flag)]
    if problems:
        raise CommandLineError(problems)
    return kind(**values)


def _plain(value: object, kind: object, flag: Flag) -> object:
    """Return the value in the option's type: numbers and paths are accepted for texts."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (str, str | None) and is_number:
        return f"{value:g}s" if flag.metavar == TIME else f"{value}"
    if kind in (float, float | None) and is_number:
        return float(value)  # type: ignore[arg-type]
    if kind == tuple[str, ...] and isinstance(value, list):
        return tuple(value)
    return value


def _problems(value: Any, kind: Any, flag: Flag) -> list[str]:
    accepted = tuple if kind == tuple[str, ...] else kind
    is_switch = kind in (bool, bool | None)
    if not isinstance(value, accepted) or (isinstance(value, bool) and not is_switch):
        return [f"{value!r} is not of the type {getattr(kind, '__name__', kind)}"]
    if flag.choices and value not in (*flag.choices, "", None):
        return [f"{value!r} is not one of {', '.join(flag.choices)}"]
    if value is None or isinstance(value, str | tuple):
        return []
    if (flag.low is not None and value < flag.low) or (flag.high is not None and value > flag.high):
        return [f"{value!r} is not in the range {flag.low} to {flag.high}"]
    return []
