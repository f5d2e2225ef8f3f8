"""A real server whose requests are taken by several shards. `test_shards_alike.py` compares what
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
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from load import Load
from served import Served, null_model, num_sockets, open_page, python_model
from tritonclient.grpc import service_pb2, service_pb2_grpc
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
        wait_until(lambda: server.has_shards(request.param))
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


@pytest.mark.parametrize("num_shards", [1, 2])
def test_bodies_that_cannot_be_received_are_failures_of_their_model(
    tmp_path: Path, num_shards: int
):
    """Too large as announced, too large as sent, and not in chunks; not those of strangers."""
    null_model(tmp_path / "models", "m")
    secret = "sixteen characters"
    scopes = 'scopes = ["infer", "metrics"]\n'
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "a"\nsecret = "{secret}"\n{scopes}')
    flags = ("--shards", str(num_shards), "--api-keys", str(tmp_path / "keys.toml"))
    head = "POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {}\r\n{}\r\n\r\n"
    chunked = "Transfer-Encoding: chunked"
    with Served(tmp_path / "models", *flags, "--max-body-bytes", "1000000") as served:
        for key in (secret, "somebody else's"):
            for fields, body, status in (
                ("Content-Length: 1000001", b"", 413),
                (chunked, b"F4241\r\n" + bytes(1_000_001), 413),
                (chunked, b"what\r\n", 400),
            ):
                address = ("127.0.0.1", served.port)
                with socket.create_connection(address, timeout=60) as client:
                    client.sendall(head.format(key, fields).encode() + body)
                    answer = client.recv(1 << 16)
                assert key != secret or answer.startswith(b"HTTP/1.1 %d " % status)
        headers = {"X-API-Key": secret}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port)) as client:
            client.request("GET", "/metrics", headers=headers)
            text = client.getresponse().read().decode()
        found = dict(re.findall(r'^penstock_rejections{.*reason="(\w+)".*} (\d+)$', text, re.M))
        assert (found["too_large"], found["invalid"]) == ("2", "1")
        assert re.search(r'^nv_inference_request_failure{.*reason="OTHER".*} 3$', text, re.M)


def test_no_request_is_lost_when_the_worker_dies_under_load(served: Served):
    async def scenario() -> Load:
        async with Load(served.port, 16, model="m") as load:
            for _ in range(2):
                enough = load.tally.num_good + 100
                while load.tally.num_good < enough:
                    await asyncio.sleep(0.01)
                # A spare may have started as well; the oldest one serves.
                worker = min(served.workers(), key=lambda each: each.create_time())
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
    victim = served.shards()[0]
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
    wait_until(lambda: served.has_shards(2))

    async def scenario() -> Load:
        async with Load(served.port, 8, model="m") as load:
            while load.tally.num_sent < 8 or sum(map(num_sockets, served.shards())) < 8:
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
        wait_until(lambda: served.has_shards(2))

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
        wait_until(lambda: served.has_shards(3))
        headers = {"X-API-Key": secret}
        began = time.monotonic()
        statuses = [infer(served.port, n, headers=headers)[0] for n in range(60)]
        elapsed_s = time.monotonic() - began
        assert set(statuses) <= {200, 429}
        # The bucket holds a second's worth, and is refilled meanwhile.
        assert 10 <= statuses.count(200) <= 10 + 10 * elapsed_s
        assert statuses[:10] == [200] * 10


def num_queued(page: SharedPage) -> float:
    """Requests of the first model that all shards show."""
    layout = page.layout
    shards = range(layout.num_shards)
    return sum(page.cells[layout.queue_at(0, shard) + REQUESTS] for shard in shards)


@contextlib.contextmanager
def stopped_worker(
    served: Served, page: SharedPage, headers: dict[str, str] | None = None
) -> Iterator[None]:
    """Stop the worker while it runs a batch, so that its slot stays busy."""
    first = send(served.port, 1, headers)
    wait_until(lambda: not page.is_idle(0, 0))
    (worker,) = served.workers()
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert receive(first) == (200, 1)


def send(
    port: int, value: int, headers: dict[str, str] | None = None
) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    client.request("POST", "/v2/models/m/infer", json.dumps({"inputs": [tensor]}), headers or {})
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
        wait_until(lambda: served.has_shards(num_shards))
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
def test_a_key_fills_its_share_of_the_queues_of_all_shards(tmp_path: Path, num_shards: int):
    null_model(tmp_path / "models", "m", batching=PATIENT, config=LONG, a_ms=300)
    key = '[[key]]\nname = "{0}"\nsecret = "sixteen characters {0}"\nscopes = ["infer"]\n'
    text = key.format("a") + "queue_share = 0.001\n" + key.format("b")
    (tmp_path / "keys.toml").write_text(text)
    first, second = ({"X-API-Key": f"sixteen characters {name}"} for name in "ab")
    flags = ("--shards", str(num_shards), "--api-keys", str(tmp_path / "keys.toml"))
    with Served(tmp_path / "models", *flags) as served:
        wait_until(lambda: served.has_shards(num_shards))
        page = open_page(served)
        with stopped_worker(served, page, second):
            admitted, refused = [], []
            for value in range(2, 34):
                client = send(served.port, value, first)
                num_before = len(admitted)
                wait_until(lambda c=client, n=num_before: is_answered(c) or num_queued(page) > n)
                (refused if is_answered(client) else admitted).append((value, client))
            # A thousandth of 8192.
            assert len(admitted) == 8
            for _, client in refused:
                status, error = receive(client)
                assert status == 429 and "its share is 8 of 8192" in error
            other = send(served.port, 99, second)
        assert receive(other) == (200, 99)
        for value, client in admitted:
            assert receive(client) == (200, value)
        assert infer(served.port, 3, headers=first) == (200, 3)


@pytest.mark.parametrize("num_shards", [2, 4])
def test_an_slo_is_kept_for_all_shards_together(tmp_path: Path, num_shards: int):
    """The requests that fit the SLO are at most as many as one executor can answer by then: each
    shard alone would admit about that many."""
    slo = 'parameters { key: "penstock.slo" value { string_value: "p99 < 20s" } }'
    null_model(tmp_path, "m", config=LONG + slo, max_batch=1, a_ms=500)
    with Served(tmp_path, "--shards", str(num_shards)) as served:
        wait_until(lambda: served.has_shards(num_shards))
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


FIRST_HELD = """
import pathlib, time
here = pathlib.Path(__file__).parent
def infer(inputs):
    value = int(inputs["x"][0, 0])
    (here / f"begun-{value}").touch()
    while value == 0 and (here / "hold").exists():
        time.sleep(0.005)
    return {"y": inputs["x"]}
"""


def test_answers_leave_in_the_order_of_the_requests_of_all_shards(tmp_path: Path):
    batching = "dynamic_batching { preserve_ordering: true } instance_group { count: 2 }"
    python_model(tmp_path, "m", FIRST_HELD, config=batching + LONG, max_batch=1)
    folder = tmp_path / "m" / "1"
    with Served(tmp_path, "--shards", "2") as served:
        wait_until(lambda: served.has_shards(2))
        # The model was tried out with zeros when it was loaded.
        (folder / "begun-0").unlink(missing_ok=True)
        (folder / "hold").touch()
        first = send(served.port, 0)
        wait_until((folder / "begun-0").exists)
        later = []
        for value in range(1, 9):
            later.append(send(served.port, value))
            wait_until((folder / f"begun-{value}").exists)
        assert not any(is_answered(client) for client in (first, *later))
        (folder / "hold").unlink()
        assert [receive(client) for client in (first, *later)] == [(200, n) for n in range(9)]


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


def test_what_shards_cannot_do_is_refused(tmp_path: Path):
    null_model(tmp_path / "models", "m")
    key = '[[key]]\nname = "{0}"\nsecret = "sixteen characters {0}"\nscopes = ["infer"]\n'
    keys = [key.format(number) + "queue_share = 0.5\n" for number in range(65)]
    (tmp_path / "keys.toml").write_text("".join(keys))
    command = [sys.executable, "-m", "penstock", "serve", "models", "--shards", "2"]
    command += ["--api-keys", "keys.toml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    assert "65 keys have a queue_share below 1; with --shards, 64 are" in ended.stderr


# Over gRPC. `test_grpc.py` runs with shards as well.


class Channels:
    """Clients with a connection of their own each, which the kernel gives to any shard."""

    def __init__(self, served: Served, count: int, key: str = "") -> None:
        self.metadata = [("x-api-key", key)] if key else []
        self._all = [
            # Different arguments, or the channels would share a connection.
            grpc.insecure_channel(served.grpc_address, options=[("penstock.client", number)])
            for number in range(count)
        ]
        self.stubs = [service_pb2_grpc.GRPCInferenceServiceStub(each) for each in self._all]

    def __enter__(self) -> "Channels":
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._all:
            channel.close()

    def codes(self, value: int, model: str = "m") -> list[str]:
        """Ask once over every connection; the names of the statuses."""
        calls = [
            stub.ModelInfer.future(message(value, model), metadata=self.metadata, timeout=60)
            for stub in self.stubs
        ]
        for call in calls:
            if call.code() == grpc.StatusCode.OK:
                assert call.result().raw_output_contents == [value.to_bytes(4, "little")]
        return [call.code().name for call in calls]


def message(value: int, model: str = "m") -> service_pb2.ModelInferRequest:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1]}
    data = [value.to_bytes(4, "little")]
    return service_pb2.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=data)


def connections(served: Served) -> list[int]:
    """How many clients each shard has, by its last answer to a ping."""
    text = served.get("/metrics")[1].decode()
    return [int(n) for n in re.findall(r"^penstock_shard_connections{.*} (\d+)$", text, re.M)]


def test_grpc_clients_are_shared_and_their_counts_are_exact(tmp_path: Path):
    null_model(tmp_path, "m", batching=PATIENT)
    with Served(tmp_path, "--shards", "2", grpc=True) as served, Channels(served, 24) as channels:
        for value in range(10):
            assert set(channels.codes(value)) == {"OK"}
        # The scrape may be counted as well. All on one side: once in 2 ** 23.
        wait_until(lambda: sum(connections(served)) in (24, 25) and all(connections(served)))
        for stub in channels.stubs:
            answers = stub.ModelStreamInfer(map(message, range(5)), timeout=60)
            found = [each.infer_response.raw_output_contents[0][0] for each in answers]
            assert found == list(range(5))
            # Every shard gives the sums of all.
            asked = service_pb2.ModelStatisticsRequest(name="m")
            (statistics,) = stub.ModelStatistics(asked, timeout=60).model_stats
            assert statistics.inference_count >= 10 * 24 + 5
        assert statistics.inference_count == (10 + 5) * 24
        assert statistics.inference_stats.success.count == (10 + 5) * 24


def test_models_come_and_go_over_grpc_in_all_shards_at_once(tmp_path: Path):
    for name in ("m", "other"):
        null_model(tmp_path / "models", name)
    secret = "sixteen characters"
    scopes = 'scopes = ["infer", "admin"]\n'
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "ann"\nsecret = "{secret}"\n{scopes}')
    control = ("--model-control-mode", "explicit", "--load-model", "m", "--log-requests")
    flags = ("--shards", "2", "--api-keys", str(tmp_path / "keys.toml"), *control)
    with (
        Served(tmp_path / "models", *flags, grpc=True) as served,
        Channels(served, 8, secret) as channels,
    ):
        load = service_pb2.RepositoryModelLoadRequest(model_name="other")
        unload = service_pb2.RepositoryModelUnloadRequest(model_name="other")
        for stub in channels.stubs[:2]:
            assert set(channels.codes(3, "other")) == {"NOT_FOUND"}
            stub.RepositoryModelLoad(load, metadata=channels.metadata, timeout=60)
            assert set(channels.codes(3, "other")) == {"OK"}
            stub.RepositoryModelUnload(unload, metadata=channels.metadata, timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            channels.stubs[0].RepositoryModelLoad(load, timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        lines = served.logged()
        assert lines.count("grpc caller=ann action=load model=other result=OK") == 2
        assert lines.count("grpc status=OK model=other") == 2 * 8
        assert lines.count("grpc status=NOT_FOUND model=other") == 2 * 8


def test_http_and_grpc_together_keep_the_rate_of_a_key(tmp_path: Path):
    null_model(tmp_path / "models", "m")
    secret = "sixteen characters"
    scopes = 'scopes = ["infer", "metrics"]\nrequests_per_s = 20\n'
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "a"\nsecret = "{secret}"\n{scopes}')
    flags = ("--shards", "2", "--api-keys", str(tmp_path / "keys.toml"))
    with (
        Served(tmp_path / "models", *flags, grpc=True) as served,
        Channels(served, 16, secret) as channels,
    ):
        began, found = time.monotonic(), []
        for number in range(6):
            found += channels.codes(number)
            found.append(infer(served.port, number, headers={"X-API-Key": secret})[0])
        for stub in channels.stubs:
            answers = stub.ModelStreamInfer(
                map(message, range(4)), metadata=channels.metadata, timeout=60
            )
            found += [each.error_message or "OK" for each in answers]
        elapsed_s = time.monotonic() - began
        assert len(found) == 6 * 17 + 16 * 4
        told = {each for each in found if isinstance(each, str) and "may send 20" in each}
        assert set(found) - told <= {"OK", 200, "RESOURCE_EXHAUSTED", 429}
        # The bucket holds a second's worth, and is refilled meanwhile.
        assert 20 <= found.count("OK") + found.count(200) <= 20 + 20 * elapsed_s


def test_another_server_does_not_share_the_port_of_grpc(tmp_path: Path):
    null_model(tmp_path, "m")
    with Served(tmp_path, "--shards", "2", grpc=True) as served:
        port = served.grpc_address.rpartition(":")[2]
        command = [sys.executable, "-m", "penstock", "serve", str(tmp_path), "--no-metrics"]
        command += ["--http-port", "0", "--grpc-port", port, "--shards", "2"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 1
        words = f"cannot listen on 127.0.0.1:{port} for gRPC: Address already in use"
        assert words in ended.stderr
