"""What NVML says becomes values; what it does not say is left out and nothing fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fake_nvml
import msgspec
import pytest
from doubles import FakeClock
from fake_nvml import GIB

from penstock.system import devices
from penstock.system.devices import Gpu, GpuUse, Watch

# Reads the devices once for each value of CUDA_VISIBLE_DEVICES.
CHILD = """
import json, os, sys
import msgspec
from penstock.system import devices
for visible in json.loads(sys.argv[1]):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    found = (devices.read_gpus(), devices.read_uses(), devices.driver())
    print(msgspec.json.encode(found).decode())
"""
VISIBLE = [
    ("2,0", ["GPU-bbcc-2222", "GPU-aaaa-0000"]),
    (" 1 , 3", ["GPU-bbbb-1111", "GPU-dddd-3333"]),
    ("GPU-bbc,GPU-bb", ["GPU-bbcc-2222", "GPU-bbbb-1111"]),
    ("MIG-1", ["GPU-aaaa-0000"]),
    # As in CUDA, an unknown name ends the list.
    ("1,9,0", ["GPU-bbbb-1111"]),
    ("1,MIG-9,0", ["GPU-bbbb-1111"]),
    ("-1", []),
    ("", []),
    ("none", []),
]
Seen = tuple[tuple[Gpu, ...], tuple[GpuUse, ...], str]


def read(folder: Path, *visible: str | None) -> list[Seen]:
    """Return what a process sees if its driver is in this folder, for each value of `visible`."""
    text = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(visible)],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    return [msgspec.json.decode(line, type=Seen) for line in text.splitlines()]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Seen]:
    folder = fake_nvml.build(tmp_path_factory.mktemp("nvml"), num_gpus=4).parent
    names = [None, *(visible for visible, _ in VISIBLE)]
    return dict(zip(names, read(folder, *names), strict=True))


def test_gpus_come_with_name_and_memory(seen: dict[str | None, Seen]) -> None:
    gpus, _, driver = seen[None]
    first, second, *_ = gpus
    assert (first.index, first.device, first.uuid) == (0, "cuda:0", "GPU-aaaa-0000")
    assert first.name == "Made Up 16"
    assert (first.total_bytes, first.free_bytes) == (16 * GIB, 15 * GIB)
    assert (second.device, second.free_bytes) == ("cuda:1", 14 * GIB)
    assert len(gpus) == 4
    assert driver == "580.1"


@pytest.mark.parametrize(("visible", "uuids"), VISIBLE)
def test_gpus_are_those_that_cuda_sees_counted_as_it_counts(
    seen: dict[str | None, Seen], visible: str, uuids: list[str]
) -> None:
    gpus, uses, _ = seen[visible]
    assert [gpu.uuid for gpu in gpus] == [use.uuid for use in uses] == uuids
    assert [gpu.index for gpu in gpus] == list(range(len(uuids)))


def test_what_a_gpu_does_is_in_plain_units(seen: dict[str | None, Seen]) -> None:
    use = seen[None][1][0]
    assert use.uuid == "GPU-aaaa-0000"
    assert (use.utilization, use.power_watts, use.power_limit_watts) == (0.37, 123.456, 700.0)
    assert (use.memory_total_bytes, use.memory_used_bytes) == (16 * GIB, GIB)
    assert use.clock_mhz == 1980
    assert use.energy_joules is not None and use.energy_joules >= 5.0


def test_a_gpu_that_refuses_a_question_answers_the_others(seen: dict[str | None, Seen]) -> None:
    use = seen[None][1][1]
    assert (use.utilization, use.power_watts, use.energy_joules) == (None, None, None)
    assert use.power_limit_watts == 700.0
    assert use.memory_used_bytes == 2 * GIB


def test_memory_of_a_process_is_told_if_the_driver_knows_it(tmp_path: Path) -> None:
    fake_nvml.build(tmp_path)
    code = (
        "from penstock.system.devices import memory_of\n"
        "print([memory_of(*each) for each in ((4242, 0), (77, 0), (1, 0), (4242, 1), (4242, 9))])"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert found.decode().strip() == str([3 * GIB, None, None, None, None])


def test_a_library_of_something_else_is_no_driver(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    libc = next(line.split()[-1] for line in maps if "libc.so" in line)
    (tmp_path / fake_nvml.NAME).symlink_to(libc)
    assert read(tmp_path, None) == [((), (), "")]


def test_without_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvml", lambda: None)
    assert devices.read_gpus() == ()
    assert devices.read_uses() == ()
    assert devices.driver() == ""


class TestWatch:
    def make(self) -> tuple[Watch, FakeClock, list[float]]:
        clock, joules = FakeClock(), [100.0]

        def read() -> list[GpuUse]:
            joules.append(joules[-1] + 50.0)
            return [GpuUse("GPU-a", energy_joules=joules[-1]), GpuUse("GPU-b")]

        return Watch(read, clock), clock, joules

    def test_energy_counts_from_the_first_look_on(self) -> None:
        watch, clock, _ = self.make()
        assert [use.energy_joules for use in watch.uses()] == [0.0, None]
        clock.advance(1.0)
        assert [use.energy_joules for use in watch.uses()] == [50.0, None]

    def test_gpus_are_asked_once_a_second_at_most(self) -> None:
        watch, clock, joules = self.make()
        for _ in range(5):
            watch.uses()
        clock.advance(0.99)
        watch.uses()
        assert len(joules) == 2
        clock.advance(0.01)
        watch.uses()
        assert len(joules) == 3


class TestWorkerEnvironment:
    def test_torch_grows_what_it_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in devices.ALLOCATOR_NAMES:
            monkeypatch.delenv(name, raising=False)
        found = devices.worker_environment()
        assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"

    @pytest.mark.parametrize("name", devices.ALLOCATOR_NAMES)
    def test_unless_somebody_has_said_otherwise(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        for other in devices.ALLOCATOR_NAMES:
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:512")
        found = devices.worker_environment()
        assert {each: found.get(each) for each in devices.ALLOCATOR_NAMES} == {
            **dict.fromkeys(devices.ALLOCATOR_NAMES),
            name: "max_split_size_mb:512",
        }


# MIG.

CLAIM = """
import json, os, sys
from penstock.errors import ConfigError
from penstock.system import devices
try:
    found = [devices.claim(each) for each in json.loads(sys.argv[1])]
except ConfigError as error:
    found = [str(error)]
print(json.dumps([found, os.environ.get("CUDA_VISIBLE_DEVICES")]))
"""


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mig")
    return fake_nvml.build(folder, num_gpus=2, num_slices=2).parent


def claimed(folder: Path, *names: str) -> tuple[list[str], str | None]:
    """What a process gets that claims these devices, and what CUDA then shows it."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    text = subprocess.run(
        [sys.executable, "-c", CLAIM, json.dumps(names)],
        env=environment | {"LD_LIBRARY_PATH": str(folder)},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    found: tuple[list[str], str | None] = tuple(json.loads(text))
    return found


def test_a_gpu_in_mig_mode_is_its_slices(sliced: Path) -> None:
    everything, some = read(sliced, None, "MIG-eeee-1,1")
    assert [gpu.uuid for gpu in everything[0]] == ["MIG-eeee-0", "MIG-eeee-1", "GPU-bbbb-1111"]
    assert [gpu.is_slice for gpu in everything[0]] == [True, True, False]
    assert [gpu.device for gpu in everything[0]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [gpu.uuid for gpu in some[0]] == ["MIG-eeee-1", "GPU-bbbb-1111"]


@pytest.mark.parametrize(
    ("device", "uuid"),
    [("cuda:1", "MIG-eeee-1"), ("cuda", "MIG-eeee-0"), ("cuda:2", "GPU-bbbb-1111")],
)
def test_a_process_claims_its_slice(sliced: Path, device: str, uuid: str) -> None:
    assert claimed(sliced, device, device) == (["cuda:0", "cuda:0"], uuid)


def test_a_process_has_one_slice(sliced: Path) -> None:
    (problem,), _ = claimed(sliced, "cuda:0", "cuda:1")
    assert "gives a process one MIG slice" in problem


def test_without_slices_nothing_is_claimed(tmp_path: Path) -> None:
    folder = fake_nvml.build(tmp_path).parent
    assert claimed(folder, "cuda:1", "cpu") == (["cuda:1", "cpu"], None)


# MPS.


@pytest.fixture
def mps_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    return tmp_path


def test_mps_is_off_without_its_files(mps_folder: Path) -> None:
    assert devices.mps() == "off"


def test_mps_is_on_if_its_daemon_runs(mps_folder: Path) -> None:
    daemon = mps_folder / "nvidia-cuda-mps-control"
    daemon.symlink_to("/bin/sleep")
    with subprocess.Popen([daemon, "60"]) as process:
        (mps_folder / "nvidia-cuda-mps-control.pid").write_text(f"{process.pid}\n")
        # Popen returns a moment before the process has its new name.
        name, deadline = Path(f"/proc/{process.pid}/comm"), time.monotonic() + 30
        while not name.read_text().startswith("nvidia") and time.monotonic() < deadline:
            time.sleep(0.001)
        try:
            assert devices.mps() == "on"
        finally:
            process.kill()
    assert devices.mps() == "off"


def test_mps_of_a_host_is_not_taken_for_certain(mps_folder: Path) -> None:
    (mps_folder / "control").touch()
    # Another process has that number here.
    (mps_folder / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    assert devices.mps().startswith("unknown")
