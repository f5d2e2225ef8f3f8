"""Models that share a worker, as shards do: nothing is lost, nothing is answered twice."""

import asyncio
import math
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from doubles import Puppets, RecordingSink, settle
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_doubles import LentLife
from waiting import until

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.errors import BackendFailed
from penstock.processes.life import ProcessLife
from penstock.serving import wants
from penstock.serving.batcher import Batcher
from penstock.serving.core_link import ShardSetup
from penstock.serving.explain import explain
from penstock.serving.model import Model
from penstock.serving.worker_place import WorkerPlace
from penstock.types import Request, TensorSpec, from_array

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16),
)
VARIABLE = replace(
    CONFIG,
    inputs=(TensorSpec("x", "INT64", (-1,)),),
    outputs=(TensorSpec("y", "INT64", (-1,)),),
)
# The spill has room for two or three requests of a shard.
TIGHT = replace(VARIABLE, memory=MemoryPolicy(slab_bytes=256, max_slabs=1, spill_bytes=1024))
SLO = replace(CONFIG, batching=BatchPolicy(8, is_dynamic=True, slo_latency_s=60.0))
DELAYED = replace(CONFIG, batching=BatchPolicy(8, is_dynamic=True, max_queue_delay_s=0.002))
NEVER: Callable[[int], bool] = lambda index: False  # noqa: E731


def ask(first: int, num_rows: int = 1, width: int = 4) -> Request:
    values = np.arange(num_rows * width).reshape(num_rows, width) + 1000 * first
    return Request(RecordingSink(), [from_array("x", "INT64", values)], 0.0)


def check(request: Request, first: int, num_rows: int = 1, width: int = 4) -> None:
    values = np.arange(num_rows * width).reshape(num_rows, width) + 1000 * first
    assert request.sink.num_final == 1
    np.testing.assert_array_equal(request.sink.outputs[0]["y"], values)


def run(config: ModelConfig, scenario, sees_idle: Callable[[int], bool] = NEVER, num_lent: int = 1):
    """Run a scenario with models that share the worker of the first."""

    async def main() -> None:
        puppets = Puppets()
        models = [Model(config, start_life=puppets, shard=ShardSetup(sees_idle=sees_idle))]
        starting = asyncio.ensure_future(models[0].start())
        await puppets.step_all()
        await starting
        (life,), ready = puppets.alive, models[0].host.instances[0].ready

        def lend(loop, on_death):
            return LentLife(loop, on_death, life, ready)

        for _ in range(num_lent):
            models.append(Model(config, start_life=lend, shard=ShardSetup(sees_idle=sees_idle)))
            await models[-1].start()
        await puppets.step_all()
        try:
            await scenario(models, puppets)
        finally:
            for model in reversed(models):
                closing = asyncio.ensure_future(model.close())
                while not closing.done():
                    await puppets.step_all()
                await closing

    asyncio.run(main())


async def all_done(requests: list[Request], puppets: Puppets) -> None:
    async with asyncio.timeout(60):
        while not all(request.is_done for request in requests):
            await puppets.step_all()
            await asyncio.sleep(0)


@pytest.mark.parametrize("config", [CONFIG, VARIABLE, SLO, DELAYED], ids=lambda c: str(c.batching))
@pytest.mark.parametrize("num_lent", [0, 1, 3])
def test_what_is_queued_is_claimed_and_answered(config, num_lent):
    async def scenario(models, puppets):
        requests = [ask(number) for number in range(10)]
        for number, request in enumerate(requests):
            models[number % len(models)].submit(request)
        await all_done(requests, puppets)
        for number, request in enumerate(requests):
            check(request, number)

    run(config, scenario, num_lent=num_lent)


def test_parts_are_merged_and_counted_once():
    async def scenario(models, puppets):
        requests = [ask(number, 2) for number in range(4)]
        for number, request in enumerate(requests):
            models[number % 2].submit(request)
        await all_done(requests, puppets)
        assert sum(model.metrics.num_executions for model in models) == 1
        assert [list(model.metrics.batches) for model in models].count([8]) == 1
        assert [model.metrics.num_inferences for model in models] == [4, 4]
        assert [model.metrics.num_success for model in models] == [2, 2]

    run(CONFIG, scenario)


def test_an_idle_worker_gets_a_batch_unasked():
    async def scenario(models, puppets):
        request = ask(1)
        models[1].submit(request)
        await settle()
        assert len(models[1].workers[0].batches) == 1, "sent without a claim"
        late = ask(2)
        models[1].submit(late)
        await settle()
        assert len(models[1].workers[0].batches) == 1, "one at a time"
        await all_done([request, late], puppets)
        check(request, 1), check(late, 2)

    run(CONFIG, scenario, sees_idle=lambda index: True)


def test_quick_batches_are_offered_to_a_busy_worker(monkeypatch):
    async def scenario(models, puppets):
        model = models[1]
        (worker,) = model.workers
        first = ask(1)
        model.submit(first)
        await settle()
        assert not worker.batches and worker.is_wanting, "how quick it is, is not known yet"
        await all_done([first], puppets)
        later = [ask(2), ask(3)]
        model.submit(later[0])
        await settle()
        assert len(worker.batches) == 1, "sent without a claim"
        model.submit(later[1])
        await settle()
        assert len(worker.batches) == 1, "one at a time"
        assert not worker.is_wanting, "its answer leads to the next one"
        assert worker.batches[0].is_started, "its start is not told"
        await all_done(later, puppets)
        check(later[0], 2), check(later[1], 3)

    make_all_quick(monkeypatch)
    run(CONFIG, scenario)


def make_all_quick(patch: pytest.MonkeyPatch) -> None:
    """Offer every batch unasked, however long this machine takes for one."""
    patch.setattr(wants, "QUICK_S", math.inf)
    patch.setattr(wants, "SLOW_S", math.inf)


@pytest.mark.parametrize(
    ("config", "slow_s"), [(CONFIG, 0.0), (DELAYED, math.inf)], ids=["slow", "delayed"]
)
def test_slow_and_delayed_batches_wait_for_a_claim(config, slow_s, monkeypatch):
    async def scenario(models, puppets):
        first, later = ask(1), ask(2)
        models[1].submit(first)
        await all_done([first], puppets)
        models[1].submit(later)
        await settle()
        assert not models[1].workers[0].batches
        await all_done([later], puppets)

    monkeypatch.setattr(wants, "QUICK_S", math.inf)
    monkeypatch.setattr(wants, "SLOW_S", slow_s)
    run(config, scenario)


def test_the_mean_time_of_batches_follows_them():
    found = wants.Wants(SimpleNamespace(batcher=Batcher(CONFIG.batching)), NEVER)
    assert not found.is_quick
    found.observe(wants.QUICK_S / 2)
    assert found.is_quick
    for _ in range(30):
        found.observe(2 * wants.QUICK_S)
    assert not found.is_quick


def test_a_slow_batch_ends_quick_offers_for_a_while():
    found = wants.Wants(SimpleNamespace(batcher=Batcher(CONFIG.batching)), NEVER)
    for _ in range(100):
        found.observe(wants.QUICK_S / 10)
    found.observe(2 * wants.SLOW_S)
    assert not found.is_quick
    for _ in range(100):
        found.observe(wants.QUICK_S / 10)
    assert found.is_quick


def test_nothing_is_offered_behind_a_batch_that_takes_long():
    busy_s = {0: wants.SLOW_S / 2, 1: 2 * wants.SLOW_S}
    queue = SimpleNamespace(batcher=Batcher(CONFIG.batching))
    found = wants.Wants(queue, NEVER, busy_s.__getitem__)
    found.observe(wants.QUICK_S / 2)
    workers = [WorkerPlace(index) for index in range(2)]
    assert [found.may_offer(worker) for worker in workers] == [True, False]


def test_idle_workers_come_first():
    queue = SimpleNamespace(batcher=Batcher(CONFIG.batching))
    found = wants.Wants(queue, lambda index: index == 2)
    workers = [WorkerPlace(index, answered_at=-index) for index in range(4)]
    assert [worker.index for worker in found.in_order(workers)] == [2, 0, 1, 3]


def test_what_waits_in_the_worker_does_not_count_as_time_of_the_batch():
    """Another shard's batch may run when one arrives that was sent to an idle worker."""

    async def scenario(models, puppets):
        for number in range(10):
            request = ask(number)
            models[0].submit(request)
            await settle()
            assert not request.is_done
            await asyncio.sleep(0.1)
            await all_done([request], puppets)
        (pace,) = explain(models[0], 0.0).paces
        assert pace.times_s[1] < 0.05

    run(SLO, scenario, sees_idle=lambda index: True)


def test_the_request_that_makes_a_merged_batch_fail_is_found():
    async def scenario(models, puppets):
        good, bad = ask(1), ask(13)
        models[0].submit(good), models[1].submit(bad)
        await all_done([good, bad], puppets)
        check(good, 1)
        assert isinstance(bad.sink.error, BackendFailed) and bad.sink.num_final == 1

    run(replace(CONFIG, options={"null.fail_on": "13000"}), scenario)


def test_a_shard_that_goes_leaves_the_others_alone():
    async def scenario(models, puppets):
        requests = [ask(number) for number in range(4)]
        for number, request in enumerate(requests):
            models[number % 2].submit(request)
        await settle()
        models[1].workers[0].close()
        await all_done(requests[::2], puppets)
        check(requests[0], 0), check(requests[2], 2)

    run(CONFIG, scenario)


@pytest.mark.parametrize(
    "config", [CONFIG, VARIABLE, TIGHT, SLO], ids=["rows", "extents", "tight", "slo"]
)
@settings(deadline=None, max_examples=at_most(60))
@given(seed=st.integers(0, 1 << 30))
def test_each_request_is_answered_exactly_once(config, seed):
    """Submitted at any time, of any size, cancelled or not, offered or claimed."""
    rng = random.Random(seed)

    async def scenario(models, puppets):
        sent: list[tuple[Request, int, int, int]] = []
        cancelled = set()
        for number in range(30):
            num_rows = rng.randint(1, 8)
            width = rng.choice((4, 4, 6)) if config in (VARIABLE, TIGHT) else 4
            request = ask(number, num_rows, width)
            model = rng.choice(models)
            model.submit(request)
            sent.append((request, number, num_rows, width))
            if rng.random() < 0.1:
                model.cancel(request)
                cancelled.add(request)
            if rng.random() < 0.4:
                for life in puppets.alive:
                    life.step()
            if rng.random() < 0.4:
                await settle(rng.randint(1, 4))
        await all_done([request for request, *_ in sent], puppets)
        for request, *what in sent:
            if request in cancelled:
                assert request.sink.num_final == 1
            else:
                check(request, *what)
        for model in models:
            assert model.num_waiting == model.num_running == 0
            assert model.memory.pool.num_in_use == 0 and model.memory.extents.num_held == 0

    share = rng.choice((0.0, 0.3, 1.0))
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.5:
            make_all_quick(patch)
        run(config, scenario, lambda index: rng.random() < share, num_lent=rng.randint(1, 3))


def test_a_worker_process_of_two_shards_is_shared_and_its_death_survived():
    async def main() -> None:
        lives: list[ProcessLife] = []
        lent: list[LentLife] = []

        def start(loop, on_death):
            lives.append(ProcessLife(loop, on_death))
            return lives[-1]

        def lend(loop, on_death):
            ready = [each.ready for each in owner.host.instances if each.is_ready]
            if not ready:
                raise BlockingIOError(11, "the worker is not back yet")
            lent.append(LentLife(loop, on_death, lives[-1], ready[0]))
            return lent[-1]

        owner = Model(CONFIG, start_life=start, shard=ShardSetup(sees_idle=NEVER))
        await owner.start()
        borrower = Model(CONFIG, start_life=lend, shard=ShardSetup(sees_idle=NEVER))
        await borrower.start()
        for attempt in range(2):
            requests = [ask(number) for number in range(40)]
            for number, request in enumerate(requests):
                (owner, borrower)[number % 2].submit(request)
                if attempt == 1 and number == 20:
                    os.kill(lives[-1].pid, signal.SIGKILL)
                    # The core notices first.
                    await until(lambda: not any(each.is_ready for each in owner.host.instances))
                    lent[-1].kill()
                await asyncio.sleep(0)
            await until(lambda requests=requests: all(each.is_done for each in requests))
            for number, request in enumerate(requests):
                check(request, number)
        # One more is a spare, if the worker had only one request of its owner when it was killed.
        assert len(lent) == 2 and len(lives) in (2, 3)
        await borrower.close()
        await owner.close()

    asyncio.run(main())
