"""A real server of several shards answers as one process does."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http as httpclient
from load import Load
from served import EXAMPLES, Served, null_model, num_sockets
from waiting import wait_until

KEYS = """
[[key]]
name = "all"
secret = "sixteen characters"
scopes = ["infer", "metrics", "shared_memory", "admin"]
[[key]]
name = "users"
secret = "fifteen and some"
scopes = ["infer"]
"""
ALL = {"X-API-Key": "sixteen characters"}
USERS = {"X-API-Key": "fifteen and some"}
CONNECTIONS = re.compile(rb'^penstock_shard_connections{shard="(\d)"} (\d+)', re.M)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards") / "repository"
    shutil.copytree(EXAMPLES, root)
    null_model(root, "faulty", fail_on=13)
    (root / "broken" / "1").mkdir(parents=True)
    (root / "broken" / "config.pbtxt").write_text('backend: "nobody"')
    (root.parent / "keys.toml").write_text(KEYS)
    return root


def serve(repository: Path, *flags: str) -> Served:
    control = ("--model-control-mode", "explicit", "--no-exit-on-error")
    loaded = [each for name in ("digits", "identity", "faulty") for each in ("--load-model", name)]
    keys = ("--api-keys", str(repository.parent / "keys.toml"))
    return Served(repository, *control, *loaded, *keys, *flags)


@pytest.fixture(scope="module")
def alone(repository: Path) -> Iterator[Served]:
    served = serve(repository)
    yield served
    assert served.terminate() == 0


@pytest.fixture(scope="module")
def sharded(repository: Path) -> Iterator[Served]:
    served = serve(repository, "--shards", "2")
    wait_until(lambda: served.has_shards(2))
    yield served
    assert served.terminate() == 0


@dataclass(frozen=True)
class Asked:
    """One message."""

    path: str
    body: bytes = b""
    method: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def of(self, served: Served) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        ) as connection:
            method = self.method or ("POST" if self.body else "GET")
            connection.request(method, self.path, self.body or None, {**ALL, **self.headers})
            answer = connection.getresponse()
            headers = dict(answer.getheaders())
            if "allow" in headers:  # Comes from a set.
                headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))
            return answer.status, headers, answer.read()


def rows(*values: float, outputs: list | None = None, **fields: object) -> bytes:
    """For `identity`: 16 numbers, the first of which are these."""
    data = [*values, *[0.5] * (16 - len(values))]
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": data}
    asked = {"inputs": [tensor], "id": "seven", **fields}
    return json.dumps(asked if outputs is None else {**asked, "outputs": outputs}).encode()


def digit() -> bytes:
    data = [n % 17 / 16 for n in range(64)]
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": data}
    classes = {"name": "logits", "parameters": {"classification": 3}}
    return json.dumps({"inputs": [tensor], "outputs": [classes]}).encode()


INFER = "/v2/models/identity/infer"
SAME = {
    "live": Asked("/v2/health/live"),
    "ready": Asked("/v2/health/ready"),
    "server": Asked("/v2"),
    "head": Asked("/v2", method="HEAD"),
    "model": Asked("/v2/models/digits"),
    "version": Asked("/v2/models/digits/versions/1"),
    "no version": Asked("/v2/models/digits/versions/7"),
    "model ready": Asked("/v2/models/digits/ready"),
    "no model ready": Asked("/v2/models/none/ready"),
    "config": Asked("/v2/models/digits/config"),
    "index": Asked("/v2/repository/index", method="POST"),
    "ready index": Asked("/v2/repository/index", b'{"ready": true}'),
    "load nobody": Asked("/v2/repository/models/nobody/load", method="POST"),
    "load with parameters": Asked(
        "/v2/repository/models/digits/load", b'{"parameters": {"config": "{}"}}'
    ),
    "load what is broken": Asked("/v2/repository/models/broken/load", method="POST"),
    "missing": Asked("/v2/logging"),
    "nowhere": Asked("/v2/nowhere?at=all"),
    "wrong method": Asked("/v2/models/digits", method="DELETE"),
    "no key": Asked("/v2/models/digits", headers={"X-API-Key": "another"}),
    "no scope": Asked("/metrics", headers=USERS),
    "infer": Asked(INFER, rows(1, 2, 3)),
    "infer version": Asked("/v2/models/identity/versions/1/infer", rows(4)),
    "infer binary out": Asked(INFER, rows(5, parameters={"binary_data_output": True})),
    "infer compressed": Asked(
        INFER, gzip.compress(rows(6)), headers={"Content-Encoding": "gzip"}
    ),
    "infer wrong compression": Asked(INFER, rows(6), headers={"Content-Encoding": "br"}),
    "infer not compressed": Asked(INFER, rows(6), headers={"Content-Encoding": "gzip"}),
    "infer answered compressed": Asked(
        INFER, rows(7, id="i" * 2000), headers={"Accept-Encoding": "gzip"}
    ),
    "infer classes": Asked("/v2/models/digits/infer", digit()),
    "infer raw": Asked(
        INFER, bytes(64), headers={"Inference-Header-Content-Length": "0"}
    ),
    "infer wrong raw": Asked(INFER, bytes(7), headers={"Inference-Header-Content-Length": "0"}),
    "infer nobody": Asked("/v2/models/none/infer", rows(1)),
    "infer broken": Asked("/v2/models/broken/infer", rows(1)),
    "infer no JSON": Asked(INFER, b"{"),
    "infer no output": Asked(INFER, rows(1, outputs=[{"name": "none"}])),
    "infer too many": Asked(INFER, rows(*range(17))),
    "infer with GET": Asked(INFER),
    "infer failing": Asked(
        "/v2/models/faulty/infer",
        b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [13]}]}',
    ),
    "infer sequence": Asked(INFER, rows(1, parameters={"sequence_id": 7})),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_shards_answer_as_the_core_does(alone: Served, sharded: Served, name: str):
    expected = SAME[name].of(alone)
    assert expected[0] != 500 or name == "infer failing"
    # Whichever shard it is that answers.
    for _ in range(4):
        assert SAME[name].of(sharded) == expected


@pytest.mark.parametrize(
    "path", ["/v2/models/stats", "/v2/models/digits/stats", "/v2/models/digits/explain"]
)
def test_what_changes_with_time_has_the_same_form(alone: Served, sharded: Served, path: str):
    def form(value: object) -> object:
        if isinstance(value, dict):
            return {key: form(each) for key, each in value.items()}
        return type(value)

    status, headers, body = Asked(path).of(sharded)
    other_status, other_headers, other = Asked(path).of(alone)
    assert (status, headers.keys()) == (other_status, other_headers.keys()) == (200, headers.keys())
    assert form(json.loads(body)) == form(json.loads(other))


def metrics(served: Served) -> bytes:
    return Asked("/metrics").of(served)[2]


def test_metrics_know_the_shards_and_how_many_clients_each_has(sharded: Served):
    names = set(re.findall(rb"^# TYPE (\S+)", metrics(sharded), re.M))
    assert b"penstock_shard_connections" in names
    cpu = rb'^penstock_process_cpu_seconds{process="shard",shard="(.)"}'
    assert re.findall(cpu, metrics(sharded), re.M) == [b"1", b"2"]
    clients = []
    for _ in range(32):
        client = http.client.HTTPConnection("127.0.0.1", sharded.port)
        client.request("GET", "/v2/health/live")
        assert client.getresponse().read() == b'{"live":true}'
        clients.append(client)
    ends = time.monotonic() + 60
    while True:
        counts = {shard: int(n) for shard, n in CONNECTIONS.findall(metrics(sharded))}
        # The scrape may be counted as well.
        if sum(counts.values()) in (32, 33):
            break
        assert time.monotonic() < ends, counts
        time.sleep(0.1)
    assert counts.keys() == {b"1", b"2"} and all(counts.values())
    for client in clients:
        client.close()


def test_models_come_and_go_for_all_shards_at_once(sharded: Served):
    text = Asked("/v2/models/text_length/ready")
    assert {text.of(sharded)[0] for _ in range(8)} == {404}
    assert Asked("/v2/repository/models/text_length/load", method="POST").of(sharded)[0] == 200
    assert {text.of(sharded)[0] for _ in range(8)} == {200}
    assert Asked("/v2/repository/models/text_length/unload", method="POST").of(sharded)[0] == 200
    assert {text.of(sharded)[0] for _ in range(8)} == {404}


@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_tritonclient_gets_its_own_bits_back(sharded: Served, count: int):
    values = np.random.default_rng(1).normal(size=(min(count, 64), 16)).astype(np.float32)
    with httpclient.InferenceServerClient(sharded.address, concurrency=8) as client:
        tensor = httpclient.InferInput("INPUT0", values.shape, "FP32")
        tensor.set_data_from_numpy(values)
        pending = [client.async_infer("identity", [tensor], headers=ALL) for _ in range(16)]
        for answer in pending:
            np.testing.assert_array_equal(answer.get_result().as_numpy("OUTPUT0"), values)


def test_a_killed_shard_takes_only_its_own_connections_along(tmp_path: Path):
    # Requests may wait for as long as the machine makes them.
    patient = "default_queue_policy { default_timeout_microseconds: 60000000 }"
    served = Served(null_model(tmp_path, "model", batching=patient, a_ms=1), "--shards", "2")
    wait_until(lambda: served.has_shards(2))
    victim, survivor = served.shards()
    workers = {worker.pid for worker in served.workers()}

    async def scenario() -> tuple[Load, int]:
        async with Load(served.port, 16, model="model") as load:
            while load.tally.num_good < 200:
                await asyncio.sleep(0.01)
            num_own = num_sockets(victim)
            os.kill(victim.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_for_two, served, victim.pid)
            enough = load.tally.num_good + 200
            while load.tally.num_good < enough:
                await asyncio.sleep(0.01)
        return load, num_own

    load, num_own = asyncio.run(scenario())
    tally = load.tally
    assert set(tally.statuses) == {200} and tally.num_wrong == 0
    assert len(tally.cut) <= num_own < 16
    assert tally.num_good + tally.num_cut >= tally.num_sent
    assert survivor.pid in {shard.pid for shard in served.shards()}
    assert {worker.pid for worker in served.workers()} == workers
    text = served.get("/metrics")[1]
    restarts = re.findall(rb"^penstock_shard_restarts{.*} (\d)", text, re.M)
    assert sorted(restarts) == [b"0", b"1"]
    assert served.terminate() == 0


def wait_for_two(served: Served, killed: int) -> None:
    """Until another shard listens in the place of this one."""
    ends = time.monotonic() + 60
    while len({each.pid for each in served.shards()} - {killed}) < 2:
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_shards_die_with_the_core(tmp_path: Path):
    served = Served(null_model(tmp_path, "m"), "--shards", "2")
    processes = served.processes()
    assert len(processes) == 4, "worker, two shards and reaper"
    served.process.kill()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert served.finish(processes) == -signal.SIGKILL


@pytest.mark.parametrize("flags", [(), ("--shards", "2")], ids=["core", "shards"])
def test_another_server_does_not_share_the_port(sharded: Served, tmp_path: Path, flags: tuple):
    root = null_model(tmp_path, "m")
    command = [sys.executable, "-m", "penstock", "serve", str(root), "--no-grpc", "--no-metrics"]
    command += ["--http-port", str(sharded.port), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    words = f"cannot listen on 127.0.0.1:{sharded.port} for HTTP: Address already in use"
    assert words in done.stderr
