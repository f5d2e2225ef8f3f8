"""Placement, memory plan and metrics on a machine with a GPU; `make test-gpu`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.served import Served

from penstock.system import devices

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

SIZE, LAYERS = 2048, 4
WEIGHT_BYTES = LAYERS * (SIZE * SIZE + SIZE) * 4
MODULE = f"""
from torch import nn

def factory():
    return nn.Sequential(*(nn.Linear({SIZE}, {SIZE}) for _ in range({LAYERS})))
"""
CONFIG = f"""
backend: "pytorch" max_batch_size: 8 dynamic_batching {{}}
input {{ name: "x" data_type: TYPE_FP32 dims: {SIZE} }}
output {{ name: "y" data_type: TYPE_FP32 dims: {SIZE} }}
"""


def add_model(root: Path, name: str, groups: str) -> torch.nn.Module:
    version = root / name / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text(MODULE)
    (root / name / "config.pbtxt").write_text(CONFIG + groups)
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
    save_file(module.state_dict(), version / "model.safetensors")
    return module.eval()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    add_model(root, "twice", "instance_group { kind: KIND_GPU count: 2 gpus: 0 }")
    # Without a group it is on each GPU, as in Triton.
    add_model(root, "auto", "")
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Served]:
    served = Served(repository)
    yield served
    assert served.terminate() == 0


def scrape(server: Served) -> dict[str, float]:
    text = server.get("/metrics")[1].decode()
    return {
        match[1]: float(match[2])
        for match in re.finditer(r"^([a-z]\S*) (\S+)$", text, re.MULTILINE)
    }


def test_the_driver_and_torch_see_the_same_gpus() -> None:
    gpus = devices.read_gpus()
    assert len(gpus) == torch.cuda.device_count()
    for gpu in gpus:
        properties = torch.cuda.get_device_properties(gpu.index)
        assert gpu.name == properties.name
        assert gpu.uuid.startswith("GPU-")
        assert gpu.total_bytes == pytest.approx(properties.total_memory, rel=0.05)
        assert 0 < gpu.free_bytes <= gpu.total_bytes
    assert devices.driver()


def test_a_gpu_says_what_it_does() -> None:
    use = devices.read_uses()[0]
    assert use.utilization is not None and 0 <= use.utilization <= 1
    assert use.power_watts is not None and use.power_watts > 0
    assert use.memory_used_bytes is not None and use.memory_total_bytes is not None
    assert use.memory_used_bytes < use.memory_total_bytes


def test_both_models_answer_on_the_gpu(server: Served, tmp_path: Path) -> None:
    row = torch.linspace(-1, 1, SIZE)
    with torch.inference_mode():
        expected = add_model(tmp_path, "again", "")(row[None])[0]
    for model in ("twice", "auto"):
        for _ in range(4):
            status, answer = server.infer(model, "x", "FP32", row.tolist())
            assert status == 200, answer
            found = torch.tensor(answer["outputs"][0]["data"])
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_instances_are_on_the_gpu_and_know_what_they_take(server: Served) -> None:
    for model, count in (("twice", 1), ("auto", torch.cuda.device_count())):
        instances = json.loads(server.get(f"/v2/models/{model}/explain")[1])["instances"]
        assert len(instances) == count
        assert instances[0]["device"] == "cuda:0"
        # Two instances on one GPU are slots of one worker, which share its weights.
        assert instances[0]["num_slots"] == (2 if model == "twice" else 1)
        assert all(each["gpu_memory_bytes"] >= WEIGHT_BYTES for each in instances)


def test_metrics_have_real_values(server: Served) -> None:
    found = scrape(server)
    uuid = devices.read_gpus()[0].uuid
    label = f'{{gpu_uuid="{uuid}"}}'
    assert 0 <= found[f"nv_gpu_utilization{label}"] <= 1
    total, used = (found[f"nv_gpu_memory_{what}_bytes{label}"] for what in ("total", "used"))
    # A worker of each model with its weights, at the least.
    assert 2 * WEIGHT_BYTES < used < total
    assert found[f"nv_gpu_power_usage{label}"] > 0
    name = "penstock_instance_gpu_memory_bytes"
    for model in ("twice", "auto"):
        labels = f'{{model="{model}",version="1",instance="0",device="cuda:0"}}'
        assert found[name + labels] >= WEIGHT_BYTES


def test_the_plan_was_told_before_the_models_were_loaded(server: Served) -> None:
    log = os.pread(server.errors.fileno(), 1 << 20, 0).decode()
    plan = next(line for line in log.splitlines() if "GPU 0 (" in line)
    assert re.search(r"twice/1 \d+ MiB for 2 instances \(estimated\)", plan)
    assert re.search(r"auto/1 \d+ MiB \(estimated\)", plan)
    assert log.index("GPU 0 (") < log.index("/1 loads ")


def test_what_cannot_fit_is_refused_at_once(tmp_path: Path) -> None:
    parameter = 'parameters {{ key: "penstock.gpu_memory_bytes" value {{ string_value: "{}" }} }}'
    huge = devices.read_gpus()[0].total_bytes + 1
    add_model(tmp_path, "huge", "instance_group { gpus: 0 }" + parameter.format(huge))
    command = [sys.executable, "-m", "penstock", "serve", str(tmp_path), "--http-port", "0"]
    ended = subprocess.run(
        [*command, "--no-grpc", "--no-metrics"], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert re.search("error: huge: GPU 0 .* of memory would be needed", ended.stderr)
