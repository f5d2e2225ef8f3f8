"""Events of a response are those of OpenAI's types, in order, and add up to the whole."""

import json

import pytest

openai_responses = pytest.importorskip("openai.types.responses")

from openai._models import construct_type_unchecked, validate_type  # noqa: E402

from penstock.errors import BackendFailed  # noqa: E402
from penstock.wire.openai_forms import AnswerChoice, CallDelta, TokenUsage  # noqa: E402
from penstock.wire.openai_logprobs import TokenLogprob  # noqa: E402
from penstock.wire.response_form import ResponseForm  # noqa: E402

PIECES = [
    AnswerChoice(0, "", None, reasoning="so "),
    AnswerChoice(0, "", None, reasoning="it is"),
    AnswerChoice(0, "ye", None, [TokenLogprob(b"ye", -0.5)]),
    AnswerChoice(0, "s", None),
    AnswerChoice(0, "", None, calls=[CallDelta(0, "f", id="c1")]),
    AnswerChoice(
        0, "", None, calls=[CallDelta(0, arguments='{"a":'), CallDelta(0, arguments="1}")]
    ),
    AnswerChoice(
        0, "", "tool_calls", calls=[CallDelta(1, "g", id="c2"), CallDelta(1, arguments="{}")]
    ),
]
USAGE = TokenUsage(3, 9, 1, 2)


def form():
    return ResponseForm("resp_1", 5, "m", {"parallel_tool_calls": True})


def events_of(data):
    found = []
    for each in data.decode().strip().split("\n\n"):
        name, line = each.split("\n")
        value = json.loads(line.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        validate_type(type_=openai_responses.ResponseStreamEvent, value=value)
        found.append(construct_type_unchecked(
            type_=openai_responses.ResponseStreamEvent, value=value))  # fmt: skip
    assert [each.sequence_number for each in found] == list(range(len(found)))
    return found


def streamed(pieces):
    made = form()
    return events_of(made.begin(0) + b"".join(map(made.piece, pieces)) + made.end(USAGE))


def test_a_stream_opens_fills_and_closes_each_item():
    found = streamed(PIECES)
    assert [each.type.removeprefix("response.") for each in found] == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    last = found[-1].response
    assert [each.type for each in last.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert last.output_text == "yes" and last.output[2].arguments == '{"a":1}'
    assert last.usage.output_tokens_details.reasoning_tokens == 2 and last.usage.total_tokens == 12


def test_the_whole_is_what_the_last_event_has():
    calls = [CallDelta(0, "f", '{"a":1}', "c1"), CallDelta(1, "g", "{}", "c2")]
    choice = AnswerChoice(0, "yes", "tool_calls", [TokenLogprob(b"ye", -0.5)], "so it is", calls)
    whole = json.loads(form().whole([choice], USAGE))
    last = streamed(PIECES)[-1].response.to_dict()

    def plain(response):
        return json.loads(json.dumps(response), object_hook=lambda each: {
            key: value for key, value in each.items() if key != "id"})  # fmt: skip

    assert plain(whole) == plain({**last, "created_at": 5})


def test_what_is_cut_is_incomplete():
    found = streamed([AnswerChoice(0, "ye", None), AnswerChoice(0, "", "length")])
    last = found[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete"


def test_a_failure_is_the_last_event():
    made = form()
    data = made.begin(0) + made.piece(AnswerChoice(0, "ye", None)) + made.piece(
        AnswerChoice(0, "", "error")
    ) + made.error(BackendFailed("the engine ended"))  # fmt: skip
    last = events_of(data)[-1]
    assert last.type == "response.failed" and last.response.error.message == "the engine ended"
