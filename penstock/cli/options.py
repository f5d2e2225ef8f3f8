"""Flags from dataclasses: each field of a group of options is a flag, and `--help` shows them by
group, with the summary first, then the default, then when to change it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from typing import Any, TypeVar, get_type_hints

import click

from penstock.api.options import Flag, flag_name, options_of
from penstock.cli.commands import write_examples

Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])
# Column of the explanations in the help.
COLUMN = 32
OTHERS = "Other options"


class FlagOption(click.Option):
    """A flag that knows its group and the parts of its help."""

    def __init__(self, names: Sequence[str], flag: Flag, **settings: Any) -> None:
        default = flag.default or _default_text(settings.get("default"))
        self.group, self.summary = flag.group, flag.summary
        self.details = flag.when if default == "-" else f"Default: {default}. {flag.when}"
        settings |= {"metavar": flag.metavar or None, "envvar": flag.variable or None}
        super().__init__(names, help=f"{flag.summary}. {self.details}", **settings)


class Command(click.Command):
    """A command whose help shows flags by group and ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[click.Option]] = {}
        for each in self.get_params(ctx):
            if isinstance(each, click.Option) and not each.hidden:
                groups.setdefault(getattr(each, "group", OTHERS), []).append(each)
        groups = {"Options": groups[OTHERS]} if len(groups) == 1 else groups
        for group, flags in groups.items():
            with formatter.section(group):
                for each in flags:
                    _write_flag(each, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)


def add_options(kind: type[Options], name: str) -> Callable[[Function], Function]:
    """Decorate a command's function: it gets the fields of `kind` as one argument, `name`."""

    options, types = options_of(kind), get_type_hints(kind)

    def decorate(function: Function) -> Function:
        def call(*args: object, **given: Any) -> object:
            made = from_params(kind, given)
            rest = {key: value for key, value in given.items() if key not in options}
            return function(*args, **rest, **{name: made})

        call.__name__, call.__doc__ = function.__name__, inspect.getdoc(function)
        made = [_option(each, flag, types[each.name]) for each, flag in options.values()]
        call.__click_params__ = [*getattr(function, "__click_params__", []), *reversed(made)]  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def from_params(kind: type[Options], params: Mapping[str, object]) -> Options:
    """Make options of parsed flags."""
    given = {name: params[name] for name in options_of(kind)}
    return kind(**{name: value for name, value in given.items() if value is not None})


def from_environment(ctx: click.Context, kind: type) -> set[str]:
    """Return the options whose values came from environment variables."""
    source = click.core.ParameterSource.ENVIRONMENT
    return {name for name in options_of(kind) if ctx.get_parameter_source(name) is source}


def _option(each: Field[object], flag: Flag, kind: object) -> click.Option:
    name = flag_name(each.name)
    names = [each.name, *([flag.short] if flag.short else []), name, *flag.aliases]
    # An empty text is no choice.
    default = None if flag.choices and not each.default else each.default
    settings: dict[str, Any] = {"default": default}
    if kind in (bool, bool | None):
        if each.default is True:
            names[names.index(name)] = f"{name}/--no-{name.removeprefix('--')}"
        else:
            settings["is_flag"] = True
    elif kind == tuple[str, ...]:
        settings["multiple"] = True
    else:
        settings["type"] = _type(flag, kind)
    return FlagOption(names, flag, **settings)


def _type(flag: Flag, kind: object) -> click.ParamType[Any]:
    if flag.choices:
        return click.Choice(flag.choices, case_sensitive=False)
    if kind in (int, int | None):
        low, high = (None if each is None else int(each) for each in flag.bounds)
        return click.IntRange(low, high)
    if kind in (float, float | None):
        return click.FloatRange(*flag.bounds)
    return click.STRING


def _default_text(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if default not in (None, "", ()) else "none"


def _write_flag(each: click.Option, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    record = each.get_help_record(ctx)
    assert record is not None
    names = record[0]
    summary, _, details = record[1].partition(". ")
    if isinstance(each, FlagOption):
        summary, details = each.summary, each.details
    width = max(formatter.width - COLUMN, 20)
    lines = [*textwrap.wrap(summary, width), *textwrap.wrap(details, width)]
    head = f"  {names}"
    if len(head) > COLUMN - 2:
        formatter.write(head + "\n")
        head = ""
    for line in lines:
        formatter.write(f"{head:{COLUMN}}{line}\n")
        head = ""
