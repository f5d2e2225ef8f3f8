"""The JSON of Triton's generate extension: what is read, what is refused, what is written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.wire import generate_v2
from penstock.wire.generate_v2 import GenerateForm
from penstock.wire.openai_forms import AnswerChoice, TokenUsage


def read(is_streaming=False, **fields):
    body = {"text_input": "hi", **fields}
    return generate_v2.read(json.dumps(body).encode(), is_streaming)


class TestRead:
    def test_what_is_not_said_is_as_triton_has_it(self):
        asked = read()
        assert asked.text == "hi" and asked.params.max_tokens == 16 and asked.id == ""
        assert asked.is_echoed and not asked.is_streamed
        streamed = read(is_streaming=True)
        assert streamed.is_streamed and not streamed.is_echoed

    def test_parameters_may_stand_in_three_places(self):
        found = read(
            temperature=0.5,
            parameters={"temperature": 0.1, "top_k": 3, "stop": ["x"], "min_p": 0.2},
            sampling_parameters='{"top_k": 7, "seed": "9", "top_p": "0.25"}',
        ).params
        assert (found.temperature, found.top_k, found.seed, found.top_p) == (0.5, 3, 9, 0.25)
        assert found.stop == ("x",) and found.min_p == 0.2

    def test_flags_may_stand_among_parameters(self):
        asked = read(parameters={"exclude_input_in_output": True, "return_finish_reason": True})
        assert not asked.is_echoed and asked.has_reason

    def test_a_stream_may_be_one_event_with_the_input(self):
        asked = read(is_streaming=True, stream=False)
        assert not asked.is_streamed and asked.is_echoed
        assert read(is_streaming=True, stream=True, exclude_input_in_output=True).is_streamed

    def test_what_asks_for_nothing_is_let_pass(self):
        assert read(bad_words="", stop_words=[""], return_logprobs=False, pad_id=2).text == "hi"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"text_input": ["a", "b"]}, "text_input"),
            ({"id": 3}, "id"),
            ({"parameters": []}, "parameters"),
            ({"sampling_parameters": {}}, "sampling_parameters"),
            ({"sampling_parameters": "[]"}, None),
            ({"stream": True}, "stream"),
            ({"stream": "yes"}, "stream"),
            ({"temperature": -1}, "temperature"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"parameters": {"max_tokens": "many"}}, "max_tokens"),
            ({"bad_words": ["x"]}, "bad_words"),
            ({"return_logprobs": True}, "return_logprobs"),
            ({"tools": [{}]}, "tools"),
        ],
    )
    def test_what_is_wrong_is_named(self, fields, param):
        with pytest.raises(InvalidRequest) as caught:
            read(**fields)
        assert caught.value.field == param

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"exclude_input_in_output": False}, "exclude_input_in_output"),
            ({"n": 2}, "n"),
            ({"return_num_output_tokens": True}, "return_num_output_tokens"),
        ],
    )
    def test_what_a_stream_does_not_have_is_named(self, fields, param):
        with pytest.raises(InvalidRequest) as caught:
            read(is_streaming=True, **fields)
        assert caught.value.field == param

    @given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
    def test_any_other_body_is_refused(self, body):
        with pytest.raises(InvalidRequest):
            generate_v2.read(body, False)


class TestWritten:
    def test_a_whole_answer(self):
        head = GenerateForm("smol", "1", read(id="a", return_num_input_tokens=True))
        found = json.loads(head.whole([AnswerChoice(0, "hi you", "stop")], TokenUsage(3, 2)))
        assert found == {
            "model_name": "smol", "model_version": "1", "id": "a", "text_output": "hi you",
            "num_input_tokens": 3,
        }  # fmt: skip

    def test_several_texts_are_a_list(self):
        asked = read(n=2, return_finish_reason=True, return_num_output_tokens=True)
        choices = [AnswerChoice(0, "a", "stop"), AnswerChoice(1, "b", "length")]
        found = json.loads(GenerateForm("m", "2", asked).whole(choices, TokenUsage(3, 5)))
        assert found["text_output"] == ["a", "b"] and found["finish_reason"] == ["stop", "length"]
        assert found["num_output_tokens"] == 5 and "id" not in found

    def test_events(self):
        head = GenerateForm("m", "1", read(is_streaming=True, return_finish_reason=True))
        event = head.piece(AnswerChoice(0, "a\n", None))
        assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
        found = json.loads(event[6:])
        assert found["text_output"] == "a\n" and found["finish_reason"] == "None"
        assert head.error(InvalidRequest("no")) == b'data: {"error":"no"}\n\n'
