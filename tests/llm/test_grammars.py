"""Grammars of clients: valid ones compile for the model's tokens, others are refused with a reason,
soon and with little memory."""

import json

import pytest

pytest.importorskip("llguidance")

import constrained_text as ct
from tiny_text import WITH_BYTES, WITH_MARKS

from penstock.errors import InvalidRequest
from penstock.llm.grammars import ByteTokens, Grammars
from penstock.llm.text import Text
from penstock.sampling_params import Constraint


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("json_schema", '{"type": "strange"}'), "JSON schema is refused: Invalid type"),
        (Constraint("json_schema", '{"uniqueItems": true}'), "uniqueItems"),
        (Constraint("json_schema", '{"$ref": "#/$defs/none"}'), "leads nowhere"),
        (Constraint("json_schema", "false"), "a schema is an object"),
        (Constraint("json_schema", '{"type": "string", "pattern": "("}'), "unclosed group"),
        (Constraint("regex", "a("), "regular expression is refused: .*unclosed group"),
        (Constraint("lark", 'start: "a" b'), 'grammar is refused: .*unknown name: "b"'),
        (Constraint("ebnf", 'root ::= "a" tail'), "grammar is refused: Rule 'tail' not found"),
        (Constraint("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "grammar is refused"),
        (Constraint("regex", "(" * 3000 + "a" + ")" * 3000), "regular expression is refused"),
        (Constraint("lark", 'start: (a\n"'), "grammar is refused"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(constraint, reason):
    with pytest.raises(InvalidRequest, match=reason):
        ct.GRAMMARS.check(constraint)


def test_everything_is_a_schema_too():
    for schema in ("true", "{}"):
        ct.GRAMMARS.check(Constraint("json_schema", schema))


def test_large_ones_are_refused_before_they_take_much():
    def schema(size):
        one = {"type": "string", "pattern": "^[a-z]{9}.*x$"}
        return {"type": "object", "properties": {f"name{n}": one for n in range(size)}}

    ct.GRAMMARS.check(ct.of_schema(schema(2000)))
    with pytest.raises(InvalidRequest, match="too large"):
        ct.GRAMMARS.check(ct.of_schema(schema(20_000)))


def test_whitespace_in_json_is_bounded():
    matcher = ct.GRAMMARS.compile(ct.of_schema({"type": "array", "items": {"type": "null"}}))
    (opening,), (space,) = ct.encode("["), ct.encode(" ")
    assert matcher.consume_token(opening)
    num = 0
    while matcher.validate_tokens([space]) and num < 100:
        assert matcher.consume_token(space)
        num += 1
    assert num == 16


@pytest.mark.parametrize("tokenizer", [WITH_BYTES, WITH_MARKS])
def test_other_tokenizers_are_read_too(tokenizer):
    """Those of SentencePiece begin a text with a space, which a grammar must not force."""
    text = Text(tokenizer)
    tokens = ByteTokens(text.vocabulary, lambda each: text.encode(each, is_whole=False))
    for word in ("the cat", "日é", '{"a":'):
        assert b"".join(tokens.tokens[each] for each in tokens(word)) == word.encode()
    grammars = Grammars(text.vocabulary, lambda each: text.encode(each, is_whole=False))
    matcher = grammars.compile(Constraint("lark", 'start: "the 日"'))
    assert matcher.consume_tokens(tokens("the 日")) and matcher.is_stopped()


def test_a_byte_without_a_token_ends_the_split():
    tokens = ByteTokens(ct.VOCABULARY, lambda each: [])
    assert b"".join(tokens.tokens[each] for each in tokens(json.dumps("aé"))) == b'"a\\u00e9"'
