"""Against a server with a known law the bench reports what the law says, within 5 %."""

import itertools
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import laws
import numpy as np
import pytest
from benched import Benched, bench, percentile_s, throughput
from perf_analyzer import PerfAnalyzer
from served import Served, null_model

from penstock.benchmark import pacer
from penstock.benchmark.pacer import Flat, Open

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]

A_S, C_S, MAX_BATCH = 0.040, 0.010, 8
QUICK_S = 0.020
STALL = -7


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    null_model(root, "alone", max_batch=1, a_ms=A_S * 1e3)
    null_model(root, "quick", max_batch=1, a_ms=QUICK_S * 1e3)
    null_model(root, "batched", max_batch=MAX_BATCH, a_ms=A_S * 1e3, c_ms=C_S * 1e3)
    null_model(root, "four", max_batch=1, a_ms=A_S * 1e3, config="instance_group { count: 4 }")
    null_model(root, "stalls", max_batch=8, a_ms=1, stall_on=STALL, stall_ms=1000)
    served = Served(root)
    yield served
    served.terminate()


def url(server: Served, model: str) -> str:
    return f"http://{server.address}/v2/models/{model}"


def due(rate: float, arrivals: str, duration_s: float) -> list[float]:
    load = Open(Flat(rate), arrivals)
    times = itertools.chain.from_iterable(pacer.due_times(load, 0))
    return list(itertools.takewhile(lambda time_s: time_s < duration_s, map(float, times)))


def check_percentiles(found: Benched, expected: np.ndarray, percents: list[float]) -> None:
    assert found.status == 0, found.errors
    (level,) = found.run.levels
    assert sum(window.num_due for window in level.windows) == len(expected)
    for percent in percents:
        reported, computed = percentile_s(level, percent), laws.percentile(expected, percent)
        print(f"p{percent}: reported {reported * 1e3:.1f} ms, computed {computed * 1e3:.1f} ms")
        assert reported == pytest.approx(computed, rel=0.05), percent


@pytest.mark.parametrize(
    ("model", "rate", "c_s", "max_batch"), [("alone", 12, 0.0, 1), ("batched", 40, C_S, MAX_BATCH)]
)
def test_percentiles_at_poisson_arrivals(
    server: Served, tmp_path: Path, model: str, rate: float, c_s: float, max_batch: int
) -> None:
    """Every arrival is known from the seed, so every latency is known from the law."""
    flags = ["--rate", str(rate), "--duration", "30s", "--precision", "0", "--warm-up", "0s"]
    found = bench(tmp_path, url(server, model), *flags)
    expected = laws.latencies(due(rate, "poisson", 30.0), A_S, c_s, max_batch)
    check_percentiles(found, expected, [50, 90, 95, 99])


def stall_after(server: Served, delay_s: float) -> threading.Thread:
    def send() -> None:
        time.sleep(delay_s)
        status, _ = server.infer("stalls", "x", "INT32", [STALL])
        assert status == 200

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_hidden_stall_is_in_the_percentiles(server: Served, tmp_path: Path) -> None:
    """Nobody tells the bench; a tenth of its requests were due while nothing was answered."""
    thread = stall_after(server, 5.0)
    flags = ["--rate", "200", "--arrivals", "constant", "--duration", "10s"]
    found = bench(tmp_path, url(server, "stalls"), *flags, "--precision", "0", "--warm-up", "0s")
    thread.join()
    (level,) = found.run.levels
    arrivals = due(200, "constant", 10.0)
    # Where in the run the stall came is not known; that it is whole in it, is.
    expected = laws.latencies(arrivals, 0.001, 0.0, 8, stalls=[(4.0, 1.0)])
    for percent in (95, 99, 99.9):
        reported, computed = percentile_s(level, percent), laws.percentile(expected, percent)
        print(f"p{percent}: reported {reported * 1e3:.0f} ms, computed {computed * 1e3:.0f} ms")
        assert reported == pytest.approx(computed, rel=0.05)


def test_perf_analyzer_misses_the_same_stall(server: Served, tmp_path: Path) -> None:
    """The reason for all this: in its rate mode a request that could not be sent was never late."""
    analyzer = PerfAnalyzer()
    thread = stall_after(server, 4.0)
    rate = ["--request-rate-range", "200", "--request-distribution", "constant"]
    # Three windows, the least it takes; it would report nothing at all if they differed.
    window = ["--measurement-interval", "3000", "--max-trials", "3"]
    window += ["--stability-percentage", "999"]
    report = analyzer.measure("stalls", tmp_path, "-u", server.address, *rate, *window)
    thread.join()
    (p99_s,) = report.p99_s
    print(f"perf_analyzer: p99 {p99_s * 1e3:.1f} ms")
    assert p99_s < 0.1


@pytest.mark.parametrize(
    ("model", "knee", "plateau"),
    [
        ("four", laws.knee(A_S, 0.0, 1, num_instances=4), 4 / A_S),
        ("alone", laws.knee(A_S, 0.0, 1), 1 / A_S),
    ],
)
def test_the_knee_is_where_the_law_has_it(
    server: Served, tmp_path: Path, model: str, knee: float, plateau: float
) -> None:
    found = bench(tmp_path, url(server, model), "--find-knee", "--duration", "5s")
    assert found.status == 0, found.errors
    answer = found.run.knee
    print(
        f"knee {answer.concurrency:.2f} (law {knee:.2f}), {answer.throughput:.1f}/s ({plateau:.1f})"
    )
    assert answer.concurrency == pytest.approx(knee, rel=0.05)
    assert answer.throughput == pytest.approx(plateau, rel=0.05)


def test_the_highest_constant_rate_is_the_capacity(server: Served, tmp_path: Path) -> None:
    flags = ["--max-rate", "--arrivals", "constant", "--slo", "p99 < 200 ms", "--duration", "10s"]
    found = bench(tmp_path, url(server, "quick"), *flags)
    assert found.status == 0, found.errors
    rate = found.run.max_rate.rate
    print(
        f"max rate {rate.value:.2f}/s ({rate.low:.2f} to {rate.high:.2f}), law {1 / QUICK_S:.2f}/s"
    )
    assert rate.value == pytest.approx(1 / QUICK_S, rel=0.05)


def test_the_highest_poisson_rate_is_that_of_the_queue(server: Served, tmp_path: Path) -> None:
    """M/D/1: where one request in ten takes longer than the limit."""
    flags = ["--max-rate", "--slo", "p90 < 100 ms", "--duration", "60s"]
    found = bench(tmp_path, url(server, "quick"), *flags)
    assert found.status == 0, found.errors
    rate, expected = found.run.max_rate.rate, laws.max_poisson_rate(QUICK_S, 0.1, 0.1)
    print(f"max rate {rate.value:.2f}/s ({rate.low:.2f} to {rate.high:.2f}), law {expected:.2f}/s")
    assert rate.value == pytest.approx(expected, rel=0.05)


def test_closed_loop_throughput_is_that_of_the_law(server: Served, tmp_path: Path) -> None:
    found = bench(tmp_path, url(server, "four"), "--concurrency", "1,2,4,8", "--duration", "4s")
    for level, count in zip(found.run.levels, (1, 2, 4, 8), strict=True):
        assert throughput(level) == pytest.approx(min(count, 4) / A_S, rel=0.05)


def test_a_pause_of_the_whole_server_is_in_the_percentiles(server: Served, tmp_path: Path) -> None:
    """SIGSTOP of the whole server: not one answer comes, and the report shows how long."""
    flags = ["--rate", "100", "--arrivals", "constant", "--duration", "8s", "--precision", "0"]

    def pause() -> None:
        time.sleep(5)
        pids = [server.process.pid, *(each.pid for each in server.processes())]
        subprocess.run(["kill", "-STOP", *map(str, pids)], check=True)
        time.sleep(1)
        subprocess.run(["kill", "-CONT", *map(str, pids)], check=True)

    thread = threading.Thread(target=pause)
    thread.start()
    found = bench(tmp_path, url(server, "stalls"), *flags, "--warm-up", "0s")
    thread.join()
    (level,) = found.run.levels
    expected = laws.latencies(due(100, "constant", 8.0), 0.001, 0.0, 8, stalls=[(3.0, 1.0)])
    for percent in (95, 99):
        computed = laws.percentile(expected, percent)
        assert percentile_s(level, percent) == pytest.approx(computed, rel=0.05)
