"""The ingress before replicas that are objects of this process: routes, figures, failures."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asgi_client import AsgiAnswer, AsgiClient
from ray_doubles import LocalHandle, cluster, run, started_replica
from text_server import NAME, write_model

from penstock.errors import ConfigError, Overloaded
from penstock.protocols import key_file
from penstock.protocols.asgi_http import AnswerEvents, AsgiExchange
from penstock.protocols.http_reader import MessageHead
from penstock.ray import cluster_models
from penstock.ray import replica as replica_module
from penstock.ray.cluster_messages import ClusterAnswer, encode_answer
from penstock.ray.cluster_router import to_call
from penstock.ray.prefixes import hash_blocks

TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
BODY = json.dumps({"inputs": [TENSOR]}).encode()
INFER = "/v2/models/identity/infer"


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "replica_name", lambda: "")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[AsgiClient, LocalHandle]]:
    """Two replicas of `identity`, one of `simple`."""
    async with (
        started_replica("identity") as one,
        started_replica("identity") as two,
        started_replica("simple") as other,
    ):
        handle = LocalHandle([one, two])
        async with cluster({"identity": handle, "simple": LocalHandle([other], "s")}) as app:
            yield AsgiClient(app), handle


def test_models_answer_through_their_replicas() -> None:
    async def test() -> None:
        async with served() as (client, handle):
            for _ in range(4):
                answer = await client.ask("POST", INFER, BODY)
                assert answer.status == 200
                assert answer.headers["content-type"] == "application/json"
                assert json.loads(answer.body)["outputs"][0]["data"] == [1.0] * 16
            assert handle.num_calls == 4
            packed = {"content-encoding": "gzip"}
            assert (await client.ask("POST", INFER, gzip.compress(BODY), packed)).status == 200
            for path in ("", "/ready", "/config", "/versions/1", "/explain"):
                assert (await client.ask("GET", f"/v2/models/identity{path}")).status == 200, path
            assert (await client.ask("GET", "/v2/models/identity/versions/9")).status == 404
            unknown = await client.ask("POST", "/v2/models/nothing/infer", BODY)
            assert unknown.status == 404
            assert b"loaded: identity, simple" in unknown.body
            wrong = await client.ask("POST", INFER, b"{")
            assert wrong.status == 400

    run(test)


def test_the_application_answers_for_itself() -> None:
    async def test() -> None:
        async with served() as (client, handle):
            assert (await client.ask("GET", "/v2/health/live")).body == b'{"live":true}'
            assert (await client.ask("GET", "/v2/health/ready")).status == 200
            about = json.loads((await client.ask("GET", "/v2")).body)
            assert about["name"] == "penstock"
            assert "binary_tensor_data" in about["extensions"]
            assert "model_repository" not in about["extensions"]
            index = json.loads((await client.ask("POST", "/v2/repository/index")).body)
            assert [(row["name"], row["version"], row["state"]) for row in index] == [
                ("identity", "1", "READY"),
                ("simple", "1", "READY"),
            ]
            handle.replicas = ()
            gone = await client.ask("GET", "/v2/health/ready")
            assert (gone.status, gone.body) == (503, b'{"error":"not ready: identity"}')
            lost = await client.ask("POST", INFER, BODY)
            assert (lost.status, lost.body) == (503, b'{"error":"its replica is gone"}')
            index = json.loads((await client.ask("POST", "/v2/repository/index")).body)
            assert index[0]["state"] == "UNAVAILABLE"

    run(test)


def test_figures_are_those_of_all_replicas() -> None:
    async def test() -> None:
        async with served() as (client, _):
            for _ in range(6):
                await client.ask("POST", INFER, BODY)
            found = json.loads((await client.ask("GET", "/v2/models/identity/stats")).body)
            (entry,) = found["model_stats"]
            assert entry["inference_count"] == 6
            everything = json.loads((await client.ask("GET", "/v2/models/stats")).body)
            names = [each["name"] for each in everything["model_stats"]]
            assert names == ["identity", "simple"]
            missing = await client.ask("GET", "/v2/models/identity/versions/9/stats")
            assert missing.status == 404
            text = (await client.ask("GET", "/metrics")).body.decode()
            for replica in ("r0", "r1"):
                sample = f'success{{model="identity",version="1",replica="{replica}"}} 3'
                assert sample in text

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/repository/models/identity/load", 501),
        ("POST", "/v2/repository/models/identity/unload", 501),
        ("GET", "/v2/systemsharedmemory/status", 501),
        ("POST", "/v2/cudasharedmemory/unregister", 501),
        ("GET", "/v2/logging", 501),
        ("GET", "/docs", 501),
        ("GET", "/nowhere", 404),
        ("DELETE", "/v2", 405),
    ],
)
def test_what_one_server_does_is_refused(method: str, path: str, status: int) -> None:
    async def test() -> None:
        async with cluster({"identity": LocalHandle()}) as app:
            assert (await AsgiClient(app).ask(method, path)).status == status

    run(test)


def test_a_client_that_leaves_cancels_its_call() -> None:
    cancelled = asyncio.Event()

    class Slow(LocalHandle):
        async def call(self, data: bytes, prefix: Any = ()) -> bytes:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return b""

    async def test() -> None:
        async with cluster({"identity": Slow()}) as app:
            client = AsgiClient(app)
            asking = asyncio.create_task(client.ask("POST", INFER, BODY))
            await asyncio.sleep(0.05)
            client.gone.set()
            await asking
            async with asyncio.timeout(5):
                await cancelled.wait()

    run(test)


class Stuck(LocalHandle):
    """Calls wait as those of Ray do that find no replica."""

    def __init__(self) -> None:
        super().__init__()
        self.is_called = asyncio.Event()

    async def call(self, data: bytes, prefix: Any = ()) -> bytes:
        self.is_called.set()
        await asyncio.sleep(600)
        return b""


def test_calls_that_run_when_the_application_ends_are_answered() -> None:
    async def test() -> None:
        handle = Stuck()
        async with cluster({"identity": handle}) as app:
            asking = asyncio.create_task(AsgiClient(app).ask("POST", INFER, BODY))
            await handle.is_called.wait()
        assert (await asking).status == 503

    run(test)


class Quick(LocalHandle):
    """Answers without a replica."""

    async def call(self, data: bytes, prefix: Any = ()) -> bytes:
        return encode_answer(ClusterAnswer(memoryview(b'{"versions":["1"],"data":[{"id":"a"}]}')))


def test_lists_do_not_wait_for_a_model_without_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_models, "READY_TIMEOUT_S", 0.01)

    async def test() -> None:
        models = {"quick": Quick(), "stuck": Stuck(), "gone": LocalHandle()}
        async with cluster(models) as app:
            client = AsgiClient(app)
            index = json.loads((await client.ask("POST", "/v2/repository/index")).body)
            states = {row["name"]: row["state"] for row in index}
            assert states == {"gone": "UNAVAILABLE", "quick": "READY", "stuck": "UNAVAILABLE"}
            listed = json.loads((await client.ask("GET", "/v1/models")).body)
            assert listed == {"object": "list", "data": [{"id": "a"}]}

    run(test)


def test_keys_are_checked_here_and_only_their_digest_goes_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nsecret = "a secret of some length"\nscopes = ["infer"]\n')
    key = {"authorization": "Bearer a secret of some length"}

    async def test() -> None:
        handle = LocalHandle()
        async with cluster({"identity": handle}, api_keys=str(keys)) as app:
            client = AsgiClient(app)
            assert (await client.ask("POST", INFER, BODY)).status == 401
            assert (await client.ask("GET", "/metrics", b"", key)).status == 403
            assert handle.num_calls == 0
            assert (await client.ask("POST", INFER, BODY, key)).status == 503
            assert handle.num_calls == 1

    run(test)

    async def look() -> None:
        headers = {name.encode(): value.encode() for name, value in key.items()}
        headers |= {b"content-encoding": b"gzip", b"accept-encoding": b"gzip"}
        exchange = AsgiExchange(AnswerEvents(), MessageHead(b"POST", b"/a?b=c", headers), b"x")
        call = to_call(exchange)
        assert call.target == b"/a?b=c"
        assert set(call.headers) == {b"accept-encoding", b"x-api-key"}
        assert len(call.headers[b"x-api-key"]) == 64

    run(look)


def test_keys_that_get_quotas_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_file, "WATCH_S", 0.001)
    path = tmp_path / "keys.toml"
    key = '[[key]]\nsecret = "a secret of some length"\nscopes = ["infer"]\n'
    path.write_text(key)

    async def test() -> None:
        async with cluster({"identity": LocalHandle()}, api_keys=str(path)) as app:
            before = app.gate.keys
            path.write_text(f"{key}requests_per_s = 1\n")
            while "quotas" not in caplog.text:
                assert app.gate.keys is before
                await asyncio.sleep(0.001)
            assert app.gate.keys is before
        with pytest.raises(ConfigError, match="has quotas"):
            async with cluster({"identity": LocalHandle()}, api_keys=str(path)):
                pass

    run(test)


@asynccontextmanager
async def texts(folder: Path) -> AsyncIterator[tuple[AsgiClient, LocalHandle]]:
    write_model(folder)
    async with started_replica(NAME, folder) as replica, started_replica("simple") as other:
        handle = LocalHandle([replica])
        models = {NAME: handle, "simple": LocalHandle([other])}
        async with cluster(models, texts=(NAME,)) as app:
            yield AsgiClient(app), handle


def test_texts_are_routed_by_the_start_of_their_prompt(tmp_path: Path) -> None:
    async def test() -> None:
        async with texts(tmp_path) as (client, handle):
            asked: dict[str, Any] = {"model": NAME, "max_tokens": 5, "temperature": 0}

            async def ask(path: str, **more: Any) -> AsgiAnswer:
                answer = await client.ask("POST", path, json.dumps({**asked, **more}).encode())
                assert answer.status == 200, answer.body
                return answer

            whole = await ask("/v1/completions", prompt="one two")
            text = json.loads(whole.body)["choices"][0]["text"]
            assert handle.prefixes[-1] == hash_blocks(b'"one two"')
            streamed = await ask("/v1/completions", prompt="one two", stream=True)
            lines = streamed.body.decode().split("\n\n")
            pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "".join(each["choices"][0]["text"] for each in pieces) == text
            assert len(streamed.parts) > 3
            messages = [{"role": "user", "content": "hello"}]
            await ask("/v1/chat/completions", messages=messages)
            assert handle.prefixes[-1] == hash_blocks(json.dumps(messages).encode())
            await ask("/v1/completions", prompt="one two", cache_salt="mine")
            assert handle.prefixes[-1] not in ((), hash_blocks(b'"one two"'))
            generated = await ask(f"/v2/models/{NAME}/generate", text_input="one two")
            assert "text_output" in json.loads(generated.body)
            events = await ask(f"/v2/models/{NAME}/generate_stream", text_input="one two")
            assert events.headers["content-type"].startswith("text/event-stream")
            tokens = await client.ask("POST", "/tokenize", b'{"prompt": "one"}')
            assert tokens.status == 200, tokens.body
            listed = json.loads((await client.ask("GET", "/v1/models")).body)
            assert [each["id"] for each in listed["data"]] == [NAME]
            assert (await client.ask("GET", f"/v1/models/{NAME}")).status == 200

    run(test)


def test_errors_of_texts_have_the_form_of_their_api(tmp_path: Path) -> None:
    async def test() -> None:
        async with texts(tmp_path) as (client, handle):
            for body, status in (
                (b'{"model": "nothing", "prompt": "x"}', 404),
                (b'{"model": "simple", "prompt": "x"}', 404),
                (b"{", 400),
                (b'{"model": 3}', 400),
            ):
                answer = await client.ask("POST", "/v1/completions", body)
                assert answer.status == status, answer.body
                assert "message" in json.loads(answer.body)["error"]
            handle.replicas = ()
            gone = json.dumps({"model": NAME, "prompt": "x", "stream": True}).encode()
            answer = await client.ask("POST", "/v1/completions", gone)
            assert answer.status == 503

    run(test)


class Busy(LocalHandle):
    async def call(self, data: bytes, prefix: Any = ()) -> bytes:
        raise Overloaded("model 'busy': too many requests wait")


def test_a_model_whose_replicas_have_too_much_to_do_is_ready() -> None:
    async def test() -> None:
        async with cluster({"busy": Busy()}) as app:
            assert (await AsgiClient(app).ask("GET", "/v2/health/ready")).status == 200

    run(test)
