"""Fields that constrain a text become one constraint, or are refused by name."""

import json

import pytest

from penstock.errors import InvalidRequest
from penstock.sampling_params import Constraint
from penstock.wire.openai_constraints import MAX_DEPTH, ConstraintFields, depth, read_constraint

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def read(**fields):
    found = read_constraint(ConstraintFields(**fields))
    return found and found.constraint


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        # The order of properties is that of the text.
        ({"response_format": schema_format(SCHEMA)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a\n", 'é"']}, "lark", 'start: "a\\n" | "é\\""'),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
def test_each_field_gives_a_constraint(fields, kind, text):
    found = read(**fields)
    assert found.kind == kind
    assert found.text == (
        text if isinstance(text, str) else json.dumps(text, separators=(",", ":"))
    )


def test_text_and_nothing_constrain_nothing():
    assert read() is None
    assert read(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "xml"}}, 'response_format.type is "xml"; expected text'),
        ({"response_format": {"type": "json_schema"}}, "expected a JSON schema"),
        ({"guided_json": "{"}, "guided_json: json: the text is not JSON"),
        ({"guided_json": 3}, "guided_json: expected a JSON schema"),
        ({"guided_regex": ""}, "expected a text that is not empty"),
        ({"guided_choice": ["a", ""]}, "expected 1 to 1024 texts"),
        ({"guided_choice": ["a"] * 1025}, "expected 1 to 1024 texts"),
        ({"guided_grammar": "x" * (1 << 18)}, "expected at most 131072"),
        (
            {"guided_regex": "a", "guided_json": {}},
            "guided_json and guided_regex: expected at most",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "expected exactly one of json"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "is not supported"),
    ],
)
def test_what_is_wrong_is_said(fields, text):
    with pytest.raises(InvalidRequest, match=text):
        read(**fields)


def test_schemas_have_limited_depth():
    schema: dict = {}
    for _ in range(MAX_DEPTH - 2):
        schema = {"items": schema}
    assert depth(schema) < MAX_DEPTH and isinstance(read(guided_json=schema), Constraint)
    for _ in range(500):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="more than 64 levels"):
        read(guided_json=schema)
