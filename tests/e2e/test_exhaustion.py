"""A server without descriptors or processes left, and one whose clock jumps: it sheds load, does
not spin, and recovers. Run by `make verify`."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from debian import LIBRARIES, unpack
from load import Load, read_answer
from served import Served, null_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(180)]

TWO = "instance_group { count: 2 kind: KIND_CPU }"
MAX_FILES = 256
NUM_GREEDY = 500
MAX_IDLE_CPU = 0.2
# The longest back-off, and a start on a busy machine.
MAX_RECOVERY_S = 10 + 5
HANG_S = 2
CGROUPS = Path("/sys/fs/cgroup/pids")
HEALTH = b"GET /v2/health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Greedy:
    """Clients that open connections, keep those they get and send nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self, num_connections: int) -> int:
        """Open until there are this many; returns how many the server has closed at once."""
        self._drop_closed()
        missing = num_connections - len(self._open)
        for _ in range(missing):
            with contextlib.suppress(OSError):
                self._open.append(await asyncio.open_connection("127.0.0.1", self._port))
        await asyncio.sleep(0.5)
        return missing - (missing - num_connections + self._drop_closed())

    def _drop_closed(self) -> int:
        for reader, writer in self._open:
            if reader.at_eof() or reader.exception() is not None:
                writer.close()
        self._open = [each for each in self._open if not each[1].is_closing()]
        return len(self._open)

    async def close(self) -> None:
        for _, writer in self._open:
            writer.close()
        await asyncio.sleep(0.1)


async def cpu_share(pid: int, seconds: float) -> float:
    """Processor time of one process, as a share of one core."""
    process = psutil.Process(pid)
    process.cpu_percent()
    await asyncio.sleep(seconds)
    return process.cpu_percent() / 100


async def time_until_ready(served: Served, num_instances: int, num_requests: int = 20) -> float:
    """How long until new connections are answered and all instances are there."""
    began = time.monotonic()
    while True:
        assert time.monotonic() - began < 60
        with contextlib.suppress(OSError):
            answers = [
                await asyncio.to_thread(served.infer, "model", "x", "INT32", [number])
                for number in range(num_requests)
            ]
            is_answered = all(status == 200 for status, _ in answers)
            num_ready = await asyncio.to_thread(served.num_ready_instances)
            if is_answered and num_ready == num_instances:
                return time.monotonic() - began
        await asyncio.sleep(0.05)


def check_nothing_lost(load: Load) -> None:
    tally = load.tally
    assert tally.num_wrong == tally.num_cut == 0
    assert set(tally.statuses) == {200}, tally.statuses


def num_descriptors(pid: int) -> int:
    """Without shared memory, whose slabs grow in number with the load up to a limit."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += not os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:")
    return count


def test_without_descriptors_it_sheds_load_and_recovers(tmp_path: Path):
    null_model(tmp_path, "model", config=TWO, a_ms=2)

    async def warm_up(served: Served) -> None:
        async with Load(served.port, 8, model="model"):
            await asyncio.sleep(0.5)
        await asyncio.sleep(0.2)

    async def scenario(served: Served, core: psutil.Process) -> tuple[Load, int, float, float]:
        async with Load(served.port, 8, model="model") as load:
            await asyncio.sleep(0.5)
            greedy = Greedy(served.port)
            num_shed = await greedy.connect(NUM_GREEDY)
            assert core.num_fds() >= MAX_FILES - 2
            # A worker dies meanwhile, and there is no descriptor for another.
            os.kill(served.workers()[0].pid, signal.SIGKILL)
            await asyncio.sleep(2)
        await greedy.connect(NUM_GREEDY)
        spent = await cpu_share(core.pid, 3)
        assert core.num_fds() >= MAX_FILES - 20, "it is exhausted still"
        await greedy.close()
        return load, num_shed, spent, await time_until_ready(served, 2)

    with Served(tmp_path, prefix=("prlimit", f"--nofile={MAX_FILES}")) as served:
        core = psutil.Process(served.process.pid)
        asyncio.run(warm_up(served))
        num_files = num_descriptors(core.pid)
        load, num_shed, spent, recovered_s = asyncio.run(scenario(served, core))
        print(
            f"\n{MAX_FILES} descriptors, {NUM_GREEDY} connections: {num_shed} shed, "
            f"{load.tally.num_good} of {load.tally.num_sent} requests of others answered, idle "
            f"core took {spent * 100:.1f} % of a processor, recovered after {recovered_s:.2f} s"
        )
        check_nothing_lost(load)
        assert num_shed >= NUM_GREEDY - MAX_FILES
        assert spent < MAX_IDLE_CPU
        assert recovered_s < MAX_RECOVERY_S
        assert num_descriptors(core.pid) <= num_files + 2


@pytest.fixture
def cgroup() -> Iterator[Path]:
    folder = CGROUPS / f"penstock-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    yield folder
    folder.rmdir()


def test_without_processes_one_instance_serves_on(tmp_path: Path, cgroup: Path):
    null_model(tmp_path, "model", config=TWO, a_ms=2)

    async def scenario(served: Served) -> tuple[Load, float, float]:
        async with Load(served.port, 8, model="model") as load:
            await asyncio.sleep(0.5)
            (cgroup / "pids.max").write_text("1")
            os.kill(served.workers()[0].pid, signal.SIGKILL)
            await asyncio.sleep(3)
            assert len(served.workers()) == 1, "the other cannot be started"
        spent = await cpu_share(served.process.pid, 3)
        async with Load(served.port, 8, model="model") as again:
            await asyncio.sleep(0.5)
            (cgroup / "pids.max").write_text("max")
            recovered_s = await time_until_ready(served, 2)
        check_nothing_lost(again)
        return load, spent, recovered_s

    with Served(tmp_path) as served:
        for process in (psutil.Process(served.process.pid), *served.processes()):
            (cgroup / "cgroup.procs").write_text(str(process.pid))
        load, spent, recovered_s = asyncio.run(scenario(served))
        print(
            f"\nno process left: {load.tally.num_good} of {load.tally.num_sent} requests answered "
            f"by one instance, idle core took {spent * 100:.1f} % of a processor, two instances "
            f"{recovered_s:.2f} s after the limit was lifted"
        )
        check_nothing_lost(load)
        assert "could not be started" in served.logged()
        assert spent < MAX_IDLE_CPU
        assert recovered_s < MAX_RECOVERY_S


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """How far the clock of `jumpy` is ahead, as libfaketime reads it."""
    path = tmp_path / "clock"
    path.write_text("+0")
    return path


@pytest.fixture
def jumpy(tmp_path: Path, clock: Path) -> Iterator[Served]:
    """A server whose core has a clock of its own. CLOCK_MONOTONIC stays, as it does on a machine,
    and workers keep the real clock: libfaketime's settings do not reach them."""
    library = unpack("libfaketime") / LIBRARIES / "faketime" / "libfaketimeMT.so.1"
    hang = f'parameters {{ key: "penstock.hang_s" value {{ string_value: "{HANG_S}" }} }}'
    null_model(tmp_path / "models", "model", config=hang + TWO, a_ms=2, hang_on=13)
    environment = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with Served(tmp_path / "models", environment=environment) as served:
        yield served


@pytest.mark.parametrize("hours", [1, -1], ids=["+1h", "-1h"])
def test_a_clock_that_jumps_changes_no_time_out(jumpy: Served, clock: Path, hours: int):
    async def scenario() -> tuple[Load, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", jumpy.port)
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", jumpy.port)
        writer.write(HEALTH)
        assert (await read_answer(reader))[0] == 200
        slow_writer.write(HEALTH[:20])
        async with Load(jumpy.port, 8, model="model") as load:
            await asyncio.sleep(1)
            clock.write_text(f"{hours:+d}h")
            await asyncio.sleep(2.5)
            # Neither is the kept connection too old, nor does the half request take too long.
            writer.write(HEALTH)
            slow_writer.write(HEALTH[20:])
            for answered in (reader, slow_reader):
                assert (await read_answer(answered))[0] == 200
            began = time.monotonic()
            status, _ = await asyncio.to_thread(jumpy.infer, "model", "x", "INT32", [13])
            hung_s = time.monotonic() - began
            assert status == 500
        writer.close()
        slow_writer.close()
        return load, hung_s

    load, hung_s = asyncio.run(scenario())
    logged = re.findall(r"^(\S+ \S+),\d+ ERROR penstock.supervisor.* hangs;", jumpy.logged(), re.M)
    ahead_s = (datetime.fromisoformat(logged[-1]) - datetime.now()).total_seconds()
    print(
        f"\nclock {hours:+d} h: {load.tally.num_good} of {load.tally.num_sent} requests answered, "
        f"longest gap {load.tally.longest_gap_s:.2f} s, two time-outs of {HANG_S} s ended after "
        f"{hung_s:.2f} s"
    )
    assert abs(ahead_s - hours * 3600) < 60, "the server's clock has jumped"
    check_nothing_lost(load)
    assert load.tally.longest_gap_s < HANG_S
    assert 2 * HANG_S <= hung_s <= 2 * (HANG_S + 1)
