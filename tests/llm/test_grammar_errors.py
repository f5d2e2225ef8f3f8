"""Refusals of grammars: in words about what the client sent."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("llguidance")

import constrained_text as ct

from penstock.errors import BackendFailed, InvalidRequest
from penstock.llm.grammar_errors import failure, refusal
from penstock.llm.tool_formats import HERMES, LLAMA3, MISTRAL, Offer, constrain
from penstock.sampling_params import Constraint

REGEX = "the regular expression is refused: "
SCHEMA = "the JSON schema is refused: "
ONE_OF = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}
OWN_WORDS = "oneOf is supported only if its schemas exclude each other visibly; use anyOf"


def refused(constraint: Constraint) -> str:
    with pytest.raises(InvalidRequest) as error:
        ct.GRAMMARS.check(constraint)
    return str(error.value)


def of_schema(schema: object) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("regex", "ab("), f"{REGEX}unclosed group at character 3"),
        (Constraint("regex", "[^\\s\\S]"), f"{REGEX}no text fits it"),
        (Constraint("regex", "a(?=b)"),
         f"{REGEX}look-around, including look-ahead and look-behind, is not supported"
         " at character 2"),
        (Constraint("regex", "a\\b"),
         f"{REGEX}look-around, such as \\b, and anchors within are not supported"),
        (of_schema(ONE_OF), SCHEMA + OWN_WORDS),
        (of_schema({"uniqueItems": True}),
         f'{SCHEMA}keywords that cannot be enforced: "uniqueItems"'),
        (of_schema({"$ref": "http://x/y"}),
         f"{SCHEMA}$ref 'http://x/y' leads out of the schema; other documents are not read"),
        (of_schema({"$ref": "#/$defs/x"}), f"{SCHEMA}$ref '#/$defs/x' leads nowhere"),
        (of_schema({"pattern": "a)"}), f"{SCHEMA}unopened group at character 2"),
        (of_schema({"type": "string", "pattern": "^a$", "enum": ["b"]}),
         f"{SCHEMA}no text fits it: its patterns and values exclude each other"),
        (of_schema({"minLength": 5, "maxLength": 2, "type": "string"}),
         f"{SCHEMA}no text fits it: minLength (5) is greater than maxLength (2)"),
        (of_schema({"type": "number", "minimum": "5"}),
         f'{SCHEMA}expected a number for \'minimum\', got "5"'),
        (Constraint("lark", "start: start"), "the grammar is refused: no text fits it"),
        (Constraint("lark", 'start: x\nx: "a" b'),
         'the grammar is refused: line 2, column 4: unknown name: "b"'),
        (Constraint("lark", 'start: %json {"type": "strange"}'),
         "the grammar is refused: line 1, column 8: Invalid type: strange"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_of_the_input_was_wrong(constraint: Constraint, expected: str) -> None:
    assert refused(constraint) == expected


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL])
@pytest.mark.parametrize("has_reasoning", [False, True])
def test_a_tool_is_named_and_the_grammar_made_of_it_is_not_shown(form, has_reasoning) -> None:
    tools = [
        SimpleNamespace(name="fine", parameters={"type": "object"}),
        SimpleNamespace(name="weather", parameters={"properties": {"city": ONE_OF}}),
    ]
    offer = Offer(form, tools, is_forced=True, has_reasoning=has_reasoning)
    found = refused(constrain(offer, None))
    assert found == f"the parameters of tool 'weather' are refused: {OWN_WORDS}"
    content = constrain(Offer(form, tools[:1]), of_schema({"type": "strange"}))
    assert refused(content) == f"{SCHEMA}Invalid type: strange"
    thinking = constrain(Offer(has_reasoning=True), of_schema({"type": "strange"}))
    assert refused(thinking) == f"{SCHEMA}Invalid type: strange"


def test_defects_are_not_blamed_on_the_client() -> None:
    constraint = Constraint("regex", "a")
    assert isinstance(refusal(constraint, "panic: at 1(1): index out of range"), BackendFailed)
    matcher = ct.GRAMMARS.compile(constraint)
    matcher.consume_token(ct.encode("b")[0])
    assert matcher.is_error()
    assert isinstance(failure(constraint, matcher.get_error()), BackendFailed)


def test_a_limit_that_is_reached_in_use_is_the_clients() -> None:
    schema = {"type": "object", "properties": {f"name{n}": {"type": "string"} for n in range(700)}}
    constraint = of_schema(schema)
    matcher = ct.GRAMMARS.compile(constraint)
    matcher.consume_token(ct.encode("{")[0])
    matcher.compute_bitmask()
    found = failure(constraint, matcher.get_error())
    expected = "the JSON schema is refused while it was used: it is too large or too complex"
    assert isinstance(found, InvalidRequest) and str(found) == expected
