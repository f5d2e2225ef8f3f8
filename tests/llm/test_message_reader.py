"""Answers are separated into reasoning, content and calls, whatever the pieces they come in."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.llm.message_reader import MessageReader
from penstock.llm.tool_formats import HERMES, LLAMA3, MISTRAL, Offer


@dataclass
class Function:
    name: str
    parameters: dict = field(default_factory=dict)


TOOLS = [Function("get"), Function("put")]
GET, PUT = '{"name": "get", "arguments": {"a": "}<"}}', '{"arguments": {}, "name": "put"}'
CALLS = [("get", '{"a": "}<"}'), ("put", "{}")]
THINKING = Offer(has_reasoning=True)
CASES = {
    "one": (HERMES, f"<tool_call>\n{GET}\n</tool_call>", "", CALLS[:1]),
    "two with content": (
        HERMES, f"I look.<tool_call>{GET}</tool_call>\n<tool_call>{PUT}</tool_call>",
        "I look.", CALLS,
    ),
    "content behind": (HERMES, f" <tool_call>{GET}</tool_call> and", "and", CALLS[:1]),
    "unknown": (HERMES, 'a <tool_call>{"name": "x"}</tool_call>',
                'a <tool_call>{"name": "x"}</tool_call>', []),
    "none": (HERMES, "a <tool_call> nothing", "a <tool_call> nothing", []),
    "part of a marker": (HERMES, "a <tool_ca", "a <tool_ca", []),
    "cut off": (HERMES, '<tool_call>{"name": "get", "arguments": {"a', "", [("get", '{"a')]),
    "cut off before its name": (HERMES, '<tool_call>{"name": "ge', '<tool_call>{"name": "ge', []),
    "without its end": (HERMES, f"<tool_call>{GET}", "", CALLS[:1]),
    "llama": (LLAMA3, '{"name": "get", "parameters": {"b": 1}}', "", [("get", '{"b": 1}')]),
    "llama, several": (LLAMA3, f" {GET}; {PUT}", "", CALLS),
    "llama, with its tag": (LLAMA3, f"<|python_tag|>{GET}", "", CALLS[:1]),
    "llama, other JSON": (LLAMA3, '{"a": 1} <|python_tag|>', '{"a": 1} <|python_tag|>', []),
    "llama, a call within a text": (LLAMA3, f"so: {GET}", f"so: {GET}", []),
    "llama, spaces": (LLAMA3, "  \n", "  \n", []),
    "mistral": (MISTRAL, f"[TOOL_CALLS][{GET}, {PUT}]", "", CALLS),
    "mistral, newer": (MISTRAL, 'ok[TOOL_CALLS]get[ARGS]{"a": "}<"}[TOOL_CALLS]put{}', "ok", CALLS),
    "mistral, a list": (MISTRAL, "[1, 2]", "[1, 2]", []),
    "empty": (MISTRAL, "", "", []),
}  # fmt: skip


def read(offer, text, cuts=()):
    reader = MessageReader(offer)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    content, reasoning, calls = "", "", []
    for start, end in zip([0, *ends], ends, strict=False):
        delta = reader.add(text[start:end], is_last=end == len(text))
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.calls:
            if call.name:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            name, before = calls[call.index]
            calls[call.index] = name, before + call.arguments
    assert reader.num_calls == len(calls)
    return content, reasoning, calls


@pytest.mark.parametrize("name", CASES)
@given(cuts=st.lists(st.integers(0, 120)))
def test_calls(name, cuts):
    form, text, content, calls = CASES[name]

    assert read(Offer(form, TOOLS), text, cuts) == (content, "", calls)
    every = range(len(text))
    assert read(Offer(form, TOOLS), text, every) == (content, "", calls)


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL])
def test_only_one_call_if_more_are_not_wanted(form):
    mark = form.marker + ("[" if form is MISTRAL else "")
    text = f"{mark}{GET}{form.after}{form.between}{'' if form is MISTRAL else form.before}{PUT}"
    assert read(Offer(form, TOOLS), text)[2] == CALLS
    assert read(Offer(form, TOOLS, is_parallel=False), text)[2] == CALLS[:1]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nso\nit is\n</think>\n\nyes", "so\nit is", "yes"),
        ("\n<think>so</think>yes", "so", "yes"),
        ("<think>so", "so", ""),
        ("<think>so </thi", "so </thi", ""),
        ("<thin", "", "<thin"),
        ("yes <think>", "", "yes <think>"),
        ("<think></think>yes", "", "yes"),
    ],
)
@given(cuts=st.lists(st.integers(0, 40)))
def test_reasoning(text, reasoning, content, cuts):
    assert read(THINKING, text, cuts) == (content, reasoning, [])


@given(cuts=st.lists(st.integers(0, 40)))
def test_a_prompt_may_have_begun_it(cuts):
    offer = Offer(HERMES, TOOLS, has_reasoning=True, is_thinking=True)
    assert read(offer, f"so\n</think>\n<tool_call>{GET}</tool_call>", cuts) == ("", "so", CALLS[:1])
