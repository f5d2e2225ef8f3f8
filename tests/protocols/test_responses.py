"""The responses API as OpenAI's own client sees it; every answer is checked against its types."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from pydantic import BaseModel, Field  # noqa: E402
from test_openai_http import NAME, with_client  # noqa: E402
from test_tools import CITY, THINKING  # noqa: E402
from text_server import WITH_TOOLS as TEMPLATE  # noqa: E402

TOOLS = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
ASKED = dict(model=NAME, input="the cat", max_output_tokens=150, extra_body={"seed": 3})


class Pet(BaseModel):
    name: str = Field(max_length=4)
    age: int = Field(ge=0, le=20)


def run(folder, scenario, template=TEMPLATE):
    return with_client(folder, scenario, template=template)


def test_a_text_whole_and_streamed(tmp_path):
    asked = {**ASKED, "max_output_tokens": 9, "temperature": 0, "instructions": "be kind"}

    async def scenario(client, server):
        create = client.responses.create
        whole = await create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
        stream = await create(**asked, stream=True)
        return whole, [event async for event in stream]

    whole, events = run(tmp_path, scenario)
    assert whole.status == "incomplete" and whole.instructions == "be kind"
    assert whole.usage.output_tokens == 9 and len(whole.output[0].content[0].logprobs) == 9
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 1
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert [each.sequence_number for each in events] == list(range(len(events)))


def test_calls_and_their_outputs(tmp_path):
    async def scenario(client, server):
        asked = {**ASKED, "tools": TOOLS, "tool_choice": "required"}
        first = await client.responses.create(**asked, parallel_tool_calls=False)
        (call,) = first.output
        items = [
            {"role": "user", "content": "the cat"},
            call.to_dict(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ]
        second = await client.responses.create(**{**ASKED, "input": items}, tools=TOOLS)
        stream = await client.responses.create(**asked, stream=True)
        return first, second, [event async for event in stream]

    first, second, events = run(tmp_path, scenario)
    (call,) = first.output
    assert call.type == "function_call" and call.name == "weather"
    assert list(json.loads(call.arguments)) == ["city"] and first.status == "completed"
    assert second.usage.input_tokens > first.usage.input_tokens
    done = [each for each in events if each.type == "response.function_call_arguments.done"]
    deltas = [
        each.delta for each in events if each.type == "response.function_call_arguments.delta"
    ]
    assert done and "".join(deltas) == "".join(each.arguments for each in done)


def test_models_of_pydantic_are_parsed(tmp_path):
    async def scenario(client, server):
        return await client.responses.parse(**ASKED, text_format=Pet)

    assert isinstance(run(tmp_path, scenario).output_parsed, Pet)


def test_reasoning_is_an_item(tmp_path):
    async def scenario(client, server):
        return await client.responses.create(
            **ASKED, text={"format": {"type": "json_schema", "name": "x",
                                      "schema": {"const": "so", "type": "string"}}})  # fmt: skip

    found = run(tmp_path, scenario, THINKING)
    if found.status == "completed":
        assert found.output_text == '"so"'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": "the cat " * 500}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x",
                              "schema": {"uniqueItems": True}}}}, "text"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_an_error_that_names_its_field(tmp_path, fields, param):
    async def scenario(client, server):
        with pytest.raises(openai.APIStatusError) as error:
            await client.responses.create(**{**ASKED, **fields})
        return error.value

    error = run(tmp_path, scenario)
    assert error.param == param and error.status_code in (400, 413)


@pytest.mark.parametrize("limit", [1, 4, 12])
def test_a_forced_call_that_is_cut_leaves_no_markup(tmp_path, limit):
    async def scenario(client, server):
        asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": limit}
        create = client.responses.create
        whole = await create(**asked, include=["message.output_text.logprobs"])
        stream = await create(**asked, stream=True)
        chat = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "the cat"}],
            tools=[{"type": "function", "function": {"name": "weather", "parameters": CITY}}],
            tool_choice="required",
            max_tokens=limit,
            seed=3,
        )
        return whole, [event async for event in stream], chat.choices[0]

    whole, events, choice = run(tmp_path, scenario)
    assert events[-1].type == "response.incomplete"
    assert not any(each.type.startswith("response.output_text") for each in events)
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == limit
        assert all(each.type == "function_call" for each in response.output), response.output
    assert choice.finish_reason == "length" and not choice.message.content
