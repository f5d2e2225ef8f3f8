"""A model of two stages with workers on strings: every request ends once, counted once."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink, settle
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.preprocess import NUM_TOKENS
from penstock.config import (
    BatchPolicy,
    MemoryPolicy,
    ModelConfig,
    PadAxis,
    Padding,
    Postprocess,
    Preprocess,
    QueuePolicy,
    ScalingConfig,
)
from penstock.dashboard.state import num_ready
from penstock.errors import (
    BackendFailed,
    Cancelled,
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    Quarantined,
    QuotaExceeded,
)
from penstock.processes import restarts
from penstock.serving.model import Model
from penstock.serving.pipeline import Stage, StagePipeline, make_model, stages_of
from penstock.serving.quotas import Quota, Quotas
from penstock.serving.traffic_split import MirrorRequest
from penstock.types import Request, RequestedOutput, Response, TensorSpec, from_array

OUTER = ModelConfig(
    name="two",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (-1,)),),
    outputs=(TensorSpec("z", "INT64", (-1,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MemoryPolicy(slab_bytes=1024, max_slabs=2, spill_bytes=1 << 16),
)
MIDDLE = (TensorSpec("y", "INT64", (-1,)),)
DELAY = BatchPolicy(8, is_dynamic=True, policies=(QueuePolicy(allow_timeout_override=True),))


def two_stages(config, first_options=None, last_options=None):
    first = replace(config, outputs=(*MIDDLE, NUM_TOKENS), options=first_options or {})
    last = replace(config, inputs=MIDDLE, options=last_options or {})
    # The seconds of a queue are the pipeline's; see `stages_of`.
    batching = replace(config.batching, preserve_ordering=False)
    return Stage("first", replace(first, batching=batching)), Stage(
        "last", replace(last, batching=batching)
    )


def run(scenario, config=OUTER, stages=None, *, closes=True, **settings):
    async def main():
        puppets = Puppets()
        made = stages or two_stages(config)
        pipeline = StagePipeline(config, made, start_life=puppets, **settings)
        starting = asyncio.ensure_future(pipeline.start())
        await puppets.step_all()
        await starting
        await scenario(pipeline, puppets)
        if closes:
            await close(pipeline, puppets)

    asyncio.run(main())


async def close(pipeline, puppets):
    closing = asyncio.ensure_future(pipeline.close())
    while not closing.done():
        await puppets.step_all()
    await closing


def ask(values, outputs=(), caller=b""):
    tensor = from_array("x", "INT64", np.array(values, np.int64))
    names = [RequestedOutput(name) for name in outputs]
    request = Request(RecordingSink(), [tensor], 0.0, outputs=names)
    request.caller = caller
    return request


def test_a_request_passes_all_stages_and_is_answered_under_the_name_of_the_whole():
    async def scenario(pipeline, puppets):
        request = ask([[1, 2, 3]])
        pipeline.submit(request)
        await puppets.step_all()
        (answer,) = request.sink.answers
        assert (answer.model_name, answer.model_version) == ("two", "1")
        assert request.sink.outputs[0]["z"].tolist() == [[1, 2, 3]]
        assert list(request.sink.outputs[0]) == ["z"]

    run(scenario)


def test_requests_share_a_batch_in_each_stage():
    async def scenario(pipeline, puppets):
        requests = [ask([[n, n]]) for n in range(5)]
        for request in requests:
            pipeline.submit(request)
        await puppets.step_all()
        assert [model.metrics.batch_sizes for model in pipeline.models] == [{5: 1}, {5: 1}]
        values = [request.sink.outputs[0]["z"].tolist() for request in requests]
        assert values == [[[n, n]] for n in range(5)]

    run(scenario)


def test_each_request_counts_once_and_stages_have_statistics_of_their_own():
    async def scenario(pipeline, puppets):
        for n in range(3):
            pipeline.submit(ask([[n], [n]]))
        await puppets.step_all()
        told = pipeline.metrics.statistics()
        assert told["inference_stats"]["success"]["count"] == 3
        assert (told["inference_count"], told["execution_count"]) == (6, 1)
        names = [model.metrics.name for model in pipeline.models]
        assert names == ["two:first", "two:last"]
        assert [model.metrics.num_success for model in pipeline.models] == [3, 3]
        notes = "\n".join(pipeline.explain().notes)
        assert "stage first" in notes and "stage last" in notes

    run(scenario)


def test_phases_of_the_whole_are_the_sums_of_the_stages():
    async def scenario(pipeline, puppets):
        pipeline.submit(ask([[1]]))
        await puppets.step_all()
        first, last = (model.metrics.phases for model in pipeline.models)
        whole = pipeline.metrics.phases
        assert whole["queue"].total == pytest.approx(first["queue"].total + last["queue"].total)
        computed = sum(first[f"compute_{each}"].total for each in ("input", "infer", "output"))
        expected = computed + last["compute_input"].total
        assert whole["compute_input"].total == pytest.approx(expected)
        assert whole["compute_infer"].total == pytest.approx(last["compute_infer"].total)
        assert {histogram.count for histogram in whole.values()} == {1}

    run(scenario)


@pytest.mark.parametrize(
    ("values", "outputs", "text"),
    [([1, 2], (), "unexpected shape"), ([[1]], ("y",), "unexpected inference output 'y'")],
)
def test_requests_that_do_not_fit_are_refused_before_any_stage(values, outputs, text):
    async def scenario(pipeline, puppets):
        request = ask(values, outputs)
        pipeline.submit(request)
        assert isinstance(request.sink.error, InvalidRequest)
        assert text in str(request.sink.error) and "'two'" in str(request.sink.error)
        assert pipeline.metrics.num_refused["invalid"] == 1

    run(scenario)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails_ends_only_its_own_request(stage):
    options = [None, None]
    options[stage] = {"null.fail_on": "7"}

    async def scenario(pipeline, puppets):
        bad, good = ask([[7]]), ask([[8]])
        pipeline.submit(bad)
        pipeline.submit(good)
        await puppets.step_all()
        assert isinstance(bad.sink.error, BackendFailed)
        assert good.sink.outputs[0]["z"].tolist() == [[8]]
        assert pipeline.metrics.num_failures["BACKEND"] == 1
        assert pipeline.metrics.num_success == 1

    run(scenario, stages=two_stages(OUTER, *options))


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_cancelled_request_ends_at_once_in_every_stage(num_steps):
    async def scenario(pipeline, puppets):
        request = ask([[1]])
        pipeline.submit(request)
        for _ in range(num_steps):
            await settle()
            for life in puppets.alive:
                life.step()
            await settle()
        is_done = request.is_done
        pipeline.cancel(request)
        assert request.sink.num_final == 1
        assert is_done or isinstance(request.sink.error, Cancelled)
        pipeline.cancel(request)
        await puppets.step_all()
        assert request.sink.num_final == 1
        assert pipeline.num_waiting == pipeline.num_running == 0

    run(scenario)


def test_a_request_whose_time_is_over_is_refused_by_the_next_stage():
    clock = FakeClock()

    async def scenario(pipeline, puppets):
        request = ask([[1]])
        request.timeout_s = 1.0
        pipeline.submit(request)
        await settle()
        clock.advance(1.5)
        await puppets.step_all()
        assert isinstance(request.sink.error, Overloaded)
        assert "timeout" in str(request.sink.error)
        assert pipeline.models[1].metrics.num_executions == 0

    run(scenario, replace(OUTER, batching=DELAY), clock=clock)


def test_answers_keep_the_order_of_arrival_if_asked():
    order = []

    class Sink(RecordingSink):
        def respond(self, request, answer, final):
            order.append(request.id)
            super().respond(request, answer, final)

    async def scenario(pipeline, puppets):
        good, bad = ask([[1]]), ask([[7, 7]])
        good.id, bad.id = "good", "bad"
        for request in (good, bad):
            request.sink = Sink()
            pipeline.submit(request)
        # The first stage refuses the second request while the first is still in the other stage.
        await puppets.step_all()
        assert order == ["good", "bad"]

    config = replace(OUTER, batching=replace(OUTER.batching, preserve_ordering=True))
    run(scenario, config, two_stages(config, {"null.fail_on": "7"}))


def test_a_mirror_counts_in_no_stage_as_a_request():
    async def scenario(pipeline, puppets):
        asked = ask([[1]])
        mirror = MirrorRequest(RecordingSink(), asked.inputs, asked.timings.received)
        pipeline.submit(mirror)
        await puppets.step_all()
        assert mirror.sink.error is None
        counts = [(each.metrics.num_success, each.metrics.batch_sizes) for each in pipeline.models]
        assert counts == [(0, {1: 1}), (0, {1: 1})]

    run(scenario)


def test_a_mirror_holds_no_answer_of_a_client_back():
    async def scenario(pipeline, puppets):
        asked, bad = ask([[1]]), ask([[7, 7]])
        mirror = MirrorRequest(RecordingSink(), asked.inputs, asked.timings.received)
        for request in (mirror, bad):
            pipeline.submit(request)
        # The first stage refuses the request while the mirror is still in the other stage.
        for _ in range(100):
            await settle()
            if puppets.alive[0].has_work:
                puppets.alive[0].step()
        assert bad.is_done and not mirror.is_done
        await puppets.step_all()
        assert mirror.is_done

    config = replace(OUTER, batching=replace(OUTER.batching, preserve_ordering=True))
    run(scenario, config, two_stages(config, {"null.fail_on": "7"}))


def test_a_key_fills_its_share_once_whatever_the_stage():
    quotas = Quotas({b"key": Quota(queue_share=0.5)})

    async def scenario(pipeline, puppets):
        requests = [ask([[n]], caller=b"key") for n in range(3)]
        for request in requests:
            pipeline.submit(request)
        assert isinstance(requests[2].sink.error, QuotaExceeded)
        await puppets.step_all()
        assert [request.sink.error for request in requests[:2]] == [None, None]
        again = ask([[4]], caller=b"key")
        pipeline.submit(again)
        await puppets.step_all()
        assert again.sink.error is None

    config = replace(OUTER, batching=replace(OUTER.batching, max_pending=4))
    run(scenario, config, quotas=quotas)


def test_drain_waits_for_every_stage():
    async def scenario(pipeline, puppets):
        request = ask([[1]])
        pipeline.submit(request)
        draining = asyncio.ensure_future(pipeline.drain())
        await settle()
        puppets.alive[0].step()
        await settle()
        assert not draining.done()
        await puppets.step_all()
        await draining
        assert request.is_done

    run(scenario)


def test_a_closed_pipeline_refuses_and_ends_what_it_has():
    async def scenario(pipeline, puppets):
        request, late = ask([[1]]), ask([[1]])
        pipeline.submit(request)
        await close(pipeline, puppets)
        assert request.sink.num_final == 1
        pipeline.submit(late)
        assert isinstance(late.sink.error, NotReady)

    run(scenario, closes=False)


def test_it_is_ready_when_every_stage_is():
    async def scenario(pipeline, puppets):
        assert pipeline.is_ready and pipeline.shown_state == "READY"
        assert [place.index for place in pipeline.processes] == [0, 1]
        # One instance of the network, as configured; that of the first stage does not count.
        assert num_ready(pipeline) == pipeline.config.num_instances == 1
        puppets.alive[0].kill()
        await settle()
        assert not pipeline.is_ready and pipeline.shown_state == "UNAVAILABLE"

    run(scenario)


def test_problems_of_all_stages_are_told_at_once():
    async def main():
        puppets = Puppets()
        stages = two_stages(OUTER, {"null.a_ms": "no"}, {"null.c_ms": "no"})
        pipeline = StagePipeline(OUTER, stages, start_life=puppets)
        starting = asyncio.ensure_future(pipeline.start())
        while not starting.done():
            await puppets.step_all()
        with pytest.raises(ConfigError) as caught:
            await starting
        assert {"null.a_ms", "null.c_ms"} == {
            name for name in ("null.a_ms", "null.c_ms") if name in str(caught.value)
        }
        await pipeline.close()

    asyncio.run(main())


STAGED = replace(
    OUTER,
    backend="pytorch",
    artifact="/models/m/config.json",
    inputs=(TensorSpec("TEXT", "BYTES", (1,)),),
    outputs=(TensorSpec("SCORES", "FP32", (3,)),),
    num_instances=2,
    preprocess=Preprocess("tokenizer", MIDDLE, Padding((PadAxis("y", 0),), (8, 16))),
    postprocess=Postprocess("classifier", (TensorSpec("logits", "FP32", (3,)),)),
    batching=BatchPolicy(8, is_dynamic=True, slo_latency_s=0.1, max_tokens=64),
)


def test_a_configuration_with_a_built_in_step_becomes_two_stages():
    before, network = (stage.config for stage in stages_of(STAGED))
    assert (before.backend, before.num_instances, before.device) == ("preprocess", 1, "cpu")
    assert before.outputs == (*MIDDLE, NUM_TOKENS)
    assert before.batching.slo_latency_s is None and before.batching.max_tokens is None
    assert network.inputs == MIDDLE and network.padding == STAGED.preprocess.padding
    assert network.num_instances == 2 and network.has_head and not network.is_staged
    assert network.batching.slo_latency_s == 0.1 and network.batching.max_tokens == 64


def test_a_model_without_a_built_in_step_has_one_stage():
    async def main():
        model = make_model(OUTER, Puppets())
        assert isinstance(model, Model)
        await model.close()

    asyncio.run(main())


class Chaos:
    """Requests, cancels and crashes in any order; then everything must have ended."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.sent = []

    async def __call__(self, pipeline, puppets):
        draw = self._random
        for number in range(draw.randint(1, 30)):
            action = draw.random()
            if action < 0.6:
                values = [[number * 10 + n for n in range(draw.randint(1, 3))]]
                request = ask(values * draw.randint(1, 2))
                if draw.random() < 0.2:
                    request.timeout_s = draw.choice([1e-6, 10.0])
                request.priority = draw.choice([0, 1, 2])
                self.sent.append((request, request.inputs[0].shape, values))
                pipeline.submit(request)
            elif action < 0.75 and self.sent:
                pipeline.cancel(draw.choice(self.sent)[0])
            elif action < 0.85 and puppets.alive:
                draw.choice(puppets.alive).kill()
            elif puppets.alive:
                draw.choice(puppets.alive).step()
            if draw.random() < 0.5:
                await settle(draw.randint(1, 6))
        for _ in range(500):
            if all(request.is_done for request, _, _ in self.sent):
                break
            await puppets.step_all()
            await asyncio.sleep(0.0005)
        await puppets.step_all()
        self.check(pipeline)

    def check(self, pipeline):
        for request, shape, values in self.sent:
            sink = request.sink
            assert sink.num_final == len(sink.answers) == 1, request
            if isinstance(sink.answers[0], Response):
                assert sink.outputs[0]["z"].tolist() == values * shape[0], "a foreign byte"
            else:
                ends = Cancelled | BackendFailed | Overloaded | Quarantined
                assert isinstance(sink.answers[0], ends), sink.answers[0]
        assert pipeline.num_waiting == pipeline.num_running == 0
        for model in pipeline.models:
            assert model.memory.pool.num_in_use == model.memory.extents.num_held == 0
        self.check_counts(pipeline.metrics)

    def check_counts(self, metrics):
        answers = [request.sink.answers[0] for request, _, _ in self.sent]
        assert metrics.num_success == sum(isinstance(a, Response) for a in answers)
        kinds = {"CANCELED": Cancelled, "BACKEND": BackendFailed, "REJECTED": Overloaded}
        for reason, kind in kinds.items():
            assert metrics.num_failures[reason] == sum(isinstance(a, kind) for a in answers)
        assert {histogram.count for histogram in metrics.phases.values()} == {metrics.num_success}


@pytest.mark.parametrize(
    "batching",
    [
        OUTER.batching,
        DELAY,
        replace(DELAY, preserve_ordering=True),
        replace(OUTER.batching, slo_latency_s=0.5),
        BatchPolicy(8, is_dynamic=True, num_priorities=2, default_priority=1),
    ],
    ids=["plain", "time-outs", "ordered", "slo", "priorities"],
)
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_law_every_admitted_request_ends_exactly_once_counted_once(batching, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)
        run(Chaos(seed), replace(OUTER, batching=batching))


def test_a_request_waits_for_a_network_that_is_scaled_to_zero_longer_than_the_slo():
    clock = FakeClock()
    config = replace(OUTER, batching=replace(OUTER.batching, slo_latency_s=0.2))
    first, last = two_stages(config)
    scaling = ScalingConfig(0, 1, scale_to_zero_s=5.0, cold_start_s=10.0)
    last = Stage("last", replace(last.config, scaling=scaling))

    async def scenario(pipeline, puppets):
        async def tick(count, works=True):
            for _ in range(count):
                clock.advance(0.5)
                for model in pipeline.models:
                    model.host.tick()
                await (puppets.step_all() if works else settle())

        await tick(12)
        assert len(puppets.alive) == 1 and pipeline.is_ready and pipeline.shown_state == "READY"
        request = ask([[1, 2]])
        pipeline.submit(request)
        (tokenizer,) = puppets.alive
        for _ in range(20):
            await settle()
            tokenizer.step()
        assert len(puppets.alive) == 2, "the network is started when its stage has a request"
        await tick(4, works=False)
        assert not request.is_done
        await puppets.step_all()
        assert request.sink.error is None
        assert request.sink.outputs[0]["z"].tolist() == [[1, 2]]

    run(scenario, config, (first, last), clock=clock)


def test_only_the_network_of_a_staged_model_is_scaled():
    config = replace(
        OUTER,
        artifact="/models/m/1/model.onnx",
        preprocess=Preprocess("tokenizer", MIDDLE),
        scaling=ScalingConfig(1, 4),
    )
    before, network = stages_of(config)
    assert not before.config.is_scaled and network.config.is_scaled
