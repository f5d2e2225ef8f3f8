"""Requests that wait for a cache elsewhere: each is answered once, whatever happens there."""

import asyncio
from dataclasses import replace

import numpy as np
from doubles import Puppets, RecordingSink

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import Cancelled, NotReady
from penstock.serving.answer_store import copy_answer
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model import Model
from penstock.serving.remote_answers import encode
from penstock.serving.remote_cache import SharedCache
from penstock.types import Request, RequestedOutput, Response, TensorSpec, from_array

CONFIG = ModelConfig(
    name="echo",
    version="3",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    is_cached=True,
    fingerprint="f",
)


class Held:
    """A store that answers when the test says so."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.asked: list = []
        self.is_there = True

    def look(self, key, hear) -> bool:
        if self.is_there:
            self.asked.append((key, hear))
        return self.is_there

    def put(self, key, value) -> bool:
        self.values[key] = value
        return True

    def answer(self) -> None:
        asked, self.asked = self.asked, []
        for key, hear in asked:
            hear(self.values.get(key))


def a_request(value: int, outputs: tuple[str, ...] = ()) -> Request:
    x = from_array("x", "INT64", np.full((1, 4), value, np.int64))
    # As those of protocols, the buffer is borrowed.
    x.data = memoryview(bytearray(x.data))
    return Request(RecordingSink(), [x], 0.0, outputs=[RequestedOutput(o) for o in outputs])


def run(scenario, config: ModelConfig = CONFIG) -> None:
    async def main() -> None:
        puppets, store = Puppets(), Held()
        model = Model(config, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        model.cache = SharedCache(config, model.metrics, store)
        await scenario(model, store, puppets)
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()

    asyncio.run(main())


def submit(model: Model, request: Request) -> RecordingSink:
    sink = request.sink
    model.submit(request)
    return sink


def test_a_request_waits_for_the_store_and_is_computed_only_if_it_has_nothing():
    async def scenario(model, store, puppets):
        request = a_request(1)
        buffer = request.inputs[0].data
        first = submit(model, request)
        buffer[:] = bytes(len(buffer))  # The connection reads its next request.
        await puppets.step_all()
        assert first.num_final == model.num_waiting == 0
        store.answer()
        await puppets.step_all()
        assert first.outputs[0]["y"].tolist() == [[1] * 4]
        assert len(store.values) == 1
        again = submit(model, a_request(1))
        store.answer()
        assert again.outputs[0]["y"].tolist() == [[1] * 4]
        metrics = model.metrics
        assert (metrics.num_executions, metrics.num_cache_hits, metrics.num_cache_misses) == (
            1,
            1,
            1,
        )

    run(scenario)


def test_without_the_store_requests_are_computed_at_once():
    async def scenario(model, store, puppets):
        store.is_there = False
        sink = submit(model, a_request(1))
        await puppets.step_all()
        assert sink.num_final == 1
        assert model.metrics.num_cache_misses == 0

    run(scenario)


def test_a_request_that_is_cancelled_meanwhile_ends_and_never_runs():
    async def scenario(model, store, puppets):
        request = a_request(1)
        sink = submit(model, request)
        model.cancel(request)
        assert isinstance(sink.error, Cancelled) and sink.num_final == 1
        store.answer()
        await puppets.step_all()
        model.cancel(request)
        assert sink.num_final == 1 and model.metrics.num_executions == 0
        assert model.metrics.num_failures["CANCELED"] == 1

    run(scenario)


def test_draining_waits_for_those_that_wait_for_the_store():
    async def scenario(model, store, puppets):
        sink = submit(model, a_request(1))
        draining = asyncio.ensure_future(model.drain())
        await puppets.step_all()
        assert not draining.done()
        store.answer()
        await puppets.step_all()
        await draining
        assert sink.outputs[0]["y"].tolist() == [[1] * 4]

    run(scenario)


def test_those_that_wait_while_the_model_is_unloaded_get_an_error():
    async def scenario(model, store, puppets):
        sink = submit(model, a_request(1))
        model.readiness.state = "UNLOADING"
        store.answer()
        await puppets.step_all()
        assert isinstance(sink.error, NotReady) and sink.num_final == 1

    run(scenario)


def test_answers_keep_the_order_where_the_model_does():
    policy = replace(CONFIG.batching, preserve_ordering=True)

    async def scenario(model, store, puppets):
        submit(model, a_request(1))
        store.answer()
        await puppets.step_all()
        slow, hit = submit(model, a_request(2)), submit(model, a_request(1))
        store.answer()
        assert (slow.num_final, hit.num_final) == (0, 0)
        await puppets.step_all()
        assert (slow.num_final, hit.num_final) == (1, 1)

    run(scenario, replace(CONFIG, batching=policy))


def test_what_is_no_answer_to_the_request_is_computed():
    async def scenario(model, store, puppets):
        submit(model, a_request(1))
        store.answer()
        await puppets.step_all()
        [key] = store.values
        wrong = Response("echo", "3", [from_array("z", "INT64", np.zeros((1, 4), np.int64))])
        for value in (
            b"",
            b"nonsense",
            encode(b"d" * 32, copy_answer(wrong)),
            store.values[key][:-1],
        ):
            store.values[key] = value
            sink = submit(model, a_request(1))
            store.answer()
            await puppets.step_all()
            assert sink.outputs[0]["y"].tolist() == [[1] * 4]
        assert model.metrics.num_cache_hits == 0
        # An output that the model does not have is refused as without a cache.
        sink = submit(model, a_request(1, ("nope",)))
        store.answer()
        assert "unexpected inference output 'nope'" in str(sink.error)

    run(scenario)


def test_servers_share_answers_only_with_the_same_fingerprint():
    store = Held()
    caches = [
        SharedCache(replace(CONFIG, fingerprint=text), ModelMetrics.from_config(CONFIG), store)
        for text in ("a", "a", "b")
    ]
    for each in caches:
        assert each.answers(a_request(1), lambda request: None)
    keys = [key for key, _ in store.asked]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].startswith(b"penstock:echo:3:")


def test_large_answers_are_not_written():
    store = Held()
    cache = SharedCache(CONFIG, ModelMetrics.from_config(CONFIG), store)
    outputs = [from_array("y", "INT64", np.zeros((1 << 15, 4), np.int64))]
    cache.keep(b"d" * 32, Response("echo", "3", outputs), 0.0)
    assert store.values == {} and cache.metrics.num_cache_misses == 1
