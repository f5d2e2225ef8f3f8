"""What lies between a request for text and its answer; both protocols' tests go through it."""

import asyncio
import json
import logging
import threading
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from engine_thread import EngineThread
from text_server import NAME, posted, served
from tiny_text import TOKENIZER

from penstock.llm import engine_supervisor, language_model
from penstock.llm.renderer import MAX_SHORT, SLOTS, TextLimits
from penstock.llm.text import Text
from penstock.protocols.text_answers import salt_of
from penstock.wire.frames import SplitRule

# More than one token for a few characters.
LONG = "the cat sat on the mat " * 120
MODEL = {"model": NAME, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
GENERATE = f"/v2/models/{NAME}/generate"


def test_keys_do_not_share_prompts():
    salts = [
        salt_of({}),
        salt_of({b"authorization": b"Bearer a"}),
        salt_of({b"authorization": b"Bearer b"}),
        salt_of({b"x-api-key": b"c"}),
    ]
    assert len(set(salts)) == 4 and "Bearer" not in "".join(salts)


@pytest.fixture
def held(monkeypatch):
    """Long texts are encoded when this is set: by somebody who runs meanwhile."""
    may_go = threading.Event()
    may_go.num_long = 0
    encode = Text.encode

    def waiting(text, said, *, is_whole=True):
        if len(said) > MAX_SHORT:
            may_go.num_long += 1
            assert may_go.wait(60), "nobody runs meanwhile"
        return encode(text, said, is_whole=is_whole)

    monkeypatch.setattr(Text, "encode", waiting)
    return may_go


def run(folder, scenario, max_length=4000):
    async def whole():
        async with served(folder, max_length=max_length) as server, asyncio.timeout(120):
            return await scenario(server)

    return asyncio.run(whole())


async def asked_for_long(server):
    """By somebody who may leave."""
    data = json.dumps({**MODEL, "prompt": LONG}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + b"\r\n" + data)
    return writer


async def three_at_once(held, server):
    """Their statuses, the first that is known first; nothing is encoded before."""
    body = {**MODEL, "prompt": LONG}
    asked = [asyncio.ensure_future(posted(server, "/v1/completions", body)) for _ in range(3)]
    done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    held.set()
    return [each.result()[0] for each in done] + sorted([(await each)[0] for each in waiting])


class TestLongTexts:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {**MODEL, "prompt": LONG}),
            ("/v1/chat/completions", {**MODEL, "messages": [{"role": "user", "content": LONG}]}),
            ("/tokenize", {"model": NAME, "prompt": LONG}),
            ("/tokenize", {"model": NAME, "messages": [{"role": "user", "content": LONG}]}),
            (GENERATE, {"text_input": LONG, "max_tokens": 3}),
        ],
    )
    def test_others_are_answered_while_one_is_encoded(self, tmp_path, held, path, body):
        async def scenario(server):
            long = asyncio.ensure_future(posted(server, path, body))
            short = await posted(server, "/v1/completions", {**MODEL, "prompt": "the"})
            assert not long.done()
            held.set()
            return short[0], (await long)[0]

        assert run(tmp_path, scenario) == (200, 200)

    def test_several_come_in_order_and_are_what_short_ones_are(self, tmp_path, held):
        held.set()
        texts = [LONG, "the cat", LONG[4:], "on"]

        async def scenario(server):
            body = {**MODEL, "echo": True, "logprobs": 1}
            both = json.loads(
                (await posted(server, "/v1/completions", body | {"prompt": texts}))[2]
            )
            tokens = [TOKENIZER.encode(each).ids for each in texts]
            same = json.loads(
                (await posted(server, "/v1/completions", body | {"prompt": tokens}))[2]
            )
            return both["choices"], same["choices"]

        found, same = run(tmp_path, scenario)
        assert [each["index"] for each in found] == [0, 1, 2, 3]
        assert [each["text"] for each in found] == [each["text"] for each in same]
        for each, text in zip(found, texts, strict=True):
            assert each["text"].startswith(text)

    def test_what_is_wrong_with_one_is_told_as_of_a_short_one(self, tmp_path, held, monkeypatch):
        held.set()

        async def scenario(server):
            much = {**MODEL, "prompt": LONG, "max_tokens": 3000}
            found = [
                await posted(server, "/v1/completions", much),
                await posted(server, GENERATE, {"text_input": LONG, "max_tokens": 3000}),
            ]

            def broken(*_, **__):
                raise ValueError("no such letter")

            monkeypatch.setattr(Text, "encode", broken)
            found.append(await posted(server, "/v1/completions", {**MODEL, "prompt": LONG}))
            found.append(await posted(server, GENERATE, {"text_input": LONG}))
            return found, server.model.metrics.num_refused

        found, refused = run(tmp_path, scenario, max_length=1500)
        assert [status for status, _, _ in found] == [400, 400, 500, 500]
        assert json.loads(found[0][2])["error"]["code"] == "context_length_exceeded"
        assert json.loads(found[2][2])["error"]["message"] == "the tokenizer failed"
        assert b"the tokenizer failed" in found[3][2] and refused["invalid"] == 2

    def test_whoever_leaves_meanwhile_is_not_answered(self, tmp_path, held, caplog):
        caplog.set_level("INFO", logger="penstock.requests")

        async def scenario(server):
            writer = await asked_for_long(server)
            await posted(server, "/v1/completions", {**MODEL, "prompt": "the"})
            writer.transport.abort()
            await posted(server, "/v1/completions", {**MODEL, "prompt": "the"})
            held.set()
            await server.model.drain()

        with caplog.filtering(logging.Filter("penstock.requests")):
            run(tmp_path, scenario)
        assert [each.status for each in caplog.records] == [200, 200, 499]

    def test_texts_of_those_who_left_are_not_looked_at(self, tmp_path, held):
        """They would keep others waiting, who stayed."""

        async def scenario(server):
            writers = []
            for _ in range(SLOTS["long"] + 3):
                writers.append(await asked_for_long(server))
                await posted(server, "/v1/completions", {**MODEL, "prompt": "the"})
            for writer in writers:
                writer.transport.abort()
            await posted(server, "/v1/completions", {**MODEL, "prompt": "the"})
            held.set()
            await server.model.drain()

        run(tmp_path, scenario)
        assert held.num_long == SLOTS["long"]

    def test_so_much_and_no_more_waits_for_it(self, tmp_path, held, monkeypatch):
        limits = TextLimits(job_s=60, max_waiting_chars=2 * len(LONG) + 1)
        monkeypatch.setattr(language_model, "limits_of", lambda settings: limits)

        assert run(tmp_path, partial(three_at_once, held)) == [429, 200, 200]

    def test_a_server_that_ends_answers_it(self, tmp_path, held):
        async def scenario(server):
            long = asyncio.ensure_future(
                posted(server, "/v1/completions", {**MODEL, "prompt": LONG})
            )
            await posted(server, "/v1/completions", {**MODEL, "prompt": "the"})
            drained = asyncio.ensure_future(server.model.drain())
            await asyncio.sleep(0)
            assert not drained.done()
            held.set()
            await drained
            return (await long)[0]

        assert run(tmp_path, scenario) == 200

    def test_one_of_a_model_that_is_unloaded_is_told_so(self, tmp_path, held):
        async def scenario(server):
            long = asyncio.ensure_future(
                posted(server, "/v1/completions", {**MODEL, "prompt": LONG})
            )
            await posted(server, "/v1/completions", {**MODEL, "prompt": "the"})
            closed = asyncio.ensure_future(server.model.close())
            await asyncio.sleep(0.05)
            held.set()
            await closed
            return (await long)[0]

        assert run(tmp_path, scenario) == 503

    def test_so_many_and_no_more_wait_for_it(self, tmp_path, held):
        async def whole():
            limits = {"penstock.max_waiting": "2"}
            async with served(tmp_path, parameters=limits, max_length=4000) as server:
                async with asyncio.timeout(120):
                    return await three_at_once(held, server)

        assert asyncio.run(whole()) == [429, 200, 200]


def events_of(data):
    """What a stream said, chunks of the transfer coding put together."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return [each.removeprefix("data: ") for each in body.decode().split("\n\n") if each]


async def cut_off(server, path, body, end):
    """The events of a stream that `end` ends after its first piece."""
    asked = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(asked)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + asked)
    await reader.readuntil(b"\r\n\r\n")
    seen = await reader.readuntil(b"data: ")
    await end(server)
    seen += await reader.read()
    writer.close()
    return events_of(seen)


async def unload(server):
    await server.model.close()


async def kill(server):
    EngineThread.last.kill()


class TestStreamsThatAreCutOff:
    LONG = {**MODEL, "max_tokens": 3900, "n": 2}
    CASES = [(unload, "abort", "unloaded"), (kill, "error", "the engine was killed")]

    @pytest.mark.parametrize(("end", "reason", "text"), CASES)
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_every_choice_ends_with_a_reason_and_the_stream_with_the_error(
        self, tmp_path, path, end, reason, text
    ):
        chat = {"messages": [{"role": "user", "content": "the"}]}
        body = self.LONG | (chat if "chat" in path else {"prompt": "the"})
        *chunks, error, done = run(tmp_path, lambda server: cut_off(server, path, body, end))
        assert done == "[DONE]" and text in json.loads(error)["error"]["message"]
        last = {}
        for chunk in map(json.loads, chunks):
            for choice in chunk["choices"]:
                last[choice["index"]] = choice["finish_reason"]
        assert last == {0: reason, 1: reason}

    @pytest.mark.parametrize(("end", "reason", "text"), CASES)
    def test_generate_tells_too(self, tmp_path, end, reason, text):
        path, body = f"{GENERATE}_stream", {"text_input": "the", "max_tokens": 3900}
        body |= {"ignore_eos": True, "return_finish_reason": True}
        *events, error = run(tmp_path, lambda server: cut_off(server, path, body, end))
        assert text in json.loads(error)["error"]
        assert json.loads(events[-1])["finish_reason"] == reason


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", MODEL | {"prompt": "a"}), (GENERATE, {"text_input": "a"})],
)
def test_while_the_engine_restarts_clients_are_told_when_to_come_again(
    tmp_path, monkeypatch, path, body
):
    monkeypatch.setattr(engine_supervisor, "backoff_s", lambda num_deaths: 30.0)

    async def scenario(server):
        EngineThread.last.kill()
        while server.model.is_ready:
            await asyncio.sleep(0)
        return await posted(server, path, body)

    status, head, answer = run(tmp_path, scenario)
    assert status == 503 and b"not ready" in answer
    (line,) = [each for each in head.splitlines() if each.startswith("Retry-After: ")]
    assert 30 <= int(line.split()[1]) <= 60


CHAT = {"messages": [{"role": "user", "content": "the cat"}]}
CALLS = [
    ("/v1/completions", {**MODEL, "prompt": "the cat"}),
    ("/v1/completions", {**MODEL, "prompt": "the cat", "stream": True}),
    ("/v1/chat/completions", MODEL | CHAT),
    (GENERATE, {"text_input": "the cat", "max_tokens": 3}),
    (f"{GENERATE}_stream", {"text_input": "the cat", "max_tokens": 3}),
]


async def split(server, mode="canary", **changes):
    """Version 2 is the candidate, with the same weights; return what splits the requests."""
    await server.catalog.add_candidate(replace(server.model.config, version="2"))
    options = {"header": "Penstock-Version", "max_kl": 0.02} | changes
    assert await server.catalog.split(NAME, SplitRule(1, mode, "2", **options))
    return server.catalog.splits[NAME]


async def until(holds):
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.002)


class TestRollouts:
    def test_a_header_names_the_version_and_answers_say_which_it_was(self, tmp_path):
        async def scenario(server):
            found = await split(server, share=0.5)
            for path, body in CALLS:
                for named, version in (("candidate", "2"), ("1", "1")):
                    header = f"Penstock-Version: {named}\r\n"
                    status, head, data = await posted(server, path, body, header)
                    assert status == 200, data
                    assert f"Penstock-Version: {version}\r\n" in f"{head}\r\n"
                    if "generate" in path:
                        assert f'"model_version":"{version}"'.encode() in data
                status, _, data = await posted(server, path, body, "Penstock-Version: 9\r\n")
                assert status == 400 and b"no version of the rollout" in data
            for side in (found.counts.stable, found.counts.candidate):
                assert side.num_requests == side.count("ttft") == side.count("length") == len(CALLS)

        run(tmp_path, scenario)

    def test_a_share_goes_to_the_candidate_and_a_path_names_its_version(self, tmp_path):
        async def scenario(server):
            found = await split(server, share=1.0)
            path, body = CALLS[0]
            assert "Penstock-Version: 2" in (await posted(server, path, body))[1]
            for version in ("1", "2"):
                path = f"/v2/models/{NAME}/versions/{version}/generate"
                status, head, data = await posted(server, path, CALLS[3][1])
                assert status == 200 and f'"model_version":"{version}"'.encode() in data
                assert "Penstock-Version" not in head
            assert found.counts.candidate.num_requests == 1
            status, _, data = await posted(server, "/v1/models", b"", method="GET")
            assert [each["id"] for each in json.loads(data)["data"]] == [NAME]
            status, _, data = await posted(server, "/tokenize", {"prompt": "the cat"})
            assert status == 200, "the only model"
            # What the renderer refuses is the client's fault.
            refused = await posted(server, CALLS[0][0], {**MODEL, "prompt": "", "max_tokens": 9999})
            assert refused[0] == 400 and found.counts.candidate.num_requests == 1

        run(tmp_path, scenario)

    def test_answers_of_equal_weights_are_equally_likely(self, tmp_path):
        async def scenario(server):
            found = await split(server, share=0.5, mirrored_per_s=1e6)
            for number, (path, body) in enumerate(CALLS * 2, 1):
                header = f"Penstock-Version: {1 + number % 2}\r\n"
                assert (await posted(server, path, body, header))[0] == 200
                await until(lambda number=number: found.counts.num_mirrored == number)
            counts = found.counts
            assert (counts.num_compared, counts.num_disagreeing) == (len(CALLS) * 2, 0)
            assert counts.outputs["log-probability"].max_distance < 1e-3
            for model in (found.stable, found.candidate):
                assert model.metrics.num_success == len(CALLS), "mirrors do not count"
                ended = model.part.metrics.num_ended
                assert sum(ended.values()) == len(CALLS)

        run(tmp_path, scenario)

    def test_a_shadow_answers_nothing(self, tmp_path):
        async def scenario(server):
            found = await split(server, "shadow", mirrored_per_s=1e6)
            for number, (path, body) in enumerate(CALLS, 1):
                header = "Penstock-Version: candidate\r\n"
                status, head, _ = await posted(server, path, body, header)
                assert status == 200 and "Penstock-Version: 1" in head
                await until(lambda number=number: found.counts.num_mirrored == number)
            candidate = found.counts.candidate
            assert candidate.count("ttft") == candidate.count("tpot") == len(CALLS)
            assert candidate.totals["length"] == found.counts.stable.totals["length"]
            assert found.counts.num_disagreeing == 0
            assert found.candidate.part.metrics.num_prompt_tokens == 0
            path = f"/v2/models/{NAME}/versions/2/generate"
            assert (await posted(server, path, CALLS[3][1]))[0] == 404

        run(tmp_path, scenario)

    def test_a_client_that_leaves_late_is_counted(self, tmp_path):
        async def scenario(server):
            found = await split(server, share=1.0, limits=(("latency", 1e-6),))
            body = {**MODEL, "prompt": "the cat", "max_tokens": 3900, "stream": True}
            data = json.dumps(body).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            writer.write(head.encode() + b"\r\n" + data)
            await reader.readuntil(b"data: ")
            writer.close()
            await until(lambda: found.counts.candidate.late == [1])
            assert found.counts.candidate.num_failed == 0

        run(tmp_path, scenario)
