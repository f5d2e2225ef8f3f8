"""Structured output as OpenAI's own client asks for it, of a model with random weights."""

import json
import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from constrained_text import fits  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402
from test_openai_http import CHAT, NAME, with_client  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                 "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


class Person(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)


def test_a_schema_whole_streamed_and_with_everything_else(tmp_path):
    async def scenario(client, server):
        asked = dict(model=NAME, messages=CHAT, response_format=FORMAT, max_tokens=150)
        whole = await client.chat.completions.create(
            **asked, n=3, seed=5, logprobs=True, top_logprobs=2, temperature=1.5
        )
        again = await client.chat.completions.create(**asked, n=3, seed=5, temperature=1.5)
        stream = await client.chat.completions.create(
            **asked, n=3, seed=5, temperature=1.5, stream=True
        )
        texts = {}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        return whole, again, texts

    whole, again, texts = with_client(tmp_path, scenario)
    for choice in whole.choices:
        assert choice.finish_reason == "stop" and fits(choice.message.content, SCHEMA)
        assert "".join(each.token for each in choice.logprobs.content).startswith("{")
    wanted = [each.message.content for each in whole.choices]
    assert [each.message.content for each in again.choices] == wanted
    assert [texts[n] for n in range(3)] == wanted


def test_pydantic_models_are_parsed(tmp_path):
    async def scenario(client, server):
        return await client.chat.completions.parse(
            model=NAME, messages=CHAT, response_format=Person, max_tokens=150, seed=3
        )

    found = with_client(tmp_path, scenario).choices[0].message.parsed
    assert isinstance(found, Person)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yy"'}}, "x|yy"),
        ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, "x|yy"),
        ({"structured_outputs": {"json": {"const": "a"}}}, '"a"'),
        ({"structured_outputs": {"json": '{"const": "a"}', "regex": None}}, '"a"'),
        ({"guided_json": {"const": "a"}}, '"a"'),
        ({"guided_regex": "a|b"}, "a|b"),
        ({"guided_choice": ["x", "y"]}, "x|y"),
        ({"guided_grammar": 'start: "x" | "yy"'}, "x|yy"),
    ],
)
def test_extensions_of_vllm(tmp_path, fields, pattern):
    async def scenario(client, server):
        completion = await client.completions.create(
            model=NAME, prompt=["the cat", "on"], max_tokens=20, extra_body=fields
        )
        chat = await client.chat.completions.create(
            model=NAME, messages=CHAT, max_tokens=20, extra_body=fields
        )
        return [each.text for each in completion.choices] + [chat.choices[0].message.content]

    for text in with_client(tmp_path, scenario):
        assert re.fullmatch(pattern, text), text


def test_any_object(tmp_path):
    async def scenario(client, server):
        return await client.chat.completions.create(
            model=NAME, messages=CHAT, response_format={"type": "json_object"}, max_tokens=200, n=4
        )

    for choice in with_client(tmp_path, scenario).choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "array", "uniqueItems": True}}}}, "response_format", "uniqueItems"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a" * 200_000}, "guided_regex", "at most 131072"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "at most one"),
        ({"guided_choice": []}, "guided_choice", "expected 1 to 1024 texts"),
        ({"structured_outputs": {}}, "structured_outputs", "expected exactly one of"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs",
         "structured_outputs.structural_tag is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
         "response_format", "expected a JSON schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_400_and_names_its_field(tmp_path, fields, param, text):
    async def scenario(client, server):
        found = []
        for _ in range(2):  # The second time it is known.
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model=NAME, messages=CHAT, extra_body=fields)
            found.append(error.value)
        return found

    for error in with_client(tmp_path, scenario):
        assert error.param == param and text in error.body["message"]


def test_a_grammar_that_fails_while_it_is_used_is_the_clients_fault(tmp_path):
    async def scenario(client, server):
        # More than llguidance's parser follows at once.
        names = [f"name{number}" for number in range(700)]
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        fields = {"guided_json": schema}
        text = "JSON schema is refused while it was used: it is too large or too complex"
        with pytest.raises(openai.BadRequestError, match=text) as error:
            await client.chat.completions.create(model=NAME, messages=CHAT, extra_body=fields)
        assert error.value.param == "guided_json"
        return await client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=3)

    assert with_client(tmp_path, scenario).usage.completion_tokens == 3
