"""A real server whose requests are taken by several shards. `test_http_fronts.py` compares what
they answer with what one process does."""

import asyncio
import contextlib
import http.client
import json
import math
import os
import random
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from load import Load
from served import Served, null_model, num_sockets
from waiting import wait_until

from penstock.serving.shared_page import HEADER_CELLS, REQUESTS, SharedPage

POISON = 13
# Requests may wait for as long as the machine makes them.
PATIENT = "default_queue_policy { default_timeout_microseconds: 60000000 }"


def infer(
    port: int, value: int, model: str = "m", headers: dict[str, str] | None = None
) -> tuple[int, object]:
    """One row over a connection of its own, so any shard may get it; its answer or error."""
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client:
        client.request(
            "POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}), headers or {}
        )
        answer = client.getresponse()
        told = json.loads(answer.read())
        found = told["outputs"][0]["data"][0] if answer.status == 200 else told["error"]
        return answer.status, found


def metric(served: Served, name: str) -> int:
    text = served.get("/metrics")[1].decode()
    return sum(int(value) for value in re.findall(rf"^{name}{{.*}} (\d+)$", text, re.M))


@pytest.fixture(params=[2, 4])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    null_model(tmp_path, "m", batching=PATIENT, a_ms=1, crash_on=POISON)
    with Served(tmp_path, "--shards", str(request.param)) as server:
        wait_until(lambda: len(server.http_fronts()) == request.param)
        yield server


def run_load(served: Served, num_good: int, num_connections: int = 16) -> Load:
    async def scenario() -> Load:
        async with Load(served.port, num_connections, model="m") as load:
            while load.tally.num_good < num_good:
                await asyncio.sleep(0.01)
        return load

    return asyncio.run(scenario())


def test_all_shards_answer_and_their_counts_are_those_of_the_clients(served: Served):
    tally = run_load(served, 500, 32).tally
    assert set(tally.statuses) == {200} and tally.num_wrong == tally.num_cut == 0
    assert metric(served, "nv_inference_request_success") == tally.num_sent == tally.num_good
    assert metric(served, "nv_inference_count") == tally.num_sent
    statistics = json.loads(served.get("/v2/models/m/stats")[1])["model_stats"][0]
    assert statistics["inference_count"] == tally.num_sent
    sizes = {
        each["batch_size"]: each["compute_infer"]["count"] for each in statistics["batch_stats"]
    }
    assert sum(size * count for size, count in sizes.items()) == tally.num_sent
    assert sum(sizes.values()) == statistics["execution_count"]
    told = json.loads(served.get("/v2/models/m/explain")[1])
    assert {int(size): count for size, count in told["batch_sizes"].items()} == sizes


def test_no_request_is_lost_when_the_worker_dies_under_load(served: Served):
    async def scenario() -> Load:
        async with Load(served.port, 16, model="m") as load:
            for _ in range(2):
                enough = load.tally.num_good + 100
                while load.tally.num_good < enough:
                    await asyncio.sleep(0.01)
                (worker,) = served.workers()
                os.kill(worker.pid, signal.SIGKILL)
                await asyncio.to_thread(
                    wait_until, lambda pid=worker.pid: pid not in {w.pid for w in served.workers()}
                )
            enough = load.tally.num_good + 100
            while load.tally.num_good < enough:
                await asyncio.sleep(0.01)
        return load

    tally = asyncio.run(scenario()).tally
    assert set(tally.statuses) == {200} and tally.num_wrong == tally.num_cut == 0
    assert metric(served, "penstock_worker_restarts") == 2


def test_a_poison_request_kills_two_workers_however_many_shards_see_it(served: Served):
    assert infer(served.port, 1) == (200, 1)
    status, error = infer(served.port, POISON)
    assert status == 500 and "twice" in error
    for _ in range(12):
        status, error = infer(served.port, POISON)
        assert status != 200 and "the model refuses it for" in error
    assert metric(served, "penstock_worker_deaths") == 2
    assert infer(served.port, 2) == (200, 2)


def test_connections_that_wait_for_a_dead_shard_are_answered_by_its_successor(served: Served):
    """Its listener stays open in the core, so nothing is reset that it had not accepted."""
    victim = served.http_fronts()[0]
    os.kill(victim.pid, signal.SIGSTOP)
    clients = []
    for _ in range(16):
        client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        client.request("GET", "/v2/health/live")
        clients.append(client)
    os.kill(victim.pid, signal.SIGKILL)
    for client in clients:
        assert client.getresponse().read() == b'{"live":true}'
        client.close()


def test_a_hung_worker_is_killed_and_its_requests_run_again(tmp_path: Path):
    null_model(
        tmp_path, "m", config='parameters { key: "penstock.hang_s" value { string_value: "1" } }'
    )
    with Served(tmp_path, "--shards", "2") as served:
        (worker,) = served.workers()
        assert infer(served.port, 5) == (200, 5)
        os.kill(worker.pid, signal.SIGSTOP)
        assert infer(served.port, 6) == (200, 6)
        assert metric(served, "penstock_worker_deaths") == 1
        assert "hangs; killing pid" in served.logged()


def test_accepted_requests_finish_when_the_server_stops(tmp_path: Path):
    null_model(tmp_path, "m", batching=PATIENT, a_ms=300)
    served = Served(tmp_path, "--shards", "2")
    wait_until(lambda: len(served.http_fronts()) == 2)

    async def scenario() -> Load:
        async with Load(served.port, 8, model="m") as load:
            while load.tally.num_sent < 8 or sum(map(num_sockets, served.http_fronts())) < 8:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            load.stop()
            served.process.send_signal(signal.SIGTERM)
        return load

    tally = asyncio.run(scenario()).tally
    assert served.finish([]) == 0
    assert tally.num_wrong == tally.num_cut == 0
    assert set(tally.statuses) <= {200, 503} and tally.num_good >= 4


def test_models_come_and_go_in_all_shards_at_once_under_load(tmp_path: Path):
    null_model(tmp_path, "m", batching=PATIENT)
    null_model(tmp_path, "other")
    control = ("--model-control-mode", "explicit", "--load-model", "m")
    with Served(tmp_path, "--shards", "2", *control) as served:
        wait_until(lambda: len(served.http_fronts()) == 2)

        async def scenario() -> Load:
            async with Load(served.port, 8, model="m") as load:
                for _ in range(3):
                    await asyncio.to_thread(come_and_go, served)
            return load

        tally = asyncio.run(scenario()).tally
        assert set(tally.statuses) == {200} and tally.num_wrong == tally.num_cut == 0
        assert tally.num_good > 0


def come_and_go(served: Served) -> None:
    """Load and unload one model, and reload the one under load."""
    change = "/v2/repository/models/{}/{}"
    assert served.post(change.format("other", "load"))[0] == 200
    assert {infer(served.port, 3, "other") for _ in range(8)} == {(200, 3)}
    assert served.post(change.format("other", "unload"))[0] == 200
    assert {infer(served.port, 3, "other")[0] for _ in range(8)} == {404}
    assert served.post(change.format("m", "load"))[0] == 200


def test_all_shards_together_keep_the_rate_of_a_key(tmp_path: Path):
    null_model(tmp_path / "models", "m")
    secret = "sixteen characters"
    scopes = 'scopes = ["infer", "metrics"]\nrequests_per_s = 10\n'
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "a"\nsecret = "{secret}"\n{scopes}')
    flags = ("--shards", "3", "--api-keys", str(tmp_path / "keys.toml"))
    with Served(tmp_path / "models", *flags) as served:
        wait_until(lambda: len(served.http_fronts()) == 3)
        headers = {"X-API-Key": secret}
        began = time.monotonic()
        statuses = [infer(served.port, n, headers=headers)[0] for n in range(60)]
        elapsed_s = time.monotonic() - began
        assert set(statuses) <= {200, 429}
        # The bucket holds a second's worth, and is refilled meanwhile.
        assert 10 <= statuses.count(200) <= 10 + 10 * elapsed_s
        assert statuses[:10] == [200] * 10


def open_page(served: Served) -> SharedPage:
    """The page of a server's shards and workers."""
    folder = Path(f"/proc/{served.process.pid}/fd")
    link = next(each for each in folder.iterdir() if "penstock-page" in os.readlink(each))
    fd = os.open(link, os.O_RDWR)
    try:
        return SharedPage.open(fd)
    finally:
        os.close(fd)


def num_queued(page: SharedPage) -> float:
    """Requests of the first model that all shards show."""
    layout = page.layout
    shards = range(layout.num_shards)
    return sum(page.cells[layout.queue_at(0, shard) + REQUESTS] for shard in shards)


@contextlib.contextmanager
def stopped_worker(served: Served, page: SharedPage) -> Iterator[None]:
    """Stop the worker while it runs a batch, so that its slot stays busy."""
    first = send(served.port, 1)
    wait_until(lambda: not page.is_idle(0, 0))
    (worker,) = served.workers()
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert receive(first) == (200, 1)


def send(port: int, value: int) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    client.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [tensor]}))
    return client


def is_answered(client: http.client.HTTPConnection) -> bool:
    return bool(select.select([client.sock], [], [], 0)[0])


def receive(client: http.client.HTTPConnection) -> tuple[int, object]:
    answer = client.getresponse()
    told = json.loads(answer.read())
    client.close()
    return answer.status, told["outputs"][0]["data"][0] if answer.status == 200 else told["error"]


LONG = 'parameters { key: "penstock.hang_s" value { string_value: "600" } }'


@pytest.mark.parametrize("num_shards", [2, 4])
def test_the_size_of_the_queue_is_limited_for_all_shards_together(tmp_path: Path, num_shards: int):
    limit = 10
    policy = f"max_queue_size: {limit} default_timeout_microseconds: 600000000"
    batching = f"default_queue_policy {{ {policy} }}"
    null_model(tmp_path, "m", batching=batching, config=LONG, a_ms=300)
    with Served(tmp_path, "--shards", str(num_shards)) as served:
        wait_until(lambda: len(served.http_fronts()) == num_shards)
        page = open_page(served)
        with stopped_worker(served, page):
            admitted, refused = [], []
            for value in range(2, 50):
                client = send(served.port, value)
                num_before = len(admitted)
                wait_until(lambda c=client, n=num_before: is_answered(c) or num_queued(page) > n)
                (refused if is_answered(client) else admitted).append((value, client))
            assert len(admitted) == limit == num_queued(page)
            for _, client in refused:
                status, error = receive(client)
                assert status == 503 and f"maximum queue size: {limit}" in error
        assert [receive(client) for _, client in admitted] == [
            (200, value) for value, _ in admitted
        ]
        assert num_queued(page) == 0


@pytest.mark.parametrize("num_shards", [2, 4])
def test_an_slo_is_kept_for_all_shards_together(tmp_path: Path, num_shards: int):
    """The requests that fit the SLO are at most as many as one executor can answer by then: each
    shard alone would admit about that many."""
    slo = 'parameters { key: "penstock.slo" value { string_value: "p99 < 20s" } }'
    null_model(tmp_path, "m", config=LONG + slo, max_batch=1, a_ms=500)
    with Served(tmp_path, "--shards", str(num_shards)) as served:
        wait_until(lambda: len(served.http_fronts()) == num_shards)
        page = open_page(served)
        with stopped_worker(served, page):
            clients = [send(served.port, value) for value in range(160)]
            wait_until(lambda: sum(map(is_answered, clients)) + num_queued(page) >= 160)
            refused = [receive(client) for client in clients if is_answered(client)]
            num_late = sum("would be answered in" in str(error) for _, error in refused)
            # Two more for each other shard, whose figures may be a moment old.
            assert num_late >= 160 - 40 - 2 * num_shards
        for client in clients:
            client.close()


def test_random_bits_on_the_page_change_no_answer(served: Served):
    page = open_page(served)
    rng = random.Random(7)
    values = [0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e300]

    def fill() -> None:
        for index in range(HEADER_CELLS, page.layout.model_at(1)):
            is_random = rng.random() < 0.5
            bits = struct.unpack("d", rng.randbytes(8))[0]
            page.cells[index] = bits if is_random else rng.choice(values)

    async def scenario() -> Load:
        async with Load(served.port, 16, model="m") as load:
            for _ in range(50):
                await asyncio.to_thread(fill)
                await asyncio.sleep(0.02)
        return load

    tally = asyncio.run(scenario()).tally
    assert set(tally.statuses) <= {200, 429, 503} and tally.num_good > 0
    assert tally.num_wrong == tally.num_cut == 0
    assert metric(served, "penstock_worker_deaths") == 0
    # What was wrong is replaced by those who know better.
    wait_until(lambda: infer(served.port, 1) == (200, 1))
    after = run_load(served, 200).tally
    assert set(after.statuses) == {200} and after.num_wrong == after.num_cut == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "does not serve gRPC yet; give --no-grpc"),
        (("--no-grpc", "--fronts", "2"), "exclude each other"),
        (("--no-grpc", "--api-keys", "keys.toml"), "queue_share does not work with --shards 2 yet"),
    ],
    ids=["grpc", "fronts", "quotas"],
)
def test_what_shards_cannot_do_yet_is_refused(tmp_path: Path, flags: tuple, text: str):
    null_model(tmp_path / "models", "m")
    secret = 'secret = "sixteen characters"\nscopes = ["infer"]\nqueue_share = 0.5\n'
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "a"\n{secret}')
    command = [sys.executable, "-m", "penstock", "serve", "models", "--shards", "2", *flags]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and text in ended.stderr and "Traceback" not in ended.stderr
