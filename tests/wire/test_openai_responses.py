"""Requests of the responses API become chats; what a stateless server cannot do is refused."""

import json

import pytest

from penstock.errors import InvalidRequest
from penstock.wire.openai_responses import read_responses

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def read(**fields):
    return read_responses(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def messages(given, **fields):
    return [dict(each) for each in read(input=given, **fields).chat.messages]


def test_a_text_and_instructions_are_messages():
    assert messages("hi", instructions="be kind") == [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"},
    ]  # fmt: skip


def test_items_are_messages_calls_and_their_outputs():
    found = messages([
        {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                     {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "wait", "annotations": []}]},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ])  # fmt: skip
    assert [each["role"] for each in found] == ["user", "assistant", "tool"]
    assert found[0]["content"] == "ab" and found[1]["reasoning_content"] == "so"
    assert [each["id"] for each in found[1]["tool_calls"]] == ["c1", "c2"]
    assert found[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found[2] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def test_tools_formats_and_limits_are_those_of_chats():
    schema = {"type": "object"}
    found = read(
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        reasoning={"effort": "low"},
        max_output_tokens=7,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream=True,
    ).chat
    assert found.tools.mode == "named" and found.tools.tools[0].is_strict
    assert found.params.constraint.text == '{"type":"object"}' and found.constraint_field == "text"
    assert found.params.max_tokens == 7 and found.params.num_logprobs == 2 and found.is_streamed
    assert found.template_options["reasoning_effort"] == "low"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "f"}]}
    tools = [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]
    only = read(tools=tools, tool_choice=allowed).chat.tools
    assert only.mode == "required" and [each.name for each in only.tools] == ["f"]


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"store": True}, "store", "store is not supported"),
        ({"background": True}, "background", "background is not supported"),
        ({"previous_response_id": "x"}, "previous_response_id", "is not supported"),
        ({"truncation": "auto"}, "truncation", "is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'; expected function"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "expected message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input",
         "'input_image'; expected text"),
        ({"input": []}, "input", "input: 0 messages; expected 1 to"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "input: 0 messages"),
        ({"include": ["file_search_call.results"]}, "include", "is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.type is"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity is not supported"),
        ({"text": {"verbosity": "medium"}}, "text", "text.verbosity is not supported"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", "reasoning.summary is not"),
        ({"reasoning": {"generate_summary": "auto"}}, "reasoning", "generate_summary is not"),
        ({"metadata": "x"}, "metadata", r"metadata: Expected `object \| null`, got `str`"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text",
         r"text\.format: Object missing required field `name`"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input",
         r"input\[0\]: Object missing required field `call_id`"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "reasoning.summary is not"),
        ({"max_output_tokens": 0}, "max_output_tokens", "expected at least 1"),
        ({"guided_regex": "a"}, "guided_regex", "is not supported"),
        ({"response_format": {"type": "text"}}, "response_format", "is not supported"),
        ({"stop": ["x"]}, "stop", "is not supported"),
        ({"max_tokens": 3}, "max_tokens", "is not supported"),
        ({"best_of": 2}, "best_of", "is not supported"),
        ({"reasoning": {"effort": 5}}, "reasoning", r"reasoning\.effort: Expected `str \| null`"),
        ({"reasoning": {"effort": "most"}}, "reasoning", r"reasoning\.effort: Invalid enum"),
        ({"reasoning": {"summary": 1}}, "reasoning", r"reasoning\.summary: Expected"),
        ({"text": {"format": 3}}, "text", r"text\.format: Expected"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": "yes"}}}, "text",
         r"text\.format\.strict: Expected `bool \| null`, got `str`"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "name": 1}}}, "text",
         r"text\.format\.name: Expected"),
        ({"text": {"verbosity": 2}}, "text", r"text\.verbosity: Expected"),
        ({"metadata": {"a": 1}}, "metadata", r"metadata\[\.\.\.\]: Expected `str`, got `int`"),
        ({"tools": [{"type": "function", "name": "f", "strict": "no"}]}, "tools",
         r"tools\[0\]\.strict: Expected"),
        ({"tools": [{"type": "function", "name": "f", "description": 4}]}, "tools",
         r"tools\[0\]\.description: Expected"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools",
         r"tools\[0\]\.parameters: Expected"),
        ({"input": [{"role": 3, "content": "a"}]}, "input", r"input\[0\]\.role: Expected"),
        ({"input": [{"role": "user", "content": 3}]}, "input", r"input\[0\]\.content: Expected"),
        ({"input": [{"role": "user", "content": "a", "status": 1}]}, "input", r"status: Expected"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input",
         r"input\[0\]\.content\[0\]\.text: Expected `str`, got `int`"),
        ({"input": [{**CALL, "arguments": {}}]}, "input", r"input\[0\]\.arguments: Expected"),
        ({"input": [{**CALL, "call_id": 7}]}, "input", r"input\[0\]\.call_id: Expected"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 4}]}, "input",
         r"input\[0\]\.output: Expected"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input",
         r"input\[0\]: Object missing required field `output`"),
        ({"input": [{"type": "reasoning", "content": [{"text": 4}]}]}, "input",
         r"input\[0\]\.content\[0\]\.text: Expected"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_its_field(fields, field, text):
    with pytest.raises(InvalidRequest, match=text) as error:
        read(**fields)
    assert error.value.field == field


def test_fields_that_are_null_ask_for_nothing():
    given = {
        "reasoning": {"summary": None, "generate_summary": None},
        "text": {"verbosity": None, "format": None},
        "metadata": None,
    }
    assert read(**given).chat == read().chat
