"""`penstock.asgi`: models with real workers inside a host application; when they start and stop."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from asgi_client import AsgiAnswer, AsgiClient
from child_processes import children_running
from text_server import NAME, write_model

import penstock
from penstock.errors import ConfigError, NotReady

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "repository"
NUMBERS = [float(number) for number in range(16)]
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": NUMBERS}
BODY = json.dumps({"inputs": [TENSOR]}).encode()
INFER = "/v2/models/identity/infer"
SLOW = """
import time
import penstock

NUMBER = penstock.Tensor("FP32", [1])

@penstock.model(inputs={"x": NUMBER}, outputs={"y": NUMBER})
def wait(x):
    time.sleep(1.0)
    return {"y": x}
"""


def workers() -> list[psutil.Process]:
    return children_running("penstock.serving.worker")


def run(test: Callable[[], Any]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def data_of(answer: AsgiAnswer) -> list[float]:
    assert answer.status == 200, answer.body
    found: list[float] = json.loads(answer.body)["outputs"][0]["data"]
    return found


async def live(app: Any) -> tuple[Callable[..., Any], asyncio.Task[None], list[Any]]:
    """Begin a lifespan; return what sends its events, its task, and the answers."""
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    answers: list[Any] = []

    async def send(event: Any) -> None:
        answers.append(event)

    task = asyncio.create_task(app({"type": "lifespan"}, events.get, send))
    await events.put({"type": "lifespan.startup"})
    while not answers:
        await asyncio.sleep(0.01)
    return events.put, task, answers


def test_the_lifespan_of_the_host_starts_and_ends_the_workers() -> None:
    async def test() -> None:
        app = penstock.asgi(EXAMPLES / "identity")
        assert workers() == []
        put, task, answers = await live(app)
        assert [each["type"] for each in answers] == ["lifespan.startup.complete"]
        assert len(workers()) == 1
        client = AsgiClient(app, "/models")
        assert data_of(await client.ask("POST", f"/models{INFER}", BODY)) == NUMBERS
        assert (await client.ask("GET", "/models/v2/health/ready")).status == 200
        assert b"nv_inference_request_success" in (await client.ask("GET", "/models/metrics")).body
        await put({"type": "lifespan.shutdown"})
        await task
        assert answers[-1]["type"] == "lifespan.shutdown.complete"
        assert workers() == []
        after = await client.ask("POST", f"/models{INFER}", BODY)
        assert (after.status, after.body) == (503, b'{"error":"the application has stopped"}')

    run(test)


def test_it_starts_once() -> None:
    """A second lifespan, as of a second test of the host, fails instead of refusing requests."""

    async def test() -> None:
        app = penstock.asgi(EXAMPLES / "identity")
        await app.stop()
        _, task, answers = await live(app)
        await task
        assert answers[0]["type"] == "lifespan.startup.failed"
        assert "make another one with penstock.asgi" in answers[0]["message"]
        with pytest.raises(NotReady, match="has stopped"):
            await app.start()
        assert workers() == []

    run(test)


def test_without_a_lifespan_the_first_request_starts_the_models() -> None:
    async def test() -> None:
        app = penstock.asgi(EXAMPLES / "identity")
        client = AsgiClient(app)
        assert (await client.ask("GET", "/v2/health/live")).status == 200
        early = await client.ask("GET", "/v2/health/ready")
        assert (early.status, early.body) == (503, b'{"error":"models are loading"}')
        answers = await asyncio.gather(*(client.ask("POST", INFER, BODY) for _ in range(20)))
        assert [data_of(each) for each in answers] == [NUMBERS] * 20
        assert len(workers()) == 1
        await app.stop()
        assert workers() == []

    run(test)


def test_a_model_that_cannot_be_loaded_fails_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"not a model")

    async def test() -> None:
        _, task, answers = await live(penstock.asgi(tmp_path))
        await task
        assert answers[0]["type"] == "lifespan.startup.failed"
        assert "broken" in answers[0]["message"]
        with pytest.raises(ConfigError, match="broken"):
            async with penstock.asgi(tmp_path):
                pass
        lazy = penstock.asgi(tmp_path)
        refused = await AsgiClient(lazy).ask("POST", "/v1/completions", b"{}")
        assert refused.status == 503
        assert "models cannot be loaded" in json.loads(refused.body)["error"]["message"]
        await lazy.stop()
        assert "broken" in refused.body.decode()
        keys = tmp_path / "keys.toml"
        keys.write_text('[[key]]\nsecret = "a secret of some length"\nscopes = ["infer"]\n')
        guarded = penstock.asgi(tmp_path, api_keys=keys)
        refused = await AsgiClient(guarded).ask("POST", INFER, BODY)
        assert (refused.status, refused.body) == (503, b'{"error":"models cannot be loaded"}')
        await guarded.stop()

    run(test)


def test_stopping_finishes_what_was_accepted_and_refuses_the_rest(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(SLOW)
    sent = {"name": "x", "datatype": "FP32", "shape": [1], "data": [7]}
    body = json.dumps({"inputs": [sent]}).encode()

    async def test() -> None:
        app = penstock.asgi(tmp_path / "wait.py")
        client = AsgiClient(app)
        await app.start()
        path = "/v2/models/wait/infer"
        first = asyncio.create_task(client.ask("POST", path, body))
        await asyncio.sleep(0.2)
        stopping = asyncio.create_task(app.stop())
        await asyncio.sleep(0)
        assert (await client.ask("POST", path, body)).status == 503
        assert not first.done()
        assert data_of(await first) == [7.0]
        await stopping
        assert workers() == []

    run(test)


def test_stopping_waits_until_answers_are_taken() -> None:
    async def test() -> None:
        app = penstock.asgi(EXAMPLES / "identity")
        await app.start()
        answer = AsgiAnswer()
        asking = asyncio.create_task(AsgiClient(app).ask("POST", INFER, BODY, answer=answer))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(app.stop())
        early, _ = await asyncio.wait([stopping], timeout=0.5)
        assert not early
        answer.is_reading.set()
        assert data_of(await asking) == NUMBERS
        await stopping

    run(test)


def test_keys_and_hosts_are_checked_if_asked_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nsecret = "a secret of some length"\nscopes = ["infer"]\n')

    async def test() -> None:
        options = {"api_keys": keys, "allow_host": ["example.com"]}
        async with penstock.asgi(EXAMPLES / "identity", **options) as app:
            client = AsgiClient(app)
            host, key = {"host": "example.com"}, {"x-api-key": "a secret of some length"}
            assert (await client.ask("POST", INFER, BODY, host)).status == 401
            assert (await client.ask("POST", INFER, BODY, {**host, **key})).status == 200
            assert (await client.ask("GET", "/metrics", b"", {**host, **key})).status == 403
            assert (
                await client.ask("POST", INFER, BODY, {"host": "evil.com", **key})
            ).status == 403
        async with penstock.asgi(EXAMPLES / "identity") as app:
            assert (await AsgiClient(app).ask("POST", INFER, BODY, {"host": "a"})).status == 200

    run(test)


def test_loading_and_pages_of_the_server_are_not_there() -> None:
    async def test() -> None:
        async with penstock.asgi(EXAMPLES / "identity") as app:
            client = AsgiClient(app)
            assert (await client.ask("GET", "/docs")).status == 404
            assert (await client.ask("POST", "/v2/repository/models/identity/load")).status == 403

    run(test)


def test_options_of_ports_are_unknown() -> None:
    with pytest.raises(TypeError, match="unknown option http_port"):
        penstock.asgi(EXAMPLES, http_port=1)  # type: ignore[call-arg]


def test_websockets_are_closed_and_other_scopes_are_errors() -> None:
    async def test() -> None:
        app, sent = penstock.asgi(EXAMPLES), []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(event: Any) -> None:
            sent.append(event["type"])

        await app({"type": "websocket"}, receive, send)
        assert sent == ["websocket.close"]
        with pytest.raises(NotImplementedError, match="ASGI scope 'tcp'"):
            await app({"type": "tcp"}, receive, send)

    run(test)


def test_no_web_framework_is_imported() -> None:
    script = (
        "import penstock, sys; penstock.asgi('x'); import penstock.api.embedded; "
        "print({'starlette', 'fastapi', 'uvicorn', 'ray'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_texts_are_streamed_and_end_with_their_client(tmp_path: Path) -> None:
    write_model(tmp_path)
    asked = {"model": NAME, "prompt": "one two", "max_tokens": 20, "temperature": 0}
    asked["ignore_eos"] = True

    async def test() -> None:
        async with penstock.asgi(tmp_path) as app:
            client = AsgiClient(app)
            models = await client.ask("GET", "/v1/models")
            assert json.loads(models.body)["data"][0]["id"] == NAME
            whole = await client.ask("POST", "/v1/completions", json.dumps(asked).encode())
            text = json.loads(whole.body)["choices"][0]["text"]
            body = json.dumps({**asked, "stream": True}).encode()
            streamed = await client.ask("POST", "/v1/completions", body)
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert len(streamed.parts) > 10
            lines = streamed.body.decode().split("\n\n")
            pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "".join(each["choices"][0]["text"] for each in pieces) == text
            answer = AsgiAnswer()
            answer.is_reading.set()
            long = json.dumps({**asked, "stream": True, "max_tokens": 200}).encode()
            leaving = AsgiClient(app)
            asking = asyncio.create_task(
                leaving.ask("POST", "/v1/completions", long, answer=answer)
            )
            while len(answer.events) < 3:
                await asyncio.sleep(0.001)
            leaving.gone.set()
            await asking
            assert not answer.is_complete

    run(test)


def test_the_example_repository_serves_all_its_models(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "models")

    async def test() -> None:
        async with penstock.asgi(tmp_path / "models") as app:
            index = await AsgiClient(app).ask("POST", "/v2/repository/index")
            states = {each["name"]: each["state"] for each in json.loads(index.body)}
            expected = ("digits", "identity", "simple", "text_length")
            assert states == dict.fromkeys(expected, "READY")

    run(test)
