"""A decoupled model with workers on strings: requests end once, after any number of responses."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from decoupled import DECOUPLED, Told, responders, values
from doubles import Puppets, RecordingSink
from waiting import until

from penstock.errors import BackendFailed, Cancelled
from penstock.serving import worker_load
from penstock.serving.model import Model
from penstock.types import Request, Response, from_array


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_load, "backend", lambda name: Told)
    Told.seen = []


class Scene:
    def __init__(self, model: Model, puppets: Puppets) -> None:
        self.model = model
        self.puppets = puppets

    async def wait(self, condition: Callable[[], object]) -> None:
        """Let the worker work until this holds."""
        stepping = asyncio.ensure_future(self._step())
        try:
            await until(condition)
        finally:
            stepping.cancel()

    async def _step(self) -> None:
        while True:
            await self.puppets.step_all()
            await asyncio.sleep(0.001)

    async def ask(self, *numbers: int) -> Request:
        """Submit a request, and wait until the model has it."""
        tensor = from_array("x", "INT64", np.array([numbers], np.int64))
        request = Request(RecordingSink(), [tensor], time.monotonic())
        known = len(Told.seen)
        self.model.submit(request)
        await self.wait(lambda: len(Told.seen) > known)
        return request


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        puppets = Puppets()
        model = Model(DECOUPLED, start_life=puppets)
        scene = Scene(model, puppets)
        starting = asyncio.ensure_future(model.start())
        await scene.wait(starting.done)
        await starting
        await scenario(scene)
        Told.seen = []
        closing = asyncio.ensure_future(model.close())
        await scene.wait(closing.done)
        await closing

    asyncio.run(main())


def seen_by(request: Request) -> list[list[int]]:
    return [each["y"][0].tolist() for each in request.sink.outputs if each]


def test_requests_are_open_while_the_worker_takes_the_next():
    async def scenario(scene):
        first, second = await scene.ask(1), await scene.ask(2)
        to_first, to_second = responders()
        to_second.send(values(20), is_final=True)
        to_first.send(values(10), is_final=False)
        to_first.send(values(11, 12), is_final=False)
        await scene.wait(lambda: second.is_done and len(first.sink.answers) == 2)
        assert (seen_by(first), seen_by(second)) == ([[10], [11, 12]], [[20]])
        assert not first.is_done and scene.model.num_running == 1
        to_first.send(None, is_final=True)
        await scene.wait(lambda: first.is_done)
        last = first.sink.answers[-1]
        assert isinstance(last, Response) and last.is_empty and not last.outputs
        await scene.wait(lambda: scene.model.num_running == 0)
        assert (first.sink.num_final, second.sink.num_final) == (1, 1)
        metrics = scene.model.metrics
        assert (metrics.num_success, metrics.num_executions, metrics.num_inferences) == (2, 2, 2)
        assert first.timings.received < first.timings.first_response < first.timings.completed
        assert scene.model.memory.extents.num_held == 0

    run(scenario)


def test_an_error_ends_a_request_once():
    async def scenario(scene):
        request = await scene.ask(1)
        (responder,) = responders()
        responder.send(values(1), is_final=False)
        responder.send(ValueError("why"), is_final=False)
        responder.send(values(2), is_final=False)
        responder.send(None, is_final=True)
        await scene.wait(lambda: request.is_done)
        assert isinstance(request.sink.error, BackendFailed) and "why" in str(request.sink.error)
        assert (seen_by(request), request.sink.num_final) == ([[1]], 1)
        assert scene.model.metrics.num_failures["BACKEND"] == 1

    run(scenario)


def test_a_cancelled_request_gets_no_more_and_the_model_hears_of_it():
    async def scenario(scene):
        request = await scene.ask(1)
        (responder,) = responders()
        scene.model.cancel(request)
        assert isinstance(request.sink.error, Cancelled)
        await scene.wait(lambda: responder.is_cancelled)
        responder.send(values(1), is_final=True)
        await scene.wait(lambda: scene.model.num_running == 0)
        assert len(request.sink.answers) == 1
        # An open batch counts as running until its model has ended it.
        counted = scene.model.metrics.responses.statistics()["0"]
        assert (counted["cancel"]["count"], counted["success"]["count"]) == (1, 0)

    run(scenario)


def test_after_a_crash_only_requests_without_a_response_run_again():
    async def scenario(scene):
        begun, ended, waiting = [await scene.ask(number) for number in (1, 2, 3)]
        first, second, _ = responders()
        first.send(values(1), is_final=False)
        second.send(values(2), is_final=True)
        await scene.wait(lambda: ended.is_done and begun.sink.answers)
        Told.seen = []
        scene.puppets.alive[0].kill()
        await scene.wait(lambda: begun.is_done and Told.seen)
        assert "after the first response" in str(begun.sink.error)
        ((given, responder),) = Told.seen
        assert given.tolist() == [[3]]
        responder.send(values(30), is_final=True)
        await scene.wait(lambda: waiting.is_done)
        assert seen_by(waiting) == [[30]] and seen_by(ended) == [[2]]
        assert all(each.sink.num_final == 1 for each in (begun, ended, waiting))
        await scene.wait(lambda: scene.model.num_running == 0)

    run(scenario)


def test_a_drain_waits_for_the_final_response():
    async def scenario(scene):
        request = await scene.ask(1)
        (responder,) = responders()
        draining = asyncio.ensure_future(scene.model.drain())
        responder.send(values(1), is_final=False)
        await scene.wait(lambda: request.sink.answers)
        assert not draining.done()
        responder.send(None, is_final=True)
        await scene.wait(draining.done)
        assert request.is_done

    run(scenario)


def test_as_many_requests_are_open_as_one_worker_may_have(monkeypatch):
    monkeypatch.setattr("penstock.serving.worker_place.MAX_RETURNED", 2)

    async def scenario(scene):
        requests = [await scene.ask(number) for number in (1, 2)]
        tensor = from_array("x", "INT64", np.array([[3]], np.int64))
        third = Request(RecordingSink(), [tensor], 0.0)
        scene.model.submit(third)
        await scene.wait(lambda: not scene.model.workers[0].is_idle)
        assert len(Told.seen) == 2 and scene.model.num_waiting == 1
        responders()[0].send(None, is_final=True)
        await scene.wait(lambda: len(Told.seen) == 3)
        for responder in responders()[1:]:
            responder.send(None, is_final=True)
        await scene.wait(lambda: all(each.is_done for each in (*requests, third)))

    run(scenario)
