"""The messages of a chat: validated and converted for chat templates.

Pure. Each content becomes one text; arguments of tool calls, which OpenAI sends as a JSON string,
become objects, as templates expect. Errors name the message's place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from penstock.errors import InvalidRequest
from penstock.wire.json_errors import JsonObject

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
MAX_MESSAGES = 4096
# Characters of a value shown in an error.
MAX_SHOWN = 40
_json = msgspec.json.Decoder()

Message: TypeAlias = JsonObject


def read_messages(messages: Sequence[Message]) -> list[Message]:
    """Validate and convert messages; InvalidRequest says what is wrong."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise _wrong(f"messages: {len(messages)}; expected 1 to {MAX_MESSAGES}")
    return [_read(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _read(message: Message, where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role: {_shown(role)}; expected one of {', '.join(ROLES)}")
    if message.get("audio") is not None:
        raise _wrong(f"{where}.audio: audio is not served; expected text")
    found = {**message, "content": _read_content(message, where)}
    if message.get("tool_calls") is not None:
        found["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
    else:
        found.pop("tool_calls", None)
    return found


def _read_content(message: Message, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        places = enumerate(content)
        return "".join(_read_part(part, f"{where}.content[{place}]") for place, part in places)
    if content is None and message["role"] == "assistant":
        # It has tool calls or a refusal instead.
        refusal = message.get("refusal")
        return refusal if isinstance(refusal, str) else ""
    raise _wrong(f"{where}.content: {_shown(content)}; expected text or parts of text")


def _read_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        raise _wrong(f"{where}: a part of type {_shown(kind)}; expected text")
    assert isinstance(part, Mapping)
    text = part.get(kind)
    if not isinstance(text, str):
        raise _wrong(f"{where}.{kind}: {_shown(text)}; expected a string")
    return text


def _read_calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise _wrong(f"{where}: {_shown(calls)}; expected a list")
    return [_read_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _read_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"{where}: expected a function with a name and arguments")
    assert isinstance(call, Mapping)
    return {**call, "function": {**function, "arguments": _read_arguments(function)}}


def _read_arguments(function: Mapping[str, object]) -> object:
    """Parse arguments to an object; anything else that a model wrote stays as it is."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = _json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _wrong(text: str) -> InvalidRequest:
    return InvalidRequest(text, "messages")


def _shown(value: object) -> str:
    """Format a value for an error: short, in JSON's terms."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"'{value[:MAX_SHOWN]}{'…' if len(value) > MAX_SHOWN else ''}'"
    kinds = {bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return kinds.get(type(value), "an object")
