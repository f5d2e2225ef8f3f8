"""A model that is scaled to zero: its first request waits for an instance, or is refused."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink, settle

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig, ScalingConfig
from penstock.errors import InvalidRequest, NotReady, Overloaded
from penstock.serving.model import Model
from penstock.serving.scaling import Observation, ScalingDecision
from penstock.types import Request, TensorSpec, from_array

SLO_S = 0.2
FIXED = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16),
    scaling=ScalingConfig(0, 1, scale_to_zero_s=60.0, cold_start_s=10.0),
)
SLO = replace(FIXED, batching=replace(FIXED.batching, slo_latency_s=SLO_S))
BOTH = pytest.mark.parametrize("config", [FIXED, SLO], ids=["fixed", "slo"])


class Given:
    """A controller that does as the test says."""

    def __init__(self, target: int) -> None:
        self.target = target

    def decide(self, seen: Observation, now: float) -> ScalingDecision:
        return ScalingDecision(self.target, "the test says so")


class Sleeper:
    """A model that has been scaled to zero; each tick is half a second."""

    def __init__(self, model: Model, puppets: Puppets, clock: FakeClock) -> None:
        self.model, self.puppets, self.clock = model, puppets, clock

    async def tick(self, count: int = 1, *, works: bool = True) -> None:
        for _ in range(count):
            self.clock.advance(0.5)
            self.model.host.tick()
            await (self.puppets.step_all() if works else settle())

    async def sleep(self) -> None:
        await self.tick(130)
        assert self.model.processes == [] and self.puppets.alive == []

    def send(self, timeout_s: float | None = None, columns: int = 4) -> Request:
        tensor = from_array("x", "INT64", np.arange(columns, dtype=np.int64)[None])
        request = Request(RecordingSink(), [tensor], self.clock())
        request.timeout_s = timeout_s
        self.model.submit(request)
        return request


def run(config: ModelConfig, scenario: Callable[[Sleeper], Awaitable[None]]) -> None:
    async def main() -> None:
        puppets, clock = Puppets(has_room=True), FakeClock()
        model = Model(config, start_life=puppets, clock=clock)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        sleeper = Sleeper(model, puppets, clock)
        await scenario(sleeper)
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())


@BOTH
def test_after_a_time_without_requests_no_process_runs_and_the_model_is_ready(config):
    async def scenario(sleeper):
        await sleeper.tick(100)
        assert len(sleeper.model.processes) == 1
        sleeper.send()
        await sleeper.tick(110)
        assert len(sleeper.model.processes) == 1, "the request counts"
        await sleeper.sleep()
        model = sleeper.model
        assert model.is_ready and model.shown_state == "READY" and model.is_cold
        assert model.host.is_ready and model.host.shown_state == "READY"
        explained = model.explain()
        assert explained.instances == [] and explained.state == "READY"
        assert explained.scaling == "0 of 0 to 1 instances: no request for 120 s"

    run(config, scenario)


@BOTH
def test_the_first_request_starts_an_instance_at_once_and_is_answered(config):
    async def scenario(sleeper):
        await sleeper.sleep()
        request = sleeper.send()
        assert len(sleeper.puppets.alive) == 1, "no tick is waited for"
        assert sleeper.model.host.scaler.describe().endswith(
            "a request came when there was no instance"
        )
        others = [sleeper.send() for _ in range(3)]
        await sleeper.tick(10, works=False)
        assert not request.is_done and sleeper.model.is_ready
        await sleeper.puppets.step_all()
        assert [each.sink.error for each in (request, *others)] == [None] * 4
        assert not sleeper.model.is_cold
        assert sleeper.model.metrics.num_restarts == 0
        await sleeper.sleep()
        again = sleeper.send()
        await sleeper.puppets.step_all()
        assert again.sink.error is None

    run(config, scenario)


@BOTH
def test_a_request_waits_no_longer_than_the_cold_start_budget(config):
    async def scenario(sleeper):
        await sleeper.sleep()
        early = sleeper.send()
        await sleeper.tick(10, works=False)
        late = sleeper.send()
        await sleeper.tick(11, works=False)
        assert isinstance(early.sink.error, NotReady | Overloaded)
        assert not late.is_done, "it has its own budget"
        await sleeper.puppets.step_all()
        assert late.sink.error is None

    run(replace(config, scaling=replace(config.scaling, cold_start_s=10.0)), scenario)


@BOTH
def test_if_loading_takes_longer_than_the_budget_requests_are_refused_at_once(config):
    async def scenario(sleeper):
        scaler = sleeper.model.host.scaler
        scaler.starts.append(42.0)
        await sleeper.sleep()
        request = sleeper.send()
        error = request.sink.error
        assert isinstance(error, NotReady) and error.retry_after_s == 42.0
        assert "loading one takes 42.0 s and requests wait for 10 s" in str(error)
        assert sleeper.model.metrics.num_refused["not_ready"] == 1
        assert len(sleeper.puppets.alive) == 1, "a retry finds an instance"
        sleeper.clock.advance(12.0)
        assert sleeper.send().sink.error.retry_after_s == 30.0
        await sleeper.puppets.step_all()
        again = sleeper.send()
        await sleeper.puppets.step_all()
        assert again.sink.error is None

    run(config, scenario)


@BOTH
def test_what_cannot_be_run_starts_nothing(config):
    async def scenario(sleeper):
        await sleeper.sleep()
        request = sleeper.send(columns=3)
        assert isinstance(request.sink.error, InvalidRequest)
        await sleeper.tick(3)
        assert sleeper.puppets.alive == []

    run(config, scenario)


def test_a_request_with_a_time_limit_of_its_own_keeps_it():
    async def scenario(sleeper):
        await sleeper.sleep()
        hasty, patient = sleeper.send(timeout_s=0.1), sleeper.send()
        await sleeper.tick(works=False)
        assert isinstance(hasty.sink.error, Overloaded)
        await sleeper.puppets.step_all()
        assert patient.sink.error is None

    run(SLO, scenario)


def test_after_a_cold_start_the_slo_counts_from_its_end():
    """All that waited is answered if it fits the SLO then, and new requests have the usual one."""

    async def scenario(sleeper):
        await sleeper.sleep()
        waited = [sleeper.send() for _ in range(8)]
        await sleeper.tick(6, works=False)
        await sleeper.puppets.step_all()
        assert [each.sink.error for each in waited] == [None] * 8
        late = sleeper.send()
        sleeper.clock.advance(2 * SLO_S)
        sleeper.model.host.tick()
        assert isinstance(late.sink.error, Overloaded) or late.is_done

    run(SLO, scenario)


def test_a_long_sleep_does_not_count_as_an_outage():
    """Time without an instance extends the limit on waiting: only the cold start may."""

    async def scenario(sleeper):
        counted = []
        batcher = sleeper.model.batcher
        count_executors = batcher.count_executors

        def note(num_ready: int, now: float) -> None:
            counted.append((num_ready, now))
            count_executors(num_ready, now)

        batcher.count_executors = note
        await sleeper.sleep()
        await sleeper.tick(200)
        assert 0 not in [number for number, _ in counted]
        began = sleeper.clock()
        sleeper.send()
        assert counted[-1] == (0, began)
        await sleeper.tick(2, works=False)
        await sleeper.puppets.step_all()
        assert counted[-1] == (1, began + 1.0)

    run(FIXED, scenario)


@BOTH
def test_a_request_that_comes_while_the_last_instance_leaves_is_answered(config):
    async def scenario(sleeper):
        await sleeper.tick(119)
        model = sleeper.model
        sleeper.clock.advance(0.6)
        model.host.tick()
        assert model.is_cold and len(model.processes) == 1, "it is told to leave"
        request = sleeper.send()
        await sleeper.puppets.step_all()
        await sleeper.tick(2)
        assert request.sink.error is None
        assert len(sleeper.puppets.alive) == 1

    run(config, scenario)


@BOTH
def test_a_request_that_was_queued_when_the_last_instance_had_to_leave_starts_another(config):
    """The core decides by reports that may be half a second old."""

    async def scenario(sleeper):
        scaler, batcher = sleeper.model.host.scaler, sleeper.model.batcher
        begun = []
        begin_cold_start = batcher.begin_cold_start

        def note(expected_s: float, now: float) -> None:
            begun.append(now)
            begin_cold_start(expected_s, now)

        batcher.begin_cold_start = note
        requests = [sleeper.send() for _ in range(7)]
        assert sleeper.model.num_waiting > 0
        scaler.policy = Given(0)
        sleeper.model.host.tick()
        assert begun == [sleeper.clock()], "the time limit of what is queued does not run"
        assert scaler.decision.target == 1, "no tick is waited for"
        scaler.policy = Given(1)
        await sleeper.tick(4)
        assert [each.sink.error for each in requests] == [None] * 7

    run(config, scenario)


@BOTH
def test_an_instance_for_refused_requests_waits_for_their_return(config):
    async def scenario(sleeper):
        scaler = sleeper.model.host.scaler
        scaler.starts.append(42.0)
        await sleeper.sleep()
        assert isinstance(sleeper.send().sink.error, NotReady)
        await sleeper.tick(80, works=False)
        assert sleeper.model.is_cold
        await sleeper.puppets.step_all()
        await sleeper.tick(110)
        assert not sleeper.model.is_cold, "the time without requests begins when it is ready"
        again = sleeper.send()
        await sleeper.puppets.step_all()
        assert again.sink.error is None

    run(config, scenario)


@BOTH
def test_an_instance_that_is_needed_again_while_it_leaves_has_not_crashed(config, caplog):
    """Otherwise a model that goes to sleep soon would start later and later."""

    async def scenario(sleeper):
        host, loop = sleeper.model.host, asyncio.get_running_loop()
        for _ in range(4):
            host.scaler.policy = Given(0)
            sleeper.model.host.tick()
            host.scaler.policy = Given(1)
            request = sleeper.send()
            until = loop.time() + 30
            while not request.is_done:
                await sleeper.puppets.step_all()
                assert loop.time() < until
            assert request.sink.error is None
            # It may have been answered by the one that leaves.
            await sleeper.tick(3)
        (instance,) = host.instances
        assert instance.crashes.num_deaths == 0
        assert sleeper.model.metrics.num_restarts == 0
        assert not any("restart in" in each.getMessage() for each in caplog.records)

    run(config, scenario)


@BOTH
def test_an_instance_that_dies_while_it_loads_is_started_again(config):
    async def scenario(sleeper):
        await sleeper.sleep()
        request = sleeper.send()
        (life,) = sleeper.puppets.alive
        life.kill("was killed by SIGSEGV")
        await settle()
        await sleeper.puppets.step_all()
        assert request.sink.error is None

    run(config, scenario)


@BOTH
def test_a_model_that_is_unloaded_while_it_loads_answers_first(config):
    async def scenario(sleeper):
        await sleeper.sleep()
        request = sleeper.send()
        draining = asyncio.ensure_future(sleeper.model.drain())
        await settle()
        assert not draining.done()
        await sleeper.puppets.step_all()
        await draining
        assert request.sink.error is None

    run(config, scenario)


def test_an_idle_model_that_is_scaled_to_zero_is_drained_at_once():
    async def scenario(sleeper):
        await sleeper.sleep()
        await asyncio.wait_for(sleeper.model.drain(), 1)

    run(FIXED, scenario)
