"""What the dashboard draws of real models, on a clock that tests move."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from page_server import null_config

from penstock.dashboard import live_sampler
from penstock.dashboard.live_sampler import LiveSampler
from penstock.errors import Overloaded
from penstock.llm.messages import StepReport
from penstock.llm.text_metrics import TextMetrics
from penstock.operate.monitor import Monitor
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.local import ThreadLife
from penstock.serving.management import ManagementApi
from penstock.serving.scrape import ShardUse
from penstock.system.devices import GpuUse
from penstock.wire.live import DRAWN, LiveEvent, LiveModel

ECHO = null_config("echo", {"x": ("INT32", (2,))}, slo="p99 < 20ms")


class Scene:
    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.management = ManagementApi(
            catalog,
            Control(catalog, "", is_explicit=True),
            shards=lambda: [ShardUse("1", 2, 7, accepts=False)],
        )
        self.now = 100.0
        self.monitor = Monitor(catalog, clock=lambda: self.now, price=1.0)
        self.sampler = LiveSampler(self.management, self.monitor, unix_time=lambda: 1e9 + self.now)

    def tick(self) -> LiveEvent:
        self.now += 1
        self.monitor.tick(self.now)
        event = self.sampler.sample(self.now)
        # As the page gets it.
        return msgspec.json.decode(msgspec.json.encode(event), type=LiveEvent)

    def model(self, name: str = "echo") -> LiveModel:
        return next(model for model in self.tick().models if model.name == name)


def play(script: Callable[[Scene], object], *configs, problems=None) -> None:
    async def main() -> None:
        catalog = Catalog(start_life=ThreadLife)
        await catalog.load(RepositoryScan(list(configs or [ECHO]), problems or {}))
        result = script(Scene(catalog))
        if asyncio.iscoroutine(result):
            await result
        await catalog.close()

    asyncio.run(main())


def test_rates_are_those_of_a_second_and_batches_of_ten() -> None:
    def script(scene: Scene) -> None:
        metrics = scene.catalog.find("echo").metrics
        assert scene.model().answered == 0
        metrics.answered(total_s=0.02, infer_s=0.01)
        metrics.answered(total_s=0.02, infer_s=0.01)
        found = scene.model()
        assert (found.answered, found.batch_sizes, found.batch_rows) == (2, {1: 2}, 1)
        assert 0.01 < found.p50_s <= found.p99_s <= 0.025
        assert found.limits_s == {"latency": 0.02} and found.cost_per_million > 0
        assert scene.model().answered == 0
        for _ in range(8):
            assert scene.model().p99_s is not None
        found = scene.model()
        assert (found.p99_s, found.batch_sizes) == (None, {})

    play(script)


def test_refusals_are_listed_with_reason_and_time() -> None:
    def script(scene: Scene) -> None:
        scene.tick()
        for _ in range(3):
            scene.catalog.find("echo").refused(Overloaded("full", reason="predicted_late"), 0.0)
        event = scene.tick()
        (entry,) = event.refusals
        assert (entry.model, entry.reason, entry.count) == ("echo", "predicted_late", 3)
        assert entry.time == event.time == 1e9 + scene.now
        assert event.models[0].refused == 3
        assert scene.tick().refusals == []
        start = scene.sampler.start(True, ["metrics"], True)
        assert start.refusals == [entry]

    play(script)


def test_the_first_event_has_the_last_minutes() -> None:
    def script(scene: Scene) -> None:
        for number in range(live_sampler.NUM_POINTS + 5):
            scene.catalog.find("echo").metrics.num_success += number
            scene.tick()
        start = scene.sampler.start(False, ["metrics", "admin"], False)
        assert (start.name, start.is_explicit, start.drawn) == ("penstock", True, list(DRAWN))
        assert (start.scopes, start.has_versions) == (["metrics", "admin"], False)
        (series,) = start.series
        assert len(series.points) == len(start.times) == live_sampler.NUM_POINTS
        answered = [point[0] for point in series.points]
        assert answered == list(range(5, live_sampler.NUM_POINTS + 5))

    play(script)


def test_a_reload_does_not_look_like_negative_traffic() -> None:
    async def script(scene: Scene) -> None:
        scene.catalog.find("echo").metrics.num_success = 50
        scene.tick()
        await scene.catalog.load(RepositoryScan([ECHO], {}))
        assert scene.model().answered == 0
        scene.catalog.find("echo").metrics.num_success = 4
        assert scene.model().answered == 4
        await scene.catalog.unload("echo")
        assert scene.tick().models == []
        assert scene.sampler.start(False, [], True).series == []

    play(script)


def test_burn_rates_machine_and_rollouts_are_in_each_event() -> None:
    def script(scene: Scene) -> None:
        metrics = scene.catalog.find("echo").metrics
        metrics.num_success, metrics.num_late = 10, 1
        scene.sampler.gpus = [GpuUse("gpu-0", 0.5, 100, 40, 70.0, 300.0)]
        scene.sampler.rollouts = lambda: {"echo": {"decision": "running", "share": 0.05}}
        event = scene.tick()
        assert event.burn_rates["echo"]["latency"]["5m"] == pytest.approx(10)
        machine = event.machine
        assert 0 <= machine.cpu <= 1 and 0 < machine.memory_used_bytes < machine.memory_total_bytes
        assert (machine.gpus[0].utilization, machine.gpus[0].memory_used_bytes) == (0.5, 40)
        assert (machine.shards[0].num_connections, machine.shards[0].accepts) == (7, False)
        assert msgspec.json.decode(event.rollouts["echo"]) == {"decision": "running", "share": 0.05}

    play(script)


def test_a_model_that_cannot_be_loaded_is_shown_with_its_problem() -> None:
    def script(scene: Scene) -> None:
        found = scene.model("broken")
        assert (found.state, found.reason) == ("UNAVAILABLE", "no such file")

    play(script, ECHO, problems={"broken": ["no such file"]})


def test_language_models_have_tokens_and_their_latencies() -> None:
    def script(scene: Scene) -> None:
        text = TextMetrics(scene.catalog.find("echo").metrics)
        found = scene.model().text
        assert (found.num_running, found.generated_tokens, found.ttft_p99_s) == (0, 0, None)
        text.step(StepReport([], 3, 2, 0, 0.1), 1.0)
        text.num_prompt_tokens, text.num_generated_tokens = 40, 9
        text.first_token_s.add(0.05)
        text.mean_token_s.add(0.02)
        found = scene.model().text
        assert (found.num_running, found.num_waiting) == (3, 2)
        assert (found.prompt_tokens, found.generated_tokens) == (40, 9)
        assert 0.04 <= found.ttft_p50_s <= 0.06 and 0.01 <= found.tpot_p99_s <= 0.025

    play(script)
