"""Requests of the core to models of the shards: with the core on one event loop."""

import pytest
from shard_server import ECHO, run
from waiting import until

from penstock.errors import BackendFailed, Cancelled, NotReady, Unsupported


def test_the_shards_answer_the_core_in_turn():
    async def scenario(server):
        await server.load(ECHO)
        model = server.catalog.find("echo")
        requests = [server.make(number) for number in range(12)]
        for request in requests:
            model.submit(request)
        assert await server.answers(*requests) == list(range(12))
        counts = [each.shard.table.find("echo").metrics.num_success for each in server.sessions]
        assert counts == [4, 4, 4]

    run(scenario, 3)


def test_what_the_request_says_and_errors_travel():
    async def scenario(server):
        await server.load(ECHO)
        looping = server.make(1)
        looping.chain, looping.caller = ("first/1", "echo/1"), b"key"
        server.catalog.find("echo").submit(looping)
        (error,) = await server.answers(looping)
        assert isinstance(error, Unsupported) and "echo/1 -> echo/1" in str(error)

    run(scenario)


def test_a_cancelled_request_is_cancelled_in_its_shard():
    async def scenario(server):
        await server.load(ECHO)
        model, request = server.catalog.find("echo"), server.make(1)
        model.submit(request)
        model.cancel(request)
        (error,) = await server.answers(request)
        assert isinstance(error, Cancelled)
        tables = [each.shard.table for each in server.sessions]
        await until(lambda: all(each.find("echo").num_waiting == 0 for each in tables))

    run(scenario)


def test_a_shard_that_ends_fails_what_it_had_and_gets_no_more():
    async def scenario(server):
        await server.load(ECHO)
        model = server.catalog.find("echo")
        lost = server.make(1)
        model.submit(lost)
        await server.sessions[0].end()
        assert isinstance(lost.sink.error, BackendFailed) and "shard" in str(lost.sink.error)
        requests = [server.make(number) for number in range(4)]
        for request in requests:
            model.submit(request)
        assert await server.answers(*requests) == [0, 1, 2, 3]

    run(scenario)


@pytest.mark.parametrize("is_open", [True, False])
def test_an_unloaded_model_refuses(is_open: bool):
    async def scenario(server):
        await server.load(ECHO)
        model, request = server.catalog.find("echo"), server.make(1)
        if is_open:
            await server.run(model.close())
        else:
            for shard in range(2):
                model.of_core.leave(shard)
        model.submit(request)
        assert isinstance(request.sink.error, NotReady)

    run(scenario)
