"""Canary and shadow rollouts of a real server, with one shard and with two."""

import json
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rollout_load import (
    EXPLICIT,
    Clients,
    add_versions,
    call,
    promote,
    rollout,
    wait_for_end,
)
from served import Served
from waiting import wait_until

from penstock.repository import history

SHARDS = pytest.mark.parametrize("shards", ["1", "2"], ids=["1 shard", "2 shards"])


def serve(root: Path, shards: str) -> Served:
    return Served(root, *EXPLICIT, "--shards", shards, grpc=True)


def kinds(root: Path) -> list[str]:
    return [each.kind for each in history.read(root / "m")]


@SHARDS
def test_a_header_chooses_the_version_over_http_and_grpc(tmp_path: Path, shards: str) -> None:
    add_versions(tmp_path, "good", "good")
    with serve(tmp_path, shards) as served:
        promote(served, 2, canary="50%", header="X-Version")
        for named, version in (("candidate", "2"), ("stable", "1"), ("2", "2")):
            with Clients(served, 4, {"X-Version": named}) as clients:
                wait_until(lambda clients=clients: sum(clients.versions.values()) >= 20)
            assert set(clients.versions) == {version}
            assert (clients.errors, clients.num_wrong) == ({}, 0)
        with Clients(served, 4, {"X-Version": "9"}) as clients:
            wait_until(lambda: len(clients.errors) == 2)
        assert all("'9' is no version of the rollout" in text for text in clients.errors)
        # Requests that name a version in their path are not split.
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'
        for version in ("1", "2"):
            status, answer = served.post(f"/v2/models/m/versions/{version}/infer", body)
            assert (status, json.loads(answer)["model_version"]) == (200, version)
        assert rollout(served)["decision"] == "running"
        event = call(served, "rollback", reason="enough")
        assert event["kind"] == "rollout stopped"
        with Clients(served, 4) as clients:
            wait_until(lambda: sum(clients.versions.values()) >= 20)
        assert set(clients.versions) == {"1"}
        assert served.post("/v2/models/m/versions/2/infer", body)[0] == 404
    assert kinds(tmp_path) == ["canary started", "rollout stopped"]


@SHARDS
def test_users_stay_with_their_version(tmp_path: Path, shards: str) -> None:
    add_versions(tmp_path, "good", "good")
    with serve(tmp_path, shards) as served:
        promote(served, 2, canary="50%", hash_header="X-User")
        chosen = {}
        for user in range(12):
            with Clients(served, 4, {"X-User": f"user {user}"}) as clients:
                wait_until(lambda clients=clients: sum(clients.versions.values()) >= 8)
            assert len(clients.versions) == 1, "in all shards and protocols"
            chosen[user] = next(iter(clients.versions))
        assert set(chosen.values()) == {"1", "2"}


@SHARDS
def test_long_bodies_are_split_and_keep_their_bits(tmp_path: Path, shards: str) -> None:
    folder = tmp_path / "m"
    for version in ("1", "2"):
        (folder / version).mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        'backend: "null" max_batch_size: 4 dynamic_batching { }\n'
        'input { name: "x" data_type: TYPE_FP32 dims: 50000 }\n'
        'output { name: "y" data_type: TYPE_FP32 dims: 50000 }\n'
        "version_policy { specific { versions: 1 } }"
    )
    with serve(tmp_path, shards) as served:
        promote(served, 2, canary="50%")
        seen = set()
        random = np.random.default_rng(1)
        for number in range(60):
            data = random.random(50_000, np.float32).tobytes()
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 50_000]}
            parameters = {"binary_data_size": len(data)}
            head = json.dumps(
                {
                    "inputs": [{**tensor, "parameters": parameters}],
                    "parameters": {"binary_data_output": True},
                }
            ).encode()
            headers = {"Inference-Header-Content-Length": str(len(head))}
            if number == 30:
                call(served, "rollback", reason="in the middle")
            url = f"http://{served.address}/v2/models/m/infer"
            request = urllib.request.Request(url, head + data, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                body, start = answer.read(), int(answer.headers["Inference-Header-Content-Length"])
            told = json.loads(body[:start])
            assert body[start:] == data
            seen.add(told["model_version"])
            assert number < 30 or told["model_version"] == "1"
        assert seen == {"1", "2"}


@SHARDS
def test_a_shadow_answers_no_request(tmp_path: Path, shards: str) -> None:
    add_versions(tmp_path, "good", "good")
    with serve(tmp_path, shards) as served:
        event = promote(served, 2, shadow=True)
        assert event["kind"] == "shadow started"
        with Clients(served, 4, {"Penstock-Version": "candidate"}) as clients:
            wait_until(lambda: rollout(served)["figures"].get("compared_rows", 0) >= 10)
        assert set(clients.versions) == {"1"}
        state = rollout(served)
        assert state["figures"]["disagreeing_rows"] == 0
        assert (state["mode"], state["share"]) == ("shadow", 0)
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'
        assert served.post("/v2/models/m/versions/2/infer", body)[0] == 404
        text = served.get("/metrics")[1].decode()
        labels = '{model="m",version="2"}'
        assert f"penstock_rollout_share{labels} 0" in text
        assert 'penstock_rollout_state{model="m",version="2",decision="running"} 1' in text
        assert f"nv_inference_request_success{labels} 0" in text, "no client got its answers"
        rows = [
            line for line in text.splitlines() if line.startswith("nv_inference_count" + labels)
        ]
        assert int(rows[0].split()[-1]) >= 10
    assert kinds(tmp_path) == ["shadow started", "rollout stopped"]


def test_a_server_that_is_killed_serves_the_stable_version_again(tmp_path: Path) -> None:
    add_versions(tmp_path, "good", "good")
    served = serve(tmp_path, "1")
    promote(served, 2, canary="50%")
    processes = served.processes()
    served.process.kill()
    served.finish(processes)
    with serve(tmp_path, "1") as served:
        with Clients(served, 2) as clients:
            wait_until(lambda: sum(clients.versions.values()) >= 10)
        assert set(clients.versions) == {"1"}
        assert kinds(tmp_path) == ["canary started", "rollout stopped"]
        assert "the server restarted" in history.read(tmp_path / "m")[-1].reason


def test_versions_with_other_inputs_are_refused(tmp_path: Path) -> None:
    add_versions(tmp_path, "good", "good")
    config = (tmp_path / "m" / "config.pbtxt").read_text()
    (tmp_path / "m" / "2" / "config.pbtxt").write_text(config.replace("dims: 1", "dims: 2"))
    with serve(tmp_path, "1") as served:
        body = json.dumps({"version": 2, "canary": "5%", "force": "x"}).encode()
        status, answer = served.post("/v2/repository/models/m/promote", body)
        assert status == 400
        assert "input x is FP32 [1] and FP32 [2]" in json.loads(answer)["error"]


FAST = {"canary": "30%", "steps": "60%", "step_s": 2, "mirrored_per_s": 20}


@pytest.mark.slow
@SHARDS
def test_a_good_candidate_is_promoted_in_steps(tmp_path: Path, shards: str) -> None:
    add_versions(tmp_path, "good", "good")
    with serve(tmp_path, shards) as served:
        with Clients(served, 8) as clients:
            promote(served, 2, **FAST)
            state = wait_for_end(served)
            assert state["decision"] == "promoted", state
            num_before = clients.versions["1"]
            wait_until(lambda: clients.versions["2"] >= 200)
            assert clients.versions["1"] <= num_before + 8, "what was in flight"
        assert (clients.errors, clients.num_wrong) == ({}, 0)
        assert kinds(tmp_path) == ["canary started", "canary step", "forced"]
        assert served.get("/v2/models/m")[0] == 200
    with serve(tmp_path, shards) as served, Clients(served, 2) as clients:
        wait_until(lambda: sum(clients.versions.values()) >= 10)
        assert set(clients.versions) == {"2"}


@pytest.mark.slow
@SHARDS
@pytest.mark.parametrize(
    ("fault", "check"),
    [("slow", "p99 < 1s"), ("wrong", "agreement"), ("errors", "errors"), ("crash", "ready")],
)
def test_a_fault_is_rolled_back(tmp_path: Path, shards: str, fault: str, check: str) -> None:
    """The fault begins a while after the candidate has loaded."""
    add_versions(tmp_path, "good", fault, after_s=3.0)
    with serve(tmp_path, shards) as served, Clients(served, 8) as clients:
        promote(served, 2, canary="30%", steps="60%", step_s=600, mirrored_per_s=20)
        began = time.monotonic()
        state = wait_for_end(served)
        assert state["decision"] == "rolled back", state
        broken = [each["name"] for each in state["checks"] if each["state"] == "broken"]
        assert check in broken
        assert time.monotonic() - began < 60
        answered = sum(clients.versions.values())
        wait_until(lambda: sum(clients.versions.values()) >= answered + 200)
        wait_until(lambda: len(served.workers()) == 1)
        num_candidate = clients.versions["2"]
        errors = clients.errors.copy()
        wait_until(lambda: sum(clients.versions.values()) >= answered + 300)
        assert (clients.versions["2"], clients.errors) == (num_candidate, errors)
        event = call(served, "history")[-1]
        assert (event["kind"], event["version"], event["previous"]) == ("rolled back", "1", ["2"])
        assert event["figures"]["swap_s"] < 2
