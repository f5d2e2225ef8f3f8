"""Models whose requests the core queues for all shards: with the core on one event loop."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from doubles import RecordingSink, settle
from shard_server import ECHO, SEGMENT_BYTES, Server, Session, run

from penstock.config import MemoryPolicy, ModelConfig
from penstock.errors import BackendFailed, Cancelled, InvalidRequest, NotReady, Overloaded, TooLarge
from penstock.repository.layout import RepositoryScan
from penstock.serving.handed_over import HandedOver
from penstock.serving.owned_model import OwnedModel
from penstock.types import Request, RequestedOutput, TensorSpec, from_array

WIDE = replace(
    ECHO,
    inputs=(TensorSpec("x", "INT64", (-1,)),),
    outputs=(TensorSpec("y", "INT64", (-1,)),),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 20),
)


@pytest.fixture(autouse=True)
def owned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model has one owner."""
    monkeypatch.setattr(ModelConfig, "has_one_owner", True)


def wide(number: int, size: int) -> Request:
    values = np.full((1, size), 1000 * number, np.int64)
    return Request(RecordingSink(), [from_array("x", "INT64", values)], 0.0)


def submit(server: Server, shard: int, request: Request) -> Request:
    server.sessions[shard].shard.table.find("echo").submit(request)
    return request


def num_held(server: Server) -> list[int]:
    return [outbox.num_held for session in server.sessions for outbox in session.outboxes]


def test_all_shards_hand_their_requests_to_the_core_and_get_their_own_answers():
    async def scenario(server):
        await server.load(ECHO)
        assert isinstance(server.catalog.find("echo"), OwnedModel)
        assert isinstance(server.sessions[0].shard.table.find("echo"), HandedOver)
        for _ in range(3):
            requests = [server.send(number % 3, number) for number in range(30)]
            assert await server.answers(*requests) == list(range(30))
        assert all(request.timings.completed for request in requests)
        assert all(request.timings.queued for request in requests)
        await server.catalog.refresh()
        metrics = server.catalog.find("echo").metrics
        assert metrics.num_success == metrics.num_inferences == 90
        # Batches have rows of all shards.
        assert metrics.num_executions < 30
        assert metrics.phases["request"].count == 90

    run(scenario, 3)


def test_the_core_gets_all_that_a_request_says():
    async def scenario(server):
        await server.load(ECHO)
        model = server.catalog.find("echo").model
        seen: list[Request] = []
        model.submit, submit_it = (
            lambda request: (seen.append(request), submit_it(request)),
            model.submit,
        )
        request = server.make(3)
        request.id, request.outputs = "one", (RequestedOutput("y", {"classification": 2}),)
        request.parameters, request.priority, request.timeout_s = {"a": "b"}, 2, 5.0
        request.caller = b"\xff key"
        assert await server.answers(submit(server, 1, request)) == [3]
        (found,) = seen
        assert (found.id, found.outputs, found.parameters) == ("one", request.outputs, {"a": "b"})
        assert (found.priority, found.timeout_s, found.caller) == (0, 5.0, b"\xff key")
        assert found.timings.received == request.timings.received

    run(scenario)


def test_errors_keep_their_class_and_what_they_say():
    async def scenario(server):
        await server.load(replace(ECHO, options={"null.fail_on": "13"}))
        wrong = server.make(1)
        wrong.inputs = [from_array("z", "INT64", np.zeros((1, 4), np.int64))]
        answers = await server.answers(submit(server, 0, wrong), submit(server, 1, server.make(1)))
        assert isinstance(answers[0], InvalidRequest) and "input 'z'" in str(answers[0])
        failing = server.make(0)
        failing.inputs = [from_array("x", "INT64", np.full((1, 4), 13, np.int64))]
        assert isinstance((await server.answers(submit(server, 1, failing)))[0], BackendFailed)
        batcher = server.catalog.find("echo").model.batcher

        def refuse(*_: object) -> None:
            raise Overloaded("full", 2.5, "queue_full")

        batcher.add = refuse
        (error,) = await server.answers(submit(server, 1, server.make(1)))
        assert isinstance(error, Overloaded)
        assert (str(error), error.retry_after_s, error.reason) == ("full", 2.5, "queue_full")
        await server.catalog.refresh()
        refused = server.catalog.find("echo").metrics.num_refused
        assert (refused["invalid"], refused["queue_full"]) == (1, 1)

    run(scenario)


def test_large_tensors_wait_for_memory_and_keep_their_order():
    async def scenario(server):
        await server.load(WIDE)
        model, seen = server.catalog.find("echo").model, []
        submit_it = model.submit
        model.submit = lambda request: (seen.append(int(request.id)), submit_it(request))
        size = SEGMENT_BYTES // 8 // 3
        # Three of these do not fit the memory at once; the small ones do not overtake them.
        requests = [wide(number, 4 if number % 4 == 3 else size) for number in range(12)]
        for number, request in enumerate(requests):
            request.id = str(number)
            submit(server, 0, request)
        assert await server.answers(*requests) == list(range(12))
        assert seen == list(range(12))
        await settle()
        assert num_held(server) == [0] * 4

    run(scenario)


def test_what_can_never_fit_is_refused_and_counted_once():
    async def scenario(server):
        await server.load(WIDE)
        long = submit(server, 0, wide(1, SEGMENT_BYTES))
        wordy = wide(1, 4)
        wordy.parameters = {"text": "x" * 300_000}
        submit(server, 1, wordy)
        for error in await server.answers(long, wordy):
            assert isinstance(error, TooLarge)
        await server.catalog.refresh()
        assert server.catalog.find("echo").metrics.num_refused["too_large"] == 2
        assert await server.answers(submit(server, 0, wide(2, 4))) == [2]

    run(scenario)


def test_a_cancelled_request_ends_at_once_and_in_the_core():
    async def scenario(server):
        await server.load(ECHO)
        part = server.sessions[0].shard.table.find("echo")
        kept, dropped = server.send(0, 1), server.send(0, 2)
        await settle()
        part.cancel(dropped)
        assert isinstance(dropped.sink.error, Cancelled)
        assert await server.answers(kept) == [1]
        part.cancel(kept)
        assert kept.sink.num_final == dropped.sink.num_final == 1
        await server.catalog.refresh()
        metrics = server.catalog.find("echo").metrics
        assert (metrics.num_success, metrics.num_failures["CANCELED"]) == (1, 1)

    run(scenario)


def test_a_shard_that_ends_cancels_what_it_had_open_and_nothing_else():
    async def scenario(server):
        await server.load(ECHO)
        model = server.catalog.find("echo").model
        kept = server.send(1, 7)
        lost = [server.send(0, number) for number in range(3)]
        await settle()
        assert model.num_running + model.num_waiting == 4
        await server.sessions[0].end()
        assert await server.answers(kept) == [7]
        assert all(request.is_done for request in lost)
        await server.catalog.refresh()
        assert server.catalog.find("echo").metrics.num_failures["CANCELED"] == 3
        server.sessions[0] = Session(server.shards, 0)
        await server.shards.open(0, server.sessions[0])
        assert await server.answers(server.send(0, 9), server.send(1, 10)) == [9, 10]

    run(scenario)


def test_an_unload_answers_what_was_handed_over():
    async def scenario(server):
        await server.load(ECHO)
        requests = [server.send(number % 2, number) for number in range(8)]
        await server.run(server.catalog.unload("echo"))
        assert await server.answers(*requests) == list(range(8))

    run(scenario)


def test_a_closed_model_refuses_and_leaves_nothing_open():
    async def scenario(server):
        await server.load(ECHO)
        part = server.sessions[0].shard.table.find("echo")
        request = server.send(0, 1)
        await part.close()
        later = server.make(2)
        part.submit(later)
        assert isinstance(request.sink.error, NotReady)
        assert isinstance(later.sink.error, NotReady)
        await asyncio.wait_for(part.drain(), 5)
        # The core's answer, if it comes, is dropped.
        for _ in range(20):
            await server.puppets.step_all()
            await settle()
        assert request.sink.num_final == 1

    run(scenario)


def test_a_reload_replaces_the_owner_without_losing_a_request():
    async def scenario(server):
        await server.load(ECHO)
        first = [server.send(number % 2, number) for number in range(4)]
        scan = RepositoryScan([replace(ECHO, version="2")], {})
        loading = asyncio.ensure_future(server.catalog.load(scan))
        while not loading.done():
            first.append(server.send(len(first) % 2, len(first)))
            await server.puppets.step_all()
            await asyncio.sleep(0.001)
        assert await server.answers(*first) == list(range(len(first)))

    run(scenario)
