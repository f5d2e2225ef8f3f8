"""Builds measured through a real server: what is sent, what is judged, and that nothing is left."""

import math
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_nvml
import numpy as np
import psutil
import pytest
from served_builds import a_config, null_build

from penstock.benchmark import stats
from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.stats import Interval
from penstock.benchmark.targets import Counters
from penstock.config import BatchPolicy
from penstock.data import InputSpec, RequestForm, open_source
from penstock.errors import BackendFailed
from penstock.optimizer import served
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Conditions, ServedMeasurement, TermVerdict
from penstock.optimizer.time_plan import CutOff, MeasurementLimits
from penstock.slo import Slo, parse
from penstock.types import TensorSpec

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


class TestMemory:
    def test_of_a_model_on_gpus_is_theirs(self):
        on_gpus = replace(a_config(), backend="pytorch", device="cuda")
        assert served.promised_bytes(served.ServedAccount(on_gpus, [], [], 500, [70, 30])) == 100

    def test_of_others_is_the_host_s(self):
        assert served.promised_bytes(served.ServedAccount(a_config(), [], [], 500)) == 500


class TestClients:
    @pytest.mark.parametrize(
        ("policy", "num_instances", "clients"),
        [
            (BatchPolicy(32, is_dynamic=True), 2, 128),
            (BatchPolicy(32, is_dynamic=True), 8, 256),
            (BatchPolicy(32, is_dynamic=False), 4, 8),
            (BatchPolicy(1, is_dynamic=True), 1, 4),
            (BatchPolicy(32, is_dynamic=True, slo_latency_s=0.1), 2, 4),
            (BatchPolicy(32, is_dynamic=True, slo_latency_s=0.1), 8, 16),
        ],
    )
    def test_are_as_many_as_the_server_does_not_refuse(self, policy, num_instances, clients):
        config = a_config(max_batch=policy.max_batch_size, num_instances=num_instances)
        config = replace(config, batching=policy)
        assert served.num_clients(config) == clients


class TestPatience:
    @pytest.mark.parametrize(
        ("slo", "seconds"),
        [
            ("p99 < 20ms at 200/s", 3.0),
            ("p50 < 4s, throughput >= 1/s", 12.0),
            ("throughput >= 0.05/s", 60.0),
            ("memory <= 1GiB", 60.0),
        ],
    )
    def test_is_as_long_as_the_slo_makes_sense_of(self, slo, seconds):
        assert served.patience_s(parse(slo)) == seconds


class TestRows:
    """What is written is what the bench then sends."""

    def sent(self, spec: TensorSpec, arrays, folder: Path) -> list[np.ndarray]:
        rows = [{spec.name: array, "label": np.array(1)} for array in arrays]
        path = served.write_rows(rows, a_config(spec), folder)
        source = open_source(InputSpec(path), RequestForm("tensors", (spec,), True), 0, 1)
        found = {}
        while len(found) < len(arrays):
            index, sample = source.next()
            assert list(sample.tensors) == [spec.name]
            found[index] = sample.tensors[spec.name][0]
        return [found[index] for index in range(len(arrays))]

    @pytest.mark.parametrize("datatype", ["FP32", "INT64", "UINT8", "BOOL", "FP16"])
    def test_equal_shapes(self, tmp_path, datatype):
        spec = TensorSpec("x", datatype, (2, 3))
        random = np.random.default_rng(1)
        arrays = [random.integers(0, 2, (2, 3)) * (n % 2) for n in range(5)]
        found = self.sent(spec, arrays, tmp_path)
        assert [each.tolist() for each in found] == [each.tolist() for each in arrays]

    def test_many_lengths(self, tmp_path):
        arrays = [np.arange(n, dtype=np.int64) for n in (1, 5, 3)]
        found = self.sent(TensorSpec("x", "INT64", (-1,)), arrays, tmp_path)
        assert [each.tolist() for each in found] == [each.tolist() for each in arrays]

    def test_floats_of_many_lengths_are_exact(self, tmp_path):
        arrays = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in (1, 5)]
        found = self.sent(TensorSpec("x", "FP32", (-1,)), arrays, tmp_path)
        assert all(np.array_equal(*pair) for pair in zip(found, arrays, strict=True))

    def test_texts_and_bytes(self, tmp_path):
        texts = ["good", "\N{SNOWMAN}", b"\xff\x00"]
        arrays = [np.array([text], np.object_) for text in texts]
        found = self.sent(TensorSpec("x", "BYTES", (1,)), arrays, tmp_path)
        assert [each.item() for each in found] == [b"good", "\N{SNOWMAN}".encode(), b"\xff\x00"]

    def test_bits_of_bf16_are_numbers_in_files(self, tmp_path):
        bits = np.array([0x3F80, 0xC000], np.uint16)  # 1 and -2
        (found,) = self.sent(TensorSpec("x", "BF16", (2,)), [bits], tmp_path)
        assert found.tolist() == bits.tolist()

    def test_a_tensor_that_is_called_file(self, tmp_path):
        (found,) = self.sent(TensorSpec("file", "FP32", (2,)), [np.ones(2)], tmp_path)
        assert found.tolist() == [1, 1]

    def test_rows_with_a_one_for_the_batch_that_the_model_has_got(self, tmp_path):
        arrays = [np.full((1, 2), number, np.float32) for number in range(3)]
        found = self.sent(TensorSpec("x", "FP32", (2,)), arrays, tmp_path)
        assert [each.tolist() for each in found] == [[n, n] for n in range(3)]

    def test_no_more_bytes_than_are_worth_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(served, "MAX_BYTES", 1000)
        rows = [{"x": np.zeros(100, np.float32)} for _ in range(5)]
        spec = TensorSpec("x", "FP32", (100,))
        path = served.write_rows(rows, a_config(spec), tmp_path)
        assert len(np.load(path)["x"]) == 2

    def test_none_are_no_file(self, tmp_path):
        assert served.write_rows([], a_config(), tmp_path) == ""


class TestPhases:
    def test_are_means_of_a_request(self):
        counters = Counters(10, 0, 10, 5, 200_000_000, 40_000_000, 10_000_000, 100_000_000, 0)
        found = served.phases([counters, counters], latency_s=0.025)
        assert found == pytest.approx(
            {
                "queue": 0.004,
                "compute input": 0.001,
                "compute": 0.010,
                "compute output": 0.0,
                "network and codec": 0.010,
            }
        )

    def test_are_called_after_the_functions_around_the_model(self):
        counters = Counters(10, 0, 10, 5, 200_000_000, 0, 20_000_000, 100_000_000, 80_000_000)
        found = served.phases([counters], 0.03, has_preprocess=True, has_postprocess=True)
        assert list(found) == ["queue", "preprocess", "compute", "postprocess", "network and codec"]
        assert (found["preprocess"], found["postprocess"]) == pytest.approx((0.002, 0.008))

    def test_without_an_account_there_are_none(self):
        assert served.phases([], 0.01) == {}


class TestPrice:
    PLAN = a_plan("p99 < 20ms, cost <= 1 per million", price_per_hour=3.6)

    def made(self) -> ServedMeasurement:
        terms = ("p99 < 20ms", "kept", NAN, 0.02, "s"), ("cost", "not measured", None, 1.0, "")
        verdicts = [TermVerdict(*each) for each in terms]
        return ServedMeasurement("", NAN, NAN, NAN, 1.0, verdicts, 1, 0, {}, 1.0, 0)

    def test_is_by_the_million_at_the_highest_rate(self):
        found = served.priced(self.made(), Interval(2000, 1000, 4000), self.PLAN)
        assert found.cost_per_million == pytest.approx(0.5)
        latency, cost = found.verdicts
        assert latency.outcome == cost.outcome == "kept"
        assert (cost.measured.low, cost.measured.high) == pytest.approx((0.25, 1.0))
        assert found.is_met

    def test_that_is_too_high_is_missed(self):
        found = served.priced(self.made(), Interval(500, 400, 600), self.PLAN)
        assert found.verdicts[1].outcome == "missed"

    def test_is_not_known_without_a_rate(self):
        found = served.priced(self.made(), NAN, self.PLAN)
        assert found.verdicts[1].outcome == "not measured"

    def test_is_not_known_without_a_price(self):
        found = served.priced(self.made(), Interval(2000, 1000, 4000), a_plan("p99 < 20ms"))
        assert (found.cost_per_million, found.max_rate.value) == (None, 2000)


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
        monkeypatch.setattr(served, "WARM_UP_S", 0.3)
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
            if timeout == served.STOP_TIMEOUT_S:
                raise KeyboardInterrupt
            return wait(process, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), served.ServedEndpoint(null_build(tmp_path), ""):
            pass
        assert set(psutil.Process().children(recursive=True)) <= before


class TestServers:
    PLAN = a_plan("p99 < 1s", duration_s=0.3)

    def children(self) -> set[psutil.Process]:
        return set(psutil.Process().children())

    @pytest.mark.slow
    def test_stay_for_the_next_measurement(self, tmp_path: Path, monkeypatch):
        monkeypatch.setattr(served, "WARM_UP_S", 0.3)
        build = null_build(tmp_path)
        before = self.children()
        servers = served.Servers()
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
        servers = served.Servers()
        with pytest.raises(KeyboardInterrupt):
            measured(null_build(tmp_path), self.PLAN, numbers(3), interrupt, servers)
        assert self.children() <= before

    def test_make_room_for_one_that_does_not_start_beside_them(self, tmp_path: Path, monkeypatch):
        first, second = null_build(tmp_path / "a"), null_build(tmp_path / "b")
        before = self.children()
        servers = served.Servers()
        enter = served.ServedEndpoint.__enter__

        def crowded(self: served.ServedEndpoint) -> served.ServedEndpoint:
            if len(set(psutil.Process().children()) - before) > 0:
                raise BackendFailed("no memory")
            return enter(self)

        monkeypatch.setattr(served.ServedEndpoint, "__enter__", crowded)
        servers.open([first], numbers(3))
        (endpoint,) = servers.open([second], numbers(3))
        assert endpoint.build is second and endpoint.is_running
        servers.close()
        assert self.children() <= before


@pytest.mark.verify
def test_two_builds_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served, "WARM_UP_S", 0.3)
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
    monkeypatch.setattr(served, "WARM_UP_S", 0.3)
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
def test_a_search_without_time_finds_no_rate(tmp_path: Path):
    build = null_build(tmp_path, max_batch=1, a_ms=10)
    plan = a_plan("p99 < 1 s", duration_s=0.5)
    bench = served.ServedBench(plan, numbers(5), silent, None, MeasurementLimits(search_s=0.0))
    (found,) = bench.with_rates([build])
    assert found.max_rate is not None and math.isnan(found.max_rate.value)
    assert found.curve is not None and not found.curve.rates


@pytest.mark.parametrize(("num_waited", "late_share"), [(0, 0.75), (3, 0.0)])
def test_waiting_for_a_busy_server_is_no_pause_of_the_machine(num_waited, late_share):
    """A generator whose connections are all busy is late because of the server."""
    histogram = stats.DurationHistogram()
    histogram.add(np.full(20, 0.2))
    windows = [
        stats.Window(n / 4, 0.25, 20, 20, 20, metrics={"latency": histogram}, max_late_s=0.5)
        if n > 1
        else stats.Window(n / 4, 0.25, 20, 20, 20, metrics={"latency": histogram})
        for n in range(8)
    ]
    generator = SimpleNamespace(num_waited=num_waited)
    level = SimpleNamespace(windows=windows, server=None, generator=generator)
    account = served.ServedAccount(a_config())
    endpoint = SimpleNamespace(
        conditions=Conditions(own_cpu=0.1), memory_bytes=1, gpu_memory_bytes=()
    )
    account.add(level, endpoint)
    plan = a_plan("p99 < 50 ms at 80/s")
    (turn,) = served.served_of(account, served.load_of(plan.slo), plan).turns
    # The window before the first late one goes with it.
    assert turn.late_share == pytest.approx(late_share + (0.125 if late_share else 0.0))
