"""The shard's end of calls, with a socket as the worker and models that answer as told."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from doubles import FakeClock, RecordingSink
from shard_server import ECHO
from waiting import until

from penstock.errors import BackendFailed, NotFound, Unsupported
from penstock.processes.channel import Channel
from penstock.serving.batches import RunningBatch
from penstock.serving.call_parcels import pack, unpack
from penstock.serving.called_models import CallLink, ModelCalls, check_chain
from penstock.serving.worker_place import WorkerPlace
from penstock.types import CANCELLED, Request, Response, Tensor, from_array, to_array
from penstock.wire import frames

X = from_array("x", "INT64", np.ones((1, 4), np.int64))
CALLER = replace(ECHO, name="caller", backend="python")


class FakeModel:
    """Keeps the requests until the test answers them."""

    is_ready = True

    def __init__(self, name: str) -> None:
        self.config = replace(ECHO, name=name)
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)
        request.respond(CANCELLED)

    def answer(self, value: int, final: bool = True) -> None:
        outputs = [from_array("y", "INT64", np.full((1, 4), value, np.int64))]
        self.requests[-1].respond(Response(self.config.name, "1", outputs), final)


class Table:
    manage = None

    def __init__(self) -> None:
        self.models = {name: FakeModel(name) for name in ("callee", "caller", "first")}

    def choose(self, name: str, version: str, headers: Mapping[bytes, bytes]):
        if name not in self.models:
            raise NotFound(f"'{name}' is not found")
        return self.models[name], None


class Caller:
    """A worker that calls."""

    def __init__(self) -> None:
        self.table, self.clock = Table(), FakeClock()
        self.callee = self.table.models["callee"]
        self.place = WorkerPlace(0)
        self.calls = ModelCalls(CALLER, self.table, self.clock)
        link = self.calls.connect(asyncio.get_running_loop(), self.place)
        assert isinstance(link, CallLink)
        self.link = link
        self.end = Channel(link.theirs.dup())
        self.number = 0

    def batch(self, *requests: Request, is_merged: bool = False) -> RunningBatch:
        made = RunningBatch(len(self.place.batches) + 1, list(requests), 0.0, is_merged=is_merged)
        self.place.batches.append(made)
        return made

    def call(self, name: str = "callee", batch: int = 0, **more: object) -> None:
        self.number += 1
        frame = frames.CallModel(self.number, batch, name, "", pack([X]).parcel, **more)
        self.end.send(frames.encode(frame))

    async def called(self, count: int = 1) -> Request:
        await until(lambda: len(self.callee.requests) == count)
        return self.callee.requests[-1]

    def read(self) -> frames.CallAnswer:
        received = self.end.receive()
        assert received is not None
        return frames.decode_call_answer(received[0])

    def close(self) -> None:
        self.link.close()
        self.end.close()


def test_a_management_call_is_answered_and_ends_with_its_worker():
    async def scenario(caller: Caller) -> None:
        asked: list[tuple[object, ...]] = []
        ended: list[str] = []

        async def manage(*call: object) -> bytes:
            asked.append(call)
            if call[1] == "wrong":
                raise NotFound("'wrong' is not found")
            if call[1] == "slow":
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("slow")
            return b""

        caller.table.manage = manage
        batch = caller.batch(request(b"key", ("first/1",)))
        caller.call("other", batch.id, action="load", parameters={"config": "{}"})
        await until(lambda: len(asked) == 1)
        action, name, version, parameters, files, key = asked[0]
        assert (action, name, version, parameters, key) == (
            "load",
            "other",
            "",
            {"config": "{}"},
            b"key",
        )
        assert {each: bytes(data) for each, data in files.items()} == {"x": bytes(X.data)}
        assert caller.read().error_kind == ""
        caller.call("wrong", batch.id, action="unload")
        await until(lambda: len(asked) == 2)
        assert caller.read().error == "'wrong' is not found"
        # The callers of the batch wait for it.
        for each in ("first", "caller"):
            caller.call(each, batch.id, action="unload")
        caller.call("other", batch.id, action="explain")
        await asyncio.sleep(0.01)
        assert [caller.read().error_kind for _ in range(3)] == ["Unsupported"] * 3
        caller.call("slow", batch.id, action="load")
        await until(lambda: len(asked) == 3)
        caller.link.close()
        await until(lambda: ended == ["slow"])

    run(scenario)


def request(caller: bytes = b"", chain: tuple[str, ...] = ()) -> Request:
    made = Request(RecordingSink(), [X], 0.0)
    made.caller, made.chain = caller, chain
    return made


def tensors(answer: frames.CallAnswer) -> list[Tensor]:
    return unpack(answer.parcel, ())


def run(scenario) -> None:
    async def whole() -> None:
        caller = Caller()
        await scenario(caller)
        caller.close()

    asyncio.run(whole())


def test_a_call_is_a_request_of_those_who_wait_for_it():
    async def scenario(caller: Caller) -> None:
        caller.batch(request(b"key", ("first/1",)), request(b"key", ("second/1", "first/1")))
        caller.call(batch=1, id="7", outputs=("y",), parameters={"timeout": 5000, "own": 1})
        made = await caller.called()
        assert (made.id, [each.name for each in made.outputs]) == ("7", ["y"])
        assert (made.timeout_s, made.parameters) == (0.005, {"own": 1})
        assert (made.caller, made.chain) == (b"key", ("first/1", "second/1", "caller/1"))
        np.testing.assert_array_equal(to_array(made.inputs[0]), to_array(X))
        caller.callee.answer(3, final=False)
        caller.callee.answer(4)
        first, second = caller.read(), caller.read()
        assert (first.call, first.is_final, second.is_final) == (1, False, True)
        assert [int(to_array(tensors(each)[0])[0, 0]) for each in (first, second)] == [3, 4]

    run(scenario)


@pytest.mark.parametrize("is_merged", [False, True])
def test_requests_of_several_keys_share_no_identity(is_merged: bool):
    async def scenario(caller: Caller) -> None:
        others = () if is_merged else (request(b"other"),)
        caller.batch(request(b"key"), *others, is_merged=is_merged)
        caller.call(batch=1)
        assert (await caller.called()).caller == b""

    run(scenario)


def test_a_call_that_cannot_be_made_is_answered_with_the_reason():
    async def scenario(caller: Caller) -> None:
        caller.call("nothing")
        caller.call("callee", parameters={"priority": "high"})
        caller.call()
        await caller.called()
        answer, invalid = caller.read(), caller.read()
        assert (answer.error_kind, answer.is_final) == ("NotFound", True)
        assert "'nothing' is not found" in answer.error
        assert invalid.error_kind == "InvalidRequest" and "priority" in invalid.error

    run(scenario)


def test_a_model_that_others_wait_for_is_no_cycle():
    check_chain(("a/1", "b/1"), "c/1")
    check_chain(("a/1",), "a/2")
    with pytest.raises(Unsupported, match="b/1 -> c/1 -> b/1"):
        check_chain(("a/1", "b/1", "c/1"), "b/1")


def test_errors_of_the_callee_come_back():
    async def scenario(caller: Caller) -> None:
        caller.call()
        (await caller.called()).respond(BackendFailed("broken"))
        answer = caller.read()
        assert (answer.error_kind, answer.error) == ("BackendFailed", "broken")

    run(scenario)


def test_calls_of_a_worker_that_ends_are_cancelled():
    async def scenario(caller: Caller) -> None:
        caller.call()
        made = await caller.called()
        caller.link.theirs.close()
        caller.end.close()
        await until(lambda: caller.callee.cancelled == [made])
        assert made.is_done

    run(scenario)


def test_a_call_that_its_code_gives_up_is_cancelled():
    async def scenario(caller: Caller) -> None:
        caller.call()
        made = await caller.called()
        caller.end.send(frames.encode(frames.CancelCall(1)))
        caller.end.send(frames.encode(frames.CancelCall(9)))
        await until(lambda: caller.callee.cancelled == [made])

    run(scenario)


def test_calls_end_when_all_requests_of_their_batch_are_cancelled():
    async def scenario(caller: Caller) -> None:
        one, two, other = request(), request(), request()
        caller.batch(one, two)
        caller.batch(other, is_merged=True)
        for batch in (1, 2, 0):
            caller.call(batch=batch)
        await caller.called(3)
        one.respond(CANCELLED)
        other.respond(CANCELLED)
        caller.calls.cancelled()
        # Somebody still waits: of a merged batch perhaps in another shard.
        assert caller.callee.cancelled == []
        two.respond(CANCELLED)
        caller.calls.cancelled()
        assert caller.callee.cancelled == caller.callee.requests[:1]
        assert (caller.read().error_kind, len(caller.callee.cancelled)) == ("Cancelled", 1)

    run(scenario)


def test_a_call_waits_for_an_instance_only_so_long():
    async def scenario(caller: Caller) -> None:
        for _ in range(3):
            caller.call()
        await caller.called(3)
        queued, running, elsewhere = caller.callee.requests
        queued.ticket = running.ticket = None
        running.timings.dispatched = caller.clock()
        caller.clock.advance(CALLER.hang_s)
        caller.calls.tick()
        assert caller.callee.cancelled == []
        caller.clock.advance(1.0)
        caller.callee.is_ready = False
        caller.calls.tick()
        assert caller.callee.cancelled == []
        caller.callee.is_ready = True
        caller.calls.tick()
        assert caller.callee.cancelled == [queued] and not elsewhere.is_done
        answer = caller.read()
        assert answer.error_kind == "DeadlineExceeded" and "no instance" in answer.error

    run(scenario)


def test_the_time_that_a_worker_waits_is_noted():
    async def scenario(caller: Caller) -> None:
        caller.end.send(frames.encode(frames.Waited(12.5)))
        await until(lambda: caller.place.waited_s == 12.5)
        assert caller.place.waited_at == caller.clock()

    run(scenario)


def test_only_code_can_call():
    async def scenario() -> None:
        place, table = WorkerPlace(0), Table()
        loop = asyncio.get_running_loop()
        assert ModelCalls(ECHO, table, FakeClock()).connect(loop, place) is None
        assert ModelCalls(CALLER, None, FakeClock()).connect(loop, place) is None

    asyncio.run(scenario())
