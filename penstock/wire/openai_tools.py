"""Tools of OpenAI's chat and responses APIs: which functions a request offers, and which it wants.

Pure. Schemas of parameters are compiled later (`llm.grammars`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InvalidRequest
from penstock.wire.json_errors import JsonObject
from penstock.wire.openai_constraints import MAX_DEPTH, depth

Mode = Literal["auto", "required", "named"]
MAX_TOOLS, MAX_NAME_CHARS = 128, 64
# Schema of a function without parameters.
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    # JSON schema of its arguments.
    parameters: JsonObject
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The functions that may be called, and what chat templates get."""

    tools: Sequence[Tool]
    mode: Mode
    # Whether an answer may have several calls.
    is_parallel: bool
    listed: Sequence[JsonObject]

    @property
    def is_forced(self) -> bool:
        return self.mode != "auto"


def read_tools(
    tools: Sequence[JsonObject] | None, choice: object, is_parallel: bool | None
) -> ToolRequest | None:
    """Return the tools of a request; None if it has none or wants none to be called."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", "expected tools, of which one is to be called")
        return None
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"{len(tools)} tools; expected at most {MAX_TOOLS}")
    found = [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise _wrong("tools", "two tools have the same name")
    mode, chosen = _read_choice(choice, names)
    if mode is None:
        return None
    return ToolRequest(
        [each for each in found if each.name in chosen],
        mode,
        is_parallel is not False and mode != "named",
        tools,
    )


def _read_tool(tool: JsonObject, where: str) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise _wrong("tools", f"{where}.type is {str(kind)[:40]!r}; expected function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong("tools", f"{where}.function: expected an object with a name")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _is_name(name):
        text = f"expected 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' and '.'"
        raise _wrong("tools", f"{where}.function.name: {text}")
    if schema is not None and not isinstance(schema, dict):
        raise _wrong("tools", f"{where}.function.parameters: expected a JSON schema")
    if depth(schema) > MAX_DEPTH:
        raise _wrong("tools", f"{where}.function.parameters: more than {MAX_DEPTH} levels")
    return Tool(name, schema or NO_PARAMETERS, bool(function.get("strict")))


def _is_name(name: str) -> bool:
    is_short = 1 <= len(name) <= MAX_NAME_CHARS
    return is_short and name.isascii() and all(c.isalnum() or c in "_-." for c in name)


def _read_choice(choice: object, names: Sequence[str]) -> tuple[Mode | None, Sequence[str]]:
    """Return how tools are chosen (None: no tool) and the names among which."""
    if choice is None or choice == "auto":
        return "auto", names
    if choice == "none":
        return None, ()
    if choice == "required":
        return "required", names
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            return _read_allowed(choice.get("allowed_tools"), names)
        if choice.get("type") == "function":
            return "named", [_read_named(choice, names)]
    expected = f"{', '.join(MODES)}, a function of tools, or allowed_tools"
    raise _wrong("tool_choice", f"expected {expected}")


def _read_allowed(allowed: object, names: Sequence[str]) -> tuple[Mode | None, Sequence[str]]:
    given = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(allowed, Mapping) or not isinstance(given, list):
        raise _wrong("tool_choice", "allowed_tools: expected an object with mode and tools")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise _wrong("tool_choice", "allowed_tools.mode: expected auto or required")
    if not given and mode == "required":
        raise _wrong("tool_choice", "allowed_tools.tools: expected at least one tool")
    return (mode if given else None), [_read_named(each, names) for each in given]


def _read_named(choice: object, names: Sequence[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise _wrong("tool_choice", f"{str(name)[:40]!r} is not one of the tools")
    return str(name)


def _wrong(field: str, text: str) -> InvalidRequest:
    return InvalidRequest(text if text.startswith(field) else f"{field}: {text}", field)
