"""The monitor of real models, on a clock of its own: what a scrape says of a minute or an hour."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed
from penstock.operate import monitor as monitors
from penstock.operate.monitor import Monitor
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.local import ThreadLife
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model import Model
from penstock.serving.scrape import expose
from penstock.serving.served import ModelProcess
from penstock.system.devices import GpuUse, Watch
from penstock.types import TensorSpec

ECHO = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT32", (1,)),),
    outputs=(TensorSpec("y", "INT32", (1,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    slo="p99 < 20ms",
    num_instances=2,
)
PLAIN = replace(ECHO, name="plain", slo="", num_instances=1, price_per_hour=8.0)


class NoEnergy:
    """A processor whose counters cannot be read."""

    def read(self) -> float | None:
        return None


class Scene:
    """A catalog, its monitor, and a clock that tests move."""

    def __init__(self, catalog: Catalog, price: float | None = None) -> None:
        self.catalog = catalog
        self.now = 1000.0
        self.gpus: list[GpuUse] = []
        watch = Watch(lambda: self.gpus, lambda: self.now)
        self.monitor = Monitor(catalog, watch, price, lambda: self.now, NoEnergy())

    def metrics(self, name: str, version: str = "") -> ModelMetrics:
        return self.catalog.find(name, version).metrics

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.monitor.tick(self.now)

    def scrape(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The values by family and by labels other than the version."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        text = expose([], others=self.monitor.families()).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [v for k, v in sample.labels.items() if k != "version"]
                name = sample.name.removesuffix("_total")
                found.setdefault(name, {})[tuple(labels)] = sample.value
        return found


@asynccontextmanager
async def scene(configs: Sequence[ModelConfig], price: float | None = None) -> AsyncIterator[Scene]:
    catalog = Catalog(start_life=ThreadLife)
    await catalog.load(RepositoryScan(list(configs), {}))
    assert not catalog.failures
    yield Scene(catalog, price)
    await catalog.close()


def play(configs: Sequence[ModelConfig], script, price: float | None = None) -> None:
    async def main() -> None:
        async with scene(configs, price) as made:
            result = script(made)
            if asyncio.iscoroutine(result):
                await result

    asyncio.run(main())


def test_burn_rates_are_those_of_the_model_over_all_its_versions() -> None:
    def script(scene: Scene) -> None:
        first, second = (scene.metrics("echo", version) for version in ("1", "2"))
        first.num_success = 90
        second.num_success, second.num_late = 10, 1
        scene.pass_time()
        rates = scene.scrape()["penstock_slo_burn_rate"]
        assert rates == pytest.approx(
            {("echo", "latency", window): 1.0 for window in ("5m", "1h", "6h", "3d")}
        )
        for _ in range(400):
            scene.pass_time()
        second.failed("BACKEND", BackendFailed("it died"))
        scene.pass_time()
        rates = scene.scrape()["penstock_slo_burn_rate"]
        assert rates["echo", "latency", "5m"] == pytest.approx(100)
        assert rates["echo", "latency", "1h"] == pytest.approx(100 * 2 / 101, rel=1e-5)

    play([ECHO, replace(ECHO, version="2"), PLAIN], script)


def test_a_reload_continues_the_burn_rate_and_an_unload_ends_it() -> None:
    async def script(scene: Scene) -> None:
        metrics = scene.metrics("echo")
        metrics.num_success, metrics.num_late = 50, 50
        scene.pass_time()
        await scene.catalog.load(RepositoryScan([ECHO], {}))
        assert scene.metrics("echo") is not metrics
        scene.metrics("echo").num_success = 50
        scene.pass_time()
        assert scene.scrape()["penstock_slo_burn_rate"]["echo", "latency", "5m"] == pytest.approx(
            50
        )
        await scene.catalog.unload("echo")
        scene.pass_time()
        assert scene.scrape().keys() == {"penstock_build_info"}

    play([ECHO], script)


def test_saturation_is_the_share_of_a_minute_that_instances_computed() -> None:
    def script(scene: Scene) -> None:
        assert "penstock_busy_ratio" not in scene.scrape()
        for second in range(60):
            scene.metrics("echo").busy_s += 1.0  # One of two instances.
            scene.metrics("plain").busy_s += 2.0  # Batches overlap on its device.
            scene.pass_time()
            if second > 2:
                ratios = scene.scrape()["penstock_busy_ratio"]
                assert ratios == pytest.approx({("echo",): 0.5, ("plain",): 1.0}, abs=0.02)
        for _ in range(61):
            scene.pass_time()
        assert scene.scrape()["penstock_busy_ratio"]["echo",] == 0

    play([ECHO, PLAIN], script)


def test_cost_is_the_price_of_the_instances_by_the_rate_of_answers() -> None:
    def script(scene: Scene) -> None:
        scene.pass_time()
        assert scene.scrape()["penstock_price_per_hour"] == pytest.approx(
            {("echo",): 3.6 * 2 / 3, ("plain",): 3.6 / 3}, abs=1e-6
        )
        assert "penstock_cost_per_million" not in scene.scrape()
        for _ in range(99):
            scene.metrics("echo").num_success += 10
            scene.pass_time()
        # 9.9 answers a second at 2.4 an hour.
        (cost,) = scene.scrape()["penstock_cost_per_million"].values()
        assert cost == pytest.approx(2.4 / 3600 * 1e6 / 9.9, rel=1e-3)
        for _ in range(400):
            scene.metrics("echo").num_success += 20
            scene.pass_time()
        (cost,) = scene.scrape()["penstock_cost_per_million"].values()
        assert cost == pytest.approx(2.4 / 3600 * 1e6 / 20, rel=0.02)

    play([ECHO, PLAIN], script, price=3.6)


def test_without_a_given_price_that_of_the_evidence_counts() -> None:
    def script(scene: Scene) -> None:
        scene.pass_time()
        found = scene.scrape()["penstock_price_per_hour"]
        assert found == pytest.approx({("plain",): 8.0 / 3}, abs=1e-6)

    play([ECHO, PLAIN], script)


def test_energy_is_divided_by_the_time_of_computing_and_by_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def script(scene: Scene) -> None:
        on_gpu = [ModelProcess(0, "cuda:0", 1, True, {})]
        monkeypatch.setattr(Model, "processes", property(lambda model: on_gpu))
        scene.gpus = [GpuUse("gpu-0", energy_joules=5000.0)]
        scene.pass_time()
        scene.monitor.divide(scene.monitor.read_joules(), scene.now)
        assert "penstock_energy_joules" not in scene.scrape()
        scene.gpus = [GpuUse("gpu-0", energy_joules=5400.0)]
        scene.metrics("echo").busy_s += 3.0
        scene.metrics("echo").num_success += 60
        scene.metrics("plain").busy_s += 1.0
        scene.pass_time(10)
        scene.monitor.divide(scene.monitor.read_joules(), scene.now)
        found = scene.scrape()
        assert found["penstock_energy_joules"] == {("echo",): 300.0, ("plain",): 100.0}
        assert found["penstock_joules_per_request"] == {("echo",): 5.0}
        # Nothing computes: the energy of an idle device is that of no version.
        scene.gpus = [GpuUse("gpu-0", energy_joules=9400.0)]
        scene.pass_time(10)
        scene.monitor.divide(scene.monitor.read_joules(), scene.now)
        assert scene.scrape()["penstock_energy_joules"]["echo",] == 300.0
        # It is a counter: what is used later is added.
        scene.gpus = [GpuUse("gpu-0", energy_joules=9500.0)]
        scene.metrics("echo").busy_s += 1.0
        scene.pass_time(10)
        scene.monitor.divide(scene.monitor.read_joules(), scene.now)
        assert scene.scrape()["penstock_energy_joules"]["echo",] == 400.0

    play([ECHO, PLAIN], script)


def test_it_ticks_and_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(scene: Scene) -> None:
        monkeypatch.setattr(monitors, "TICK_S", 0.001)
        ticks: list[float] = []
        enough = asyncio.Event()

        def fail(now: float) -> None:
            ticks.append(now)
            if len(ticks) == 1:
                raise RuntimeError("a listener failed")
            enough.set()

        scene.monitor.on_tick.append(fail)
        task = asyncio.create_task(scene.monitor.run())
        async with asyncio.timeout(10):
            await enough.wait()
        task.cancel()
        assert ticks[1] == scene.now

    with caplog.at_level(logging.ERROR):
        play([ECHO], script)
    assert [each.exc_info[1].args for each in caplog.records] == [("a listener failed",)]
