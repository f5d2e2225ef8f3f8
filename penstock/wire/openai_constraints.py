"""Structured output: the fields of OpenAI's API and of vLLM's extensions that constrain a text.

Pure. Form and size are checked here; whether a schema or a grammar is valid is found where it is
compiled (`llm.grammars`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.errors import InvalidRequest
from penstock.sampling_params import Constraint
from penstock.wire.json_errors import JsonObject

# Characters of a grammar, and levels of a schema.
MAX_CHARS, MAX_DEPTH = 1 << 17, 64
MAX_CHOICES = 1024
ANY_OBJECT: JsonObject = {"type": "object"}
FORMATS = ("text", "json_object", "json_schema")
# Fields of `structured_outputs` that give a constraint.
KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Its other fields, with the values that request nothing.
OTHERS: Mapping[str, Sequence[object]] = {
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "disable_fallback": (None, False, True),
}


class ConstraintFields(msgspec.Struct, kw_only=True):
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    guided_json: JsonObject | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Constrained:
    """A constraint and the request field that gives it."""

    field: str
    constraint: Constraint


def read_constraint(found: ConstraintFields) -> Constrained | None:
    """Return what the text must be, if the request says so; at most one field may."""
    given = list(_given(found))
    if len(given) > 1:
        names = " and ".join(each.field for each in given)
        raise InvalidRequest(f"{names}: expected at most one of them", given[1].field)
    return given[0] if given else None


def constraint_field(found: ConstraintFields) -> str:
    """Return the field that gives the constraint; empty without one."""
    given = read_constraint(found)
    return "" if given is None else given.field


def _given(found: ConstraintFields) -> Iterator[Constrained]:
    if found.response_format is not None:
        schema = read_format(found.response_format, "response_format")
        if schema is not None:
            yield Constrained("response_format", of_schema(schema, "response_format"))
    options = found.structured_outputs
    if options is not None:
        yield _structured(options)
    for name in KINDS:
        value = getattr(found, f"guided_{name}", None)
        if value is not None:
            field = f"guided_{name}"
            yield Constrained(field, _constraint(name, value, field))


def read_format(value: JsonObject, field: str) -> object:
    """Return the schema of a response format; None for text."""
    kind = value.get("type")
    if kind not in FORMATS:
        shown = json.dumps(kind)[:40]
        raise InvalidRequest(f"{field}.type is {shown}; expected {', '.join(FORMATS)}", field)
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if schema is None:
        raise InvalidRequest(f"{field}.json_schema.schema: expected a JSON schema", field)
    return schema


def _structured(options: JsonObject) -> Constrained:
    field = "structured_outputs"
    for name, value in options.items():
        if value not in OTHERS.get(name, (value,)):
            text = f"{field}.{name} is not supported"
            raise InvalidRequest(text, field, "unsupported_parameter")
    given = {name: options[name] for name in KINDS if options.get(name) not in (None, False)}
    if len(given) != 1:
        raise InvalidRequest(f"{field}: expected exactly one of {', '.join(KINDS)}", field)
    ((name, value),) = given.items()
    return Constrained(field, _constraint(name, value, field))


def _constraint(kind: str, value: object, field: str) -> Constraint:
    if kind == "json_object":
        return of_schema(ANY_OBJECT, field)
    if kind == "json":
        return of_schema(_parsed(value, field), field)
    if kind == "choice":
        return of_choices(value, field)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{field}: {kind}: expected a text that is not empty", field)
    check_size(value, field)
    if kind == "regex":
        return Constraint("regex", value)
    return Constraint("ebnf" if "::=" in value else "lark", value)


def _parsed(value: object, field: str) -> object:
    """Return a schema, which may be given as a text."""
    if not isinstance(value, str):
        return value
    check_size(value, field)
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{field}: json: the text is not JSON", field) from None


def of_schema(schema: object, field: str) -> Constraint:
    """Return the constraint for JSON that fits a schema."""
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest(f"{field}: expected a JSON schema, which is an object", field)
    if depth(schema) > MAX_DEPTH:
        raise InvalidRequest(f"{field}: the schema has more than {MAX_DEPTH} levels", field)
    text = msgspec.json.encode(schema).decode()
    check_size(text, field)
    return Constraint("json_schema", text)


def of_choices(value: object, field: str) -> Constraint:
    choices = value if isinstance(value, list) else []
    if not 1 <= len(choices) <= MAX_CHOICES or not all(
        isinstance(each, str) and each for each in choices
    ):
        text = f"{field}: choice: expected 1 to {MAX_CHOICES} texts that are not empty"
        raise InvalidRequest(text, field)
    lark = "start: " + " | ".join(quote(each) for each in choices)
    check_size(lark, field)
    return Constraint("lark", lark)


def quote(text: str) -> str:
    """Return a text as a terminal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def check_size(text: str, field: str) -> None:
    if len(text) > MAX_CHARS:
        raise InvalidRequest(
            f"{field}: a grammar of {len(text)} characters; expected at most {MAX_CHARS}", field
        )


def depth(value: object) -> int:
    """Return how deep a JSON value is nested; it stops counting beyond the limit."""
    level, values = 0, [value]
    while values and level <= MAX_DEPTH:
        level += 1
        inner: list[object] = []
        for each in values:
            if isinstance(each, Mapping):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        values = inner
    return level
