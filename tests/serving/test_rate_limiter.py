"""Models that share resources: their batches run only while they hold them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from doubles import Puppets, RecordingSink, settle

from penstock.config import BatchPolicy, ModelConfig, RateLimit, ScalingConfig
from penstock.errors import ConfigError
from penstock.serving.model import Model
from penstock.serving.rate_limiter import RateLimiter, limit_at
from penstock.serving.rate_pool import ResourceKey
from penstock.types import Request, TensorSpec, from_array

R = ResourceKey("R")
NEEDS_R = (RateLimit("cpu", (("R", True, 1),)),)
CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (1,)),),
    outputs=(TensorSpec("y", "INT64", (1,)),),
    max_batch_size=1,
    batching=BatchPolicy(1),
    rate_limits=NEEDS_R,
    options={"null.fail_on": "13"},
)


class Place:
    """A model and its workers."""

    def __init__(self, limiter: RateLimiter, config: ModelConfig) -> None:
        self.puppets = Puppets()
        self.model = Model(config, start_life=self.puppets)
        self.model.limit_rate(limiter)
        self.sinks: list[RecordingSink] = []

    async def start(self) -> None:
        starting = asyncio.ensure_future(self.model.start())
        await self.puppets.step_all()
        await starting

    def ask(self, *values: int) -> None:
        for value in values:
            request = Request(RecordingSink(), [from_array("x", "INT64", np.array([[value]]))], 0.0)
            self.sinks.append(request.sink)
            self.model.submit(request)

    @property
    def num_running(self) -> int:
        return sum(len(each.batches) for each in self.model.workers)

    @property
    def num_answered(self) -> int:
        return sum(sink.num_final for sink in self.sinks)

    async def close(self) -> None:
        closing = asyncio.ensure_future(self.model.close())
        while not closing.done():
            await self.puppets.step_all()


def run(scenario, *configs: ModelConfig, given: dict | None = None) -> None:
    async def main() -> None:
        limiter = RateLimiter(given or {})
        places = [Place(limiter, config) for config in configs]
        for each in places:
            await each.start()
        await scenario(limiter, *places)
        for each in places:
            await each.close()
        assert limiter.pool.used(R) == 0

    asyncio.run(main())


async def finish(limiter: RateLimiter, *places: Place) -> int:
    """Run all batches to their end; return how many ran at a time at most."""
    most = 0
    while True:
        await settle()
        if all(place.num_answered == len(place.sinks) for place in places):
            break
        running = sum(place.num_running for place in places)
        assert running <= limiter.pool.count(R) and running == limiter.pool.used(R)
        assert running, "nothing goes on"
        most = max(most, running)
        for place in places:
            for life in place.puppets.alive:
                life.step()
    return most


def test_models_that_share_a_resource_never_execute_at_the_same_time():
    async def scenario(limiter, a, b):
        a.ask(*range(12))
        b.ask(*range(12))
        assert await finish(limiter, a, b) == 1
        answers = [sink.outputs[0]["y"].item() for sink in (*a.sinks, *b.sinks)]
        assert answers == [*range(12), *range(12)]

    run(scenario, CONFIG, replace(CONFIG, name="other"))


def test_with_more_of_it_more_execute():
    async def scenario(limiter, a, b):
        a.ask(*range(9))
        b.ask(*range(9))
        assert await finish(limiter, a, b) == 2

    run(scenario, CONFIG, replace(CONFIG, name="other"), given={R: 2})


def test_instances_of_one_model_share_too():
    async def scenario(limiter, a):
        a.ask(*range(9))
        assert await finish(limiter, a) == 1

    run(scenario, replace(CONFIG, num_instances=3))


def test_a_model_without_needs_does_not_wait():
    async def scenario(limiter, a):
        a.ask(1)
        await settle()
        assert a.num_running == limiter.pool.used(R) == 1
        free = Place(limiter, replace(CONFIG, name="free", rate_limits=(RateLimit("cpu", ()),)))
        await free.start()
        free.ask(2)
        await free.puppets.step_all()
        assert free.num_answered == 1 and a.num_answered == 0
        await a.puppets.step_all()
        await free.close()

    run(scenario, CONFIG)


def test_a_model_with_a_smaller_priority_number_executes_more_often():
    async def scenario(limiter, a, b):
        a.ask(*range(20, 80))
        b.ask(*range(20, 80))
        while a.num_answered < 30:
            await settle()
            for place in (a, b):
                for life in place.puppets.alive:
                    life.step()
        assert b.num_answered == pytest.approx(15, abs=2)
        await finish(limiter, a, b)

    seldom = (replace(NEEDS_R[0], priority=2),)
    run(scenario, CONFIG, replace(CONFIG, name="other", rate_limits=seldom))


def test_errors_cancellations_and_crashes_give_back_what_was_held():
    async def scenario(limiter, a, b):
        a.ask(13)
        b.ask(1)
        await finish(limiter, a, b)
        assert "fail_on" in str(a.sinks[0].error)
        # Its worker dies while it holds the resource that the other waits for.
        a.ask(2)
        await settle()
        b.ask(3)
        await settle()
        assert (a.num_running, b.num_running) == (1, 0)
        a.puppets.alive[0].kill()
        while not b.sinks[-1].num_final:
            await settle()
            await b.puppets.step_all()
        await a.puppets.step_all()

    run(scenario, CONFIG, replace(CONFIG, name="other"))


def test_a_model_that_is_unloaded_gives_back_what_it_holds_and_wants():
    async def scenario(limiter, a, b):
        a.ask(1, 2)
        b.ask(3)
        await settle()
        assert (a.num_running, b.num_running) == (1, 0)
        await a.close()
        await b.puppets.step_all()
        assert b.sinks[0].num_final == 1
        a.close = settle

    run(scenario, CONFIG, replace(CONFIG, name="other"))


def test_a_batch_that_waits_to_be_filled_holds_nothing():
    policy = BatchPolicy(4, is_dynamic=True, max_queue_delay_s=100.0)
    waiting = replace(CONFIG, name="slow", max_batch_size=4, batching=policy)

    async def scenario(limiter, a, b):
        a.ask(1)
        await settle()
        assert limiter.pool.used(R) == 0
        decided = limiter.num_decisions
        await settle(50)
        # It asks again when something changes, not all the time.
        assert limiter.num_decisions == decided
        b.ask(2)
        await b.puppets.step_all()
        assert b.num_answered == 1
        a.ask(3, 4, 5)
        await finish(limiter, a, b)
        assert a.model.metrics.batch_sizes == {4: 1}

    run(scenario, waiting, CONFIG)


def test_a_need_that_can_never_be_met_is_refused():
    limiter = RateLimiter({R: 2})
    limiter.check(replace(CONFIG, rate_limits=(RateLimit("cpu", (("R", True, 2),)),)))
    with pytest.raises(
        ConfigError, match=r"instance_group.rate_limiter: needs 3 of 'R' \(global\)"
    ):
        limiter.check(replace(CONFIG, rate_limits=(RateLimit("cpu", (("R", True, 3),)),)))


def test_each_instance_has_the_limit_of_its_group():
    limits = (
        RateLimit("cpu", (("R", True, 1),), 1),
        RateLimit("cuda", (("G", False, 1),), 2),
        RateLimit("cpu", (("R", True, 2),), 3),
    )
    config = replace(
        CONFIG,
        backend="python",
        rate_limits=limits,
        num_instances=4,
        device="cpu",
        spread=("cpu", "cuda:0", "cpu", "cuda:1"),
        scaling=ScalingConfig(max_instances=6),
    )
    found = [limit_at(config, index) for index in range(4)]
    assert [priority for _, priority in found] == [1, 2, 3, 2]
    assert found[3][0] == {ResourceKey("G", "cuda:1"): 1}
    # Those that are added by load are as the last one on their device.
    assert limit_at(config, len(config.places) - 2)[1] == 3
