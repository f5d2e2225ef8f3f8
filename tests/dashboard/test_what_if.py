"""Predictions for loaded models: from which times, for which models, and within limits."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from page_server import KEYS, SECRETS, PageServer, null_config, page_server

from penstock.config import ENSEMBLE, LLM
from penstock.dashboard import what_if
from penstock.dashboard.what_if import LEARNT, MEASURED, WhatIf
from penstock.errors import BackendFailed, NotReady, Overloaded, Unsupported
from penstock.protocols.gate import Gate
from penstock.serving.metrics import BatchStatistics
from penstock.wire.live import WhatIfBody

PLAIN = null_config("plain", {"x": ("INT32", (1,))})
SLO = null_config("slo", {"x": ("INT32", (1,))}, slo="p99 < 500ms")
SLO = replace(SLO, batching=replace(SLO.batching, slo_latency_s=0.5))
IDLE = null_config("idle", {"x": ("INT32", (1,))})
ROW = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1,1],"data":[1]}]}'


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server([PLAIN, SLO, IDLE]) as running:
        for name in ("plain", "slo"):
            for _ in range(3):
                assert running.ask(f"/v2/models/{name}/infer", body=ROW)[0] == 200
        yield running


def ask(server: PageServer, body: dict, **headers: str) -> tuple[int, dict]:
    status, _, data = server.ask("/dashboard/what-if", headers, json.dumps(body).encode())
    return status, json.loads(data)


def test_a_model_is_predicted_from_the_batches_that_it_ran(server: PageServer) -> None:
    status, answer = ask(server, {"model": "plain", "rate": 50})
    assert status == 200
    assert (answer["model"], answer["version"], answer["basis"]) == ("plain", "1", MEASURED)
    assert list(answer["times_s"]) == ["1", "4"]
    assert "Only batches of 1 rows have run" in answer["notes"][0]
    assert 0 < answer["asked"]["p50_s"] <= answer["asked"]["p99_s"] < 1
    assert answer["asked"]["rate"] == 50 and answer["capacity"] > 50
    assert answer["current"] is None or answer["current"]["rate"] > 0


def test_with_an_slo_the_batcher_knows_all_sizes(server: PageServer) -> None:
    status, answer = ask(server, {"model": "slo", "rate": 20, "version": 1, "instances": 3})
    assert status == 200
    assert answer["basis"] == LEARNT and set(answer["times_s"]) >= {"1", "2", "4"}
    assert answer["asked"]["num_instances"] == 3 and answer["asked"]["keeps_slo"] is True
    assert all("Not known well" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"model": "nowhere", "rate": 1}, 404, "nowhere"),
        ({"model": "plain", "rate": 1, "version": "9"}, 404, "9"),
        ({"model": "idle", "rate": 1}, 503, "no batch has run yet"),
        ({"model": "plain", "rate": 0}, 400, "rate"),
        ({"model": "plain", "rate": 1e9}, 400, "rate"),
        ({"model": "plain", "rate": 1, "instances": -1}, 400, "instances"),
        ({"model": "plain", "rate": 1, "more": 1}, 400, "more"),
        ({"rate": 1}, 400, "model"),
    ],
)
def test_what_cannot_be_predicted_is_explained(
    server: PageServer, body: dict, status: int, text: str
) -> None:
    found, answer = ask(server, body)
    assert found == status and text in answer["error"]


def test_it_needs_the_scope_of_metrics() -> None:
    with page_server([PLAIN], Gate(KEYS)) as running:
        for name, status in (("infer", 403), ("admin", 403), ("metrics", 503)):
            key = {"X-API-Key": SECRETS[name]}
            assert ask(running, {"model": "plain", "rate": 1}, **key)[0] == status


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backend": LLM}, "language models"),
        ({"backend": ENSEMBLE}, "ensembles are not simulated; ask for their members"),
        ({"is_decoupled": True}, "models of sequences, decoupled models"),
        ({"batching": replace(PLAIN.batching, max_tokens=100)}, "token budget"),
    ],
)
def test_models_of_other_kinds_are_not_simulated(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, changes: dict, text: str
) -> None:
    other = SimpleNamespace(config=replace(PLAIN, **changes))
    monkeypatch.setattr(server.catalog, "find", lambda name, version: other)
    with pytest.raises(Unsupported, match=text):
        asyncio.run(WhatIf(server.catalog).predict(WhatIfBody("plain", 1.0)))


def test_one_prediction_runs_at_a_time(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = what_if.run

    def slow(job: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return real(job)

    monkeypatch.setattr(what_if, "run", slow)
    answers: list[tuple[int, dict]] = []
    first = threading.Thread(
        target=lambda: answers.append(ask(server, {"model": "slo", "rate": 9}))
    )
    first.start()
    assert begun.wait(60)
    status, answer = ask(server, {"model": "slo", "rate": 9})
    assert status == 503 and "another prediction is running" in answer["error"]
    go_on.set()
    first.join(60)
    assert answers[0][0] == 200


def test_the_simulation_of_a_client_that_has_left_is_waited_for(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real, body = what_if.run, WhatIfBody("slo", 9.0)

    def slow(job: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return real(job)

    monkeypatch.setattr(what_if, "run", slow)

    async def scenario() -> None:
        predictions = WhatIf(server.catalog)
        first = asyncio.ensure_future(predictions.predict(body))
        assert await asyncio.to_thread(begun.wait, 60)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        try:
            with pytest.raises(Overloaded, match="another prediction is running"):
                await asyncio.wait_for(predictions.predict(body), 5)
        finally:
            go_on.set()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(Overloaded):
                    await predictions.predict(body)
                    return
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_simulation_has_a_limit(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "TIMEOUT_S", 0.001)
    status, answer = ask(server, {"model": "slo", "rate": 9})
    assert status == 500 and "took longer" in answer["error"]


def test_a_simulation_that_fails_says_why(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_if, "CHILD", "penstock.no_such_module")
    with pytest.raises(BackendFailed, match="no_such_module"):
        asyncio.run(WhatIf(server.catalog).predict(WhatIfBody("slo", 1.0)))


def test_a_larger_batch_never_takes_less(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = server.catalog.find("plain")
    statistics = {1: BatchStatistics(10, 0.0, 0.1, 0.0), 4: BatchStatistics(1, 0.0, 0.002, 0.0)}
    monkeypatch.setattr(model.metrics, "batches", statistics)
    times_s, _, notes = what_if.batch_times(model)
    assert times_s == pytest.approx({1: 0.01, 4: 0.01})
    assert notes == [what_if.NOT_RISING.format("T(4)")]


def test_without_batches_there_are_no_times(server: PageServer) -> None:
    with pytest.raises(NotReady):
        what_if.batch_times(server.catalog.find("idle"))
