"""`penstock bench` against real servers: every protocol, and every way in which it can go wrong."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from benched import Benched, bench, finish, start
from served import EXAMPLES, Served, null_model

from penstock.system.exit_codes import ExitCode

FAKE_OPENAI = Path(__file__).parents[1] / "benchmark" / "fake_openai.py"
CHAIN = """
platform: "ensemble" max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step { model_name: "slow" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } }
  step { model_name: "fast" model_version: 1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
}
"""
SHORT = ["--duration", "500ms", "--warm-up", "0s"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(EXAMPLES, grpc=True)
    yield served
    assert served.terminate() == 0


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`whole` runs `slow`, then version 1 of `fast`."""
    root = tmp_path_factory.mktemp("chained")
    null_model(root, "slow", a_ms=5)
    null_model(root, "fast")
    (root / "whole" / "1").mkdir(parents=True)
    (root / "whole" / "config.pbtxt").write_text(CHAIN)
    with Served(root, grpc=True) as served:
        yield served


def num_good(found: Benched) -> int:
    return sum(window.num_good for level in found.run.levels for window in level.windows)


def num_failed(found: Benched) -> int:
    return sum(window.num_failed for level in found.run.levels for window in level.windows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "protocol"),
    [
        ("http://{http}/v2/models/identity", "v2 HTTP, binary"),
        ("http://{http}/v2/models/identity --tensors json", "v2 HTTP, JSON"),
        ("http://{http}/v2/models/digits -b 4", "v2 HTTP, binary"),
        ("http://{http}/v2/models/text_length", "v2 HTTP, binary"),
        ("grpc://{grpc}/identity", "v2 gRPC"),
        ("http://{http}/v2/health/ready", "HTTP"),
    ],
)
@pytest.mark.parametrize("load", ["--concurrency 2", "--rate 50", "--rate 50 --processes 2"])
def test_every_protocol_under_every_kind_of_load(
    server: Served, tmp_path: Path, form: str, protocol: str, load: str
) -> None:
    words = form.format(http=server.address, grpc=server.grpc_address).split()
    found = bench(tmp_path, *words, *load.split(), *SHORT)
    assert found.status == 0, found.errors
    assert found.run.target.protocol == protocol
    # The first request of each client is due at the start, however short the level is.
    assert num_good(found) >= 2 and num_failed(found) == 0
    assert not found.run.is_partial


@pytest.mark.verify
def test_the_server_has_counted_what_we_have(server: Served, tmp_path: Path) -> None:
    url = f"http://{server.address}/v2/models/identity"
    found = bench(tmp_path, url, "--rate", "100", "--duration", "1s", "--warm-up", "0s")
    (level,) = found.run.levels
    assert level.server.num_success == pytest.approx(num_good(found), abs=10)
    assert found.run.target.server.startswith("penstock")
    assert "queue" in found.out


@pytest.mark.parametrize(
    "address", ["http://{0.address}/v2/models/whole", "grpc://{0.grpc_address}/whole"]
)
def test_the_time_of_each_member_of_an_ensemble(
    chained: Served, tmp_path: Path, address: str
) -> None:
    """Other clients of a member count too, which is why they are per request."""
    folder = tmp_path / "page.html"
    flags = ["--concurrency", "2", *SHORT, "--html", str(folder)]
    found = bench(tmp_path, address.format(chained), *flags)
    assert found.status == 0, found.errors
    [level] = found.run.levels
    assert level.server is not None
    whole, members = level.server, level.server.members
    assert list(members) == ["slow", "fast/1"]
    for each in members.values():
        assert each.num_success >= whole.num_success > 0
    # Each of its executions takes 5 ms.
    assert members["slow"].compute_infer_ns / members["slow"].num_executions > 5e6
    rows = [line.split() for line in found.out.splitlines()]
    assert [row[0] for row in rows if len(row) > 8 and row[0] in members] == list(members)
    [summary] = json.loads((tmp_path / "run.json").read_text())["levels"]
    shown = summary["summary"]["members"]
    assert shown["slow"]["server_ms"] > 5 and shown["fast/1"]["phases_ms"]["compute infer"] >= 0
    assert "Members" in folder.read_text()


def test_where_the_time_of_single_requests_went(server: Served, tmp_path: Path) -> None:
    url = f"http://{server.address}/v2/models/identity"
    found = bench(tmp_path, url, "--concurrency", "2", *SHORT)
    samples = [sample for level in found.run.levels for sample in level.samples]
    assert samples
    assert all(sum(sample.phases_s.values()) > 0 for sample in samples)


def test_streams_of_an_llm(tmp_path: Path) -> None:
    """The fake's law: the first token after 30 ms, then one every 5 ms."""
    command = [sys.executable, str(FAKE_OPENAI), "--ttft-ms", "30", "--gap-ms", "5"]
    fake = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = fake.stdout.readline().strip()
        trace = tmp_path / "trace.csv"
        rows = "".join(f"{number * 0.05:.2f},20,{4 + number % 3}\n" for number in range(20))
        trace.write_text("time,input_length,output_length\n" + rows)
        flags = ["--trace", str(trace), "--slo", "p50 ttft < 10s, p50 tpot < 10s"]
        found = bench(tmp_path, address, *flags, "--warm-up", "0s")
    finally:
        fake.kill()
        fake.wait()
        fake.stdout.close()
    assert found.status == 0, found.errors
    (level,) = found.run.levels
    metrics = {name for window in level.windows for name in window.metrics}
    assert metrics == {"latency", "ttft", "tpot", "itl"}
    assert sum(window.num_output_tokens for window in level.windows) == sum(
        4 + number % 3 for number in range(20)
    )
    assert "TPOT = (last token - first token) / (output tokens - 1)" in found.out
    assert found.out.startswith("SLO kept")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("http://{http}/v2/models/nobody", "nobody"),
        ("grpc://{grpc}/nobody", "nobody"),
        ("http://{grpc}/v2/models/identity", "{grpc}"),
        ("grpc://{http}/identity", "{http}"),
        ("http://127.0.0.1:9/v2/models/identity", "127.0.0.1:9"),
        ("grpc://127.0.0.1:9/identity", "127.0.0.1:9"),
        ("openai+http://{http}/v1", "{http}"),
        ("http://{http}/v2/models/identity --version 9", "9"),
    ],
)
def test_what_is_not_there(server: Served, tmp_path: Path, form: str, text: str) -> None:
    places = {"http": server.address, "grpc": server.grpc_address}
    found = bench(tmp_path, *form.format(**places).split())
    assert found.status == ExitCode.FAILED
    assert found.errors.startswith("error: ")
    assert text.format(**places) in found.errors
    assert "Traceback" not in found.errors


def test_data_of_the_wrong_shape(server: Served, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, INPUT0=np.zeros((5, 17), np.float32))
    found = bench(tmp_path, f"http://{server.address}/v2/models/identity", "--data", str(data))
    assert found.status == ExitCode.FAILED
    assert "INPUT0" in found.errors and "[17]" in found.errors and "[16]" in found.errors


def wait_until_measuring(process: subprocess.Popen[str], served: Served, model: str) -> None:
    """Until the server has answered more than whatever comes before the measurement."""
    num_before = num_answered(served, model)
    while num_answered(served, model) < num_before + 150:
        assert process.poll() is None
        time.sleep(0.02)


def num_answered(served: Served, model: str) -> int:
    (stats,) = json.loads(served.get(f"/v2/models/{model}/stats")[1])["model_stats"]
    return int(stats["inference_stats"]["success"]["count"])


@pytest.mark.slow
def test_a_server_that_dies_leaves_a_partial_result(tmp_path: Path) -> None:
    served = Served(null_model(tmp_path / "models", "null", a_ms=2))
    path = tmp_path / "run.json"
    # With a precision the first level may end just before the server does.
    flags = ["--concurrency", "2,4", "--duration", "60s", "--precision", "0", "--warm-up", "0s"]
    process = start(f"http://{served.address}/v2/models/null", *flags, "--json", str(path))
    wait_until_measuring(process, served, "null")
    children = served.processes()
    served.process.kill()
    psutil.wait_procs(children, timeout=60)
    served.finish(children)
    found = finish(process, path)
    assert found.status == 1
    assert found.run.is_partial
    assert "the server stopped answering: connection" in found.run.problem
    assert found.run.problem in found.out
    assert num_good(found) > 100
    assert len(found.run.levels) == 1 and found.run.levels[0].ending == "lost"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured(server: Served, tmp_path: Path, number: int) -> None:
    path = tmp_path / "run.json"
    url = f"http://{server.address}/v2/models/identity"
    flags = ["--rate", "100", "--duration", "60s", "--warm-up", "0s", "--json", str(path)]
    process = start(url, *flags)
    wait_until_measuring(process, server, "identity")
    process.send_signal(number)
    found = finish(process, path)
    assert found.status == 130
    assert (found.run.is_partial, found.run.problem) == (True, "interrupted")
    assert num_good(found) > 10
    assert "partial" in found.out


@pytest.mark.slow
def test_requests_that_the_server_refuses_are_counted_by_cause(tmp_path: Path) -> None:
    """A queue of one: most of what is due is refused, and that is not an SLO that was kept."""
    limit = "default_queue_policy { max_queue_size: 1 }"
    models = null_model(tmp_path / "models", "null", max_batch=1, batching=limit, a_ms=50)
    served = Served(models)
    flags = ["--rate", "100", "--duration", "1s", "--warm-up", "0s", "--slo", "p99 < 1s", "--gate"]
    found = bench(tmp_path, f"http://{served.address}/v2/models/null", *flags)
    served.terminate()
    assert found.status == ExitCode.MISSED
    assert num_failed(found) > 10
    (cause,) = {text for window in found.run.levels[0].windows for text in window.failures}
    assert cause.startswith("status 503")
    assert found.out.startswith("SLO missed")
