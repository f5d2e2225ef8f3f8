"""Types of the fields within objects of a responses request, as the openai package has them. Pure.

Only fields whose value is used, or that a client would expect to be. What values mean is decided
where they are read (`openai_responses`, `openai_tools`, `openai_constraints`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.wire.json_errors import JsonObject

Status = Literal["in_progress", "completed", "incomplete"]
Length = Literal["auto", "concise", "detailed"]


class Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Length | None = None
    generate_summary: Length | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(msgspec.Struct):
    name: str
    parameters: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class MessageItem(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[JsonObject]
    id: str | None = None
    status: Status | None = None


class CallItem(msgspec.Struct):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class OutputItem(msgspec.Struct):
    call_id: str
    output: str | list[JsonObject]
    id: str | None = None
    status: Status | None = None


class ReasoningText(msgspec.Struct):
    text: str
    type: str = "reasoning_text"


class ReasoningItem(msgspec.Struct):
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class TextPart(msgspec.Struct):
    text: str
    annotations: list[JsonObject] | None = None
    logprobs: list[JsonObject] | None = None


class RefusalPart(msgspec.Struct):
    refusal: str


ITEMS: Mapping[str, type[msgspec.Struct]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
PARTS: Mapping[str, type[msgspec.Struct]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "refusal": RefusalPart,
}


def check_fields(value: object, kind: Any, where: str) -> None:
    """Raise InvalidRequest unless the fields of an object have the types of `kind`; `where` is its
    path in the request."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        field = where.partition("[")[0].partition(".")[0]
        raise InvalidRequest(f"{where}{path.rstrip('`')}: {text}", field) from None


def check_items(items: Sequence[JsonObject]) -> None:
    """Check the items of an input and the parts of their content. Those of unknown types pass:
    their reader refuses them."""
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in ITEMS:
            continue
        check_fields(item, ITEMS[kind], where)
        name = "output" if kind == "function_call_output" else "content"
        parts = item.get(name)
        if kind == "reasoning" or not isinstance(parts, list):
            continue
        for number, part in enumerate(parts):
            if part.get("type") in PARTS:
                check_fields(part, PARTS[part["type"]], f"{where}.{name}[{number}]")
