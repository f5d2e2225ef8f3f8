"""Tools and the choice among them, or what is wrong with them."""

import pytest

from penstock.errors import InvalidRequest
from penstock.wire.openai_tools import NO_PARAMETERS, read_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name, **changes):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **changes}}


TOOLS = [tool("weather"), tool("time", parameters=None)]
WEATHER = {"type": "function", "function": {"name": "weather"}}


def test_tools_and_their_schemas():
    found = read_tools(TOOLS, None, None)
    assert [(each.name, each.parameters) for each in found.tools] == [
        ("weather", SCHEMA), ("time", NO_PARAMETERS),
    ]  # fmt: skip
    assert found.mode == "auto" and found.is_parallel and found.listed is TOOLS


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("auto", "auto", ["weather", "time"]),
        ("required", "required", ["weather", "time"]),
        (WEATHER, "named", ["weather"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}},
         "auto", ["weather"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
         "required", ["weather"]),
    ],
)  # fmt: skip
def test_choices(choice, mode, names):
    found = read_tools(TOOLS, choice, None)
    assert found.mode == mode and [each.name for each in found.tools] == names
    assert found.is_forced == (mode != "auto")
    assert not read_tools(TOOLS, choice, False).is_parallel
    assert found.is_parallel == (mode != "named")


def test_no_tool_may_be_called():
    assert read_tools(TOOLS, "none", None) is None
    assert read_tools(None, "none", True) is read_tools([], "auto", None) is None


@pytest.mark.parametrize(
    ("tools", "choice", "field", "text"),
    [
        (None, "required", "tool_choice", "expected tools"),
        (None, WEATHER, "tool_choice", "expected tools"),
        ([{"type": "custom"}], None, "tools", "tools\\[0\\].type is 'custom'; expected function"),
        ([{"type": "function"}], None, "tools", "expected an object with a name"),
        ([tool("a b")], None, "tools", "expected 1 to 64 letters"),
        ([tool("a" * 65)], None, "tools", "expected 1 to 64 letters"),
        ([tool("a", parameters=3)], None, "tools", "expected a JSON schema"),
        ([tool("a"), tool("a")], None, "tools", "two tools have the same name"),
        ([tool(f"a{n}") for n in range(129)], None, "tools", "129 tools; expected at most 128"),
        (TOOLS, "sometimes", "tool_choice", "expected none, auto, required"),
        (TOOLS, {"type": "custom", "custom": {"name": "x"}}, "tool_choice", "expected none, auto"),
        (TOOLS, {"type": "function", "function": {"name": "x"}}, "tool_choice", "'x' is not one"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice", "mode and tools"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}},
         "tool_choice", "auto or required"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
         "tool_choice", "at least one tool"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tools, choice, field, text):
    with pytest.raises(InvalidRequest, match=text) as error:
        read_tools(tools, choice, None)
    assert error.value.field == field


def test_no_tool_may_be_allowed():
    nothing = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    assert read_tools(TOOLS, nothing, None) is None


def test_schemas_have_limited_depth():
    schema: dict = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="more than 64 levels"):
        read_tools([tool("a", parameters=schema)], None, None)
