"""Memory of requests that are being received: theirs until they are complete, slow or gone."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import psutil
import pytest
from doubles import Puppets, RecordingSink, settle

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.errors import Overloaded
from penstock.serving.model import Model
from penstock.serving.reservation import Reservation, private_copy, private_memory
from penstock.types import Request, TensorSpec, from_array

ROWS = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)), TensorSpec("z", "INT64", (2,))),
    outputs=(TensorSpec("y", "INT64", (4,)), TensorSpec("w", "INT64", (2,))),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=8, spill_bytes=1 << 12),
)
EXTENTS = replace(ROWS, max_batch_size=0, batching=BatchPolicy(1))
FORM = object()


def run(config: ModelConfig, scenario: Callable[[Model, Puppets], Awaitable[None]]) -> None:
    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets, clock=time.monotonic)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        # The first request of its form is copied.
        assert model.reserve(FORM) is None
        first = ask(config, 0)
        model.submit(first)
        await puppets.step_all()
        check(first, 0)
        await scenario(model, puppets)
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())


def values(config: ModelConfig, number: int) -> list[np.ndarray]:
    rows = (1,) if config.max_batch_size else ()
    return [
        np.full((*rows, *spec.shape), number * 10 + index, np.int64)
        for index, spec in enumerate(config.inputs)
    ]


def ask(config: ModelConfig, number: int) -> Request:
    """A request of one form; its tensors are not in the order of the model."""
    tensors = [
        from_array(spec.name, spec.datatype, value)
        for spec, value in zip(config.inputs, values(config, number), strict=True)
    ]
    request = Request(RecordingSink(), tensors[::-1], 0.0)
    request.form = FORM
    return request


def fill(request: Request, reservation: Reservation) -> None:
    for tensor, view in zip(request.inputs, reservation.views, strict=True):
        view[:] = memoryview(tensor.data)
        tensor.data = view


def check(request: Request, number: int) -> None:
    assert request.sink.error is None
    (answer,) = request.sink.outputs
    assert set(answer["y"].ravel().tolist()) == {number * 10}
    assert set(answer["w"].ravel().tolist()) == {number * 10 + 1}


def is_idle(model: Model) -> bool:
    memory = model.memory
    return memory.pool.num_in_use == memory.extents.num_held == 0


@pytest.mark.parametrize("config", [ROWS, EXTENTS], ids=["rows", "extents"])
class TestReserved:
    def test_a_complete_request_runs_where_it_was_received(self, config):
        async def scenario(model, puppets):
            request, reservation = ask(config, 1), model.reserve(FORM)
            fill(request, reservation)
            model.submit(request, reservation)
            reservation.drop()  # It is the request's now.
            await puppets.step_all()
            check(request, 1)
            assert is_idle(model)

        run(config, scenario)

    def test_nothing_runs_before_it_is_complete(self, config):
        async def scenario(model, puppets):
            reservation = model.reserve(FORM)
            others = [ask(config, number) for number in range(2, 6)]
            for each in others:
                model.submit(each)
            await puppets.step_all()
            for number, each in enumerate(others, 2):
                check(each, number)
            assert model.num_waiting == model.num_running == 0
            request = ask(config, 7)
            fill(request, reservation)
            model.submit(request, reservation)
            await puppets.step_all()
            check(request, 7)
            assert is_idle(model)

        run(config, scenario)

    def test_who_leaves_gives_it_back(self, config):
        async def scenario(model, puppets):
            reservation = model.reserve(FORM)
            assert not is_idle(model)
            reservation.drop()
            reservation.drop()
            assert is_idle(model)

        run(config, scenario)

    def test_a_slow_client_goes_on_in_private_memory(self, config):
        async def scenario(model, puppets):
            request, reservation = ask(config, 1), model.reserve(FORM)
            for tensor, view in zip(request.inputs, reservation.views, strict=True):
                view[:8] = memoryview(tensor.data)[:8]
            shared = list(reservation.views)
            reservation.move_out()
            assert is_idle(model)
            for view in shared:
                view[:] = b"\xee" * len(view)  # Of another request by now.
            for tensor, view in zip(request.inputs, reservation.views, strict=True):
                assert view[:8] == tensor.data[:8]
            fill(request, reservation)
            model.submit(request, reservation)
            await puppets.step_all()
            check(request, 1)
            assert is_idle(model)

        run(config, scenario)

    def test_a_refused_request_gives_it_back(self, config):
        batching = replace(config.batching, max_pending=1)
        full = replace(config, batching=batching)

        async def scenario(model, puppets):
            held = ask(full, 1)
            model.submit(held)
            await settle()
            waiting = ask(full, 2)
            model.submit(waiting)
            request, reservation = ask(full, 3), model.reserve(FORM)
            fill(request, reservation)
            model.submit(request, reservation)
            reservation.drop()
            assert isinstance(request.sink.error, Overloaded)
            await puppets.step_all()
            check(held, 1)
            assert is_idle(model)

        run(full, scenario)

    def test_another_layout_gets_a_copy(self, config):
        """Plans are forgotten when there are too many, and made again."""

        async def scenario(model, puppets):
            request, reservation = ask(config, 1), model.reserve(FORM)
            request.form = object()
            fill(request, reservation)
            model.submit(request, reservation)
            reservation.drop()
            others = [model.reserve(FORM) for _ in range(3)]
            for each in filter(None, others):
                for view in each.views:
                    view[:] = b"\xee" * len(view)
            await puppets.step_all()
            check(request, 1)
            for each in filter(None, others):
                each.drop()
            assert is_idle(model)

        run(config, scenario)

    def test_after_a_death_it_runs_again_with_its_inputs(self, config):
        async def scenario(model, puppets):
            requests = []
            for number in range(1, 4):
                request, reservation = ask(config, number), model.reserve(FORM)
                fill(request, reservation)
                requests.append(request)
                model.submit(request, reservation)
                reservation.drop()
            await settle()
            puppets.alive[0].kill()
            while not all(request.is_done for request in requests):
                await puppets.step_all()
                await asyncio.sleep(0.001)
            for number, request in enumerate(requests, 1):
                check(request, number)
            assert is_idle(model)

        run(config, scenario)

    def test_a_cancelled_request_gives_it_back(self, config):
        async def scenario(model, puppets):
            request, reservation = ask(config, 1), model.reserve(FORM)
            fill(request, reservation)
            model.submit(request, reservation)
            model.cancel(request)
            await puppets.step_all()
            assert is_idle(model)

        run(config, scenario)

    def test_it_outlives_its_model(self, config):
        async def scenario(model, puppets):
            scenario.reservation = model.reserve(FORM)

        run(config, scenario)
        reservation = scenario.reservation
        for view in reservation.views:
            view[:] = b"\x01" * len(view)
        reservation.move_out()
        assert all(view[:2] == b"\x01\x01" for view in reservation.views)
        reservation.drop()

    def test_a_model_that_is_not_ready_reserves_nothing(self, config):
        async def main() -> None:
            model = Model(config, start_life=Puppets(), clock=time.monotonic)
            assert model.reserve(FORM) is None
            await model.close()

        asyncio.run(main())


def test_bodies_that_complete_out_of_order_are_still_one_run_of_rows(monkeypatch):
    sent = []

    async def scenario(model, puppets):
        describe = model.memory.frame

        def frame(batch):
            sent.append(describe(batch))
            return sent[-1]

        monkeypatch.setattr(model.memory, "frame", frame)
        model.submit(ask(ROWS, 0))  # The worker is busy meanwhile.
        requests = [ask(ROWS, number) for number in range(1, 5)]
        reservations = [model.reserve(FORM) for _ in requests]
        for index in (2, 0, 3, 1):
            fill(requests[index], reservations[index])
            model.submit(requests[index], reservations[index])
        await puppets.step_all()
        for number, request in enumerate(requests, 1):
            check(request, number)
        rows = [[(run.row, run.count) for run in each.runs] for each in sent]
        assert rows == [[(0, 1)], [(0, 4)]]

    run(ROWS, scenario)


def test_slow_clients_hold_a_quarter_of_the_spill():
    async def scenario(model, puppets):
        held = []
        while (reservation := model.reserve(FORM)) is not None:
            held.append(reservation)
        assert 0 < model.memory.extents.capacity - model.memory.extents.free_bytes <= 1 << 10
        request = ask(EXTENTS, 1)
        model.submit(request)
        await puppets.step_all()
        check(request, 1)
        for reservation in held:
            reservation.drop()
        assert is_idle(model)

    run(EXTENTS, scenario)


def test_private_memory_is_not_touched_before_it_is_used():
    before = psutil.Process().memory_info().rss
    view = private_memory(1 << 28)
    view[0] = view[-1] = 1
    assert psutil.Process().memory_info().rss - before < 1 << 26
    assert private_copy(memoryview(b"abc")) == b"abc"
