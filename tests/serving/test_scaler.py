"""Instances that come and go: the actor, with workers on strings and a clock moved by the test."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from doubles import FakeClock, FakeGpus, Puppets, RecordingSink, settle

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig, ScalingConfig
from penstock.serving.fleet import Fleet, GpuReservations
from penstock.serving.model import Model
from penstock.serving.scaling import Observation, ScalingDecision
from penstock.types import Request, TensorSpec, from_array

ECHO = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True, max_wait_s=0.0),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16),
    scaling=ScalingConfig(1, 4, scale_down_s=10.0, scale_to_zero_s=60.0),
)
GIB = 1 << 30


class Given:
    """A controller that does as the test says."""

    def __init__(self, target: int) -> None:
        self.target = target

    def decide(self, seen: Observation, now: float) -> ScalingDecision:
        return ScalingDecision(self.target, "the test says so")


class Scaled:
    """A model, and what a test does with it. Each tick is half a second of the clock."""

    def __init__(self, model: Model, puppets: Puppets, clock: FakeClock) -> None:
        self.model, self.puppets, self.clock = model, puppets, clock
        self.requests: list[Request] = []

    @property
    def host(self):
        return self.model.host

    @property
    def states(self) -> list[str]:
        return [each.state for each in self.model.processes]

    def send(self, count: int = 1) -> list[Request]:
        sent = []
        for _ in range(count):
            values = np.arange(4, dtype=np.int64)[None] + 1000 * len(self.requests)
            tensor = from_array("x", "INT64", values)
            request = Request(RecordingSink(), [tensor], self.clock())
            self.requests.append(request)
            sent.append(request)
            self.model.submit(request)
        return sent

    async def tick(self, count: int = 1, *, requests: int = 0, works: bool = True) -> None:
        for _ in range(count):
            self.send(requests)
            await (self.puppets.step_all() if works else settle())
            self.clock.advance(0.5)
            self.host.tick()
            await (self.puppets.step_all() if works else settle())

    def set_times(self, seconds: float) -> None:
        """Report that batches take so long: those of the `null` backend take no time."""
        self.model.batcher.mean_times = lambda: dict.fromkeys((1, 2, 4), seconds)

    def check_answers(self) -> None:
        """Each request got its own bytes, once."""
        for number, request in enumerate(self.requests):
            assert request.sink.num_final == 1
            assert request.sink.error is None, request.sink.error
            assert request.sink.outputs[0]["y"][0, 0] == 1000 * number


def run(
    scenario: Callable[[Scaled], Awaitable[None]],
    config: ModelConfig = ECHO,
    *,
    has_room: bool = True,
) -> None:
    async def main() -> None:
        puppets, clock = Puppets(has_room=has_room), FakeClock()
        model = Model(config, start_life=puppets, clock=clock)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        await scenario(Scaled(model, puppets, clock))
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing
        assert puppets.alive == []

    asyncio.run(main())


async def grow(scaled: Scaled) -> None:
    """Send so much that all four instances are needed."""
    scaled.set_times(0.2)
    await scaled.tick(8, requests=35)
    assert scaled.states == ["ready"] * 4


def test_load_starts_instances_and_their_answers_are_right():
    async def scenario(scaled):
        assert scaled.states == ["ready"]
        await grow(scaled)
        assert len(scaled.puppets.alive) == 4
        assert "4 of 1 to 4 instances: " in scaled.host.scaler.describe()
        assert "sustain" in scaled.host.scaler.describe()
        await scaled.tick(4, requests=8)
        scaled.check_answers()
        used = {record.instance for record in scaled.model.history.recent}
        assert used == {0, 1, 2, 3}

    run(scenario)


def test_the_batcher_counts_the_instances_that_take_batches():
    async def scenario(scaled):
        counted = []
        count_executors = scaled.model.batcher.count_executors

        def note(num_ready: int, now: float) -> None:
            counted.append(num_ready)
            count_executors(num_ready, now)

        scaled.model.batcher.count_executors = note
        await grow(scaled)
        assert counted[-1] == 4
        await scaled.tick(160)
        assert scaled.states == ["ready"] and counted[-1] == 1

    run(scenario)


def test_instances_stop_one_by_one_when_the_load_ends_and_lose_nothing():
    async def scenario(scaled):
        await grow(scaled)
        counts = []
        for _ in range(160):
            await scaled.tick(requests=1)
            counts.append(len(scaled.states))
        assert counts[-1] == 1 and len(scaled.puppets.alive) == 1
        assert {a - b for a, b in zip(counts, counts[1:], strict=False)} == {0, 1}
        scaled.check_answers()
        assert scaled.model.metrics.num_restarts == 0
        assert scaled.model.metrics.num_deaths == {"crash": 0, "hang": 0}

    run(scenario)


def test_an_instance_that_is_stopped_answers_first_and_gets_nothing_new():
    async def scenario(scaled):
        await grow(scaled)
        last = scaled.host.instances[3]
        # All have a batch that they have not seen yet.
        scaled.send(16)
        await settle()
        place = scaled.model.workers[3]
        assert place.batches
        scaled.host.supervisor.dismiss(last, "the test says so")
        await scaled.puppets.step_all()
        assert last.child is None and not place.is_ready
        scaled.check_answers()

    run(scenario)


def test_a_stopped_place_is_used_again():
    async def scenario(scaled):
        await grow(scaled)
        await scaled.tick(160)
        assert scaled.states == ["ready"]
        lives = {each.life for each in scaled.host.instances}
        await grow(scaled)
        assert {each.life for each in scaled.host.instances} - lives
        scaled.check_answers()

    run(scenario)


def test_load_that_returns_while_an_instance_leaves_uses_its_place_when_it_has_left():
    async def scenario(scaled):
        await grow(scaled)
        supervisor, last = scaled.host.supervisor, scaled.host.instances[3]
        life = last.life
        supervisor.dismiss(last, "the test says so")
        await scaled.tick(1, requests=35, works=False)
        assert last.is_wanted and last.life == life, "it is wanted again before it has left"
        await scaled.tick(2, requests=35)
        assert last.is_ready and last.life > life
        scaled.check_answers()

    run(scenario)


def test_an_instance_that_still_loads_is_stopped_first():
    async def scenario(scaled):
        scaled.set_times(0.2)
        await scaled.tick(8, requests=35, works=False)
        assert scaled.states == ["ready", "starting", "starting", "starting"]
        scaled.host.scaler.policy = Given(3)
        await scaled.tick(works=False)
        assert scaled.states == ["ready", "starting", "starting"]
        await scaled.tick(4, requests=1)
        assert scaled.states == ["ready"] * 3 and scaled.model.metrics.num_restarts == 0

    run(scenario)


def test_a_worker_that_dies_while_others_start_or_stop_is_replaced():
    async def scenario(scaled):
        await grow(scaled)
        scaled.send(8)
        scaled.host.supervisor.dismiss(scaled.host.instances[2], "the test says so")
        for index in (0, 2):
            scaled.host.instances[index].child.life.kill("was killed by SIGSEGV")
        await scaled.tick(3, requests=35)
        assert scaled.states == ["ready"] * 4
        scaled.check_answers()
        assert scaled.model.metrics.num_deaths["crash"] == 1, "the other one was leaving"

    run(scenario)


def test_an_instance_that_cannot_load_does_not_end_the_model(monkeypatch):
    async def scenario(scaled):
        def fail(*_: object) -> None:
            raise RuntimeError("no licence")

        scaled.set_times(0.2)
        with monkeypatch.context() as patch:
            patch.setattr("penstock.serving.worker.load_runner", fail)
            await scaled.tick(6, requests=35)
            assert scaled.model.state == "READY" and scaled.states[0] == "ready"
            assert set(scaled.states[1:]) == {"starting"}
        for _ in range(40):
            await asyncio.sleep(0.05)
            await scaled.tick(requests=1)
        assert "ready" in scaled.states
        scaled.check_answers()

    run(scenario)


def test_without_memory_for_another_nothing_is_started_and_the_reason_says_so():
    async def scenario(scaled):
        scaled.set_times(0.2)
        await scaled.tick(8, requests=35)
        assert scaled.states == ["ready"]
        assert scaled.host.scaler.describe().endswith("; memory has room for 1")

    run(scenario, has_room=False)


def test_a_version_that_replaces_another_begins_with_as_many_instances():
    async def main() -> None:
        puppets = Puppets(has_room=True)
        for wanted, expected in ((3, 3), (9, 4), (0, 1)):
            model = Model(ECHO, start_life=puppets)
            model.host.scaler.begin_with(wanted)
            starting = asyncio.ensure_future(model.start())
            await puppets.step_all()
            await starting
            assert len(model.processes) == expected
            closing = asyncio.ensure_future(model.close())
            while not closing.done():
                await puppets.step_all()

    asyncio.run(main())


def test_a_fixed_number_has_no_scaler():
    async def scenario(scaled):
        assert scaled.host.scaler.describe() == ""
        await scaled.tick(20, requests=35)
        assert scaled.states == ["ready"]

    run(scenario, replace(ECHO, scaling=ScalingConfig()))


class TestGpus:
    """Two GPUs of 10 GiB; a worker takes 3 GiB."""

    CONFIG = replace(
        ECHO,
        device="cuda:0",
        spread=("cuda:0", "cuda:1"),
        num_instances=2,
        gpu_memory_bytes=3 * GIB,
    )

    def reservations(self, gpus: FakeGpus) -> GpuReservations:
        return GpuReservations(Fleet(0.0, gpus))

    async def until(self, scaled: Scaled, holds: Callable[[], bool]) -> None:
        """Send more than an instance sustains; the plan is made in a thread."""
        for _ in range(2000):
            if holds():
                return
            await scaled.tick(requests=35)
            await asyncio.sleep(0.002)
        raise AssertionError("it did not happen")

    def test_a_worker_is_started_only_if_the_memory_plan_has_room(self):
        gpus = FakeGpus(10 * GIB, 10 * GIB)

        async def scenario(scaled):
            reservations = self.reservations(gpus)
            scaled.host.scaler.find_room = reservations.find_room
            assert scaled.states == ["ready", "ready"]
            await scaled.tick(160)
            assert scaled.states == ["ready"], "the one on the second GPU is stopped"
            assert scaled.model.processes[0].device == "cuda:0"
            gpus.used_bytes = [3 * GIB, 9 * GIB]
            scaled.set_times(0.4)
            full = "; memory has room for 1"
            await self.until(scaled, lambda: scaled.host.scaler.describe().endswith(full))
            assert scaled.states == ["ready"]
            gpus.used_bytes = [3 * GIB, 7 * GIB]
            await self.until(scaled, lambda: scaled.states == ["ready", "ready"])
            other = replace(self.CONFIG, scaling=ScalingConfig())
            assert await reservations.find_room(other) is not None, "nothing is reserved now"

        config = replace(self.CONFIG, scaling=replace(ECHO.scaling, max_instances=2))
        run(scenario, config)

    def test_memory_is_reserved_once_if_the_load_changes_while_room_is_sought(self):
        may_find, held = asyncio.Event(), []

        async def find_room(config: ModelConfig) -> Callable[[], None]:
            await may_find.wait()
            held.append(config)
            return held.pop

        async def scenario(scaled):
            scaler = scaled.host.scaler
            scaler.find_room, scaler.policy = find_room, Given(1)
            await scaled.tick(3)
            assert scaled.states == ["ready"]
            for target in (2, 1, 2):
                scaler.policy = Given(target)
                await scaled.tick()
            may_find.set()
            await scaled.tick(3)
            assert scaled.states == ["ready", "ready"]
            assert held == [], "the worker has its memory"

        run(scenario, replace(self.CONFIG, scaling=replace(ECHO.scaling, max_instances=2)))

    def test_slots_of_one_worker_are_scaled_together(self):
        """Two instances on a GPU share a worker and its weights: either both run or none."""
        config = replace(
            ECHO,
            device="cuda:0",
            num_instances=2,
            scaling=replace(ECHO.scaling, min_instances=0, max_instances=2),
        )
        assert config.places == (("cuda:0", 2),)

        async def scenario(scaled):
            await scaled.tick(40)
            assert scaled.states == ["ready"]
            await scaled.tick(100)
            assert scaled.states == [] and scaled.model.is_ready
            scaled.send()
            await scaled.tick(2)
            scaled.check_answers()
            assert scaled.states == ["ready"]

        run(scenario, config)


@pytest.mark.parametrize("num_ticks", [1, 7])
def test_an_unloaded_model_is_freed_without_the_garbage_collector(num_ticks):
    import gc
    import weakref

    kept = []

    async def scenario(scaled):
        await scaled.tick(num_ticks, requests=35)
        kept.append(weakref.ref(scaled.host))

    gc.collect()
    gc.disable()
    try:
        run(scenario)
        time.sleep(0)
        assert kept[0]() is None
    finally:
        gc.enable()
