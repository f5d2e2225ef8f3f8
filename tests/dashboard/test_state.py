"""The state route: what each key may see, and that it is true."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from doubles import Puppets
from page_server import KEYS, SECRETS, PageServer, null_config, page_server

from penstock.config import ModelConfig, ScalingConfig
from penstock.dashboard.state import StateReader, num_ready, num_wanted
from penstock.protocols.gate import Gate
from penstock.serving.model import Model
from penstock.serving.scaling import Observation, ScalingDecision


class Given:
    """A controller that does as the test says."""

    def __init__(self, target: int) -> None:
        self.target = target

    def decide(self, seen: Observation, now: float) -> ScalingDecision:
        return ScalingDecision(self.target, "the test says so")


def labelled(config: ModelConfig, *labels: str) -> ModelConfig:
    return replace(config, outputs=(replace(config.outputs[0], labels=labels),))


CONFIGS = [
    null_config("echo", {"x": ("INT32", (2,))}, slo="p99 < 20 ms"),
    labelled(null_config("echo", {"x": ("INT32", (2,))}, version="10", slo="off"), "a", "b"),
    null_config("plain", {"x": ("FP32", (-1,))}, max_batch_size=0),
]
PROBLEMS = {"broken": ["the file is cut off", "and empty"]}


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server(CONFIGS, problems=PROBLEMS) as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[PageServer]:
    with page_server(CONFIGS, Gate(KEYS)) as running:
        yield running


def state_of(server: PageServer, **headers: str) -> dict:
    status, fields, body = server.ask("/dashboard/state", headers)
    assert status == 200
    assert fields["Cache-Control"] == "no-store"
    return json.loads(body)


def test_models_come_by_name_with_the_newest_version_first(server: PageServer) -> None:
    state = state_of(server)
    assert (state["name"], state["needs_key"]) == ("penstock", False)
    assert state["scopes"] == ["infer", "metrics", "shared_memory", "admin"]
    rows = [(each["name"], each["version"], each["state"]) for each in state["models"]]
    ready = "READY"
    assert rows[0] == ("broken", "", "UNAVAILABLE")
    assert rows[1:] == [("echo", "10", ready), ("echo", "1", ready), ("plain", "1", ready)]


def test_a_model_says_what_it_promises_and_takes(server: PageServer) -> None:
    broken, newest, first, plain = state_of(server)["models"]
    assert broken["reason"] == "the file is cut off; and empty"
    assert broken["call"] is None
    assert (first["slo"], newest["slo"]) == ("p99 < 20 ms", "")
    assert first["inputs"] == [{"name": "x", "datatype": "INT32", "shape": [-1, 2]}]
    assert plain["outputs"] == [{"name": "OUT_x", "datatype": "FP32", "shape": [-1]}]
    assert (newest["labels"], first["labels"]) == ({"OUT_x": ["a", "b"]}, {})
    assert (first["batching"], plain["batching"]) == ("up to 4", "none")
    assert first["num_ready"] == first["num_instances"] == 1
    assert newest["call"]["path"] == "v2/models/echo/infer"
    assert first["call"]["path"] == "v2/models/echo/versions/1/infer"


def test_the_state_of_the_server_follows_its_models(server: PageServer) -> None:
    assert state_of(server)["state"] == "not ready"
    server.management.lifecycle.is_loading = True
    assert state_of(server)["state"] == "loading"
    server.management.lifecycle.is_loading = False
    server.management.lifecycle.is_draining = True
    assert state_of(server)["state"] == "shutting down"
    server.management.lifecycle.is_draining = False


def test_without_a_key_nothing_is_told(locked: PageServer) -> None:
    for headers in ({}, {"X-API-Key": "not a key that is known"}):
        status, _, body = locked.ask("/dashboard/state", headers)
        assert status == 401
        assert b"echo" not in body


@pytest.mark.parametrize("name", ["metrics", "admin"])
def test_a_key_of_another_scope_sees_no_models(locked: PageServer, name: str) -> None:
    status, _, body = locked.ask("/dashboard/state", {"X-API-Key": SECRETS[name]})
    assert status == 403
    assert b"echo" not in body


def test_figures_of_load_need_the_scope_of_metrics(locked: PageServer) -> None:
    known = state_of(locked, **{"X-API-Key": SECRETS["infer"]})
    assert known["needs_key"]
    assert known["scopes"] == ["infer"]
    assert {json.dumps(each["load"]) for each in known["models"]} == {"null"}
    both = state_of(locked, Authorization=f"Bearer {SECRETS['both']}")
    assert both["scopes"] == ["infer", "metrics"]
    assert both["models"][0]["load"] == {"num_waiting": 0, "num_answered": 0, "num_failed": 0}


def test_requests_are_counted(server: PageServer) -> None:
    call = state_of(server)["models"][3]["call"]
    assert server.ask(f"/{call['path']}", body=call["body"].encode())[0] == 200
    assert state_of(server)["models"][3]["load"]["num_answered"] == 1


def test_example_calls_are_made_once_for_each_model(server: PageServer) -> None:
    reader = StateReader(server.management, needs_key=False)
    first, second = (reader.read(["infer"]).models for _ in range(2))
    assert all(a.call is b.call for a, b in zip(first, second, strict=True))


def test_no_secret_is_in_the_state(locked: PageServer) -> None:
    text = json.dumps(state_of(locked, **{"X-API-Key": SECRETS["both"]}))
    assert not any(secret in text for secret in SECRETS.values())
    assert "$PENSTOCK_API_KEY" in text


def test_instances_that_follow_the_load_are_those_of_now() -> None:
    scaling = ScalingConfig(0, 4)
    config = replace(null_config("m", {"x": ("INT32", (2,))}), scaling=scaling)

    async def scenario() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        assert model.host is not None
        found = []
        for target in (1, 3, 0):
            model.host.scaler.policy = Given(target)
            model.host.tick()
            starting_now = num_wanted(model), num_ready(model)
            await puppets.step_all()
            found.append((*starting_now, num_wanted(model), num_ready(model)))
        assert found == [(1, 1, 1, 1), (3, 1, 3, 3), (0, 3, 0, 0)]
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(scenario())
