"""Tools and reasoning as OpenAI's own client sees them. The model is random: it calls tools because
it has to, or because a grammar of the request writes its text."""

import json

import jsonschema_rs
import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from test_openai_http import CHAT, NAME, with_client  # noqa: E402
from text_server import WITH_TOOLS as TEMPLATE  # noqa: E402

THINKING = TEMPLATE + "{% if think %}<think>{% endif %}{# </think> #}"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": CITY, "now": {"type": "object", "maxProperties": 0}}
WEATHER = {"type": "function", "function": {"name": "weather"}}
ASKED = dict(model=NAME, messages=CHAT, tools=TOOLS, max_tokens=150)


def lark(text):
    return {"guided_grammar": f"start: {json.dumps(text)}"}


def run(folder, scenario, template=TEMPLATE, parameters=None):
    return with_client(folder, scenario, template=template, parameters=parameters)


def check(message):
    assert message.tool_calls and not message.content
    for call in message.tool_calls:
        assert call.type == "function" and call.id.startswith("call_")
        assert jsonschema_rs.is_valid(
            SCHEMAS[call.function.name], json.loads(call.function.arguments)
        )


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral"])
def test_required_and_named_calls_fit_their_schemas(tmp_path, parser):
    async def scenario(client, server):
        create = client.chat.completions.create
        return (
            await create(**ASKED, tool_choice="required", n=4, seed=3, parallel_tool_calls=False),
            await create(**ASKED, tool_choice=WEATHER, n=2, seed=3),
        )

    required, named = run(tmp_path, scenario, parameters={"penstock.tool_parser": parser})
    for choice in [*required.choices, *named.choices]:
        assert choice.finish_reason in ("stop", "tool_calls", "length")
        if choice.finish_reason != "length":
            if parser != "hermes":
                choice.message.tool_calls[0].id = f"call_{choice.message.tool_calls[0].id}"
            check(choice.message)
    assert {"tool_calls"} <= {each.finish_reason for each in required.choices}
    assert {each.message.tool_calls[0].function.name for each in named.choices} == {"weather"}
    assert {"tool_calls"} & {each.finish_reason for each in named.choices} == set()


def test_a_stream_gives_the_same_calls_in_pieces(tmp_path):
    asked = {**ASKED, "tool_choice": "required", "seed": 4, "n": 2, "temperature": 0.5}

    async def scenario(client, server):
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        return whole, [chunk async for chunk in stream]

    whole, chunks = run(tmp_path, scenario)
    calls, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or ():
                key = choice.index, delta.index
                if delta.id:
                    assert delta.type == "function" and key not in calls
                    calls[key] = [delta.function.name, ""]
                calls[key][1] += delta.function.arguments
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in whole.choices:
        wanted = [[e.function.name, e.function.arguments] for e in choice.message.tool_calls]
        assert [calls[choice.index, n] for n in range(len(wanted))] == wanted
        assert reasons[choice.index] == choice.finish_reason


def test_calls_of_a_free_text_are_found(tmp_path):
    text = (
        'I see. <tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )

    async def scenario(client, server):
        create = client.chat.completions.create
        found = await create(**ASKED, extra_body=lark(text))
        one = await create(**ASKED, extra_body=lark(text), parallel_tool_calls=False)
        off = await create(**ASKED, extra_body=lark(text), tool_choice="none")
        plain = await create(**ASKED, extra_body=lark("no call"))
        stream = await create(**ASKED, extra_body=lark(text), stream=True)
        return found, one, off, plain, [chunk async for chunk in stream]

    found, one, off, plain, chunks = run(tmp_path, scenario)
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I see. "
    assert [(e.function.name, e.function.arguments) for e in choice.message.tool_calls] == [
        ("weather", '{"city": "x"}'), ("now", "{}"),
    ]  # fmt: skip
    assert len(one.choices[0].message.tool_calls) == 1
    assert off.choices[0].message.content == text and off.choices[0].finish_reason == "stop"
    assert plain.choices[0].message.content == "no call"
    assert plain.choices[0].message.tool_calls is None
    pieces = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(each.content or "" for each in pieces) == "I see. "
    assert sum(len(each.tool_calls or ()) for each in pieces) > 4


def test_a_history_with_calls_and_an_answer_goes_on(tmp_path):
    async def scenario(client, server):
        first = await client.chat.completions.create(**ASKED, tool_choice=WEATHER, seed=2)
        message = first.choices[0].message
        call = message.tool_calls[0]
        history = [
            *CHAT, message,
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]  # fmt: skip
        second = await client.chat.completions.create(**{**ASKED, "messages": history})
        return first, second

    first, second = run(tmp_path, scenario)
    assert first.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_tools_reach_the_template_unless_none_may_be_called(tmp_path):
    async def scenario(client, server):
        asked = {**ASKED, "max_tokens": 1}
        create = client.chat.completions.create
        found = [await create(**asked), await create(**asked, tool_choice="none")]
        return [each.usage.prompt_tokens for each in found]

    with_tools, without = run(tmp_path, scenario)
    assert with_tools > without


def test_response_format_is_for_the_content(tmp_path):
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a"}}}

    async def scenario(client, server):
        return await client.chat.completions.create(**ASKED, response_format=shape, n=6, seed=1)

    for choice in run(tmp_path, scenario).choices:
        if choice.finish_reason == "stop":
            assert choice.message.content == '"a"' and not choice.message.tool_calls
        elif choice.finish_reason == "tool_calls":
            check(choice.message)


def test_reasoning_is_apart(tmp_path):
    text = "<think>\nso it is\n</think>\n\nyes"

    async def scenario(client, server):
        create = client.chat.completions.create
        asked = dict(model=NAME, messages=CHAT, max_tokens=100)
        whole = await create(**asked, extra_body=lark(text))
        opened = lark("so it is</think>yes") | {"chat_template_kwargs": {"think": True}}
        begun = await create(**asked, extra_body=opened)
        stream = await create(**asked, extra_body=lark(text), stream=True)
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a"}}}
        strict = await create(**asked, response_format=shape, n=4)
        return whole, begun, [chunk async for chunk in stream], strict

    whole, begun, chunks, strict = run(tmp_path, scenario, THINKING)
    for each in (whole, begun):
        message = each.choices[0].message
        assert (message.content, message.reasoning_content) == ("yes", "so it is")
    pieces = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(each.content or "" for each in pieces) == "yes"
    assert "".join(getattr(each, "reasoning_content", "") for each in pieces) == "so it is"
    for choice in strict.choices:
        if choice.finish_reason == "stop":
            assert choice.message.content == '"a"'


@pytest.mark.parametrize(
    ("template", "fields", "param", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "tools", "no known form"),
        (TEMPLATE, {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice",
         "'x' is not one of the tools"),
        (TEMPLATE, {"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "array", "uniqueItems": True}}}]}, "tools",
         "uniqueItems"),
        (TEMPLATE, {"functions": [{"name": "f"}]}, "functions", "functions is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_400(tmp_path, template, fields, param, text):
    async def scenario(client, server):
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(**{**ASKED, **fields})
        return error.value

    error = run(tmp_path, scenario, template)
    assert error.param == param and text in error.body["message"]
