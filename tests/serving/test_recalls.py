"""Requests that end while their batch waits in a worker of several shards."""

import asyncio
from dataclasses import replace

import pytest
from doubles import settle
from test_shards import ECHO, run

from penstock.config import BatchPolicy, QueuePolicy
from penstock.types import Request

RECALLS = replace(
    ECHO,
    batching=BatchPolicy(8, is_dynamic=True, policies=(QueuePolicy(allow_timeout_override=True),)),
)


async def ends(request: Request) -> None:
    """Wait until a request has ended, while workers do nothing."""
    async with asyncio.timeout(60):
        while not request.is_done:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["time-out", "cancel"])
def test_a_request_that_ends_in_a_worker_that_has_not_started_it_never_runs(how):
    """The others of its batch are queued again."""

    async def scenario(server):
        await server.load(RECALLS)
        model = server.sessions[0].shard.table.find("echo")
        short, kept = server.make(1), server.make(2)
        short.timeout_s = 0.02 if how == "time-out" else None
        for request in (short, kept):
            model.submit(request)
        await settle()
        (place,) = model.workers
        assert [batch.requests for batch in place.batches] == [[short, kept]], "it is dispatched"
        if how == "cancel":
            model.cancel(short)
        await ends(short)
        text = "Request timeout expired" if how == "time-out" else "cancelled"
        assert text in str(short.sink.error)
        assert not kept.is_done
        assert await server.answers(kept) == [2]
        await server.catalog.refresh()
        metrics = server.catalog.find("echo").metrics
        assert (metrics.num_executions, metrics.num_inferences) == (1, 1)
        assert sum(metrics.num_refused.values()) == (how == "time-out")
        assert await server.answers(*(server.send(0, n) for n in range(20))) == list(range(20))

    run(scenario)


def test_a_batch_that_starts_before_it_is_recalled_answers_the_others():
    async def scenario(server):
        await server.load(RECALLS)
        model = server.sessions[0].shard.table.find("echo")
        short, kept = server.make(1), server.make(2)
        for request in (short, kept):
            model.submit(request)
        await settle()
        (life,) = server.puppets.alive
        life.step()  # Its frames are on their way.
        model.cancel(short)
        assert await server.answers(kept) == [2]
        assert "cancelled" in str(short.sink.error)
        assert not model.workers[0].batches
        await server.catalog.refresh()
        assert server.catalog.find("echo").metrics.num_executions == 1

    run(scenario)
