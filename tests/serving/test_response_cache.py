"""Answers from the cache: which requests are the same, what is kept, and what is counted."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, NotReady
from penstock.serving.answer_store import AnswerStore
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model import Model
from penstock.serving.response_cache import (
    MAX_HASHED_BYTES,
    ModelCache,
    digest_of,
)
from penstock.serving.traffic_split import MirrorRequest
from penstock.types import Request, RequestedOutput, Response, Tensor, TensorSpec, from_array

CONFIG = ModelConfig(
    name="echo",
    version="3",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)), TensorSpec("s", "BYTES", (1,))),
    outputs=(TensorSpec("y", "INT64", (4,)), TensorSpec("t", "BYTES", (1,))),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    is_cached=True,
)
FIXED = replace(CONFIG, inputs=CONFIG.inputs[:1], outputs=CONFIG.outputs[:1])
SECRET = b"s" * 32


def a_request(*tensors: Tensor, outputs: tuple[str, ...] = ()) -> Request:
    asked = [RequestedOutput(name) for name in outputs]
    return Request(RecordingSink(), list(tensors), 990.0, outputs=asked)


def x(value: int, rows: int = 1) -> Tensor:
    return from_array("x", "INT64", np.full((rows, 4), value, np.int64))


def s(text: str) -> Tensor:
    return from_array("s", "BYTES", np.array([[text.encode()]], object))


def cache(config: ModelConfig = CONFIG, max_bytes: int = 1 << 20) -> ModelCache:
    metrics = ModelMetrics.from_config(config)
    return ModelCache(config, metrics, AnswerStore(max_bytes), FakeClock())


def answer(value: int = 1) -> Response:
    return Response("echo", "3", [from_array("y", "INT64", np.full((1, 4), value))])


def answers(model: ModelCache, request: Request) -> bool:
    """Whether the cache answers; then nothing goes on to the model."""
    return model.answers(request, lambda _: pytest.fail("it goes on"))


# Which requests are the same.

Names = st.sampled_from(["", "a", "ab", "b", "x"])
Tensors = st.builds(
    Tensor,
    Names,
    st.sampled_from(["INT8", "UINT8", "BYTES"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.binary(max_size=6),
)
Parameters = st.dictionaries(Names, st.sampled_from([True, 1, 1.0, "1", 0, ""]), max_size=2)
Requests = st.tuples(
    st.lists(Tensors, max_size=3, unique_by=lambda each: each.name),
    st.lists(Names, max_size=2).map(tuple),
    Parameters,
)


def made(parts) -> Request:
    tensors, outputs, parameters = parts
    request = a_request(*tensors, outputs=outputs)
    request.parameters = parameters
    return request


def essence(parts):
    """All that an answer may depend on."""
    tensors, outputs, parameters = parts
    named = {(t.name, t.datatype, t.shape, bytes(t.data)) for t in tensors}
    return named, outputs, {(key, repr(value)) for key, value in parameters.items()}


@given(Requests, Requests)
def test_requests_have_the_same_digest_only_if_they_are_the_same(one, other):
    is_same = essence(one) == essence(other)
    assert (digest_of(made(one), SECRET) == digest_of(made(other), SECRET)) == is_same


@given(Requests)
def test_the_order_of_inputs_and_what_no_answer_depends_on_do_not_matter(parts):
    tensors, outputs, parameters = parts
    one, other = made(parts), made((tensors[::-1], outputs, parameters))
    other.id, other.priority, other.timeout_s, other.caller = "id", 2, 1.0, b"key"
    assert digest_of(one, SECRET) == digest_of(other, SECRET)


def test_without_the_secret_a_digest_says_nothing():
    request = a_request(x(1))
    assert digest_of(request, SECRET) != digest_of(request, b"t" * 32)


def mirror() -> Request:
    return MirrorRequest(RecordingSink(), [x(1)], 0.0)


def with_regions() -> Request:
    request = a_request(x(1))
    request.uses_regions = True
    return request


def in_process() -> Request:
    request = a_request(x(1))
    request.takes_arrays = True
    return request


def large() -> Request:
    size = MAX_HASHED_BYTES + 1
    return a_request(Tensor("x", "UINT8", (size,), bytes(size)))


def with_large_number() -> Request:
    request = a_request(x(1))
    request.parameters = {"n": 1 << 70}
    return request


@pytest.mark.parametrize("make", [mirror, with_regions, in_process, large, with_large_number])
def test_some_requests_are_computed_each_time(make):
    model = cache()
    for _ in range(2):
        request = make()
        sink = request.sink
        assert not answers(model, request)
        assert request.sink is sink
        request.respond(answer())
    assert len(model.store) == 0
    assert model.metrics.num_cache_hits == model.metrics.num_cache_misses == 0


# What is kept.


def test_a_request_is_answered_as_the_same_one_was_before():
    model = cache()
    first = a_request(x(1))
    sink = first.sink
    assert not answers(model, first)
    first.respond(answer(7))
    assert sink.outputs[0]["y"].tolist() == [[7] * 4]
    again = a_request(x(1))
    assert answers(model, again)
    [found] = again.sink.answers
    assert (found.model_name, found.model_version) == ("echo", "3")
    assert again.sink.outputs[0]["y"].tolist() == [[7] * 4]
    assert again.is_done and again.sink.num_final == 1
    assert not answers(model, a_request(x(2)))


def test_errors_are_not_kept():
    model = cache()
    for error in (BackendFailed("it broke"), InvalidRequest("it does not fit")):
        request = a_request(x(1))
        sink = request.sink
        assert not answers(model, request)
        request.respond(error)
        assert sink.error is error
    assert len(model.store) == model.metrics.num_cache_misses == 0


def test_answers_that_are_not_final_or_elsewhere_are_not_kept():
    model = cache()
    several, arrays = a_request(x(1)), a_request(x(2))
    assert not answers(model, several) and not answers(model, arrays)
    several.respond(answer(), final=False)
    arrays.respond(Response("echo", "3", (), arrays={"y": np.zeros(1)}))
    assert len(model.store) == 0


def test_an_answer_that_is_larger_than_the_cache_passes():
    model = cache(max_bytes=1024)
    request = a_request(x(1))
    sink = request.sink
    assert not answers(model, request)
    request.respond(Response("echo", "3", [from_array("y", "INT64", np.zeros((300, 4), int))]))
    assert sink.num_final == 1
    assert (len(model.store), model.metrics.num_cache_misses) == (0, 1)


def test_another_load_of_the_same_version_finds_nothing():
    store = AnswerStore(1 << 20)
    first, second = (ModelCache(CONFIG, ModelMetrics.from_config(CONFIG), store) for _ in range(2))
    request = a_request(x(1))
    assert not answers(first, request)
    request.respond(answer())
    assert answers(first, a_request(x(1)))
    assert not answers(second, a_request(x(1)))


def test_what_a_client_does_to_its_answer_changes_no_other():
    model = cache()
    request = a_request(x(1))
    answers(model, request)
    request.respond(answer(7))
    first, second = a_request(x(1)), a_request(x(1))
    answers(model, first)
    first.sink.answers[0].outputs[0].data = b""
    answers(model, second)
    assert second.sink.outputs[0]["y"].tolist() == [[7] * 4]
    # Its bytes may be sent later.
    assert first.sink.answers[0].keeper.keep(first)() is None


def test_hits_and_misses_are_counted_with_their_times():
    model = cache()
    clock = model.clock
    request = a_request(x(1))
    answers(model, request)
    clock.advance(5)
    request.respond(answer())
    answers(model, again := a_request(x(1)))
    metrics = model.metrics
    assert (metrics.num_cache_misses, metrics.num_cache_hits, metrics.num_success) == (1, 1, 1)
    assert again.timings.phases()["total"] == clock.now - 990.0
    assert again.timings.phases()["queue_batch"] == 0
    found = metrics.statistics()["inference_stats"]
    assert found["cache_hit"]["count"] == found["cache_miss"]["count"] == 1
    assert found["success"] == {"count": 1, "ns": 15 * 10**9}
    # As in Triton, it counts as queued for no time, and not as computed.
    assert found["queue"] == {"count": 1, "ns": 0}
    assert found["compute_infer"]["count"] == 0


# In a model.


def run(config, scenario) -> None:
    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        model.cache = ModelCache(config, model.metrics, AnswerStore(1 << 20))
        await scenario(model, puppets)
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())


@pytest.mark.parametrize("config", [CONFIG, FIXED])
def test_a_hit_needs_neither_queue_nor_worker(config):
    async def scenario(model, puppets):
        def ask(value: int) -> tuple[Request, RecordingSink]:
            tensors = [x(value), s(f"text {value}")][: len(config.inputs)]
            request = a_request(*tensors)
            request.form = "a form"
            sink = request.sink
            model.submit(request)
            return request, sink

        _, first = ask(1)
        await puppets.step_all()
        _, again = ask(1)
        assert again.num_final == 1  # At once.
        assert [v.tolist() for v in again.outputs[0].values()] == [
            v.tolist() for v in first.outputs[0].values()
        ]
        _, other = ask(2)
        assert other.num_final == 0
        await puppets.step_all()
        assert other.outputs[0]["y"].tolist() == [[2] * 4]
        assert model.metrics.num_executions == model.metrics.num_inferences == 2
        assert model.metrics.num_success == 3
        # Even if no worker runs.
        puppets.alive[0].kill()
        _, last = ask(2)
        assert last.outputs[0]["y"].tolist() == [[2] * 4]
        await puppets.step_all()

    run(config, scenario)


def test_hits_have_their_turn_where_answers_keep_the_order():
    policy = replace(FIXED.batching, preserve_ordering=True)

    async def scenario(model, puppets):
        first = a_request(x(1))
        model.submit(first)
        await puppets.step_all()
        slow, hit = a_request(x(2)), a_request(x(1))
        sinks = slow.sink, hit.sink
        model.submit(slow)
        model.submit(hit)
        assert [sink.num_final for sink in sinks] == [0, 0]
        await puppets.step_all()
        assert [sink.num_final for sink in sinks] == [1, 1]
        assert sinks[1].outputs[0]["y"].tolist() == [[1] * 4]

    run(replace(FIXED, batching=policy), scenario)


def test_a_model_that_is_being_unloaded_answers_nothing_from_its_cache():
    async def scenario(model, puppets):
        model.submit(a_request(x(1)))
        await puppets.step_all()
        model.readiness.state = "UNLOADING"
        late = a_request(x(1))
        model.submit(late)
        assert isinstance(late.sink.error, NotReady)

    run(FIXED, scenario)
