"""Builds measured through a real server: what is sent, what is judged, and that nothing is left."""

import math
import subprocess
from dataclasses import replace
from pathlib import Path

import fake_nvml
import numpy as np
import psutil
import pytest
from served_builds import null_build

from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.stats import Interval
from penstock.errors import BackendFailed
from penstock.optimizer import endpoints, served, time_plan
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import ServedMeasurement
from penstock.optimizer.time_plan import CutOff, MeasurementLimits
from penstock.slo import Slo, parse

NAN = Interval(math.nan, math.nan, math.nan)


def a_plan(slo: str = "", **others: object) -> Plan:
    return Plan("m.onnx", "model", "out", slo=parse(slo) if slo else Slo(()), **others)


def numbers(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.array([n], np.int32), "label": np.array(n % 2)} for n in range(count)]


def silent(text: str) -> None:
    pass


def measured(build, plan, rows, watch, servers=None, limits=served.UNLIMITED) -> ServedMeasurement:
    (found,) = served.ServedBench(plan, rows, watch, servers, limits).measure([build])
    return found


class TestLoad:
    @pytest.mark.parametrize(
        ("slo", "load"),
        [
            ("p99 < 20ms at 200/s", Open(Flat(200))),
            ("p99 < 20ms at 200/s constant", Open(Flat(200), "constant")),
            ("p99 < 20ms at 200/s gamma 3", Open(Flat(200), "gamma", 3.0)),
            ("throughput >= 100/s, p99 < 20ms", Open(Flat(105.0))),
            ("throughput >= 100/s, memory <= 1GiB", Open(Flat(105.0), "constant")),
            ("p99 < 20ms", Closed(1)),
        ],
    )
    def test_is_the_slos(self, slo, load):
        assert served.load_of(parse(slo)) == load

    def test_without_one_there_is_one_client(self):
        assert served.load_of(Slo(())) == Closed(1)


class TestEndpoint:
    def test_a_model_that_cannot_be_loaded_says_why(self, tmp_path: Path):
        build = null_build(tmp_path)
        (build.folder / "config.pbtxt").write_text('backend: "nonsense"')
        with pytest.raises(
            BackendFailed, match=r"did not start; the server wrote: (?s:.*)nonsense"
        ):
            measured(build, a_plan(), numbers(3), silent)

    @pytest.mark.slow
    def test_the_speed_of_the_processor_is_not_that_of_a_gpu(self, tmp_path: Path, monkeypatch):
        """The model is served on the CPU here; its configuration, as read, says otherwise."""
        monkeypatch.setattr(time_plan, "WARM_UP_S", 0.3)
        build = null_build(tmp_path)
        plan = a_plan("p99 < 1s", duration_s=0.3)
        (turn,) = measured(build, plan, numbers(3), silent).turns
        assert turn.conditions.speed_s > 0
        on_gpu = replace(build, config=replace(build.config, device="cuda"))
        (turn,) = measured(on_gpu, plan, numbers(3), silent).turns
        assert turn.conditions.speed_s == 0

    def test_nothing_is_left_when_somebody_interrupts(self, tmp_path: Path):
        def interrupt(text: str) -> None:
            raise KeyboardInterrupt

        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(KeyboardInterrupt):
            measured(null_build(tmp_path), a_plan("p99 < 1s"), numbers(3), interrupt)
        assert set(psutil.Process().children(recursive=True)) <= before

    def test_interrupted_while_it_stops_it_is_killed_and_the_interruption_goes_on(
        self, tmp_path: Path, monkeypatch
    ):
        before = set(psutil.Process().children(recursive=True))
        wait = subprocess.Popen.wait

        def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
            if timeout == endpoints.STOP_TIMEOUT_S:
                raise KeyboardInterrupt
            return wait(process, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), endpoints.ServedEndpoint(null_build(tmp_path), ""):
            pass
        assert set(psutil.Process().children(recursive=True)) <= before


class TestServers:
    PLAN = a_plan("p99 < 1s", duration_s=0.3)

    def children(self) -> set[psutil.Process]:
        return set(psutil.Process().children())

    @pytest.mark.slow
    def test_stay_for_the_next_measurement(self, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(time_plan, "WARM_UP_S", 0.3)
        build = null_build(tmp_path)
        before = self.children()
        servers = endpoints.Servers()
        measured(build, self.PLAN, numbers(3), silent, servers)
        (running,) = self.children() - before
        measured(build, self.PLAN, numbers(3), silent, servers)
        assert self.children() - before == {running}
        # One that has died meanwhile is started again.
        running.kill()
        running.wait()
        measured(build, self.PLAN, numbers(3), silent, servers)
        (fresh,) = self.children() - before
        assert fresh != running
        servers.close()
        assert self.children() <= before

    def test_go_when_a_measurement_fails(self, tmp_path: Path):
        def interrupt(text: str) -> None:
            raise KeyboardInterrupt

        before = self.children()
        servers = endpoints.Servers()
        with pytest.raises(KeyboardInterrupt):
            measured(null_build(tmp_path), self.PLAN, numbers(3), interrupt, servers)
        assert self.children() <= before

    def test_make_room_for_one_that_does_not_start_beside_them(self, tmp_path: Path, monkeypatch):
        first, second = null_build(tmp_path / "a"), null_build(tmp_path / "b")
        before = self.children()
        servers = endpoints.Servers()
        enter = endpoints.ServedEndpoint.__enter__

        def crowded(self: endpoints.ServedEndpoint) -> endpoints.ServedEndpoint:
            if len(set(psutil.Process().children()) - before) > 0:
                raise BackendFailed("no memory")
            return enter(self)

        monkeypatch.setattr(endpoints.ServedEndpoint, "__enter__", crowded)
        servers.open([first], numbers(3))
        (endpoint,) = servers.open([second], numbers(3))
        assert endpoint.build is second and endpoint.is_running
        servers.close()
        assert self.children() <= before


@pytest.mark.verify
def test_two_builds_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time_plan, "WARM_UP_S", 0.3)
    quick = null_build(tmp_path / "a", a_ms=1)
    slow = null_build(tmp_path / "b", a_ms=100)
    slo = "p99 < 90ms, goodput >= 50 %, throughput >= 5/s, memory <= 100GiB at 40/s"
    heard: list[str] = []
    plan = a_plan(slo, duration_s=1.0)
    bench = served.ServedBench(plan, numbers(5), heard.append)
    first, second = bench.measure([quick, slow])
    # It sleeps for 100 ms, so nothing is faster than that.
    assert second.p50.value > 0.1
    assert [each.outcome for each in second.verdicts] == ["missed", "missed", "kept", "kept"]
    assert [each.unit for each in second.verdicts] == ["s", "%", "/s", "bytes"]
    assert second.goodput == 0 and not second.is_met
    assert second.phases["compute"] > 0.1
    assert second.rows_per_batch > 1
    for each in (first, second):
        assert (each.num_runs, each.num_failed, each.load) == (2, 0, "40/s poisson")
        assert each.num_requests > 40
        assert each.memory_bytes > 1 << 20
        assert each.gpu_memory_bytes == 0
    assert any(text.startswith("40/s poisson, measuring") for text in heard)


@pytest.mark.slow
def test_a_round_that_has_no_time_is_left_out(tmp_path: Path, monkeypatch):
    # Servers start slowly on a busy machine.
    monkeypatch.setattr(served, "MIN_START_S", 120.0)
    plan = a_plan("p99 < 1s", duration_s=0.5)
    limits = MeasurementLimits(num_rounds=3, left_s=lambda: 0.5)
    builds = [null_build(tmp_path / name) for name in "ab"]
    found = served.ServedBench(plan, numbers(3), silent, None, limits).prove(builds)
    # Neither is there time to search for rates.
    assert [(each.num_runs, each.max_rate) for each in found] == [(1, None), (1, None)]


def test_a_server_that_takes_longer_to_start_than_is_left_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served, "MIN_START_S", 0.2)
    build = null_build(tmp_path, load_ms=60_000)
    with pytest.raises(CutOff, match=r"not ready after 0\.2 s"):
        measured(build, a_plan(), numbers(3), silent, limits=MeasurementLimits(left_s=lambda: 0.0))


def test_what_an_instance_takes_of_a_gpu_is_taken_down(tmp_path: Path, monkeypatch):
    (tmp_path / "driver").mkdir()
    driver = fake_nvml.build(tmp_path / "driver").parent
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(time_plan, "WARM_UP_S", 0.3)
    build = null_build(tmp_path, gpu_memory_bytes=3 << 30)
    with open(build.folder / "config.pbtxt", "a") as file:
        file.write("\ninstance_group { kind: KIND_GPU }\n")
    found = measured(build, a_plan("p99 < 1s", duration_s=0.5), numbers(3), silent)
    assert found.gpu_memory_bytes == 3 << 30


@pytest.mark.slow
def test_without_limits_the_highest_rate_is_what_it_answers(tmp_path: Path):
    build = null_build(tmp_path, max_batch=1, a_ms=10)
    plan = a_plan("throughput >= 5/s", duration_s=0.5)
    limits = MeasurementLimits(search_s=10.0)
    (found,) = served.ServedBench(plan, numbers(5), silent, None, limits).with_rates([build])
    # One after the other, 10 ms each.
    assert found.max_rate is not None
    assert 1 < found.max_rate.value <= 101


@pytest.mark.slow
def test_the_search_begins_at_a_rate_that_was_just_kept(tmp_path: Path):
    build = null_build(tmp_path, max_batch=8, a_ms=1)
    plan = a_plan("p99 < 5 s at 150/s", duration_s=0.5)
    bench = served.ServedBench(plan, numbers(5), silent, None, MeasurementLimits(search_s=1.0))
    (found,) = bench.with_rates([build])
    assert found.is_met
    assert found.curve is not None and min(found.curve.rates) >= 150


@pytest.mark.slow
def test_a_search_without_time_finds_no_rate(tmp_path: Path):
    build = null_build(tmp_path, max_batch=1, a_ms=10)
    plan = a_plan("p99 < 1 s", duration_s=0.5)
    bench = served.ServedBench(plan, numbers(5), silent, None, MeasurementLimits(search_s=0.0))
    (found,) = bench.with_rates([build])
    assert found.max_rate is not None and math.isnan(found.max_rate.value)
    assert found.curve is not None and not found.curve.rates
