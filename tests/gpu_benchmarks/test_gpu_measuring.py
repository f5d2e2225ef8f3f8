"""How the GPU benchmarks measure, on a GPU that is none; and a row as it is run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from fake_gpu import FakeGpu

from penstock.backends import pytorch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "gpu"
SECONDS = 0.01


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import run

    return run


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakeGpu]:
    """One for each runner that is loaded."""
    made: list[FakeGpu] = []

    def open_device(name: str) -> FakeGpu:
        made.append(FakeGpu())
        return made[-1]

    monkeypatch.setattr(pytorch, "open_device", open_device)
    return made


def measured(run, name: str, technique: str, num_runners: int = 1):
    shard = run.open_shard(name, "cpu")
    asked = shard.techniques[technique]
    runners = [run.backend("pytorch")(shard.config(asked)) for _ in range(num_runners)]
    load = shard.loads(asked)[-1]
    for runner in runners:
        run.answers(runner, load)
    return load, run.measured(runners, load, asked, SECONDS)


FROM_HOST = {"host_waited_ms", "host_ms", "host_per_s"}
ON_DEVICE = {"waited_ms", "device_ms", "device_per_s"}


def test_inputs_on_the_device_and_from_the_host_are_measured_apart(run, fake) -> None:
    load, found = measured(run, "resnet50", "fp32 eager")
    assert found.keys() == FROM_HOST | ON_DEVICE
    assert all(value > 0 for value in found.values())
    # Memory that batches lie in: one for each that is on its way.
    (gpu,) = fake
    assert gpu.pinned_bytes == [load.inputs["image"].nbytes] * 2
    assert found["device_per_s"] == pytest.approx(load.num_rows / found["device_ms"] * 1e3)


def test_tokens_are_counted_too_and_packed_batches_are_full_of_them(run, fake) -> None:
    load, found = measured(run, "bert-large", "packed BF16")
    assert found["host_tokens_per_s"] / found["host_per_s"] == pytest.approx(12)
    assert load.num_tokens == load.inputs["attention_mask"].sum() <= 64
    assert "device_tokens_per_s" in found


def test_pageable_memory_is_not_told_to_the_device(run, fake) -> None:
    _, found = measured(run, "resnet50", "fp16 fused, graphs, pageable")
    assert found.keys() == FROM_HOST
    assert fake[0].pinned_bytes == []


def test_two_copies_have_lanes_of_their_own(run, fake) -> None:
    measured(run, "resnet50", "fp16 fused, graphs, two copies", num_runners=2)
    assert len(fake) == 2
    assert all(len(each.pinned_bytes) == 2 for each in fake)


def test_a_rate_is_the_median_of_parts(run) -> None:
    from measuring import typical_s

    # Two on their way that end together, and in one part somebody else was on the device.
    ends = [0.0]
    for number in range(20):
        ends += [ends[-1] + (2.0 if number != 7 else 9.0), ends[-1] + (2.0 if number != 7 else 9.0)]
    assert typical_s(ends, 2) == 1.0
    # Few: the mean.
    assert typical_s([0.0, 4.0, 4.0, 8.0, 8.0], 2) == 2.0


def test_answers_are_compared_with_what_was_kept(run, tmp_path) -> None:
    found = {"y": np.array([3.0, 4.0], np.float32)}
    path = tmp_path / "reference.npz"
    assert run.error_of(found, path) is None
    np.savez(path, y=np.array([3.0, 4.5]))
    assert run.error_of(found, path) == pytest.approx(0.5 / np.hypot(3, 4.5))


@pytest.mark.slow
def test_a_row_is_measured_once(tmp_path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPTS / "run.py"), "--model", "bert-large", "--device", "cpu"]
    command += ["--only", "packed BF16, CUDA graphs, one slot", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = []
    for _ in range(2):
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=100, env=environment, check=False
        )
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout)
    assert "1 techniques" in printed[0] and "0 techniques" in printed[1]
    (row,) = json.loads(out.read_text())["techniques"].values()
    assert row["batches"]["checked"]["error"] < 0.1
    assert row["batches"]["full"]["host_per_s"] > 0 and row["took_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_rows_of_several_networks_run_in_one_call(tmp_path) -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "--device", "cpu", "--jobs", "2"]
    command += ["--model", "efficientnet-b0", "--model", "detector", "--again"]
    kept = {"PYTHONPATH": str(ROOT), "OUT": str(tmp_path)}
    for only in ("int8", "served in batches"):
        ended = subprocess.run(
            [*command, "--only", only],
            capture_output=True,
            text=True,
            timeout=200,
            env=os.environ | kept,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert "2 techniques, 2 at a time" in ended.stdout
    for model in ("efficientnet-b0", "detector"):
        rows = json.loads((tmp_path / f"gpu_{model}.json").read_text())["techniques"]
        int8 = rows["int8 fused, graphs"]
        served = rows["fp16 channels-last, graphs, served in batches"]
        assert int8["built"]["form"] == "ONNX" and 0 < int8["batches"]["2"]["error"] < 0.3
        assert served["batches"]["4 clients"]["served_per_s"] > 0


def test_one_file_is_not_of_several_models() -> None:
    command = [sys.executable, str(SCRIPTS / "run.py"), "--model", "all", "--out", "a.json"]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ended.returncode == 2 and "--out: a file is of one model" in ended.stderr
