"""Scaling with real processes: load starts workers, silence stops them, and no request is lost."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Served, python_model
from waiting import wait_until

SLEEPY = """
import time
def infer(inputs):
    time.sleep(0.08 + 0.02 * len(inputs["x"]))
    return {"y": inputs["x"]}
"""
LIMITS = {"min_instances": 0, "max_instances": 4, "scale_to_zero_s": 2, "scale_down_s": 1}
SHARDS = pytest.mark.parametrize("shards", ["1", "2"])


def serve(root: Path, shards: str, **more: object) -> Served:
    python_model(
        root,
        "sleepy",
        SLEEPY,
        config="dynamic_batching { }",
        slo="p99 < 1 s",
        **{**LIMITS, **more},
    )
    return Served(root, "--shards", shards)


def instances(served: Served) -> dict[str, int]:
    """Instances of the model by state."""
    text = served.get("/metrics")[1].decode()
    lines = re.findall(r'^penstock_instances{model="sleepy".*state="(\w+)"} (\d+)$', text, re.M)
    return {state: int(count) for state, count in lines}


def explain(served: Served) -> dict:
    return json.loads(served.get("/v2/models/sleepy/explain")[1])


def ask(served: Served, number: int) -> tuple[int, object]:
    status, answer = served.infer("sleepy", "x", "INT32", [number])
    return status, answer["outputs"][0]["data"] if status == 200 else answer


@SHARDS
@pytest.mark.slow
def test_load_starts_workers_and_silence_stops_them_all(tmp_path: Path, shards: str) -> None:
    # Longer than a busy machine takes until the first look.
    with serve(tmp_path, shards, scale_to_zero_s=15) as served:
        assert sum(instances(served).values()) == 1
        stop = threading.Event()

        def client(first: int) -> list[tuple[int, object, int]]:
            found = []
            while not stop.is_set():
                found.append((*ask(served, first + len(found)), first + len(found)))
                time.sleep(0.1 if found[-1][0] == 503 else 0)
            return found

        with ThreadPoolExecutor(24) as pool:
            clients = [pool.submit(client, 1000 * number) for number in range(24)]
            try:
                wait_until(lambda: instances(served)["ready"] >= 2)
            finally:
                time.sleep(1)
                stop.set()
            answers = [answer for each in clients for answer in each.result()]
        served_well = [each for each in answers if each[0] == 200]
        assert all(data == [number] for _, data, number in served_well)
        assert {status for status, _, _ in answers} <= {200, 503}, "late ones are refused"
        assert len(served_well) > 50
        wait_until(lambda: served.workers() == [])
        assert served.status("/v2/models/sleepy/ready") == 200
        assert served.status("/v2/health/ready") == 200
        index = json.loads(served.post("/v2/repository/index")[1])
        assert [(each["name"], each["state"]) for each in index] == [("sleepy", "READY")]
        wait_until(lambda: explain(served)["instances"] == [])
        assert explain(served)["scaling"].startswith("0 of 0 to 4 instances: no request for ")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda number: ask(served, number), range(4)))
        assert answers == [(200, [number]) for number in range(4)]
        assert re.search(
            r"^penstock_worker_restarts{.*} 0$", served.get("/metrics")[1].decode(), re.M
        )


@SHARDS
def test_a_cold_start_beyond_its_budget_is_refused_at_once_and_the_retry_succeeds(
    tmp_path: Path, shards: str
) -> None:
    limits = {"scale_to_zero_s": 0.2, "cold_start_s": 0.01}
    with serve(tmp_path, shards, **limits) as served:
        wait_until(lambda: served.workers() == [])
        status, answer = ask(served, 1)
        assert status == 503
        assert "requests wait for 0.01 s (penstock.cold_start_s)" in answer["error"]
        wait_until(lambda: ask(served, 2)[0] == 200)


@SHARDS
def test_a_server_that_stops_during_a_cold_start_answers_first(tmp_path: Path, shards: str) -> None:
    served = serve(tmp_path, shards, scale_to_zero_s=0.2)
    wait_until(lambda: served.workers() == [])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, served, 7)
        wait_until(lambda: served.workers() != [])
        assert served.terminate() == 0
        assert asked.result() == (200, [7])
