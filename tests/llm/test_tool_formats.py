"""Families are found by their templates, and their grammars write what their readers read."""

import json
import random

import pytest

pytest.importorskip("llguidance")

import constrained_text as ct
import jsonschema_rs
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from test_message_reader import Function, read

from penstock.llm.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    Offer,
    after_prompt,
    constrain,
    find_dialect,
    find_format,
    has_reasoning,
)
from penstock.sampling_params import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
          "required": ["a"], "additionalProperties": False}  # fmt: skip
EMPTY = {"type": "object", "additionalProperties": False}
TOOLS = [Function("get", SCHEMA), Function("put", EMPTY)]
JSON = Constraint("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA3),
        ('{% if tools %}{"name": x, "parameters": y}{% endif %}', LLAMA3),
        ("{% if tools %}something else{% endif %}", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_a_family_is_found_by_its_template(template, wanted):
    assert find_format(template) is wanted
    assert find_format(template, "mistral") is MISTRAL
    assert find_format(template, "none") is None


def test_reasoning_is_found_by_its_template():
    assert has_reasoning("{{ x.split('</think>') }}") and not has_reasoning("plain")
    assert has_reasoning("plain", "think") and not has_reasoning("</think>", "none")


def test_special_tokens_of_a_dialect_are_known_by_their_numbers():
    vocabulary = ct.VOCABULARY
    dialect = find_dialect(vocabulary, "mistral", "think")
    assert dialect.format is MISTRAL and dialect.has_reasoning and dialect.tokens == {}


def test_prompts_that_open_reasoning():
    offer = Offer(has_reasoning=True)
    for text, wanted in (("hi<think>\n", True), ("<think>\n\n</think>\n\n", False), ("hi", False)):
        assert after_prompt(offer, ct.VOCABULARY, ct.encode(text)).is_thinking == wanted
    assert not after_prompt(Offer(), ct.VOCABULARY, ct.encode("<think>")).is_thinking


def written(constraint, seed) -> str | None:
    """A random text of a grammar; None if it does not end."""
    matcher = ct.GRAMMARS.compile(constraint)
    mask = np.zeros((1, ct.GRAMMARS.num_words), np.int32)
    chance, found = random.Random(seed), b""
    for _ in range(500):
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        # The end as soon as possible, so that texts have one.
        end = ct.GRAMMARS.end_token
        token = end if end in bits and chance.random() < 0.5 else int(chance.choice(bits))
        if token == end:
            return found.decode("utf-8", "replace")
        found += ct.VOCABULARY.piece(token)
        assert matcher.consume_token(token), matcher.get_error()
        if matcher.is_stopped():
            return found.decode("utf-8", "replace")
    return None


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_forced_calls_fit_their_schemas(form, is_parallel):
    offer = Offer(form, TOOLS, is_parallel, is_forced=True)
    constraint = constrain(offer, JSON)
    most = 0
    for seed in range(8):
        content, _, calls = read(offer, written(constraint, seed))
        assert not content and calls
        most = max(most, len(calls))
        for name, arguments in calls:
            schema = SCHEMA if name == "get" else EMPTY
            assert jsonschema_rs.is_valid(schema, json.loads(arguments))
    assert (most > 1) == is_parallel


def test_content_fits_its_schema_or_is_a_call():
    offer = Offer(HERMES, TOOLS)
    seen = set()
    for seed in range(12):
        content, _, calls = read(offer, written(constrain(offer, JSON), seed))
        assert bool(content) != bool(calls)
        seen.add(bool(calls))
        if content:
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(content))
    assert seen == {True, False}


@pytest.mark.parametrize("is_thinking", [True, False])
def test_reasoning_comes_before_what_is_constrained(is_thinking):
    offer = Offer(has_reasoning=True, is_thinking=is_thinking)
    matcher = ct.GRAMMARS.compile(constrain(offer, JSON))
    start = "" if is_thinking else "<think>"
    text = start + 'so {"b"} it is\n</think>\n\n{"a":5}'
    assert matcher.consume_tokens(ct.encode(text)) and matcher.is_accepting(), matcher.get_error()
    content, reasoning, _ = read(offer, text)
    assert json.loads(content) == {"a": 5} and reasoning == 'so {"b"} it is'


def test_other_constraints_stay():
    regex = Constraint("regex", "a")
    assert constrain(Offer(HERMES, TOOLS, has_reasoning=True), regex) is regex
    assert constrain(Offer(), JSON) is JSON and constrain(Offer(HERMES, TOOLS), None) is None


def test_markers_that_are_tokens_are_named_by_their_numbers():
    offer = Offer(MISTRAL, TOOLS, is_forced=True, marker_token=ct.END)
    matcher = ct.GRAMMARS.compile(constrain(offer, None))
    assert matcher.consume_token(ct.END) and not matcher.is_error()


def test_ids():
    assert len(MISTRAL.new_id()) == 9 and HERMES.new_id().startswith("call_")
    assert HERMES.new_id() != HERMES.new_id()
