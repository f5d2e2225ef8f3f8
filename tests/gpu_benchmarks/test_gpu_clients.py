"""A model served in process to clients that always have a request on its way."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from penstock.serving.local import LocalModel
from penstock.system.devices import GpuUse

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import clients

    return clients


@pytest.fixture
def subject(clients):
    """A tiny network, and rows of it."""
    import run

    shard = run.open_shard("resnet50", "cpu")
    technique = shard.techniques["fp32 eager"]
    return shard.config(technique), shard.rows(technique)


def test_batches_are_made_of_single_rows_of_many_clients(clients, subject) -> None:
    config, rows = subject
    found = {most: clients.served(clients.as_served(config, most), rows, 4, 0.3) for most in (1, 4)}
    assert found[1]["mean_batch"] == 1 < found[4]["mean_batch"] <= 4
    for row in found.values():
        assert row["served_per_s"] > 0 and 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["clients"] == 4 and "utilization" not in row


def test_the_gpu_is_asked_how_busy_it_is(clients, subject, monkeypatch) -> None:
    config, rows = subject
    monkeypatch.setattr(clients, "SETTLE_S", 0.0)
    told = iter([0.5, None, *[1.0] * 100])

    def read() -> list[GpuUse]:
        return [GpuUse("a", next(told), power_watts=300.0), GpuUse("b", 0.0)]

    with LocalModel(clients.as_served(config, 2)) as model:
        found = clients.measured(model, rows, 2, 0.8, is_on_gpu=True, read=read)
    assert 0.5 < found["utilization"] < 1 and found["power_watts"] == 300


def test_a_request_that_fails_fails_the_row(clients, subject) -> None:
    config, rows = subject
    config = clients.as_served(config, 2)
    # The module cannot take what the configuration lets through.
    inputs = tuple(replace(each, shape=(4, 32, 32)) for each in config.inputs)
    bad = [{name: np.zeros((1, 4, 32, 32), np.float32) for name in rows[0]}]
    with pytest.raises(Exception, match="channels"):
        clients.served(replace(config, inputs=inputs), bad, 2, 0.1)
