"""A language model behind a real server whose requests are taken by several shards, each with a
renderer process; the engine is one process."""

import asyncio
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from child_processes import children_running
from served import Served
from waiting import wait_until

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from text_server import NAME, write_model

CHAT = [{"role": "user", "content": "the cat"}]
GREEDY = {"model": NAME, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
SEEDED = {"model": NAME, "max_tokens": 12, "temperature": 1.1, "seed": 11, "n": 2}
# What is asked, and whether as a stream.
QUESTIONS = [
    ("/v1/completions", {**GREEDY, "prompt": "the cat sat"}),
    ("/v1/completions", {**SEEDED, "prompt": ["the cat", "def f(x):"]}),
    # Alone in each step: otherwise its last digits depend on who else is.
    ("/v1/completions", {**SEEDED, "prompt": "the cat", "n": 1, "logprobs": 2}),
    ("/v1/completions", {**GREEDY, "prompt": [5, 6, 7], "echo": True, "stream": True}),
    ("/v1/chat/completions", {**GREEDY, "messages": CHAT}),
    ("/v1/chat/completions", {**SEEDED, "messages": CHAT, "stream": True}),
    ("/v1/chat/completions", {**GREEDY, "messages": "wrong"}),
    ("/v1/completions", {**GREEDY, "prompt": "the cat", "max_tokens": 9999}),
    ("/v1/completions", {**GREEDY, "prompt": "the", "model": "unknown"}),
    (f"/v2/models/{NAME}/generate", {"text_input": "the cat", "max_tokens": 8, "seed": 3}),
    (f"/v2/models/{NAME}/generate_stream", {"text_input": "the cat", "max_tokens": 8, "seed": 3}),
    (f"/v2/models/{NAME}/infer", {"inputs": []}),
    ("/tokenize", {"model": NAME, "prompt": "the cat", "return_token_strs": True}),
    ("/tokenize", {"model": NAME, "messages": CHAT}),
    ("/detokenize", {"model": NAME, "tokens": [5, 6, 7]}),
    ("/v1/embeddings", {"model": NAME, "input": "the cat"}),
    ("/v1/completions", {**SEEDED, "prompt": "the cat", "guided_regex": "[a-f]{5}"}),
    ("/v1/chat/completions", {**SEEDED, "messages": CHAT, "guided_regex": "("}),
    ("/v1/chat/completions", {**SEEDED, "messages": CHAT, "stream": True,
                              "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/chat/completions", {**SEEDED, "messages": CHAT, "tools": [
        {"type": "function", "function": {"name": "f"}}]}),
]  # fmt: skip
GETS = ("/v1/models", f"/v1/models/{NAME}", "/tokenizer_info", f"/v2/models/{NAME}/ready")
# Ids and times differ from answer to answer.
VARYING = re.compile(rb'"(id|created)":("[^"]*"|\d+)')
LONG = {"model": NAME, "prompt": "the cat sat", "max_tokens": 3000, "ignore_eos": True}
LONG |= {"stream": True, "temperature": 0}


# One number of shards in every run of the tests, the others before a release.
SHARDS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = {"penstock.max_num_seqs": "32", "penstock.kv_cache_bytes": str(64 << 20)}
    # Otherwise each server measures which one is faster.
    limits["penstock.dtype"] = "float32"
    return write_model(tmp_path_factory.mktemp("text"), limits, max_length=4000)


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)])
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(folder, "--drain-s", "60", "--shards", str(request.param)) as server:
        if request.param > 1:
            wait_until(lambda: server.has_shards(request.param))
        yield server


def answer(served: Served, path: str, body: object = None, key: str = "") -> tuple[int, bytes]:
    """Ask over a connection of its own, which any shard may get."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{served.address}{path}", data)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, VARYING.sub(b"", found.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, VARYING.sub(b"", error.read())


EXPECTED: dict[str, tuple[int, bytes]] = {}


def test_every_answer_is_that_of_one_process_bit_for_bit(served: Served):
    """Eight times over connections of their own: with several shards, each answers some."""
    for number in range(8):
        for path, body in QUESTIONS:
            # A prefix that is known from before changes what the usage says, not the text.
            body = {**body, "cache_salt": str(number)} if path.startswith("/v1/c") else body
            key = f"{path} {json.dumps(body)}"
            found = answer(served, path, body)
            assert found == EXPECTED.setdefault(key, found), key
        for path in GETS:
            found = answer(served, path)
            assert found == EXPECTED.setdefault(path, found)
    assert EXPECTED["/v1/models"][0] == 200


def metrics(served: Served) -> dict[str, float]:
    """The sum of each metric, by name."""
    found: dict[str, float] = {}
    for line in served.get("/metrics")[1].decode().splitlines():
        if match := re.match(r"([\w:]+)(?:{.*})? ([\d.e+-]+)$", line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def is_idle(served: Served) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = metrics(served)
    return not any(found[f"penstock:{name}"] for name in names)


def test_counts_are_those_of_the_clients(served: Served):
    wait_until(lambda: is_idle(served))
    before = metrics(served)
    body = {**GREEDY, "prompt": "the cat", "max_tokens": 5}
    for _ in range(20):
        assert answer(served, "/v1/completions", body)[0] == 200
    assert answer(served, "/v1/completions", {**body, "max_tokens": 9999})[0] == 400
    after = metrics(served)
    added = {name: value - before[name] for name, value in after.items() if name in before}
    assert added["penstock:generation_tokens_total"] == 100
    assert added["penstock:request_success_total"] == 20
    assert added["penstock:time_to_first_token_seconds_count"] == 20
    assert added["penstock:request_queue_time_seconds_count"] == 20
    assert added["penstock:inter_token_latency_seconds_count"] == 80
    assert added["penstock:e2e_request_latency_seconds_count"] == 20
    assert added["nv_inference_request_success"] == 20
    # Each token is computed once, except the last.
    assert added["penstock:prefix_cache_queries_total"] == added["penstock:prompt_tokens_total"]
    num_prompt = added["penstock:prompt_tokens_total"]
    assert added["penstock:iteration_tokens_total_sum"] == num_prompt + 20 * 4
    statistics = json.loads(served.get(f"/v2/models/{NAME}/stats")[1])["model_stats"][0]
    assert statistics["inference_count"] == after["nv_inference_request_success"]


class Stream:
    """A client of a streamed answer; any shard may have it."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.seen = b""

    async def begin(self, body: dict | None = None) -> "Stream":
        data = json.dumps(body or LONG).encode()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._served.port)
        self.port = self.writer.get_extra_info("sockname")[1]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        self.writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
        self.seen = await self.reader.readuntil(b"data: ")
        return self

    async def end(self) -> bytes:
        """All that comes, also if the connection is cut."""
        try:
            while data := await self.reader.read(1 << 16):
                self.seen += data
        except ConnectionResetError:
            pass
        self.writer.close()
        return self.seen


def shards_by_client(served: Served) -> dict[int, int]:
    """The process that has each connection, by the client's port."""
    return {
        each.raddr.port: process.pid
        for process in served.shards()
        for each in process.net_connections("tcp")
        if each.raddr
    }


def test_clients_that_leave_free_their_places_in_the_engine(served: Served):
    async def scenario() -> None:
        streams = await asyncio.gather(*(Stream(served).begin() for _ in range(12)))
        for each in streams:
            each.writer.transport.abort()

    asyncio.run(scenario())
    wait_until(lambda: is_idle(served))
    assert answer(served, "/v1/completions", {**GREEDY, "prompt": "the"})[0] == 200


def test_a_dead_engine_is_told_to_all_streams_and_replaced(served: Served):
    (engine,) = children_running("penstock.llm.engine_main", psutil.Process(served.process.pid))

    async def scenario() -> list[bytes]:
        streams = await asyncio.gather(*(Stream(served).begin() for _ in range(8)))
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            return await asyncio.gather(*(each.end() for each in streams))

    before = metrics(served)["penstock_worker_restarts"]
    for seen in asyncio.run(scenario()):
        assert b"the engine was killed by SIGKILL" in seen and b"[DONE]" in seen
    wait_until(lambda: served.status(f"/v2/models/{NAME}/ready") == 200)
    for _ in range(8):
        # Shards hear of the new engine a moment after the core.
        wait_until(lambda: answer(served, "/v1/completions", {**GREEDY, "prompt": "the"})[0] == 200)
    assert metrics(served)["penstock_worker_restarts"] == before + 1


def test_a_shard_that_is_killed_loses_only_its_own_streams(served: Served):
    shards = served.shards()
    if not shards:
        pytest.skip("one process")

    async def scenario() -> tuple[list[bytes], list[bytes]]:
        streams = await asyncio.gather(
            *(Stream(served).begin({**LONG, "max_tokens": 2000}) for _ in range(16))
        )
        found = await asyncio.to_thread(shards_by_client, served)
        owners = {stream: found[stream.port] for stream in streams}
        victim = owners[streams[0]]
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(100):
            ends = await asyncio.gather(*(each.end() for each in streams))
        seen = dict(zip(streams, ends, strict=True))
        mine = [seen[each] for each in streams if owners[each] == victim]
        return mine, [seen[each] for each in streams if owners[each] != victim]

    mine, others = asyncio.run(scenario())
    assert not any(b"[DONE]" in seen for seen in mine)
    assert all(b"[DONE]" in seen and b"error" not in seen for seen in others)
    # All say the same text, and the engine holds nothing for the dead.
    assert len({VARYING.sub(b"", seen.split(b"\r\n\r\n", 1)[1]) for seen in others}) <= 1
    wait_until(lambda: is_idle(served))
    wait_until(lambda: len(served.shards()) == len(shards))
    for _ in range(8):
        assert answer(served, "/v1/completions", {**GREEDY, "prompt": "the"})[0] == 200
    # Its renderer went with it, and the successor has one.
    core = psutil.Process(served.process.pid)
    wait_until(lambda: len(children_running("penstock.llm.renderer_main", core)) == len(shards))


def test_a_renderer_that_is_killed_is_replaced(served: Served):
    core = psutil.Process(served.process.pid)
    for each in children_running("penstock.llm.renderer_main", core):
        os.kill(each.pid, signal.SIGKILL)
    asked = {**GREEDY, "messages": CHAT}
    # One that reaches a dead renderer is taken for what killed it.
    for _ in range(8):
        wait_until(lambda: answer(served, "/v1/chat/completions", asked)[0] == 200)


@pytest.mark.slow
def test_a_hung_engine_is_replaced(tmp_path: Path):
    folder = write_model(tmp_path)
    with open(folder / "config.pbtxt", "a") as file:
        file.write('\nparameters { key: "penstock.hang_s" value { string_value: "1" } }')
    with Served(folder, "--shards", "2") as served:
        body = {**GREEDY, "prompt": "the cat"}
        for _ in range(16):  # Each shard knows how long steps take.
            assert answer(served, "/v1/completions", body)[0] == 200
        (engine,) = children_running("penstock.llm.engine_main", psutil.Process(served.process.pid))
        os.kill(engine.pid, signal.SIGSTOP)
        status, text = answer(served, "/v1/completions", body)
        assert status == 500 and b"the engine said nothing for" in text
        wait_until(lambda: answer(served, "/v1/completions", body)[0] == 200)
        assert metrics(served)["penstock_worker_deaths"] == 1


@pytest.mark.parametrize("num_shards", SHARDS)
def test_streams_finish_when_the_server_stops(folder: Path, num_shards: int):
    served = Served(folder, "--drain-s", "60", "--shards", str(num_shards))
    processes = served.processes()

    async def scenario() -> list[bytes]:
        body = {**LONG, "max_tokens": 300}
        streams = await asyncio.gather(*(Stream(served).begin(body) for _ in range(8)))
        served.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*(each.end() for each in streams))

    for seen in asyncio.run(scenario()):
        assert seen.count(b'"finish_reason":"length"') == 1 and b"[DONE]" in seen
    assert served.finish(processes) == 0


@pytest.mark.slow
def test_streams_are_told_when_the_drain_period_ends(folder: Path):
    served = Served(folder, "--drain-s", "0.2", "--shards", "2")

    async def scenario() -> list[bytes]:
        streams = await asyncio.gather(*(Stream(served).begin() for _ in range(8)))
        served.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*(each.end() for each in streams))

    for seen in asyncio.run(scenario()):
        assert b'"finish_reason":"abort"' in seen and b'"error":{"message":"model' in seen
        assert b"data: [DONE]" in seen
    assert served.finish([]) == 0


@pytest.mark.parametrize("num_shards", SHARDS)
def test_quotas_of_keys_hold_over_all_shards(folder: Path, tmp_path: Path, num_shards: int):
    """So low that nothing comes back while the test runs."""
    keys = {"slow": "tokens_per_s = 0.01", "rare": "requests_per_s = 0.01", "free": ""}
    text = "".join(
        f'[[key]]\nname = "{name}"\nsecret = "{name:-<16}"\nscopes = ["infer"]\n{quota}\n'
        for name, quota in keys.items()
    )
    (tmp_path / "keys.toml").write_text(text)
    flags = ("--api-keys", str(tmp_path / "keys.toml"), "--shards", str(num_shards))
    body = {**GREEDY, "prompt": "the cat"}
    with Served(folder, *flags) as served:
        for name in ("slow", "rare"):
            found = [answer(served, "/v1/completions", body, f"{name:-<16}") for _ in range(12)]
            statuses = [status for status, _ in found]
            assert statuses == [200, *[429] * 11], name
            what = b"tokens/s, prompts and answers" if name == "slow" else b"requests/s"
            assert what in found[-1][1]
        for _ in range(6):
            assert answer(served, "/v1/completions", body, f"{'free':-<16}")[0] == 200
        # A changed file is used by every shard.
        (tmp_path / "keys.toml").write_text(text.replace("tokens_per_s = 0.01", ""))
        wait_until(lambda: "API keys reloaded" in served.logged())
        time.sleep(0.1)
        for _ in range(6):
            assert answer(served, "/v1/completions", body, f"{'slow':-<16}")[0] == 200


@pytest.mark.slow
def test_models_come_and_go_in_all_shards(folder: Path, tmp_path: Path):
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / NAME).symlink_to(folder)
    with Served(repository, "--shards", "2", "--model-control-mode", "explicit") as served:
        body = {**GREEDY, "prompt": "the cat"}
        for _ in range(2):
            assert answer(served, f"/v2/repository/models/{NAME}/load", {})[0] == 200
            for _ in range(8):
                assert answer(served, "/v1/completions", body)[0] == 200
            assert answer(served, f"/v2/repository/models/{NAME}/unload", {})[0] == 200
            for _ in range(8):
                assert answer(served, "/v1/completions", body)[0] == 404
        core = psutil.Process(served.process.pid)
        wait_until(lambda: not children_running("penstock.llm.engine_main", core))
        wait_until(lambda: not children_running("penstock.llm.renderer_main", core))
