"""Calls are read as they come, in pieces of any size."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.llm.call_scanner import CallScanner

NAMES = ("get", "put")
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text('ab\\"{}[]:, é', max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text('a\\"}', max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("abc", max_size=3), values, max_size=3)


def scan(text, cuts=(), **options):
    scanner = CallScanner(NAMES, **options)
    found, num = "", 0
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        if scanner.is_done or scanner.has_failed:
            break
        num += scanner.feed(text[start:end])
        found += scanner.take_arguments()
    return scanner, found, text[num:]


@given(arguments, st.sampled_from(["arguments", "parameters"]), st.booleans(), st.booleans(),
       st.sampled_from([None, 1]), st.lists(st.integers(0, 80)))  # fmt: skip
def test_what_was_written_is_passed_on(given_, key, is_first, as_text, indent, cuts):
    parts = {"id": 7, "name": "put", key: json.dumps(given_) if as_text else given_}
    parts = dict(reversed(parts.items())) if is_first else parts
    text = json.dumps(parts, indent=indent, ensure_ascii=False)
    scanner, found, rest = scan(text + " tail", cuts)
    assert scanner.is_done and scanner.name == "put" and rest == " tail"
    assert json.loads(found) == given_


@pytest.mark.parametrize("text", ['{"name": "get"}', '{"name": "get", "arguments": null }'])
def test_no_arguments_are_an_empty_object(text):
    scanner, found, _ = scan(text)
    assert scanner.is_done and found == "{}"


@pytest.mark.parametrize(
    "text", ["[]", '{"name": "other"}', '{"arguments": {}}', "{3: 4}", '{"name" "get"}',
             '{"name": "get" "arguments": {}}', '{"name": 3, "arguments": {}}', "{}"]
)  # fmt: skip
def test_what_is_no_call_fails(text):
    scanner, *_ = scan(text)
    assert scanner.has_failed and not scanner.is_done


def test_a_bare_name():
    for text in ('get{"a": [1]}', 'get[ARGS]{"a": [1]}', 'get[CALL_ID]x1[ARGS]{"a": [1]}'):
        scanner, found, rest = scan(text + "[", range(40), is_bare=True)
        assert scanner.is_done and scanner.name == "get" and json.loads(found) == {"a": [1]}
        assert rest == "["
