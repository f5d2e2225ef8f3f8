"""`penstock bench --shared-memory` against a real server with one or two shards: the model reads
the rows that were placed, and no region is left."""

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from benched import Benched, bench, finish, start
from served import Served, null_model
from waiting import wait_until

from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.kinds import open_target
from penstock.data import Sample
from penstock.system.exit_codes import ExitCode
from penstock.wire.v2_client import decode_answer

ROW = 40_000
CONFIG = f"""
backend: "null" max_batch_size: 4 dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {ROW} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {ROW} ] }}
"""
SHORT = ["--duration", "1s", "--warm-up", "0s"]


@pytest.fixture(scope="module", params=[1, 2])
def served(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Served]:
    folder = null_model(tmp_path_factory.mktemp("models"), "picky", max_batch=1, fail_on=13)
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text(CONFIG)
    with Served(folder, "--shared-memory", "--shards", str(request.param)) as server:
        if request.param > 1:
            wait_until(lambda: server.has_shards(request.param))
        yield server


def num_regions(served: Served) -> int:
    return len(json.loads(served.get("/v2/systemsharedmemory/status")[1]))


def counts(found: Benched) -> tuple[int, int]:
    windows = [window for level in found.run.levels for window in level.windows]
    return sum(each.num_good for each in windows), sum(each.num_failed for each in windows)


def answer_to(served: Served, message: bytes) -> dict[str, Any]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as sock:
        sock.sendall(message)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        body = answer.read()
    assert answer.status == 200, body
    return decode_answer(int(answer.headers["Inference-Header-Content-Length"]), body)


def test_answers_are_those_to_the_rows_that_were_placed(served: Served) -> None:
    rows = np.random.default_rng(0).random((16, 2, ROW), np.float32)

    async def scenario() -> None:
        spec = TargetSpec(f"http://{served.address}/v2/models/echo", shared_memory=True)
        target = open_target(spec)
        try:
            await target.describe()
            messages = [target.encode(Sample({"x": each})) for each in rows]
            await target.open(1)
            for _ in range(2):
                for row, message in zip(rows, messages, strict=True):
                    assert len(message) < 1000
                    answer = await asyncio.to_thread(answer_to, served, message)
                    assert np.array_equal(answer["y"], row)
        finally:
            await target.close()

    asyncio.run(scenario())
    assert num_regions(served) == 0


@pytest.mark.parametrize(
    "load", ["--concurrency 4", "--rate 50", "--rate 50 --processes 2", "--rate 50 -b 4"]
)
def test_every_kind_of_load(served: Served, tmp_path: Path, load: str) -> None:
    url = f"http://{served.address}/v2/models/echo"
    found = bench(tmp_path, url, "--shared-memory", *load.split(), *SHORT)
    assert found.status == 0, found.errors
    num_good, num_failed = counts(found)
    assert num_good > 0 and num_failed == 0
    assert found.run.target.shared_memory
    assert "v2 HTTP, inputs in shared memory" in found.out
    assert "in shared memory and repeats its first" in found.run.origin.text
    assert num_regions(served) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_highest_rate_is_found(served: Served, tmp_path: Path) -> None:
    url = f"http://{served.address}/v2/models/echo"
    search = ["--max-rate", "--slo", "p99 < 2 s", "--timeout", "3s", "--processes", "2"]
    search += ["--duration", "200ms", "--warm-up", "0s"]
    found = bench(tmp_path, url, "--shared-memory", *search)
    assert found.status == 0, found.errors
    assert found.run.max_rate.rate.value > 0
    texts = {text for level in found.run.levels for each in level.windows for text in each.failures}
    assert not any("shared memory" in text for text in texts), texts
    assert num_regions(served) == 0


def test_the_model_sees_each_example_in_its_turn(served: Served, tmp_path: Path) -> None:
    """One example of eight fails, so one request of eight does."""
    data = tmp_path / "data.npz"
    np.savez(data, x=np.array([[1], [2], [3], [13], [5], [6], [7], [8]], np.int32))
    url = f"http://{served.address}/v2/models/picky"
    flags = ["--shared-memory", "--data", str(data), "--rate", "200", "--processes", "2"]
    found = bench(tmp_path, url, *flags, *SHORT)
    num_good, num_failed = counts(found)
    assert num_good + num_failed > 50
    assert num_failed / (num_good + num_failed) == pytest.approx(1 / 8, abs=0.06)
    texts = {text for level in found.run.levels for each in level.windows for text in each.failures}
    assert all("a row starts with" in text for text in texts), texts
    assert num_regions(served) == 0


def test_killed_generators_leave_no_region(served: Served, tmp_path: Path) -> None:
    url = f"http://{served.address}/v2/models/echo"
    flags = ["--shared-memory", "--rate", "50", "--duration", "60s", "--processes", "2"]
    process = start(url, *flags, "--json", str(tmp_path / "run.json"))
    wait_until(lambda: num_regions(served) == 2)
    for child in psutil.Process(process.pid).children():
        os.kill(child.pid, signal.SIGKILL)
    assert finish(process, tmp_path / "run.json").status != 0
    wait_until(lambda: num_regions(served) == 0)


def test_an_interrupted_run_leaves_no_region(served: Served, tmp_path: Path) -> None:
    url = f"http://{served.address}/v2/models/echo"
    flags = ["--shared-memory", "--rate", "50", "--duration", "60s"]
    process = start(url, *flags, "--json", str(tmp_path / "run.json"))
    wait_until(lambda: num_regions(served) == 1)
    process.send_signal(signal.SIGINT)
    finish(process, tmp_path / "run.json")
    assert num_regions(served) == 0


def test_a_server_that_does_not_allow_it_gets_no_load(tmp_path: Path) -> None:
    with Served(null_model(tmp_path / "models", "null")) as server:
        url = f"http://{server.address}/v2/models/null"
        found = bench(tmp_path, url, "--shared-memory", "--rate", "10", *SHORT)
        assert found.status == ExitCode.FAILED
        assert "start it with: penstock serve MODEL --shared-memory" in found.errors
        assert found.run is None
