"""What operators see of a real server: exact statistics, metrics, logs, explain."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from load import Load, read_answer
from prometheus_client.parser import text_string_to_metric_families
from served import EXAMPLES, Served, null_model
from tritonclient.utils import InferenceServerException

FAILS, STALLS = 666, 667
RAISES = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        print("what a model prints")
        pb_utils.Logger.log_warn("what a model logs")
        raise ValueError("no")
"""
MISBEHAVIOUR = {"fail_on": FAILS, "stall_on": STALLS, "stall_ms": 500}
QUEUE = "default_queue_policy { max_queue_size: 24 }"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("watched")
    null_model(root, "busy", batching=QUEUE, max_batch=8, a_ms=5, **MISBEHAVIOUR)
    slo = 'parameters { key: "penstock.slo" value { string_value: "p99 < 500ms" } }'
    null_model(root, "promise", config=slo, max_batch=8, a_ms=1)
    raiser = null_model(root, "raiser") / "raiser"
    config = (raiser / "config.pbtxt").read_text().replace('"null"', '"python"')
    (raiser / "config.pbtxt").write_text(config)
    (raiser / "1" / "model.py").write_text(RAISES)
    served = Served(root, "--log-format", "json", "--log-requests", grpc=True)
    yield served
    assert served.terminate() == 0


def statistics(served: Served, model: str) -> dict:
    status, body = served.get(f"/v2/models/{model}/stats")
    assert status == 200
    [entry] = json.loads(body)["model_stats"]
    return entry


def message(value: object, model: str = "busy") -> bytes:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    return head.encode() + b"%d\r\n\r\n" % len(body) + body


class Crowd:
    """Requests that succeed, fail in the model, are wrong, are refused, or are given up."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.seen: Counter[int] = Counter()
        self.num_left = 0

    async def run(self) -> None:
        values: list[object] = [1, FAILS, 1, "wrong", 1, 2]
        clients = [self.ask(values[i % len(values)]) for i in range(120)]
        leaving = [self.leave(3) for _ in range(119)]
        await asyncio.gather(*clients, *leaving)
        await self.leave(STALLS)

    async def ask(self, value: object) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        for _ in range(5):
            writer.write(message(value))
            status, _, _ = await read_answer(reader)
            self.seen[status] += 1
        writer.close()

    async def leave(self, value: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(message(value))
        await writer.drain()
        writer.close()
        self.num_left += 1


def check_sums(entry: dict) -> None:
    """What holds at any moment."""
    stats = entry["inference_stats"]
    assert entry["inference_count"] >= entry["execution_count"]
    in_batches = sum(b["batch_size"] * b["compute_infer"]["count"] for b in entry["batch_stats"])
    assert in_batches == entry["inference_count"]
    num_batches = sum(batch["compute_infer"]["count"] for batch in entry["batch_stats"])
    assert num_batches == entry["execution_count"]
    phases = ("queue", "compute_input", "compute_infer", "compute_output")
    assert {stats[phase]["count"] for phase in phases} == {stats["success"]["count"]}
    assert sum(stats[phase]["ns"] for phase in phases) <= stats["success"]["ns"]
    waits = stats["queue_batch"]["ns"] + stats["queue_instance"]["ns"]
    assert waits == pytest.approx(stats["queue"]["ns"], abs=1000)


def counters(entry: dict) -> list[int]:
    stats = entry["inference_stats"]
    return [
        entry["inference_count"],
        entry["execution_count"],
        *(stats[name]["count"] for name in sorted(stats)),
        *(stats[name]["ns"] for name in sorted(stats)),
    ]


def test_statistics_are_exact_under_load(served):
    crowd, readings, is_over = Crowd(served.port), [], threading.Event()

    def look() -> None:
        while len(readings) <= 5 or not is_over.is_set():
            readings.append(statistics(served, "busy"))

    watcher = threading.Thread(target=look)
    watcher.start()
    asyncio.run(crowd.run())
    is_over.set()
    watcher.join()
    entry = statistics(served, "busy")
    while num_ended(entry) < 600 + crowd.num_left:
        time.sleep(0.01)  # Those whose clients left may still run.
        entry = statistics(served, "busy")
    for reading in (*readings, entry):
        check_sums(reading)
    for before, after in zip(readings, [*readings[1:], entry], strict=True):
        assert all(a <= b for a, b in zip(counters(before), counters(after), strict=True))

    failed, refused = failures(served), crowd.seen[503]
    assert sum(crowd.seen.values()) == 600
    assert crowd.seen.keys() == {200, 400, 500, 503}
    assert (failed["BACKEND"], failed["OTHER"]) == (crowd.seen[500], crowd.seen[400])
    # Of those whose clients left, some were refused, some answered before it was noticed.
    num_success = entry["inference_stats"]["success"]["count"]
    unseen = num_success - crowd.seen[200] + failed["REJECTED"] - refused + failed["CANCELED"]
    assert unseen == crowd.num_left == 120
    assert num_success >= crowd.seen[200] and failed["REJECTED"] >= refused
    assert failed["CANCELED"] > 0
    assert entry["inference_stats"]["fail"]["count"] == sum(failed.values())


def num_ended(entry: dict) -> int:
    stats = entry["inference_stats"]
    return stats["success"]["count"] + stats["fail"]["count"]


def failures(served: Served) -> dict[str, int]:
    return {
        sample.labels["reason"]: int(sample.value)
        for family in text_string_to_metric_families(served.get("/metrics")[1].decode())
        for sample in family.samples
        if sample.name.startswith("nv_inference_request_failure")
        and sample.labels["model"] == "busy"
    }


# The metrics port.


def open_url(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_metrics_port_knows_every_process(served):
    status, body = open_url(served.metrics_url)
    assert status == 200
    samples = [
        sample
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    ]
    resident = {
        (sample.labels["process"], sample.labels.get("model", "")): sample.value
        for sample in samples
        if sample.name == "penstock_process_resident_bytes"
    }
    assert resident.keys() == {
        ("core", ""),
        ("worker", "busy"),
        ("worker", "promise"),
        ("worker", "raiser"),
    }
    assert all(value > 1 << 20 for value in resident.values())
    values = {sample.name: sample.value for sample in samples if not sample.labels}
    assert 0 <= values["nv_cpu_utilization"] <= 1
    assert values["nv_cpu_memory_total_bytes"] > values["nv_cpu_memory_used_bytes"] > 0


def test_the_metrics_port_serves_nothing_else(served):
    base = served.metrics_url.removesuffix("/metrics")
    assert open_url(f"{base}/v2/health/ready")[0] == 200
    assert open_url(f"{base}/v2/models/busy")[0] == 404


# Logs.


def lines(served: Served) -> list[dict]:
    """Everything that was logged so far, all of it JSON."""
    # Without the line that is being written.
    text = served.logged().rpartition("\n")[0]
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        assert {"ts", "level", "logger", "msg", "pid"} <= line.keys()
    return found


def wait_for(served: Served, words: str) -> dict:
    """The line that says this, which may come a moment later."""
    while True:
        for line in lines(served):
            if words in line["msg"]:
                return line
        time.sleep(0.05)


def test_requests_are_logged_with_where_the_time_went(served):
    assert served.infer("promise", "x", "INT32", [7])[0] == 200
    client = grpcclient.InferenceServerClient(served.grpc_address)
    tensor = grpcclient.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[7]], np.int32))
    client.infer("promise", [tensor], request_id="over grpc")
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer("absent", [tensor])
    tensor = grpcclient.InferInput("x", [1, 2], "INT32")
    tensor.set_data_from_numpy(np.array([[7, 7]], np.int32))
    with pytest.raises(InferenceServerException, match="shape"):
        client.infer("promise", [tensor])
    client.close()
    assert served.infer("promise", "x", "INT32", ["secret"])[0] == 400
    elsewhere = urllib.request.Request(f"http://{served.address}/v2/x", headers={"Host": "evil"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(elsewhere)
    caught.value.close()
    assert served.infer("stranger", "x", "INT32", [1])[0] == 404
    wait_for(served, "model=stranger")
    told = [line for line in lines(served) if line["logger"] == "penstock.requests"]
    about = [line for line in told if line.get("model") in ("promise", "absent", "stranger")]
    [refused] = [line for line in told if line.get("path") == "/v2/x"]
    assert (refused["status"], refused["error"]) == (403, "NotAllowed")
    first, over_grpc, absent, misshapen, wrong, unknown = about[-6:]
    assert (absent["status"], absent["error"]) == ("NOT_FOUND", "NotFound")
    assert (misshapen["status"], misshapen["error"]) == ("INVALID_ARGUMENT", "InvalidRequest")
    assert first["rows"] == 1 and "rows" not in misshapen
    assert (first["protocol"], first["status"], first["model"]) == ("http", 200, "promise")
    assert first["total_ms"] >= first["compute_infer_ms"] > 0
    assert {"queue_batch_ms", "queue_instance_ms", "decode_ms"} <= first.keys()
    assert (over_grpc["protocol"], over_grpc["status"]) == ("grpc", "OK")
    assert over_grpc["request_id"] == "over grpc"
    assert (wrong["status"], wrong["error"]) == (400, "InvalidRequest")
    assert (unknown["status"], unknown["model"]) == (404, "stranger")
    assert "secret" not in json.dumps(told)


def test_the_life_of_models_and_workers_is_logged(served):
    [worker] = [w for w in served.workers() if w.pid == worker_of(served, "promise")]
    worker.kill()
    ready = wait_for(served, "promise/1 is ready after")
    assert (ready["model"], ready["version"], ready["level"]) == ("promise", "1", "INFO")
    death = wait_for(served, "worker was killed by SIGKILL")
    assert (death["model"], death["instance"], death["level"]) == ("promise", 0, "WARNING")
    assert death["reason"] == "was killed by SIGKILL"
    while served.infer("promise", "x", "INT32", [7])[0] != 200:
        time.sleep(0.05)


def test_what_a_model_raises_and_logs_is_json_from_its_worker(served):
    assert served.infer("raiser", "x", "INT32", [7])[0] == 500
    assert served.process.stdout.readline() == "what a model prints\n"
    pid = worker_of(served, "raiser")
    raised = wait_for(served, "the model raised ValueError")
    assert (raised["model"], raised["pid"], raised["level"]) == ("raiser", pid, "ERROR")
    assert raised["exception"].startswith("Traceback")
    assert raised["exception"].endswith("ValueError: no")
    logged = wait_for(served, "what a model logs")
    assert (logged["model"], logged["level"]) == ("raiser", "WARNING")


def worker_of(served: Served, model: str) -> int:
    _, body = served.get(f"/v2/models/{model}/explain")
    [instance] = json.loads(body)["instances"]
    return instance["pid"]


def test_overload_is_told_when_it_begins(served):
    asyncio.run(Crowd(served.port).run())
    wait_for(served, "is overloaded")
    told = [line for line in lines(served) if "is overloaded" in line["msg"]]
    assert told and told[0]["reason"] == "queue_full"
    assert len(told) <= 5, "not one line for each refusal"


# Explain.


def explain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "explain", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_explain_shows_what_the_batcher_does(served):
    def num_batches() -> int:
        return statistics(served, "busy")["execution_count"]

    async def under_load() -> tuple[subprocess.CompletedProcess[str], dict]:
        async with Load(served.port, 4, model="busy"):
            while await asyncio.to_thread(num_batches) <= 64:
                await asyncio.sleep(0.05)
            url = ("--url", f"http://{served.address}")
            text = await asyncio.to_thread(explain, "busy", *url)
            answer = await asyncio.to_thread(explain, "busy", "--version", "1", "--json", *url)
            return text, json.loads(answer.stdout)

    ended, answer = asyncio.run(under_load())
    assert (ended.returncode, ended.stderr) == (0, "")
    for words in ("busy/1 READY", "mode fixed", "Why batches", "Rows per batch", "max_queue_size"):
        assert words in ended.stdout
    assert answer["model"] == "busy"
    assert len(answer["recent"]) == 64
    assert sum(answer["batch_sizes"].values()) > 64
    assert answer["shapes"][0]["shape"] == "[1]"
    assert any("Batches" in sentence for sentence in answer["verdicts"])


def test_explain_of_slo_mode_shows_times(served):
    assert served.infer("promise", "x", "INT32", [7])[0] == 200
    ended = explain("promise", "--url", f"http://{served.address}")
    assert "mode slo: penstock.slo promises an answer within 500 ms" in ended.stdout
    assert "T(8)" in ended.stdout


def test_explain_of_a_stranger_is_an_error_in_words(served):
    ended = explain("stranger", "--url", f"http://{served.address}")
    assert ended.returncode == 1
    assert "unknown model: 'stranger' is not found" in ended.stderr
    ended = explain("busy", "--version", "9", "--url", f"http://{served.address}")
    assert "version 9 is not found; loaded: 1" in ended.stderr


def test_explain_watches_until_it_is_interrupted(served):
    command = [sys.executable, "-m", "penstock", "explain", "busy", "--watch"]
    process = subprocess.Popen(
        [*command, "--url", f"http://{served.address}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(2):
            assert any("busy/1 READY" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_explain_and_metrics_need_the_same_key(tmp_path: Path):
    secrets = {"infer": "i" * 16, "metrics": "m" * 16}
    (tmp_path / "keys.toml").write_text(
        "".join(f'[[key]]\nsecret = "{s}"\nscopes = ["{n}"]\n' for n, s in secrets.items())
    )
    served = Served(EXAMPLES / "identity", "--api-keys", str(tmp_path / "keys.toml"))
    url = f"http://{served.address}"
    assert "PENSTOCK_API_KEY" in explain("identity", "--url", url).stderr
    refused = explain("identity", "--url", url, "--api-key", secrets["infer"])
    assert "no scope 'metrics'" in refused.stderr
    allowed = explain("identity", "--url", url, PENSTOCK_API_KEY=secrets["metrics"])
    assert "identity/1 READY" in allowed.stdout
    assert open_url(served.metrics_url)[0] == 401
    base = served.metrics_url.removesuffix("/metrics")
    assert open_url(f"{base}/v2/health/live")[0] == 200
    assert served.terminate() == 0
