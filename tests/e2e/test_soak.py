"""Millions of requests, thousands of loads, cancels and regions: nothing grows. `make verify`.

By count, not by time. Each percent of the requests gives a sample of the memory of the core and of
the worker that answers; loads, cancels and registrations of shared memory go on beside them.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from served import Served, null_model
from soak_load import Done, SoakLoad

NUM_STEPS, STEPS_PER_DECILE = 100, 10
MAX_SLOPE = (1 << 20) / 100_000
# Memory comes in blocks: less than this is no trend in a short run.
NOISE_BYTES = 3 << 20
# Pairs of deciles that rise less those that fall, of 45: in one of a hundred series without a trend
# (Mann-Kendall, standard deviation 11.2).
MIN_RISES = 26
# With fewer requests in a step, its p99 is the slowest of a handful.
MIN_FOR_P99 = 2000
LEAKING = """
class Model:
    def __init__(self):
        self.kept = []

    def infer(self, inputs):
        x = inputs["x"]
        self.kept += [bytearray(b"x") * 1024 for _ in range(len(x))]
        return {"y": x}
"""
CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""


@dataclass(frozen=True, slots=True)
class Sample:
    num_requests: int
    rss: int


def slope(samples: Sequence[Sample]) -> float:
    """Bytes per request, by least squares."""
    mean_x = sum(each.num_requests for each in samples) / len(samples)
    mean_y = sum(each.rss for each in samples) / len(samples)
    square = sum((each.num_requests - mean_x) ** 2 for each in samples)
    product = sum((each.num_requests - mean_x) * (each.rss - mean_y) for each in samples)
    return product / square


def second_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    return samples[len(samples) // 2 :]


def leaks(samples: Sequence[Sample]) -> bool:
    """Whether memory grows in the second half by more than 1 MiB per 100,000 requests, and by more
    than noise: 10 MiB in a million requests."""
    half = second_half(samples)
    num_requests = half[-1].num_requests - half[0].num_requests
    growth = slope(half) * num_requests
    return growth > max(MAX_SLOPE * num_requests, NOISE_BYTES)


def has_slowed_down(p99s: Sequence[float]) -> bool:
    """Whether the last of the deciles is more than 10 % above the first, and that is more than the
    spread of the deciles: they rise steadily, or the last one is twice as high as any other. On a
    shared machine deciles differ by more than 10 % by themselves."""
    pairs = [(a, b) for n, a in enumerate(p99s) for b in p99s[n + 1 :]]
    rises = sum((b > a) - (b < a) for a, b in pairs)
    is_trend = rises >= MIN_RISES or p99s[-1] > 2 * max(p99s[:-1])
    return p99s[-1] > 1.1 * p99s[0] and is_trend


def make_samples(bytes_per_request: float, total: int = 2_000_000) -> list[Sample]:
    """A server that takes 60 MB at first and then grows, with noise of 0.5 MB."""
    step = total // NUM_STEPS
    return [
        Sample(n * step, int(60e6 + 20e6 * min(1, n / 10) + bytes_per_request * n * step))
        for n in range(NUM_STEPS + 1)
    ]


class TestChecks:
    @pytest.mark.parametrize("bytes_per_request", [0, 5, 10])
    def test_a_flat_series_is_no_leak(self, bytes_per_request: float):
        samples = make_samples(bytes_per_request)
        assert slope(second_half(samples)) == pytest.approx(bytes_per_request, abs=0.1)
        assert not leaks(samples)

    @pytest.mark.parametrize("bytes_per_request", [11, 64, 1024])
    def test_a_leak_is_found(self, bytes_per_request: float):
        assert leaks(make_samples(bytes_per_request))

    def test_a_leak_of_a_kibibyte_is_found_in_a_short_run(self):
        assert leaks(make_samples(1024, 20_000)) and not leaks(make_samples(0, 20_000))

    def test_noise_is_no_leak(self):
        noisy = [
            Sample(each.num_requests, each.rss + (n % 2) * 500_000)
            for n, each in enumerate(make_samples(0))
        ]
        assert not leaks(noisy)

    def test_a_steady_rise_and_a_jump_are_slower_and_a_spread_is_not(self):
        assert not has_slowed_down([10, 14, 11, 10, 12, 11, 10, 10, 11, 13])
        assert not has_slowed_down([8.2, 13.9, 6.3, 7.1, 6.0, 2.0, 11.9, 1.9, 10.3, 14.7])
        assert has_slowed_down([10, 14, 11, 10, 12, 11, 10, 10, 11, 30])
        assert not has_slowed_down([10, 10, 10, 10, 10, 10, 10, 10, 10, 10.9])
        assert has_slowed_down([10, 10.2, 10.4, 10.6, 10.8, 11, 11.2, 11.4, 11.6, 11.8])


@dataclass(frozen=True, slots=True)
class Holdings:
    """Count the open resources of the server, and files that it left behind."""

    num_files: int
    num_threads: int
    num_children: int
    num_shared: int
    num_temporary: int

    def grown(self, before: "Holdings") -> dict[str, int]:
        return {
            name: getattr(self, name) - getattr(before, name)
            for name in self.__dataclass_fields__
            if getattr(self, name) > getattr(before, name)
        }


class Soak:
    """A server with `model`, `slow` for cancels, and `other`, which is loaded and unloaded."""

    def __init__(self, root: Path, temporary: Path) -> None:
        self._temporary = temporary
        temporary.mkdir()
        null_model(root, "slow", a_ms=20)
        null_model(root, "other")
        flags = ["--model-control-mode", "explicit"]
        flags += ["--load-model", "model", "--load-model", "slow", "--shared-memory"]
        self.served = Served(root, *flags, environment={"TMPDIR": str(temporary)})
        self.core = psutil.Process(self.served.process.pid)
        # Processes that stay; workers of `other` come and go.
        self._measured = [self.core, *self.served.workers()]
        self.load = SoakLoad(self.served.port)
        self.samples: list[Sample] = []
        self.steps: list[Done] = []
        self.num_loads = 0

    def step(self, requests: int, cancels: int = 0, regions: int = 0) -> None:
        self.steps.append(self.load.run(requests, cancels, regions))
        num_done = sum(each.num_good + each.num_bad for each in self.steps)
        rss = sum(each.memory_info().rss for each in self._measured)
        self.samples.append(Sample(num_done, rss))

    def load_and_unload(self, count: int) -> None:
        for _ in range(count):
            for verb in ("load", "unload"):
                status, answer = self.served.post(f"/v2/repository/models/other/{verb}")
                assert status == 200, answer
            self.num_loads += 1

    def count(self) -> Holdings:
        """When what was unloaded has gone."""
        ends = time.monotonic() + 30
        while len(self.served.workers()) > 2 and time.monotonic() < ends:
            time.sleep(0.1)
        time.sleep(0.5)
        return Holdings(
            self.core.num_fds(),
            self.core.num_threads(),
            len(self.served.processes()),
            len(os.listdir("/dev/shm")),
            len(list(self._temporary.rglob("*"))),
        )

    def p99s(self) -> list[float]:
        """Return the median p99 of each decile's steps, so that one bad second is no trend."""
        found = []
        for begin in range(0, len(self.steps), STEPS_PER_DECILE):
            steps = sorted(each.p99_s for each in self.steps[begin : begin + STEPS_PER_DECILE])
            found.append(steps[len(steps) // 2])
        return found

    def close(self) -> None:
        self.load.close()
        assert self.served.terminate() == 0


@contextmanager
def in_background(soak: Soak, num_loads: int) -> Iterator[None]:
    """Load and unload meanwhile; what fails there fails here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            soak.load_and_unload(num_loads)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.verify
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("total", [20_000, 2_000_000], ids=["20k", "2M"])
def test_nothing_grows(tmp_path: Path, total: int):
    """For each 1,000 requests a load and an unload, five cancels, and fifty regions."""
    num_loads, num_cancels, num_regions = total // 1000, total // 200, total // 20
    soak = Soak(null_model(tmp_path / "models", "model"), tmp_path / "temporary")
    try:
        halfway = None
        for decile in range(NUM_STEPS // STEPS_PER_DECILE):
            with in_background(soak, num_loads // 10):
                for _ in range(STEPS_PER_DECILE):
                    counts = (total, num_cancels, num_regions)
                    soak.step(*(count // NUM_STEPS for count in counts))
            if decile == 4:
                halfway = soak.count()
        assert halfway is not None
        grown = soak.count().grown(halfway)
        workers_left = len(soak.served.workers())
    finally:
        soak.close()
    num_good = sum(each.num_good for each in soak.steps)
    num_cancelled = sum(each.num_cancelled for each in soak.steps)
    num_shared = sum(each.num_shared for each in soak.steps)
    p99s = soak.p99s()
    spread = ", ".join(f"{each * 1e3:.1f}" for each in p99s)
    print(
        f"\nsoak: {num_good} of {total} requests answered, {soak.num_loads} loads, {num_cancelled} "
        f"cancels, {num_shared} regions; "
        f"memory {slope(second_half(soak.samples)) * 1e5 / 2**20:+.2f} MiB per 100,000 "
        f"requests in the second half, {soak.samples[-1].rss / 2**20:.0f} MiB at the end; more "
        f"than halfway: {grown or 'nothing'}; p99 of the deciles {spread} ms"
    )
    assert num_good == total and soak.num_loads == num_loads and workers_left == 2
    assert num_cancelled == num_cancels and num_shared == num_regions
    assert not leaks(soak.samples)
    assert not grown
    assert total // NUM_STEPS < MIN_FOR_P99 or not has_slowed_down(p99s)


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_planted_leak_of_1_kib_per_request_is_found(tmp_path: Path):
    (tmp_path / "models" / "model" / "1").mkdir(parents=True)
    (tmp_path / "models" / "model" / "1" / "model.py").write_text(LEAKING)
    (tmp_path / "models" / "model" / "config.pbtxt").write_text(CONFIG)
    soak = Soak(tmp_path / "models", tmp_path / "temporary")
    try:
        for _ in range(NUM_STEPS):
            soak.step(200)
    finally:
        soak.close()
    found = slope(second_half(soak.samples))
    print(f"\nplanted leak of 1024 bytes per request: {found:.0f} bytes per request found")
    assert leaks(soak.samples)
    assert found >= 900
