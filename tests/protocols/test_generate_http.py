"""Triton's generate extension with a real language model, over real sockets."""

import asyncio
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from engine_thread import EngineThread
from text_server import NAME, posted, served

PATH = f"/v2/models/{NAME}/generate"
GREEDY = {"text_input": "the cat", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def run(folder, scenario, **options):
    async def whole():
        async with served(folder, **options) as server, asyncio.timeout(120):
            return await scenario(server)

    return asyncio.run(whole())


def events(body):
    """Without the lengths of chunks: an event is one line."""
    lines = [each for each in body.split(b"\r\n") if each.startswith(b"data: ")]
    return [json.loads(each[6:]) for line in lines for each in line.split(b"\n\n") if each]


def test_whole_and_as_events_it_is_the_same_text(tmp_path):
    async def scenario(server):
        whole = await posted(server, PATH, GREEDY)
        bare = await posted(server, PATH, {**GREEDY, "exclude_input_in_output": True, "id": "x"})
        stream = await posted(server, f"{PATH}_stream", {**GREEDY, "return_finish_reason": True})
        versioned = f"/v2/models/{NAME}/versions/1/generate_stream"
        one = await posted(server, versioned, {**GREEDY, "stream": False})
        plain = await posted(
            server,
            "/v1/completions",
            {"model": NAME, "prompt": "the cat", "max_tokens": 6, "temperature": 0}
            | {"ignore_eos": True},
        )
        return whole, bare, stream, one, json.loads(plain[2])["choices"][0]["text"]

    whole, bare, stream, one, text = run(tmp_path, scenario)
    expected = {"model_name": NAME, "model_version": "1", "text_output": "the cat" + text}
    assert whole[0] == 200 and json.loads(whole[2]) == expected
    assert json.loads(bare[2]) == {**expected, "id": "x", "text_output": text}
    assert stream[0] == 200 and "Content-Type: text/event-stream; charset=utf-8" in stream[1]
    pieces = events(stream[2])
    assert "".join(each["text_output"] for each in pieces) == text and len(pieces) > 1
    assert pieces[-1]["finish_reason"] == "length" and pieces[0]["finish_reason"] == "None"
    assert "text/event-stream" in one[1] and events(one[2]) == [expected]
    assert b"DONE" not in stream[2]


def test_several_and_what_else_is_asked_for(tmp_path):
    async def scenario(server):
        body = {**GREEDY, "n": 2, "return_finish_reason": True, "return_num_output_tokens": True}
        return await posted(server, PATH, body)

    status, _, body = run(tmp_path, scenario)
    found = json.loads(body)
    assert status == 200 and found["finish_reason"] == ["length"] * 2
    assert len(set(found["text_output"])) == 1 and found["num_output_tokens"] == 12


def test_what_is_refused_has_v2s_form_and_counts(tmp_path):
    async def scenario(server):
        found = [
            await posted(server, PATH, {"text_input": 3}),
            await posted(server, PATH, b"{"),
            await posted(server, PATH, {**GREEDY, "max_tokens": 1000}),
            await posted(server, f"{PATH}_stream", {**GREEDY, "top_p": 7}),
            await posted(server, "/v2/models/nobody/generate", GREEDY),
            await posted(server, f"/v2/models/{NAME}/versions/7/generate", GREEDY),
            await posted(server, PATH, GREEDY, method="GET"),
        ]
        server.lifecycle.drain()
        found.append(await posted(server, PATH, GREEDY))
        return found, server.model.metrics.num_refused

    found, refused = run(tmp_path, scenario)
    assert [status for status, _, _ in found] == [400, 400, 400, 400, 404, 404, 405, 503]
    assert all(list(json.loads(body)) == ["error"] for _, _, body in found)
    assert b"text_input: expected one text" in found[0][2] and b"together" in found[2][2]
    assert refused["invalid"] == 4 and refused["not_ready"] == 1


def test_a_full_queue_refuses_with_when_to_come_again(tmp_path):
    async def scenario(server):
        body = {**GREEDY, "max_tokens": 100}
        return await asyncio.gather(*(posted(server, PATH, body) for _ in range(12)))

    limits = {"penstock.max_num_seqs": "1", "penstock.max_waiting": "2"}
    found = run(tmp_path, scenario, parameters=limits)
    refused = [head for status, head, _ in found if status == 503]
    assert refused and all("Retry-After: 1" in head for head in refused)


def test_an_engine_that_dies_is_told_in_the_stream(tmp_path):
    async def scenario(server):
        body = json.dumps({**GREEDY, "max_tokens": 200}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {PATH}_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await reader.readuntil(b"data: ")
        EngineThread.last.kill()
        rest = await reader.read()
        writer.close()
        return rest

    assert "the engine was killed" in events(run(tmp_path, scenario))[-1]["error"]
