"""The machine is described as far as it says anything."""

import psutil
import pytest
from doubles import FakeGpus

from penstock.benchmark import system
from penstock.system import devices
from penstock.system.devices import GpuUse


def test_the_environment_names_processor_and_versions() -> None:
    found = system.environment("http://127.0.0.1:8000")
    assert found.host_cpu
    assert found.num_cores == psutil.cpu_count()
    assert {"penstock", "python", "numpy"} <= found.versions.keys()
    assert found.is_server_local


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("http://localhost:8000/v2", True),
        ("grpc://127.0.0.1:8001/m", True),
        ("models/digits", True),
        ("http://192.0.2.1:8000", False),  # Reserved for documentation: nobody's address.
        ("http://no-such-host.invalid", False),
    ],
)
def test_whether_the_server_shares_the_machine(address: str, is_local: bool) -> None:
    assert system.is_local(address) == is_local


def test_a_sample_says_how_busy_the_machine_is() -> None:
    watch = system.SystemWatch(10.0)
    sum(range(2_000_000))
    for moment in (10.25, 10.5, 10.75):
        watch.look(moment)
    (sample,) = watch.samples
    assert sample.at_s == 0.5
    assert 0 <= sample.cpu_percent <= 100
    assert 0 < sample.memory_bytes < psutil.virtual_memory().total
    assert len(sample.gpu_percent) == len(sample.gpu_watts)


def test_gpus_are_named_and_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [
        GpuUse("GPU-0", 0.5, 100, 40, 300.0, 700.0, 1.0, 1980),
        GpuUse("GPU-1", memory_used_bytes=60),
    ]
    monkeypatch.setattr(devices, "read_uses", lambda: uses)
    monkeypatch.setattr(devices, "read_gpus", FakeGpus(100, 100))
    monkeypatch.setattr(devices, "driver", lambda: "580.1")
    sample = system.take_sample(0.5)
    assert (sample.gpu_percent, sample.gpu_memory_bytes) == ([50.0], [40, 60])
    assert (sample.gpu_watts, sample.gpu_mhz) == ([300.0], [1980])
    found = system.environment("models/digits")
    assert found.gpus == ["Made Up", "Made Up"]
    assert found.versions["NVIDIA driver"] == "580.1"
