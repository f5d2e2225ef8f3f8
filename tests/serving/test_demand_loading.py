"""A model that its requests load: what its first worker proves, and what happens if that fails."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig, ScalingConfig
from penstock.errors import NotReady
from penstock.serving.model import Model
from penstock.types import Request, TensorSpec, from_array

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16),
    scaling=ScalingConfig(on_demand="true", cold_start_s=10.0),
)
BROKEN = replace(CONFIG, options={"null.a_ms": "soon"})


class Demanded:
    """A model whose first request loads it, with room for it as the test says."""

    def __init__(self, model: Model, puppets: Puppets, clock: FakeClock) -> None:
        self.model, self.puppets, self.clock = model, puppets, clock

    @property
    def loading(self):
        return self.model.host.demand

    async def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.advance(0.5)
            self.model.host.tick()
            await self.puppets.step_all()

    def send(self, row: np.ndarray | None = None) -> Request:
        values = np.arange(4) if row is None else row
        tensor = from_array("x", "INT64", values.astype(np.int64)[None])
        request = Request(RecordingSink(), [tensor], self.clock())
        self.model.submit(request)
        return request


def run(
    scenario: Callable[[Demanded], Awaitable[None]],
    config: ModelConfig = CONFIG,
    may_start: asyncio.Event | None = None,
) -> None:
    async def find_room(wanted: ModelConfig) -> Callable[[], None]:
        if may_start is not None:
            await may_start.wait()
        return lambda: None

    async def main() -> None:
        puppets, clock = Puppets(has_room=True), FakeClock()
        model = Model(config, start_life=puppets, clock=clock)
        model.host.demand.begin(find_room, is_lazy=True)
        await model.start()
        assert puppets.alive == []
        await scenario(Demanded(model, puppets, clock))
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing
        assert puppets.alive == []

    asyncio.run(main())


def test_requests_wait_for_the_first_worker_and_are_batched_as_it_proved():
    async def scenario(demanded):
        assert demanded.model.is_ready and demanded.loading.is_idle
        assert "no request has come yet" in demanded.loading.reason
        requests = [demanded.send() for _ in range(4)]
        assert not demanded.loading.is_idle and demanded.loading.is_awaited
        await demanded.tick(2)
        assert [each.sink.error for each in requests] == [None] * 4
        assert all(each.sink.num_final == 1 for each in requests)
        assert demanded.loading.reason == "" and demanded.loading.is_idle
        await demanded.tick(100)
        assert [each.state for each in demanded.model.processes] == ["ready"], "it stays"
        assert demanded.model.metrics.load_s == demanded.model.host.scaler.load_s

    run(scenario)


def test_an_evicted_model_answers_first_and_the_next_request_loads_it():
    async def scenario(demanded):
        demanded.send()
        await demanded.tick(2)
        late = demanded.send()
        demanded.loading.evict("others need its memory")
        await demanded.tick(2)
        assert late.sink.num_final == 1 and late.sink.error is None
        await demanded.tick(10)
        assert demanded.puppets.alive == [] and demanded.model.is_ready
        assert "others need its memory" in demanded.loading.reason
        again = demanded.send()
        await demanded.tick(2)
        assert again.sink.error is None and again.sink.num_final == 1

    run(scenario)


def test_a_load_that_fails_is_told_to_all_that_wait_and_tried_again_later():
    async def scenario(demanded):
        waiting = [demanded.send() for _ in range(3)]
        await demanded.tick()
        for each in waiting:
            assert isinstance(each.sink.error, NotReady)
            assert "model 'echo' cannot be loaded now: " in str(each.sink.error)
            assert "null.a_ms" in str(each.sink.error)
        assert not demanded.model.is_ready and demanded.model.state == "READY"
        assert demanded.model.shown_state == "UNAVAILABLE"
        assert "null.a_ms" in demanded.model.reason
        assert demanded.send().sink.num_final == 1, "at once"
        await demanded.tick(30)
        assert demanded.puppets.alive == [], "nobody asks for it"
        assert demanded.model.is_ready
        again = demanded.send()
        assert not again.sink.num_final
        await demanded.tick()
        assert "null.a_ms" in str(again.sink.error)

    run(scenario, BROKEN)


def test_what_a_request_waited_for_is_in_its_refusal():
    never = asyncio.Event()

    async def scenario(demanded):
        request = demanded.send()
        await demanded.tick()
        demanded.loading.wait_for("b/1 has the memory")
        assert demanded.loading.reason == "it is being loaded; b/1 has the memory"
        await demanded.tick(21)
        text = "no instance of model 'echo' was ready in 10 s (penstock.cold_start_s): b/1 has the"
        assert text in str(request.sink.error)
        await demanded.tick(8)
        assert not demanded.loading.is_awaited, "nobody waits any more"

    run(scenario, may_start=never)


@pytest.mark.parametrize("count", [1, 3])
def test_all_instances_are_started_once_the_first_has_proved_the_model(count: int):
    async def scenario(demanded):
        demanded.send()
        await demanded.tick(4)
        assert [each.state for each in demanded.model.processes] == ["ready"] * count

    run(scenario, replace(CONFIG, num_instances=count))


MINGLES = """
def infer(inputs):
    return {"y": inputs["x"] + inputs["x"].sum(axis=0)}
"""


@pytest.mark.parametrize("slo_s", [None, 60.0], ids=["fixed", "slo"])
def test_requests_that_waited_run_alone_if_the_model_proves_to_need_that(
    tmp_path: Path, slo_s: float | None
):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").write_text(MINGLES)

    async def scenario(demanded):
        assert demanded.model.mode != "unbatched"
        requests = [demanded.send(np.arange(4) * number) for number in range(1, 6)]
        await demanded.tick(3)
        assert demanded.model.mode == "unbatched"
        for number, each in enumerate(requests, 1):
            assert each.sink.num_final == 1 and each.sink.error is None, each.sink.error
            assert (each.sink.outputs[0]["y"][0] == 2 * number * np.arange(4)).all()

    config = replace(
        CONFIG,
        backend="python",
        artifact=str(tmp_path / "1" / "model.py"),
        batching=BatchPolicy(4, is_dynamic=True, slo_latency_s=slo_s),
    )
    run(scenario, config)
