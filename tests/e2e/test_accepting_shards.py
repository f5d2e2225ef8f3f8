"""A real server of several shards at low and high rates: which of them have the clients."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from load import Load
from served import Served, null_model, num_sockets, open_page
from tritonclient.grpc import service_pb2, service_pb2_grpc
from waiting import wait_until

from penstock.serving.shared_page import CPU_S, HEARTBEAT

LOW = ("--shard-accept", "load")
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [7]}]})


def start(path: Path, num_shards: int, *flags: str, grpc: bool = False) -> Served:
    served = Served(path, "--shards", str(num_shards), *LOW, *flags, grpc=grpc)
    wait_until(lambda: len(served.shards()) == num_shards)
    # Until then connections wait with any shard.
    wait_until(lambda: accepting(served) == [1] + [0] * (num_shards - 1))
    return served


def accepting(served: Served) -> list[int]:
    text = served.get("/metrics")[1].decode()
    return [int(n) for n in re.findall(r"^penstock_shard_accepts{.*} (\d)$", text, re.M)]


def num_clients(served: Served) -> list[int]:
    """Of each shard, in the order in which they were started."""
    shards = sorted(served.shards(), key=lambda each: (each.create_time(), each.pid))
    return [num_sockets(each) for each in shards]


@contextlib.contextmanager
def clients(served: Served, count: int) -> Iterator[list[http.client.HTTPConnection]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60))
            )
            for _ in range(count)
        ]


def ask(client: http.client.HTTPConnection) -> None:
    client.request("POST", "/v2/models/m/infer", BODY)
    answer = client.getresponse()
    assert json.loads(answer.read())["outputs"][0]["data"] == [7] and answer.status == 200


@pytest.mark.parametrize("num_shards", [2, 4])
def test_few_connections_are_all_with_the_first_shard(tmp_path: Path, num_shards: int):
    null_model(tmp_path, "m")
    with start(tmp_path, num_shards, grpc=True) as served:
        with clients(served, 12) as connected:
            for _ in range(5):
                for client in connected:
                    ask(client)
            channels = [
                grpc.insecure_channel(served.grpc_address, options=[("penstock.client", number)])
                for number in range(6)
            ]
            for channel in channels:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60).live
            assert num_clients(served) == [18] + [0] * (num_shards - 1)
            for channel in channels:
                channel.close()
        told = json.loads(served.get("/v2/models/m/explain")[1])
        assert (
            told["shards"]
            == f"{num_shards} shards: --shards {num_shards}; 1 accept new connections"
        )


def test_one_core_means_one_shard(tmp_path: Path):
    """If the server chooses, for the cores that the process may use."""
    null_model(tmp_path, "m")
    core = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(core), sys.executable, "-m", "penstock", "serve", str(tmp_path)]
    command += ["--shards", "0", "--http-port", "0", "--no-grpc", "--no-metrics"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        shown = next(line for line in run.stdout if line.startswith("Shards"))
        run.terminate()
        _, log = run.communicate(timeout=60)
    assert shown == "Shards   1 (1 core)\n" and "1 shard: 1 core" in log


def test_the_next_shard_accepts_when_the_first_dies(tmp_path: Path):
    null_model(tmp_path, "m")
    with start(tmp_path, 2) as served:
        first = max(served.shards(), key=num_sockets)
        with clients(served, 4) as connected:
            for client in connected:
                ask(client)
            first = max(served.shards(), key=num_sockets)
            (other,) = [each for each in served.shards() if each.pid != first.pid]
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: accepting(served) in ([0, 1], [1, 0]))
            for client in connected:
                client.close()
                ask(client)
        wait_until(lambda: len(served.shards()) == 2)
        wait_until(lambda: accepting(served) == [1, 0])
        assert other.is_running()


@contextlib.contextmanager
def seemingly_busy(served: Served) -> Iterator[None]:
    """Let the first shard show that its loop is always busy; a real load may not get that much of
    a machine's cores."""
    page, ended = open_page(served), threading.Event()
    first = page.layout.shard_at(0)

    def show() -> None:
        while not ended.wait(0.001):
            page.cells[first + CPU_S] = page.cells[first + HEARTBEAT] = time.monotonic()

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_clients_spread_when_the_first_shard_is_busy_and_lose_nothing(tmp_path: Path):
    null_model(tmp_path, "m", max_batch=64)
    with start(tmp_path, 2) as served:

        async def scenario() -> Load:
            async with Load(served.port, 32, model="m") as load:
                with seemingly_busy(served):
                    await asyncio.to_thread(wait_until, lambda: min(num_clients(served)) >= 8)
                enough = load.tally.num_good + 500
                while load.tally.num_good < enough:
                    await asyncio.sleep(0.01)
            return load

        tally = asyncio.run(scenario()).tally
        assert set(tally.statuses) == {200} and tally.num_wrong == tally.num_cut == 0
        assert accepting(served) == [1, 1]
        assert "2 shards accept connections now; before, 1" in served.logged()


def test_grpc_clients_spread_and_lose_nothing(tmp_path: Path):
    null_model(tmp_path, "m")
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1]}
    message = service_pb2.ModelInferRequest(
        model_name="m", inputs=[tensor], raw_input_contents=[bytes((7, 0, 0, 0))]
    )
    with start(tmp_path, 2, grpc=True) as served, contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(
                grpc.insecure_channel(served.grpc_address, options=[("penstock.client", number)])
            )
            for number in range(8)
        ]
        stubs = [service_pb2_grpc.GRPCInferenceServiceStub(each) for each in channels]

        def ask_all() -> list[int]:
            calls = [stub.ModelInfer.future(message, timeout=60) for stub in stubs]
            assert [call.result().raw_output_contents[0][0] for call in calls] == [7] * 8
            return num_clients(served)

        with seemingly_busy(served):
            wait_until(lambda: min(ask_all()) >= 3)
        assert sum(ask_all()) == 8
