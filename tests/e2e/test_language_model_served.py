"""A language model behind a real server: its engine is a process, clients are OpenAI's."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from child_processes import children_running
from served import Served

pytest.importorskip("torch")
pytest.importorskip("tokenizers")
openai = pytest.importorskip("openai")

from text_server import NAME, WITH_TOOLS, write_model  # noqa: E402

BODY = {"model": NAME, "prompt": "the cat sat", "max_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {"penstock.max_num_seqs": "32", "penstock.kv_cache_bytes": str(8 << 20)}
    return write_model(tmp_path_factory.mktemp("text"), limits, template=WITH_TOOLS)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    served = Served(folder, "--drain-s", "5")
    yield served
    assert served.terminate() == 0


def a_client(served: Served) -> "openai.OpenAI":
    return openai.OpenAI(
        base_url=f"http://{served.address}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    )


def metrics(served: Served) -> dict[str, float]:
    """Of language models, by name."""
    _, text = served.get("/metrics")
    found = {}
    for line in text.decode().splitlines():
        if line.startswith("penstock:"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] = float(value)
    return found


def until_idle(served: Served, timeout_s: float) -> float:
    """Seconds until nothing runs, nothing waits and no block is held."""
    began = time.monotonic()
    busy = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(metrics(served)[f"penstock:{name}"] for name in busy):
        assert time.monotonic() - began < timeout_s, metrics(served)
        time.sleep(0.05)
    return time.monotonic() - began


def engines(served: Served) -> list[int]:
    core = psutil.Process(served.process.pid)
    return [each.pid for each in children_running("penstock.llm.engine_main", core)]


def test_a_chat_whole_and_streamed(served: Served):
    client = a_client(served)
    asked = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}]}
    asked |= {"max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    began = time.monotonic()
    pieces = [(time.monotonic() - began, piece) for piece in
              client.chat.completions.create(**asked, stream=True)]  # fmt: skip
    texts = [piece.choices[0].delta.content or "" for _, piece in pieces]
    assert "".join(texts) == whole.choices[0].message.content
    # Not all at once: the first came before the last was made.
    assert pieces[0][0] < pieces[-1][0]


def test_structured_output_tools_and_responses(served: Served):
    """By processes that compile grammars and compute masks."""
    pytest.importorskip("llguidance")
    client = a_client(served)
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}},
            "required": ["city"], "additionalProperties": False}  # fmt: skip
    chat = {"model": NAME, "messages": [{"role": "user", "content": "the cat"}]}
    chat |= {"max_tokens": 180, "seed": 3}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": city}}
    for _ in range(2):
        (choice,) = client.chat.completions.create(**chat, response_format=shape).choices
        assert choice.finish_reason == "stop" and list(json.loads(choice.message.content)) == [
            "city"
        ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
    (choice,) = client.chat.completions.create(
        **chat, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ).choices
    assert choice.finish_reason == "tool_calls"
    assert list(json.loads(choice.message.tool_calls[0].function.arguments)) == ["city"]
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.chat.completions.create(**chat, extra_body={"guided_regex": "("})
    form = {"format": {"type": "json_schema", "name": "x", "schema": city}}
    response = client.responses.create(
        model=NAME, input="the cat", text=form, extra_body={"seed": 3}
    )
    assert list(json.loads(response.output_text)) == ["city"]


def test_the_second_of_two_that_begin_alike_is_found(served: Served):
    client = a_client(served)
    prompt = "on the mat " * 12
    first, second = (
        client.completions.create(model=NAME, prompt=prompt, max_tokens=2) for _ in range(2)
    )
    known = [each.usage.prompt_tokens_details.cached_tokens for each in (first, second)]
    assert known[0] < known[1] and known[1] >= first.usage.prompt_tokens - 17


async def stream(served: Served, num_pieces: int) -> tuple[int, bytes]:
    """Reads so many pieces of an answer, then leaves without a word; or to the end. Status, and
    what was seen."""
    body = json.dumps({**BODY, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    seen = b""
    try:
        while seen.count(b"data: ") < num_pieces:
            data = await reader.read(4096)
            if not data:
                break
            seen += data
    finally:
        writer.transport.abort()
    return int(seen.split()[1]) if seen else 0, seen


@pytest.mark.verify
@pytest.mark.timeout(120)
def test_a_hundred_that_leave_in_the_middle_leave_nothing_behind(served: Served):
    until_idle(served, 10)

    async def all_of_them() -> list[tuple[int, bytes]]:
        return await asyncio.gather(*(stream(served, 1 + number % 5) for number in range(100)))

    found = asyncio.run(all_of_them())
    took_s = until_idle(served, 5)
    num_left = sum(status == 200 for status, _ in found)
    print(f"\n{num_left} streams were left; idle {took_s:.2f} s later")
    assert {status for status, _ in found} <= {200, 429} and took_s < 1.0
    assert a_client(served).completions.create(model=NAME, prompt="the", max_tokens=2).choices


@pytest.mark.verify
@pytest.mark.timeout(120)
def test_an_engine_that_is_killed_under_load_is_told_and_comes_back(served: Served):
    until_idle(served, 10)

    async def load_and_kill() -> list[tuple[int, bytes]]:
        asked = [asyncio.ensure_future(stream(served, 10_000)) for _ in range(24)]
        await asyncio.wait([asyncio.ensure_future(stream(served, 1))])
        (pid,) = engines(served)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            return await asyncio.gather(*asked)

    found = asyncio.run(load_and_kill())
    # Whoever had not all of it was told why, in the stream or by the status.
    for status, seen in found:
        assert b"the engine" in seen or b"[DONE]" in seen, (status, seen[-300:])
    assert any(b"the engine" in seen for _, seen in found)
    client = a_client(served)
    began = time.monotonic()
    while True:
        try:
            assert client.completions.create(model=NAME, prompt="the", max_tokens=2).choices
            break
        except openai.InternalServerError:
            assert time.monotonic() - began < 60
            time.sleep(0.2)
    print(f"\nserving again {time.monotonic() - began:.1f} s after the kill")
    until_idle(served, 5)


def test_streams_are_told_when_the_drain_period_ends(tmp_path: Path):
    folder = write_model(tmp_path, {"penstock.kv_cache_bytes": str(64 << 20)}, max_length=4000)
    served = Served(folder, "--drain-s", "0.2")
    body = {**BODY, "max_tokens": 3900, "n": 8, "stream": True}

    async def streamed() -> bytes:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        seen = await reader.readuntil(b"data: ")
        served.process.send_signal(signal.SIGTERM)
        seen += await reader.read()
        writer.close()
        return seen

    seen = asyncio.run(streamed())
    assert seen.count(b'"finish_reason":"abort"') == 8
    assert b'"error":{"message":"model' in seen and b"data: [DONE]" in seen
    assert served.finish([]) == 0
