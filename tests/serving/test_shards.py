"""Several shards and one core on one event loop: every frame is encoded, workers are on strings."""

import asyncio
import math
import random
import struct
import time
from dataclasses import replace

import numpy as np
import pytest
from doubles import Puppets, RecordingSink, settle
from shard_server import ECHO, Server, Session, run
from waiting import until

from penstock.config import BatchPolicy, QueuePolicy
from penstock.errors import BackendFailed, NotFound, NotReady, Overloaded, Quarantined
from penstock.processes import restarts
from penstock.repository.layout import RepositoryScan
from penstock.serving import model_host, wants
from penstock.serving.catalog import Catalog
from penstock.serving.shards import Shards
from penstock.serving.shared_page import HEADER_CELLS, REQUESTS, SharedPage
from penstock.types import Request, from_array
from penstock.wire import frames


def test_each_shard_gets_its_own_answers_of_the_same_worker():
    async def scenario(server):
        await server.load(ECHO)
        assert len(server.puppets.alive) == 1
        for _ in range(3):
            requests = [server.send(number % 3, number) for number in range(30)]
            assert await server.answers(*requests) == list(range(30))
        await server.catalog.refresh()
        metrics = server.catalog.find("echo").metrics
        assert metrics.num_success == metrics.num_inferences == 90
        assert metrics.num_executions == sum(metrics.batch_sizes.values())
        assert sum(size * count for size, count in metrics.batch_sizes.items()) == 90
        assert metrics.phases["request"].count == 90
        assert all(s.shard.table.find("echo").metrics.num_success == 30 for s in server.sessions)

    run(scenario, 3)


def test_a_model_is_published_everywhere_when_its_load_returns_and_gone_when_unloaded():
    async def scenario(server):
        tables = [session.shard.table for session in server.sessions]
        scan = RepositoryScan([ECHO, replace(ECHO, name="other")], {})
        loading = asyncio.ensure_future(server.catalog.load(scan))
        await settle()
        for table in tables:
            with pytest.raises(NotReady, match="is loading"):
                table.find("echo")
        await server.run(loading)
        assert [table.versions("echo") for table in tables] == [["1"], ["1"]]
        await server.run(server.catalog.unload("echo"))
        for table in tables:
            with pytest.raises(NotFound, match="loaded: other"):
                table.find("echo")
        assert await server.answers(server.send(0, 1, "other"), server.send(1, 2, "other")) == [
            1,
            2,
        ]

    run(scenario)


def test_shards_know_why_a_model_could_not_be_loaded():
    async def scenario(server):
        await server.load(ECHO, replace(ECHO, name="bad", options={"null.no_such_option": "1"}))
        for session in server.sessions:
            with pytest.raises(NotReady, match="could not be loaded: .*no_such_option"):
                session.shard.table.find("bad")
        assert await server.answers(server.send(1, 5)) == [5]

    run(scenario)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_load_time_is_that_until_all_workers_are_warm(num_shards: int):
    """With the time that processes take to start, whoever takes the requests."""

    async def main() -> None:
        puppets = Puppets()
        shards = Shards(num_shards) if num_shards > 1 else None
        catalog = Catalog(puppets, shards=shards)
        loading = asyncio.ensure_future(catalog.load(RepositoryScan([ECHO], {})))
        await until(lambda: puppets.alive)
        await asyncio.sleep(0.05)
        assert not loading.done(), "no worker has done anything"
        while not loading.done():
            await puppets.step_all()
        assert catalog.find("echo").metrics.load_s >= 0.05
        closing = asyncio.ensure_future(catalog.close())
        while not closing.done():
            await puppets.step_all()
        if shards is not None:
            shards.close()

    asyncio.run(main())


def test_answers_leave_in_the_order_of_all_shards(monkeypatch):
    """Two workers: what one has computed waits for what the other has not."""
    monkeypatch.setattr(wants, "QUICK_S", 0.0)
    policy = BatchPolicy(1, is_dynamic=True, preserve_ordering=True)
    config = replace(ECHO, max_batch_size=1, batching=policy, num_instances=2)

    async def scenario(server):
        await server.load(config)
        page = server.shards.blocks.page
        for ends in (False, True):
            first = server.send(0, 1)
            await settle()
            workers = server.sessions[0].shard.table.find("echo").workers
            (slow,) = (worker.index for worker in workers if worker.batches)
            fast = server.puppets.alive[1 - slow]
            page.show_batch(0, slow, time.monotonic(), time.monotonic() + 60, 1)
            later = [server.send(shard, 2 + shard) for shard in (0, 1)]
            for _ in range(20):
                while fast.has_work:
                    fast.step()
                await asyncio.sleep(0.002)
            assert not any(request.is_done for request in (first, *later))
            shown = server.sessions[1].shard.table.find("echo")
            assert shown.num_waiting == shown.num_running == 0, "its answer is there"
            if ends:
                await server.run(server.sessions[0].end())
                assert await server.answers(later[1]) == [3]
            else:
                assert await server.answers(first, *later) == [1, 2, 3]

    run(scenario)


def test_a_reload_answers_what_the_old_version_had():
    async def scenario(server):
        await server.load(ECHO)
        old = [server.send(shard, shard) for shard in range(2)]
        await settle()
        await server.load(replace(ECHO, version="2"))
        new = [server.send(shard, 10 + shard) for shard in range(2)]
        assert await server.answers(*old, *new) == [0, 1, 10, 11]
        assert {r.sink.answers[0].model_version for r in old} == {"1"}
        assert {r.sink.answers[0].model_version for r in new} == {"2"}
        while len(server.puppets.alive) > 1:
            await server.run(asyncio.sleep(0.01))

    run(scenario)


def test_a_shard_that_ends_takes_only_its_own_requests_along():
    async def scenario(server):
        await server.load(ECHO)
        assert await server.answers(*(server.send(shard, shard) for shard in range(2))) == [0, 1]
        await server.catalog.refresh()
        kept = server.send(1, 7)
        server.send(0, 8)
        await settle()
        await server.run(server.sessions[0].end())
        assert await server.answers(kept) == [7]
        server.sessions[0] = Session(server.shards, 0)
        await server.shards.open(0, server.sessions[0])
        assert await server.answers(server.send(0, 9), server.send(1, 10)) == [9, 10]
        await server.catalog.refresh()
        assert server.catalog.find("echo").metrics.num_success == 5, "1 of them in the old shard"

    run(scenario)


def test_a_shard_that_does_not_answer_is_killed_and_does_not_hold_up_a_load(monkeypatch):
    monkeypatch.setattr("penstock.serving.shards.ANSWER_S", 0.05)

    async def scenario(server):
        server.sessions[0].is_silent = True
        await server.load(ECHO)
        assert not server.sessions[0].is_open
        assert await server.answers(server.send(1, 3)) == [3]

    run(scenario)


def test_a_killed_shard_keeps_what_it_has_counted_before_it_has_ended():
    async def scenario(server):
        await server.load(ECHO)
        assert await server.answers(*(server.send(n % 2, n) for n in range(6))) == list(range(6))
        await server.catalog.refresh()
        model = server.catalog.find("echo")
        assert model.metrics.num_success == 6
        server.sessions[0].kill()
        await server.catalog.refresh()
        assert model.metrics.num_success == 6
        await server.run(server.sessions[0].end())
        await server.catalog.refresh()
        assert model.metrics.num_success == 6

    run(scenario)


def test_a_shard_that_ends_while_others_are_read_counts_once():
    async def scenario(server):
        await server.load(ECHO)
        assert await server.answers(*(server.send(n % 2, n) for n in range(6))) == list(range(6))
        await server.catalog.refresh()
        model, last = server.catalog.find("echo"), server.sessions[1]
        may_answer, ask = asyncio.Event(), last.ask

        async def ask_later(question: frames.ShardQuestion) -> bytes:
            await may_answer.wait()
            return await ask(question)

        last.ask = ask_later
        reading = asyncio.ensure_future(server.catalog.refresh())
        await settle()
        await server.run(server.sessions[0].end())
        may_answer.set()
        await server.run(reading)
        assert model.metrics.num_success == 6

    run(scenario)


async def kill_when_running(server: Server, *requests: Request, has_started: bool = True) -> None:
    """Kill the worker once all of these are with it, and none has been answered."""
    running = set(requests)
    places = [s.shard.table.find("echo").workers[0] for s in server.sessions]
    for _ in range(1000):
        held = {r for place in places for batch in place.batches for r in batch.requests}
        if running <= held:
            break
        for life in server.puppets.alive:
            life.step()
        await settle()
    assert running <= held
    for batch in (batch for place in places for batch in place.batches if has_started):
        # As the worker's Started says.
        batch.is_started, batch.is_merged = True, len(running) > 1
    (life,) = server.puppets.alive
    life.kill("was killed by SIGSEGV")
    await settle()


def test_a_death_with_requests_of_two_shards_blames_neither_and_all_are_answered():
    async def scenario(server):
        await server.load(ECHO)
        requests = [server.send(0, 1), server.send(1, 2)]
        await kill_when_running(server, *requests)
        assert await server.answers(*requests) == [1, 2]
        again = [server.send(1, 1), server.send(0, 2)]
        assert await server.answers(*again) == [1, 2]

    run(scenario)


def test_requests_that_a_dead_worker_had_not_started_are_not_to_blame(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)

    async def scenario(server):
        await server.load(ECHO)
        request = server.send(0, 5)
        for _ in range(4):
            await kill_when_running(server, request, has_started=False)
        assert request.num_deaths == 0
        assert await server.answers(request) == [5]
        assert await server.answers(server.send(1, 5)) == [5]

    run(scenario)


def test_a_single_request_in_a_merged_batch_runs_again_after_every_death(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)

    async def scenario(server):
        await server.load(ECHO)
        requests = [server.send(0, 1), server.send(1, 2)]
        await kill_when_running(server, *requests)
        held = [r.num_deaths for r in requests]
        assert held == [1, 1]
        assert await server.answers(*requests) == [1, 2]

    run(scenario)


def test_a_poison_request_of_one_shard_is_refused_by_all(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)

    async def scenario(server):
        await server.load(ECHO)
        assert await server.answers(server.send(1, 1)) == [1]
        poison = server.send(0, 13)
        await kill_when_running(server, poison)
        await kill_when_running(server, poison)
        assert [type(each) for each in await server.answers(poison)] == [BackendFailed]
        for shard in range(2):
            (error,) = await server.answers(server.send(shard, 13))
            assert isinstance(error, Quarantined)
        assert await server.answers(server.send(0, 2), server.send(1, 3)) == [2, 3]

    run(scenario)


def test_a_silent_shard_delays_a_verdict_only_for_a_moment(monkeypatch):
    monkeypatch.setattr(model_host, "LOST_S", 0.05)

    async def scenario(server):
        await server.load(ECHO)
        request = server.send(1, 4)
        await settle()
        server.sessions[0].is_silent = True
        await kill_when_running(server, request)
        assert await server.answers(request) == [4]
        assert server.catalog.find("echo").metrics.num_deaths["crash"] in (0, 1)

    run(scenario)


def test_a_later_table_is_not_replaced_by_an_earlier_one():
    async def scenario(server):
        await server.load(ECHO)
        shard = server.sessions[0].shard
        await shard.answer(frames.Publish(0, {}, {}, ()))
        assert shard.table.versions("echo") == ["1"]
        await shard.answer(frames.Publish(1 << 40, {}, {}, ("soon",)))
        with pytest.raises(NotReady, match="'soon' is loading"):
            shard.table.find("soon")

    run(scenario)


def test_explanations_of_all_shards_are_joined():
    async def scenario(server):
        await server.load(ECHO)
        await server.answers(*(server.send(number % 2, number) for number in range(8)))
        model = server.catalog.find("echo")
        await model.refresh()
        told = model.explain()
        assert told.state == "READY" and [each.state for each in told.instances] == ["idle"]
        assert sum(shape.num_requests for shape in told.shapes) == 8
        assert sum(batch.num_requests for batch in told.recent) == 8

    run(scenario)


def block_of(server: Server, name: str = "echo") -> int:
    """The model's block on the page."""
    (block,) = server.catalog.find(name).opening.blocks
    return block


def num_shown(server: Server, shard: int) -> float:
    """How many requests a shard shows as queued."""
    page = server.shards.blocks.page
    return page.cells[page.layout.queue_at(block_of(server), shard) + REQUESTS]


def occupy(server: Server) -> None:
    """Show the only slot as busy, so that shards queue what they get."""
    now = time.monotonic()
    server.shards.blocks.page.show_batch(block_of(server), 0, now, now + 60.0, 1)


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("limit", ["max_queue_size", "max_pending"])
def test_limits_of_the_queue_apply_to_all_shards_together(num_shards, limit):
    policy = BatchPolicy(8, is_dynamic=True)
    if limit == "max_pending":
        policy = replace(policy, max_pending=10)
    else:
        policy = replace(policy, policies=(QueuePolicy(max_queue_size=10),))

    async def scenario(server):
        await server.load(replace(ECHO, batching=policy))
        occupy(server)
        requests = []
        for number in range(40):
            requests.append(server.send(number % num_shards, number))
            # The figures of others may be a moment old.
            time.sleep(0.0001)
        assert sum(num_shown(server, shard) for shard in range(num_shards)) == 10
        answers = await server.answers(*requests)
        assert answers[:10] == list(range(10))
        assert all(isinstance(each, Overloaded) for each in answers[10:])
        assert [num_shown(server, shard) for shard in range(num_shards)] == [0.0] * num_shards

    run(scenario, num_shards)


def test_a_cancelled_request_is_not_shown_any_more():
    async def scenario(server):
        await server.load(ECHO)
        occupy(server)
        request, kept = server.send(1, 1), server.send(1, 2)
        await settle()
        assert num_shown(server, 1) == 2
        server.sessions[1].shard.table.find("echo").cancel(request)
        assert num_shown(server, 1) == 1
        assert await server.answers(kept) == [2]

    run(scenario)


def test_an_idle_worker_gets_batches_unasked_even_after_a_merged_one():
    async def scenario(server):
        await server.load(ECHO)
        page, block = server.shards.blocks.page, block_of(server)
        assert await server.answers(server.send(0, 1), server.send(1, 2)) == [1, 2]
        assert page.is_idle(block, 0)
        for shard in range(2):
            request = server.send(shard, 3)
            await settle()
            (place,) = server.sessions[shard].shard.table.find("echo").workers
            assert len(place.batches) == 1, "sent without a claim"
            assert await server.answers(request) == [3]
        assert page.is_idle(block, 0)

    run(scenario)


def test_a_busy_worker_is_not_sent_batches_unasked():
    async def scenario(server):
        await server.load(ECHO)
        occupy(server)
        request = server.send(0, 1)
        await settle()
        (place,) = server.sessions[0].shard.table.find("echo").workers
        assert not place.batches and place.is_wanting
        assert await server.answers(request) == [1]

    run(scenario)


def test_a_worker_that_seems_busy_but_neither_claims_nor_runs_is_killed():
    """Its slot is still shown as busy: no shard has a batch there whose limit could pass."""

    async def scenario(server):
        await server.load(replace(ECHO, hang_s=0.2))
        occupy(server)
        request = server.send(0, 1)
        await settle()
        part = server.sessions[0].shard.table.find("echo").readiness
        (life,) = server.puppets.alive
        page, block = server.shards.blocks.page, block_of(server)
        for _ in range(3):
            time.sleep(0.25)
            page.show_batch(block, 0, 0.0, 1.0, 1)
            part.tick()
            await settle()
        assert life.is_alive, "it runs batches of other shards"
        for _ in range(2):
            time.sleep(0.25)
            part.tick()
            await settle()
        assert not life.is_alive
        assert await server.answers(request) == [1]
        assert server.catalog.find("echo").stages[0].metrics.num_deaths["hang"] == 1

    run(scenario)


def test_the_dead_show_nothing():
    async def scenario(server):
        await server.load(ECHO)
        page, block = server.shards.blocks.page, block_of(server)
        occupy(server)
        server.send(0, 1), server.send(1, 2)
        await settle()
        await server.sessions[0].end()
        assert (num_shown(server, 0), num_shown(server, 1)) == (0, 1)
        (life,) = server.puppets.alive
        life.kill()
        await settle()
        assert page.is_idle(block, 0)

    run(scenario)


def test_a_reload_gets_another_block_and_gives_the_old_one_back():
    async def scenario(server):
        blocks = set()
        for version in range(1, 301):
            await server.load(replace(ECHO, version=str(version)))
            blocks.add(block_of(server))
            if version % 50 == 0:
                requests = [server.send(number % 2, number) for number in range(4)]
                assert await server.answers(*requests) == list(range(4))
        assert len(blocks) == 256, "more loads than blocks"

    run(scenario)


def test_a_model_that_could_not_be_loaded_gives_its_block_back():
    async def scenario(server):
        bad = replace(ECHO, options={"null.no_such_option": "1"})
        for _ in range(300):
            await server.load(bad)
        (failure,) = server.catalog.failures
        assert "no_such_option" in failure.problems[0]

    run(scenario)


class Rubbish:
    """Fills the page with random bits, except for the header, which is read once."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, page: SharedPage) -> None:
        rng = self._rng
        values = [0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e300, time.monotonic()]
        end = page.layout.model_at(1)
        for index in range(HEADER_CELLS, end):
            is_random = rng.random() < 0.3
            page.cells[index] = (
                struct.unpack("d", rng.randbytes(8))[0] if is_random else rng.choice(values)
            )


@pytest.mark.parametrize("slo_s", [None, 30.0], ids=["fixed", "slo"])
@pytest.mark.parametrize("seed", range(3))
def test_random_bits_on_the_page_change_no_answer(slo_s, seed):
    async def scenario(server):
        policy = replace(ECHO.batching, slo_latency_s=slo_s)
        await server.load(replace(ECHO, batching=policy))
        rubbish, page = Rubbish(seed), server.shards.blocks.page
        num_answered = 0
        for _ in range(8):
            rubbish(page)
            requests = [server.send(number % 3, number) for number in range(6)]
            await settle()
            rubbish(page)
            for number, answer in enumerate(await server.answers(*requests)):
                assert answer == number or isinstance(answer, Overloaded)
                num_answered += answer == number
        assert num_answered > 0

    run(scenario, 3)


# Rollouts


def counts_of(server):
    """What all shards have counted."""
    *_, candidate = server.catalog
    return candidate.split_counts(1)


async def split_echo(server, share: float, mode: str = "canary", mirrored_per_s: float = 0.0):
    """Load a candidate beside ECHO and split requests with it."""
    await server.run(server.catalog.add_candidate(replace(ECHO, version="2")))
    rule = frames.SplitRule(1, mode, "2", share=share, header="v", mirrored_per_s=mirrored_per_s)
    assert await server.run(server.catalog.split("echo", rule))


def send_split(server, shard: int, number: int, headers: dict | None = None) -> Request:
    values = np.arange(4, dtype=np.int64)[None] + 1000 * number
    request = Request(RecordingSink(), [from_array("x", "INT64", values)], time.monotonic())
    model, split = server.sessions[shard].shard.table.choose("echo", "", headers or {})
    request.id = model.config.version
    if split is not None:
        split.watch(request, model)
    model.submit(request)
    return request


def outputs_of(*requests: Request) -> list[int]:
    sinks = [getattr(each.sink, "inner", each.sink) for each in requests]
    return [int(sink.outputs[0]["y"][0, 0]) // 1000 for sink in sinks]


async def finish(server, requests) -> None:
    for _ in range(2000):
        await server.puppets.step_all()
        if all(request.is_done for request in requests):
            return
        await asyncio.sleep(0.001)


def test_all_shards_split_requests_and_the_core_adds_up_what_they_count():
    async def scenario(server):
        await server.load(ECHO)
        await server.run(server.catalog.add_candidate(replace(ECHO, version="2")))
        for session in server.sessions:
            table = session.shard.table
            assert table.find("echo").config.version == "1"
            with pytest.raises(NotFound):
                table.find("echo", "2")
        rule = frames.SplitRule(1, "canary", "2", share=0.5, header="v")
        assert await server.catalog.split("echo", rule)
        named = [(number % 2, (b"stable", b"candidate")[number // 2 % 2]) for number in range(40)]
        requests = [
            send_split(server, shard, number, {b"v": version})
            for number, (shard, version) in enumerate(named)
        ]
        await finish(server, requests)
        assert outputs_of(*requests) == list(range(40))
        await server.catalog.refresh()
        counts = counts_of(server)
        assert (counts.stable.num_requests, counts.candidate.num_requests) == (20, 20)
        # What a shard that has ended had counted is kept.
        await server.sessions[1].end()
        await server.catalog.refresh()
        assert counts_of(server).candidate.num_requests == 20
        server.sessions.pop()

    run(scenario)


@pytest.mark.parametrize("answers_first", [False, True])
def test_counts_neither_fall_nor_double_while_a_shard_ends(answers_first: bool):
    """It is killed before it answers, or after that while the core waits for others."""

    async def scenario(server):
        await server.load(ECHO)
        await split_echo(server, 0.5)
        requests = [send_split(server, number % 2, number) for number in range(20)]
        await finish(server, requests)
        await server.catalog.refresh()
        first, last = server.sessions
        may_answer, ask = asyncio.Event(), first.ask

        async def ask_late(question: frames.ShardQuestion) -> bytes:
            await may_answer.wait()
            return await ask(question)

        first.ask = ask_late
        last.is_open = answers_first
        reading = asyncio.ensure_future(server.catalog.refresh())
        await settle()
        if answers_first:
            await last.end()
        may_answer.set()
        await reading
        for _ in range(2):
            counts = counts_of(server)
            assert counts.stable.num_requests + counts.candidate.num_requests == 20
            assert server.catalog.find("echo").metrics.num_success == counts.stable.num_requests
            await last.end()
            await server.catalog.refresh()
        server.sessions.pop()

    run(scenario)


def test_a_new_process_of_a_shard_splits_as_the_others_do():
    async def scenario(server):
        await server.load(ECHO)
        await split_echo(server, 1.0)
        await server.sessions[1].end()
        server.sessions[1] = Session(server.shards, 1)
        await server.run(server.shards.open(1, server.sessions[1]))
        requests = [send_split(server, 1, number) for number in range(5)]
        assert [each.id for each in requests] == ["2"] * 5
        await finish(server, requests)
        assert outputs_of(*requests) == list(range(5))

    run(scenario)


@pytest.mark.parametrize("promotes", [True, False])
def test_the_end_of_a_rollout_is_known_to_all_shards_and_loses_nothing(promotes: bool):
    async def scenario(server):
        await server.load(ECHO)
        await split_echo(server, 0.5)
        requests = [send_split(server, number % 2, number) for number in range(20)]
        catalog = server.catalog
        if promotes:
            await server.run(catalog.promote_candidate("echo", lambda: asyncio.sleep(0)))
        else:
            await server.run(catalog.drop_candidate("echo"))
        kept = "2" if promotes else "1"
        for session in server.sessions:
            assert session.shard.table.versions("echo") == [kept]
            assert session.shard.table.splits == {}
        requests += [send_split(server, number % 2, number) for number in range(20, 30)]
        await finish(server, requests)
        assert outputs_of(*requests) == list(range(30))
        assert {each.id for each in requests[20:]} == {kept}
        for _ in range(100):
            await server.puppets.step_all()
            await asyncio.sleep(0.001)
        assert len(server.puppets.alive) == 1

    run(scenario)


@pytest.mark.parametrize(("call", "num_left"), [("drop_candidate", 1), ("unload", 0), ("load", 1)])
def test_a_client_that_leaves_while_shards_are_told_leaves_no_worker_behind(
    call: str, num_left: int
):
    async def scenario(server):
        await server.load(ECHO)
        await split_echo(server, 0.5)
        is_told, publish = asyncio.Event(), server.shards.publish

        async def publish_late() -> None:
            await is_told.wait()
            await publish()

        server.shards.publish = publish_late
        catalog, scan = server.catalog, RepositoryScan([replace(ECHO, version="3")], {})
        doing = catalog.load(scan) if call == "load" else getattr(catalog, call)("echo")
        changing = asyncio.ensure_future(doing)
        while catalog.rules:
            await server.run(asyncio.sleep(0.001))
        changing.cancel()
        await settle()
        is_told.set()
        await server.run(asyncio.wait([changing]))
        for _ in range(1000):
            await server.run(asyncio.sleep(0.001))
            if len(server.puppets.alive) == num_left:
                break
        assert len(server.puppets.alive) == num_left

    run(scenario)


def test_shards_mirror_and_compare_on_their_own():
    async def scenario(server):
        await server.load(ECHO)
        await split_echo(server, 0.0, "shadow", 1e6)
        for number in range(10):
            request = send_split(server, number % 2, number)
            await finish(server, [request])
            await server.puppets.step_all()
        await server.catalog.refresh()
        counts = counts_of(server)
        assert counts.num_mirrored == counts.num_compared == 10
        assert (counts.num_disagreeing, counts.candidate.num_requests) == (0, 10)
        metrics = [model.metrics for model in server.catalog]
        assert [each.num_success for each in metrics] == [10, 0]
        assert metrics[1].num_inferences == 10

    run(scenario)
