"""The OpenAI target: one answer with a clock of its own, and a small real server."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from benchmark.fake_openai import FakeOpenAI
from doubles import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from suites.target import NetworkTargetContract, Sent, assert_good

from penstock.benchmark.exchange import Collector, TimedExchange, floats
from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.http_messages import Causes
from penstock.benchmark.targets.openai import (
    MAX_EVENT_BYTES,
    EventParser,
    NotEvents,
    OpenAI,
    StreamReader,
    find_place,
    parse_extra,
)
from penstock.data import Sample
from penstock.errors import ConfigError

EVENT_STREAM = {b"content-type": b"text/event-stream; charset=utf-8"}
FIRST = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":5}}\n\n'
LAST = b"data: [DONE]\n\n"


def piece(**delta: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"delta": delta}]}).encode()


def completion(text: str) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"text": text}]}).encode()


class Answered:
    """An answer whose chunks come a second apart, from 1001 on."""

    def __init__(
        self, *chunks: bytes, status: int = 200, headers: dict[bytes, bytes] = EVENT_STREAM
    ) -> None:
        clock = FakeClock(1000.0)
        self.exchange = TimedExchange(1000.0, b"", lambda exchange: None)
        reader = StreamReader(self.exchange, Causes(), clock)
        reader.head(status, headers)
        for chunk in chunks:
            clock.advance(1.0)
            reader.chunk(chunk)
        self.failure = reader.end()

    @property
    def times(self) -> list[float]:
        assert self.exchange.stream is not None
        return self.exchange.stream.times

    @property
    def num_tokens(self) -> tuple[int, int]:
        assert self.exchange.stream is not None
        return self.exchange.stream.num_input_tokens, self.exchange.stream.num_output_tokens


# One answer


def test_pieces_have_the_times_at_which_they_came() -> None:
    answered = Answered(FIRST, piece(content="a"), piece(content="b"), USAGE + LAST)
    assert answered.failure is None
    assert answered.times == [1002.0, 1003.0]
    assert answered.num_tokens == (11, 5)


def test_pieces_that_come_together_have_the_same_time() -> None:
    answered = Answered(FIRST + piece(content="a") + piece(content="b"), LAST)
    assert answered.times == [1001.0, 1001.0]


def test_a_piece_that_is_cut_has_the_time_of_its_end() -> None:
    whole = piece(content="a")
    for cut in range(1, len(whole) - 1):
        answered = Answered(whole[:cut], whole[cut:], LAST)
        assert answered.times == [1002.0]
        assert answered.failure is None


def test_without_usage_pieces_are_counted() -> None:
    answered = Answered(piece(content="a"), piece(content="b"), LAST)
    assert answered.num_tokens == (0, 2)


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning", "refusal"])
def test_text_of_every_kind_is_a_piece(field: str) -> None:
    assert Answered(piece(**{field: "x"}), LAST).times == [1001.0]


def test_calls_of_tools_are_pieces() -> None:
    call = [{"index": 0, "function": {"arguments": "{"}}]
    assert Answered(piece(tool_calls=call), LAST).times == [1001.0]


@pytest.mark.parametrize(
    "empty",
    [
        FIRST,
        piece(),
        piece(content=None),
        piece(content="", reasoning_content=None, tool_calls=[]),
        b": ping\n\n",
        b'data: {"choices":[]}\n\n',
        b'data: {"choices":null,"id":"x"}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
    ],
)
def test_what_has_no_text_is_no_piece(empty: bytes) -> None:
    answered = Answered(empty, piece(content="a"), empty, LAST)
    assert answered.failure is None
    assert answered.times == [1002.0]


def test_pieces_of_completions() -> None:
    answered = Answered(completion(""), completion("a"), completion("b"), USAGE, LAST)
    assert answered.times == [1002.0, 1003.0]


def test_usage_told_all_the_time_counts_as_it_was_last() -> None:
    def told(num_tokens: int) -> bytes:
        usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
        return (
            b"data: %s\n\n"
            % json.dumps({"choices": [{"delta": {"content": "x"}}], "usage": usage}).encode()
        )

    answered = Answered(told(2), told(7), LAST)
    assert answered.num_tokens == (3, 7)
    assert answered.times == [1001.0, 1002.0]


def test_nothing_after_done_counts() -> None:
    answered = Answered(piece(content="a"), LAST + piece(content="b"), b"data: {\n\n")
    assert answered.failure is None
    assert answered.times == [1001.0]


@pytest.mark.parametrize(
    ("chunks", "failure"),
    [
        ([], "stream cut"),
        ([piece(content="a")], "stream cut"),
        ([piece(content="a"), USAGE], "stream cut"),
        ([LAST], "empty answer"),
        ([FIRST, USAGE, LAST], "empty answer"),
        (
            [piece(content="a"), b'data: {"error":{"message":"took 5.2 s"}}\n\n', LAST],
            "error in the stream: took N s",
        ),
        ([b'data: {"error":"bad"}\n\n', LAST], "error in the stream: bad"),
        ([b'data: {"choices": 5}\n\n'], "error in the stream: Expected"),
        ([b"data: {\n\n", LAST], "error in the stream: Input data was truncated"),
        ([b"data: \xff\n\n", LAST], "error in the stream: "),
        ([b"data: " + b"x" * (2 << 20), LAST], "error in the stream: an event is longer than"),
    ],
)
def test_answers_that_are_no_good(chunks: list[bytes], failure: str) -> None:
    told = Answered(*chunks).failure
    assert told is not None
    assert told.startswith(failure)


def test_a_status_is_told_with_its_text() -> None:
    body = b'{"error": {"message": "slow down"}}'
    answered = Answered(body[:10], body[10:], status=429, headers={})
    assert answered.failure == "status 429: slow down"
    assert answered.exchange.stream is None


def test_an_answer_that_is_not_streamed_is_told_as_such() -> None:
    headers = {b"content-type": b"application/json"}
    answered = Answered(b'{"choices": []}', headers=headers)
    assert answered.failure == "the answer is no event stream but application/json"
    assert Answered(headers={}).failure == "the answer is no event stream but of no content type"


# A server


@pytest.fixture(scope="module")
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI().in_thread() as fake:
        yield fake


def chat(text: str = "hello", max_tokens: int | None = 3) -> Sample:
    return Sample(fields={"messages": [{"role": "user", "content": text}]}, max_tokens=max_tokens)


class TestChat(NetworkTargetContract):
    @pytest.fixture(autouse=True)
    def _served(self, server: FakeOpenAI) -> None:
        self._port = server.port

    def port(self) -> int:
        return self._port

    def spec_at(self, port: int, max_connections: int = 64) -> TargetSpec:
        address = f"openai+http://127.0.0.1:{port}/v1"
        return TargetSpec(address, max_connections=max_connections, timeout_s=20.0)

    def sample(self) -> Sample:
        return chat()

    def misfit(self) -> Sample:
        return Sample(fields={"prompt": "for completions"})


class TestCompletions(TestChat):
    def spec_at(self, port: int, max_connections: int = 64) -> TargetSpec:
        address = f"http://127.0.0.1:{port}/v1/completions"
        return TargetSpec(address, max_connections=max_connections, timeout_s=20.0)

    def sample(self) -> Sample:
        return Sample(fields={"prompt": "hello"}, max_tokens=3)

    def misfit(self) -> Sample:
        return chat()


def conversing(
    fake: FakeOpenAI, body: Callable[[OpenAI], Coroutine[Any, Any, Any]], **settings: Any
) -> Any:
    """With a fake of one's own, in one event loop."""

    async def whole() -> Any:
        async with fake.listening(), asyncio.timeout(60):
            target = OpenAI(TargetSpec(fake.address, **settings))
            try:
                return await body(target)
            finally:
                await target.close()

    return asyncio.run(whole())


def described(fake: FakeOpenAI, **settings: Any) -> Any:
    return conversing(fake, lambda target: target.describe(), **settings)


def problem(fake: FakeOpenAI, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        described(fake, **settings)
    (text,) = caught.value.problems
    return text


def answered(fake: FakeOpenAI, sample: Sample, **settings: Any) -> TimedExchange:
    async def body(target: OpenAI) -> TimedExchange:
        await target.describe()
        await target.open(1)
        return await Sent(target, target.encode(sample)).end()

    exchange: TimedExchange = conversing(fake, body, **settings)
    return exchange


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_times_follow_the_law_of_the_server(line_end: str) -> None:
    fake = FakeOpenAI(ttft_s=0.05, gap_s=0.01, line_end=line_end)
    exchange = answered(fake, chat("one two three", max_tokens=8))
    assert_good(exchange)
    stream = exchange.stream
    assert stream is not None
    assert len(stream.times) == 8
    assert stream.times == sorted(stream.times)
    # Not earlier than the law; how much later is this machine's business.
    assert stream.times[0] - exchange.sent >= 0.05
    assert stream.times[-1] - exchange.sent >= 0.05 + 7 * 0.01
    assert exchange.done >= stream.times[-1]
    assert stream.num_output_tokens == 8
    assert stream.num_input_tokens > 0


def test_what_is_collected_of_a_stream() -> None:
    exchange = answered(FakeOpenAI(gap_s=0.005, num_reasoning=2), chat(max_tokens=5))
    collector = Collector()
    collector.add(exchange)
    columns = collector.take()
    assert len(floats(columns.gaps)) == 4
    assert exchange.stream is not None
    times = exchange.stream.times
    assert floats(columns.tpot) == [pytest.approx((times[-1] - times[0]) / 4)]
    (first,) = floats(columns.first)
    assert exchange.sent < first < exchange.done


def test_a_stall_is_seen_between_two_tokens() -> None:
    exchange = answered(FakeOpenAI(), chat("stall:0.6", max_tokens=3))
    assert exchange.stream is not None
    times = exchange.stream.times
    assert times[1] - times[0] >= 0.1, "the stall, less what a busy machine delays the first token"


def test_without_usage_pieces_are_the_tokens() -> None:
    exchange = answered(FakeOpenAI(has_usage=False), chat(max_tokens=6))
    assert exchange.stream is not None
    assert exchange.stream.num_output_tokens == 6
    assert exchange.stream.num_input_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "failure"),
    [
        ("fail:429", "status 429: refused, request 3"),
        ("fail:500", "status 500: refused, request 3"),
        ("cut:0", "stream cut"),
        ("cut:2", "stream cut"),
        ("end:2", "stream cut"),
        ("error:1", "error in the stream: out of memory"),
    ],
)
def test_failures_are_told_by_their_cause(prompt: str, failure: str) -> None:
    exchange = answered(FakeOpenAI(), chat(prompt, max_tokens=4))
    assert exchange.failure == failure
    assert exchange.sent <= exchange.done


def test_a_failure_spoils_nothing_for_the_next() -> None:
    async def body(target: OpenAI) -> None:
        await target.describe()
        await target.open(1)
        for prompt in ("fail:503", "cut:1", "end:1", "error:1"):
            assert (await Sent(target, target.encode(chat(prompt))).end()).failure
            assert_good(await Sent(target, target.encode(chat())).end())

    conversing(FakeOpenAI(), body, max_connections=1)


def test_an_answer_that_takes_too_long_is_none() -> None:
    exchange = answered(FakeOpenAI(ttft_s=20.0), chat(), timeout_s=0.1)
    assert exchange.failure == "no answer within 0.1 s"
    assert exchange.done - exchange.sent >= 0.1


# What is sent


def request_of(fake: FakeOpenAI, sample: Sample, **settings: Any) -> tuple[str, Any, Any]:
    assert_good(answered(fake, sample, **settings))
    return fake.asked[-1]


def test_the_request_of_a_chat() -> None:
    path, headers, body = request_of(FakeOpenAI(), chat("hé"), api_key="secret")
    assert path == "/v1/chat/completions"
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer secret"
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hé"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
    }


def test_the_request_of_a_completion() -> None:
    sample = Sample(fields={"prompt": "hi"})
    path, headers, body = request_of(FakeOpenAI(), sample, api="completions")
    assert path == "/v1/completions"
    assert "authorization" not in headers
    assert body["prompt"] == "hi"
    assert "max_tokens" not in body


def test_further_fields_are_added_and_null_takes_away() -> None:
    extra = '{"ignore_eos": true, "temperature": 0.5, "stream_options": null}'
    _, headers, body = request_of(FakeOpenAI(), chat(), extra=extra, headers={"X-Team": "a"})
    assert (body["ignore_eos"], body["temperature"]) == (True, 0.5)
    assert "stream_options" not in body
    assert headers["x-team"] == "a"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ("{", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ('{"stream": false}', "always streamed"),
    ],
)
def test_further_fields_that_make_no_sense(extra: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_extra(extra)


def test_a_sample_that_is_no_json() -> None:
    async def body(target: OpenAI) -> None:
        await target.describe()
        with pytest.raises(ConfigError, match="'messages' cannot be written as JSON"):
            target.encode(Sample(fields={"messages": [object()]}))
        with pytest.raises(ConfigError, match="expected 'messages' for OpenAI chat, got prompt"):
            target.encode(Sample(fields={"prompt": "x"}))

    conversing(FakeOpenAI(), body)


# What it is


def test_describes_itself() -> None:
    told, form = described(FakeOpenAI())
    assert (told.protocol, told.model, told.server) == ("OpenAI chat", "tiny", "fake 1.2.3")
    assert form.kind == "messages"
    told, form = described(FakeOpenAI(), api="completions")
    assert (told.protocol, form.kind) == ("OpenAI completions", "prompt")


def test_a_server_is_named_by_its_header_or_by_who_owns_its_models() -> None:
    told, _ = described(FakeOpenAI(server_header="llama.cpp", version=""))
    assert told.server == "llama.cpp"
    told, _ = described(FakeOpenAI(server_header="", version=""))
    assert told.server == "fake"


def test_the_model_is_found_or_asked_for() -> None:
    several = FakeOpenAI(models=("b", "a"))
    assert described(several, model="a")[0].model == "a"
    where = f"http://127.0.0.1:{several.port}/v1/models"
    text = problem(several)
    assert text == f"{where}: say by --model which one is meant; there is a, b"
    assert problem(several, model="c") == f"{where}: no model 'c'; there is a, b"
    assert problem(FakeOpenAI(models=())).endswith("there is none at all")


def test_a_server_without_a_list_of_models_needs_a_name() -> None:
    missing = {"/v1/models": (404, "application/json", b"{}")}
    assert described(FakeOpenAI(answers=missing), model="m")[0].model == "m"
    assert "this is no OpenAI server (status 404)" in problem(FakeOpenAI(answers=missing))


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": {}}', b"\xff"])
def test_something_else_answers(body: bytes) -> None:
    page = {"/v1/models": (200, "text/html", body)}
    assert "this is no OpenAI server (" in problem(FakeOpenAI(answers=page), model="m")


def test_a_key_is_asked_for_and_used() -> None:
    text = problem(FakeOpenAI(api_key="secret"))
    assert text.endswith("invalid api key; give a key by --api-key or PENSTOCK_API_KEY")
    assert described(FakeOpenAI(api_key="secret"), api_key="secret")[0].model == "tiny"


@pytest.mark.parametrize(
    ("address", "base", "api"),
    [
        ("openai+http://h:1/v1", "/v1", "chat"),
        ("openai+http://h:1/v1/", "/v1", "chat"),
        ("openai+http://h:1", "/v1", "chat"),
        ("openai+https://h/proxy/v1", "/proxy/v1", "chat"),
        ("openai+http://h:1/v1/chat/completions", "/v1", "chat"),
        ("openai+http://h:1/v1/completions", "/v1", "completions"),
        ("http://h:1/v1/completions", "/v1", "completions"),
    ],
)
def test_addresses(address: str, base: str, api: str) -> None:
    place = find_place(TargetSpec(address))
    assert (place.base, place.api) == (base, api)
    assert place.url.host == "h"


@pytest.mark.parametrize(
    "spec",
    [
        TargetSpec("openai+ftp://h/v1"),
        TargetSpec("openai+http:///v1"),
        TargetSpec("openai+http://h/v1?x=1"),
        TargetSpec("openai+http://h/v1", api="embeddings"),
        TargetSpec("openai+http://h/v1", api_key="two\nlines"),
    ],
)
def test_addresses_that_make_no_sense(spec: TargetSpec) -> None:
    with pytest.raises(ConfigError):
        OpenAI(spec)


def test_pieces_have_the_times_of_the_clock_that_exchanges_use() -> None:
    before = time.monotonic()
    exchange = answered(FakeOpenAI(), chat())
    assert exchange.stream is not None
    assert before <= exchange.stream.times[0] <= time.monotonic()


# Server-sent events, cut anywhere

STREAM = (
    b"\n: a comment\nevent: message\nid: 7\nretry: 5\ndata: one\n\n"
    b"data:two\ndata:  lines\n\n\n\n"
    b'data\n\ndata: {"x": "\xc3\xa9"}\n\nother: data: no\n\n: data: no\n\ndata: [DONE]\n\n'
)
PARSED_EVENTS = [b"one", b"two\n lines", b"", b'{"x": "\xc3\xa9"}', b"[DONE]"]


def parsed(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_whatever_ends_a_line(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    assert parsed(stream) == PARSED_EVENTS
    assert parsed(*(stream[i : i + 1] for i in range(len(stream)))) == PARSED_EVENTS
    for cut in range(len(stream)):
        assert parsed(stream[:cut], b"", stream[cut:]) == PARSED_EVENTS


@given(
    st.lists(st.sampled_from([b"data: a", b"data", b":", b"x: y", b"", b"\r", b"\n", b"\r\n"])),
    st.lists(st.integers(0, 60)),
)
def test_where_it_is_cut_makes_no_difference(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"\r\n".join(lines)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert parsed(*pieces) == parsed(stream)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_an_event_is_there_with_its_last_byte(line_end: bytes) -> None:
    """Its time is what is measured: nothing may wait for the next one."""
    parser = EventParser()
    event = b"data: x" + line_end + line_end
    for _ in range(3):
        # Of a CRLF the first half says it all.
        whole = event.removesuffix(b"\n") if line_end == b"\r\n" else event
        assert parser.feed(whole[:-1]) == []
        assert parser.feed(whole[-1:]) == [b"x"]
        assert parser.feed(event[len(whole) :]) == []


def test_an_event_without_its_empty_line_counts_at_the_end() -> None:
    assert parsed(b"data: [DONE]") == [b"[DONE]"]
    assert parsed(b"data: [DONE]\n") == [b"[DONE]"]
    assert parsed(b"") == []


def test_an_absurd_event_is_refused() -> None:
    parser = EventParser()
    with pytest.raises(NotEvents, match="longer than"):
        parser.feed(b"data: " + b"x" * MAX_EVENT_BYTES)
    parser = EventParser()
    line = b"data: " + b"x" * 1000 + b"\n"
    with pytest.raises(NotEvents, match="longer than"):
        for _ in range(MAX_EVENT_BYTES // 1000 + 1):
            parser.feed(line)
