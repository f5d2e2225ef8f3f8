"""A real server beside a driver that tells of GPUs that are not there: placement, plan, metrics."""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import fake_nvml
import pytest
from fake_nvml import GIB
from served import Served, null_model


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with two GPUs of 16 GiB, 15 and 14 of them free."""
    folder = fake_nvml.build(tmp_path_factory.mktemp("driver")).parent
    return {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0,1"}


def group(text: str, num_bytes: int | None = None) -> str:
    groups = f"instance_group {{ {text} }}"
    if num_bytes is None:
        return groups
    key = 'key: "penstock.gpu_memory_bytes"'
    return groups + f' parameters {{ {key} value {{ string_value: "{num_bytes}" }} }}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, driver: dict[str, str]):
    root = tmp_path_factory.mktemp("models")
    null_model(
        root, "wide", config=group("kind: KIND_GPU count: 2", GIB), max_batch=1, a_ms=150,
        gpu_memory_bytes=3 * GIB,
    )  # fmt: skip
    null_model(root, "second", config=group("kind: KIND_GPU gpus: 1"))
    null_model(root, "plain", config=group("kind: KIND_CPU"))
    served = Served(root, environment=driver)
    yield served
    assert served.terminate() == 0


def instances(server: Served, model: str) -> list[dict]:
    status, body = server.get(f"/v2/models/{model}/explain")
    assert status == 200
    return json.loads(body)["instances"]


def test_instances_are_on_the_gpus_that_were_asked_for(server: Served):
    # Those of one GPU are slots of one worker.
    wide = [(each["device"], each["num_slots"]) for each in instances(server, "wide")]
    assert wide == [("cuda:0", 2), ("cuda:1", 2)]
    assert [each["device"] for each in instances(server, "second")] == ["cuda:1"]
    assert [each["device"] for each in instances(server, "plain")] == ["cpu"]
    assert len({each["pid"] for each in instances(server, "wide")}) == 2


def test_workers_count_gpus_as_the_driver_does(server: Served):
    orders = {worker.environ().get("CUDA_DEVICE_ORDER") for worker in server.workers()}
    assert orders == {"PCI_BUS_ID"}
    allocators = {worker.environ().get("PYTORCH_ALLOC_CONF") for worker in server.workers()}
    assert allocators == {"expandable_segments:True"}


def test_all_gpus_work_at_the_same_time(server: Served):
    answers: dict[int, dict] = {}

    def ask(number: int) -> None:
        answers[number] = server.infer("wide", "x", "INT32", [number])[1]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = {number: answer["outputs"][0]["data"] for number, answer in answers.items()}
    assert data == {number: [number] for number in range(8)}
    recent = json.loads(server.get("/v2/models/wide/explain")[1])["recent"]
    assert {batch["instance"] for batch in recent} == {0, 1}


def test_the_configuration_says_where_instances_are(server: Served):
    config = json.loads(server.get("/v2/models/wide/config")[1])
    [group] = config["instance_group"]
    assert (group["count"], group["kind"], group["gpus"]) == (2, "KIND_GPU", [0, 1])


def test_a_scrape_tells_of_gpus_and_of_the_instances_on_them(server: Served):
    for body in (server.get("/metrics")[1], urlopen(server.metrics_url)):
        text = body.decode()
        assert 'nv_gpu_utilization{gpu_uuid="GPU-aaaa-0000"} 0.37' in text
        assert f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-bbbb-1111"}} {16 * GIB}' in text
        assert 'nv_gpu_power_usage{gpu_uuid="GPU-aaaa-0000"} 123.456' in text
        assert 'nv_gpu_power_usage{gpu_uuid="GPU-bbbb-1111"}' not in text
        assert re.search(r'nv_energy_consumption{gpu_uuid="GPU-aaaa-0000"} \d+', text)
        labels = 'model="wide",version="1",instance="1",device="cuda:1"'
        assert f"penstock_instance_gpu_memory_bytes{{{labels}}} {3 * GIB}" in text


def urlopen(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def penstock(*arguments: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    whole = os.environ | environment
    return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=60)


def test_the_plan_is_in_the_log_before_anything_is_loaded(tmp_path: Path, driver: dict[str, str]):
    null_model(tmp_path, "large", config=group("kind: KIND_GPU gpus: 0 count: 2", 14 * GIB))
    null_model(tmp_path, "small", config=group("kind: KIND_GPU gpus: 0", GIB))
    flags = ("--http-port", "0", "--no-grpc", "--no-metrics")
    ended = penstock("serve", tmp_path, *flags, environment=driver)
    assert ended.returncode == 1
    assert (
        "GPU 0 (Made Up 16): models need 15.0 GiB of the 14.2 GiB that can be had: "
        "large/1 14.0 GiB for 2 instances (configured); small/1 1.0 GiB (configured)"
    ) in ended.stderr
    assert "error: small: GPU 0 (Made Up 16): 15.0 GiB of memory would be needed" in ended.stderr
    assert "loads" not in ended.stderr, "nothing was started"


def test_keeping_less_back_makes_room(tmp_path: Path, driver: dict[str, str]):
    null_model(tmp_path, "large", config=group("kind: KIND_GPU gpus: 0", 15 * GIB))
    served = Served(tmp_path, "--gpu-memory-reserve", "0", environment=driver)
    assert instances(served, "large")[0]["device"] == "cuda:0"
    assert served.terminate() == 0


def test_a_gpu_that_is_not_there_ends_the_start(tmp_path: Path, driver: dict[str, str]):
    null_model(tmp_path, "far", config=group("gpus: [ 0, 5 ]"))
    ended = penstock("serve", tmp_path, "--http-port", "0", "--no-grpc", environment=driver)
    assert ended.returncode == 1
    problem = "far: instance_group: asks for GPU 5, and there are only GPUs 0, 1"
    assert f"error: {problem}\n" in ended.stderr


def test_inspect_shows_which_instance_would_be_where(tmp_path: Path, driver: dict[str, str]):
    null_model(tmp_path, "wide", config=group("kind: KIND_GPU"))
    ended = penstock("inspect", tmp_path, environment=driver)
    assert "#   instances: 0 on cuda:0 (Made Up 16); 1 on cuda:1 (Made Up 16)" in ended.stdout
    hidden = penstock("inspect", tmp_path, environment=driver | {"CUDA_VISIBLE_DEVICES": ""})
    assert (
        "#   instances: cannot be placed here: instance_group: asks for KIND_GPU" in hidden.stdout
    )
    assert ended.returncode == hidden.returncode == 0
