"""OpenAI's JSON: what is read, what is refused and by which field, what is written."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.wire import openai_prompts as openai
from penstock.wire.documented import describe_model
from penstock.wire.openai_forms import DONE, AnswerChoice, ChatForm, CompletionForm, TokenUsage
from penstock.wire.openai_logprobs import TokenLogprob
from penstock.wire.openai_v1 import read_chat, template_options
from penstock.wire.statuses import openai_error

FORM = CompletionForm("cmpl-1", 1700000000, "smol", True)
CHAT = ChatForm("cmpl-1", 1700000000, "smol", True)


def body(**fields) -> bytes:
    return json.dumps({"model": "smol", **fields}).encode()


def completion(**fields):
    return openai.read_completion(body(**{"prompt": "hi", **fields}))


def chat(**fields):
    messages = [{"role": "user", "content": "hi"}]
    return read_chat(body(**{"messages": messages, **fields}))


class TestCompletions:
    def test_what_is_not_said_is_as_openai_has_it(self):
        found = completion()
        assert found.prompts == ["hi"] and not found.is_streamed and not found.is_echoed
        params = found.params
        assert (params.temperature, params.top_p, params.n, params.max_tokens) == (1, 1, 1, 16)
        assert params.stop == () and params.seed is None and params.num_logprobs is None

    @pytest.mark.parametrize(
        ("prompt", "expected"),
        [
            ("a", ["a"]),
            (["a", "b"], ["a", "b"]),
            ([1, 2], [[1, 2]]),
            ([[1], [2, 3]], [[1], [2, 3]]),
        ],
    )
    def test_prompts_are_texts_or_tokens(self, prompt, expected):
        assert completion(prompt=prompt).prompts == expected

    def test_null_is_as_if_it_were_not_there(self):
        names = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "user")
        assert completion(**dict.fromkeys(names)) == completion()

    def test_what_nobody_knows_is_ignored(self):
        assert completion(strange={"a": 1}) == completion()

    def test_all_params(self):
        params = completion(
            max_tokens=5, temperature=0, top_p=0.5, n=2, stop=["a", "b"], seed=7, top_k=-1,
            min_p=0.1, logit_bias={"5": -100}, logprobs=3, stop_token_ids=[2], ignore_eos=True,
            min_tokens=2, priority=-1, repetition_penalty=1.1, presence_penalty=1,
            frequency_penalty=-1,
        ).params  # fmt: skip
        assert params.stop == ("a", "b") and params.logit_bias == {5: -100} and params.top_k == 0
        assert (params.num_logprobs, params.stop_token_ids, params.ignore_eos) == (3, {2}, True)

    def test_only_an_echo_may_ask_for_nothing(self):
        assert completion(echo=True, max_tokens=0).params.max_tokens == 0
        with pytest.raises(InvalidRequest, match="max_tokens is 0; expected 1 to"):
            completion(max_tokens=0)


class TestChats:
    def test_parts_of_text_are_one_text(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        found = chat(messages=[{"role": "user", "content": parts}])
        assert found.messages[0]["content"] == "ab"

    def test_the_newer_name_of_the_limit_counts(self):
        assert chat(max_tokens=5, max_completion_tokens=9).params.max_tokens == 9
        assert chat().params.max_tokens is None

    def test_logprobs(self):
        assert chat(logprobs=True).params.num_logprobs == 0
        assert chat(logprobs=True, top_logprobs=4).params.num_logprobs == 4
        assert chat(logprobs=False).params.num_logprobs is None

    def test_streams_tell_their_usage_if_asked(self):
        found = chat(stream=True, stream_options={"include_usage": True})
        assert found.is_streamed and found.has_usage

    def test_what_is_not_served_may_be_there_without_asking_for_anything(self):
        chat(tools=[], tool_choice="auto", response_format={"type": "text"})

    def test_options_of_the_template(self):
        options = {"enable_thinking": False}
        assert chat(chat_template_kwargs=options).template_options == options


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"temperature": 2.1}, "temperature", "temperature is 2.1; expected 0.0 to 2.0"),
        ({"temperature": "hot"}, "temperature", "Expected `float | null`, got `str`"),
        ({"top_p": -0.1}, "top_p", "expected 0.0 to 1.0"),
        ({"n": 0}, "n", "expected 1 to 128"),
        ({"n": 129}, "n", "expected 1 to 128"),
        ({"n": 1.5}, "n", "got `float`"),
        ({"stop": [""]}, "stop", "of 1 to 256 characters"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 texts"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a': 1.0; expected tokens with -100 to 100"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "expected tokens with -100 to 100"),
        ({"max_tokens": -1}, "max_tokens", "expected 1 to 2147483647"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "expected 0 to 3"),
        ({"stream_options": {}}, "stream_options", "expected stream to be true"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function: expected"),
        ({"response_format": {"type": "yaml"}}, "response_format", "expected text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "expected a JSON schema"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options",
         "stream_options.continuous_usage_stats is not supported"),
        ({"messages": []}, "messages", "0; expected 1 to 4096"),
        ({"messages": [{"content": "a"}]}, "messages", "messages[0].role: null; expected one of"),
        ({"model": "m" * 1000}, "model", "a name of 1000 characters"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected 0 to 20"),
        ({"model": None}, "model", "Expected `str`, got `null`"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_its_field(fields, param, text):
    with pytest.raises(InvalidRequest) as error:
        chat(**fields)
    assert error.value.field == param and text in str(error.value)


def test_a_field_that_is_missing_is_named():
    with pytest.raises(InvalidRequest, match="missing required field `messages`") as caught:
        read_chat(b'{"model": "a"}')
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequest, match="missing required field `model`") as caught:
        openai.read_completion(b'{"prompt": "a"}')
    assert caught.value.field == "model"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"1e999"])
def test_what_is_no_json_is_refused(raw):
    with pytest.raises(InvalidRequest):
        read_chat(raw)


@pytest.mark.parametrize(
    "field",
    [
        b'"prompt": "\xff"', b'"prompt": "a", "zzz": 1e999', b'"prompt": "a", "n": 1' + b"0" * 400,
        b'"prompt": "a", "logit_bias": {"' + b"1" * 5000 + b'": 1}',
        b'"prompt": "a", "top_k": 18446744073709551615', b'"prompt": [99999999999]',
        b'"prompt": "a", "seed": 99999999999999999999', b'"prompt": "a", "priority": 1e30',
        b'"prompt": "a", "stop_token_ids": [-1]', b'"prompt": "a", "max_tokens": 99999999999',
        b'"prompt": "a", "temperature": NaN', b'"prompt": "a", "n": true',
    ],
)  # fmt: skip
def test_strange_numbers_and_bytes_are_refused(field):
    with pytest.raises(InvalidRequest):
        openai.read_completion(b'{"model": "m", ' + field + b"}")


@pytest.mark.parametrize("prompt", [[], [[]], [["a"]], [1, "a"], 5, ["x"] * 513])
def test_prompts_that_are_none(prompt):
    with pytest.raises(InvalidRequest) as error:
        completion(prompt=prompt)
    assert error.value.field == "prompt"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
names = st.sampled_from(
    ["messages", "prompt", "n", "stop", "logit_bias", "temperature", "logprobs", "stream_options",
     "max_tokens", "tools", "input", "dimensions", "chat_template_kwargs", "stop_token_ids"]
)  # fmt: skip


@given(st.dictionaries(names, values, max_size=6))
def test_whatever_comes_is_read_or_refused(fields):
    for read in (read_chat, openai.read_completion, openai.read_embeddings):
        try:
            read(body(**fields))
        except InvalidRequest as error:
            assert str(error)


class TestEmbeddings:
    def test_inputs_and_form(self):
        found = openai.read_embeddings(body(input=["a", "b"], encoding_format="base64"))
        assert found.input == ["a", "b"] and found.encoding_format == "base64"
        assert found.dimensions is None

    def test_another_form_is_refused(self):
        with pytest.raises(InvalidRequest, match="encoding_format"):
            openai.read_embeddings(body(input="a", encoding_format="hex"))


def event(raw: bytes):
    assert raw.startswith(b"data: ") and raw.endswith(b"\n\n") and raw.count(b"\n") == 2
    return json.loads(raw[6:])


class TestAnswers:
    def test_a_completion(self):
        top = [(b"ab", -0.5), (b"c", -2.0)]
        logprobs = [TokenLogprob(b"ab", -0.5, top), TokenLogprob(b"d", -1.0, offset=2)]
        choice = AnswerChoice(0, "abd", "length", logprobs)
        found = json.loads(FORM.whole([choice], TokenUsage(3, 2, 1)))
        assert (found["object"], found["id"], found["model"]) == (
            "text_completion",
            "cmpl-1",
            "smol",
        )
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["choices"][0]["logprobs"] == {
            "tokens": ["ab", "d"],
            "token_logprobs": [-0.5, -1.0],
            "top_logprobs": [{"ab": -0.5, "c": -2.0}, None],
            "text_offset": [0, 2],
        }
        assert found["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    def test_a_prompts_first_token_has_no_logprob(self):
        choice = AnswerChoice(
            0, "a", None, [TokenLogprob(b"a", math.nan), TokenLogprob(b"b", -math.inf)]
        )
        found = event(FORM.piece(choice))
        assert found["choices"][0]["logprobs"]["token_logprobs"] == [None, -9999.0]

    def test_a_chat(self):
        choice = AnswerChoice(1, "ü", "stop", [TokenLogprob("ü".encode(), -0.5, [(b"x", -1.0)])])
        found = json.loads(CHAT.whole([choice], TokenUsage(1, 1)))
        (answer,) = found["choices"]
        assert answer["message"] == {"role": "assistant", "content": "ü", "refusal": None}
        (token,) = answer["logprobs"]["content"]
        assert token["bytes"] == [195, 188] and token["top_logprobs"][0]["token"] == "x"

    def test_pieces_of_a_chat(self):
        first = event(CHAT.begin(0))["choices"][0]
        assert first["delta"]["role"] == "assistant" and first["finish_reason"] is None
        piece = event(CHAT.piece(AnswerChoice(0, "a\nb", None)))
        assert piece["object"] == "chat.completion.chunk"
        assert piece["choices"][0]["delta"] == {"content": "a\nb"}
        last = event(CHAT.piece(AnswerChoice(0, "", "stop")))
        assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
        usage = event(CHAT.end(TokenUsage(1, 2)).removesuffix(DONE))
        assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 3

    def test_usage_of_a_stream_of_text(self):
        found = event(FORM.end(TokenUsage(1, 2)).removesuffix(DONE))
        assert found["choices"] == [] and found["usage"]["completion_tokens"] == 2

    def test_models_and_errors(self):
        known = describe_model("smol", 5, 2048)
        model = json.loads(msgspec.json.encode(known))
        expected = {"id": "smol", "object": "model", "created": 5, "owned_by": "penstock"}
        assert model == {**expected, "max_model_len": 2048}
        found = json.loads(openai_error("no", "invalid_request_error", "n"))
        assert found == {
            "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": None}
        }


class TestTokens:
    def test_a_text_or_messages_and_not_both(self):
        asked = openai.read_tokenize(b'{"model": "m", "prompt": "a", "add_special_tokens": false}')
        assert (asked.prompt, asked.messages, asked.add_special_tokens) == ("a", None, False)
        message = {"role": "user", "content": "hi"}
        body = json.dumps({"model": "m", "messages": [message], "return_token_strs": True})
        asked = openai.read_tokenize(body.encode())
        assert asked.prompt is None and asked.messages == [message] and asked.return_token_strs
        for wrong in ({"model": "m"}, {"model": "m", "prompt": "a", "messages": [message]}):
            with pytest.raises(InvalidRequest, match="either prompt or messages"):
                openai.read_tokenize(json.dumps(wrong).encode())

    def test_options_of_the_template(self):
        message = {"role": "user", "content": "hi"}
        body = {"messages": [message], "add_generation_prompt": False}
        body["chat_template_kwargs"] = {"enable_thinking": True}
        asked = openai.read_tokenize(json.dumps(body).encode())
        assert template_options(asked) == {
            "add_generation_prompt": False,
            "enable_thinking": True,
        }

    def test_tokens_to_text(self):
        assert openai.read_detokenize(b'{"model": "m", "tokens": [1, 2]}') == ("m", [1, 2])
        with pytest.raises(InvalidRequest, match="tokens: token -1; expected 0 to ") as caught:
            openai.read_detokenize(b'{"model": "m", "tokens": [1, -1]}')
        assert caught.value.field == "tokens"


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([-1], "stop_token_ids: token -1; expected 0 to "),
        ([1 << 62], "stop_token_ids: token 4611686018427387904; expected 0 to "),
        (list(range(17)), "stop_token_ids: 17 tokens; expected at most 16"),
    ],
)
def test_stop_tokens_that_are_wrong_are_told(tokens, text):
    body = {"model": "m", "prompt": "a", "stop_token_ids": tokens}
    with pytest.raises(InvalidRequest, match=text) as caught:
        openai.read_completion(json.dumps(body).encode())
    assert caught.value.field == "stop_token_ids"


def test_likely_tokens_come_in_order_and_parts_of_characters_as_bytes():
    top = [(b"\xe6\x97", -0.1), (b"\xe6", -0.2), (b"a", -0.3), (b"a", -0.4), (b"b", -math.inf)]
    token = TokenLogprob(b"\xe6\x97", -0.1, top, offset=3)
    choice = AnswerChoice(0, "x", "stop", [token])
    told = json.loads(FORM.whole([choice], TokenUsage(1, 1)))["choices"][0]["logprobs"]
    assert told["tokens"] == [r"bytes:\xe6\x97"] and told["text_offset"] == [3]
    (found,) = told["top_logprobs"]
    expected = {r"bytes:\xe6\x97": -0.1, r"bytes:\xe6": -0.2, "a": -0.3, "b": -9999.0}
    assert list(found.items()) == list(expected.items())
    found = json.loads(CHAT.whole([choice], TokenUsage(1, 1)))["choices"][0]["logprobs"]
    assert found["content"][0]["bytes"] == [0xE6, 0x97]
    assert [each["bytes"] for each in found["content"][0]["top_logprobs"]][1] == [0xE6]


def test_an_error_quotes_little():
    found = json.loads(openai_error("x" * 1_000_000, "invalid_request_error"))
    assert len(found["error"]["message"]) < 1100


class TestPythonsWords:
    """Errors are ours: none has the text of a Python exception."""

    @pytest.mark.parametrize(
        ("raw", "expected"),
        [
            (b'{"model": "m", "prompt": "\xff"}', "not UTF-8"),
            (b'{"model": "m", "prompt": "a", "b": ' + b"[" * 100_000, "nested too deeply"),
        ],
    )
    def test_of_bodies(self, raw, expected):
        with pytest.raises(InvalidRequest, match=expected) as caught:
            openai.read_completion(raw)
        text = str(caught.value)
        assert "codec" not in text and "recursion" not in text.lower()
