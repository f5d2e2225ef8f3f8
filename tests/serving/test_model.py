"""The model with workers on strings: every request ends exactly once, with its own bytes."""

import asyncio
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink, settle
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from penstock.backends.null import NullRunner
from penstock.config import (
    BatchPolicy,
    MemoryPolicy,
    ModelConfig,
    PadAxis,
    Padding,
    QueuePolicy,
)
from penstock.errors import (
    BackendFailed,
    Cancelled,
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    PenstockError,
    Quarantined,
    QuotaExceeded,
    TooLarge,
)
from penstock.processes import restarts
from penstock.processes.channel import socket_pair
from penstock.serving import (
    quarantine,
    supervisor,
    warmups,
    worker,
    worker_load,
)
from penstock.serving.instance import Instance
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model import Model
from penstock.serving.quarantine import QUARANTINE_S
from penstock.serving.quotas import Quota, Quotas
from penstock.serving.reservation import Reservation
from penstock.serving.slab import Segment
from penstock.serving.traffic_split import MirrorRequest
from penstock.types import Request, RequestedOutput, Response, TensorSpec, from_array
from penstock.wire import frames

FIXED = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16),
)
VARIABLE = replace(
    FIXED,
    inputs=(TensorSpec("x", "INT64", (-1,)),),
    outputs=(TensorSpec("y", "INT64", (-1,)),),
    memory=MemoryPolicy(slab_bytes=1024, max_slabs=2, spill_bytes=1 << 16),
)
PADDED = replace(VARIABLE, padding=Padding((PadAxis("x", 0, -7),), (2, 16, 64)))
TEXT = replace(
    FIXED,
    inputs=(TensorSpec("x", "BYTES", (-1,)),),
    outputs=(TensorSpec("y", "BYTES", (-1,)),),
)
UNBATCHED = replace(VARIABLE, max_batch_size=0, batching=BatchPolicy(1))
MIXED = replace(
    FIXED,
    inputs=(TensorSpec("x", "INT64", (4,)), TensorSpec("s", "INT64", (-1,))),
    outputs=(TensorSpec("y", "INT64", (4,)), TensorSpec("t", "INT64", (-1,))),
)


# Two instances that share a worker, as on a GPU.
SHARED = replace(FIXED, device="cuda", num_instances=2)


def run(
    config: ModelConfig,
    scenario: Callable[[Model, Puppets], Awaitable[None]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets, clock=clock)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        await scenario(model, puppets)
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())


def ask(config: ModelConfig, *values: np.ndarray, outputs: tuple[str, ...] = ()) -> Request:
    tensors = [
        from_array(spec.name, spec.datatype, value)
        for spec, value in zip(config.inputs, values, strict=True)
    ]
    return Request(RecordingSink(), tensors, 0.0, outputs=[RequestedOutput(o) for o in outputs])


def canary(number: int, shape: tuple[int, ...], datatype: str = "INT64") -> np.ndarray:
    """Values that appear in no other request."""
    size = int(np.prod(shape))
    values = np.arange(size, dtype=np.int64) + number * 1000
    if datatype == "BYTES":
        return np.array([b"%d\0" % v * (v % 3) for v in values], dtype=object).reshape(shape)
    return values.reshape(shape)


def test_requests_of_one_turn_of_the_loop_share_a_batch():
    async def scenario(model, puppets):
        requests = [ask(FIXED, canary(i, (1, 4))) for i in range(5)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for i, request in enumerate(requests):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, 4)))
        assert model.metrics.num_executions == 1
        assert model.metrics.num_inferences == 5
        assert model.metrics.batch_sizes == {5: 1}

    run(FIXED, scenario)


def test_the_answer_has_the_outputs_asked_for_in_that_order():
    async def scenario(model, puppets):
        one, two = canary(1, (2, 4)), canary(2, (2, 3))
        request = ask(MIXED, one, two, outputs=("t", "y"))
        only = ask(MIXED, one, two, outputs=("y",))
        model.submit(request)
        model.submit(only)
        await puppets.step_all()
        assert list(request.sink.outputs[0]) == ["t", "y"]
        np.testing.assert_array_equal(request.sink.outputs[0]["t"], two)
        assert list(only.sink.outputs[0]) == ["y"]

    run(MIXED, scenario)


@pytest.mark.parametrize("config", [FIXED, VARIABLE, PADDED, TEXT, UNBATCHED, MIXED])
def test_every_kind_of_model_answers_with_the_right_bytes(config):
    async def scenario(model, puppets):
        sent = []
        for i in range(12):
            values = [
                canary(i, tuple(s if s > 0 else 1 + i % 3 for s in (1, *spec.shape)), spec.datatype)
                for spec in config.inputs
            ]
            if config.max_batch_size == 0:
                values = [value[0] for value in values]
            request = ask(config, *values)
            sent.append((request, values))
            model.submit(request)
        await puppets.step_all()
        for request, values in sent:
            (answer,) = request.sink.outputs
            for got, value in zip(answer.values(), values, strict=True):
                assert got.tolist() == value.tolist()
        assert model.memory.pool.num_in_use == model.memory.extents.num_held == 0

    run(config, scenario)


def test_lengths_of_one_bucket_share_a_batch_and_answers_keep_their_own():
    async def scenario(model, puppets):
        lengths = [3, 16, 5, 9, 40, 2]
        requests = [ask(PADDED, canary(n, (1, n))) for n in lengths]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for n, request in zip(lengths, requests, strict=True):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(n, (1, n)))
        assert model.metrics.padded_bytes == 8 * (4 * 16 + 64 + 2)
        assert model.metrics.padding_bytes == model.metrics.padded_bytes - 8 * sum(lengths)
        assert any("42 % of their bytes" in note for note in model.explain().notes)
        # 3, 16, 5 and 9 in the bucket of 16; 40 in that of 64; 2 in its own.
        assert model.metrics.batch_sizes == {4: 1, 1: 2}
        assert model.host.notes == ()

    run(PADDED, scenario)


BUDGET = replace(PADDED, batching=BatchPolicy(8, is_dynamic=True, max_tokens=64))


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        # 3, 16, 5, 9 and 16 are 16 each, of which 64 tokens hold four; 40 and 30 are 64 each.
        ({}, [(4, 64), (1, 16), (1, 64), (1, 64), (1, 65)]),
        # Their own lengths are 49 together; those of 40 and 30 are more than 64.
        ({"penstock.pack": "tokens"}, [(5, 49), (1, 40), (1, 30), (1, 65)]),
    ],
)
def test_batches_have_a_budget_of_tokens(options, batches):
    config = replace(BUDGET, options=options)

    async def scenario(model, puppets):
        lengths = [3, 16, 5, 9, 16, 40, 30, 65]
        requests = [ask(config, canary(n, (1, n))) for n in lengths]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for n, request in zip(lengths, requests, strict=True):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(n, (1, n)))
        ran = [(record.num_rows, record.num_tokens) for record in model.history.recent]
        assert sorted(ran) == sorted(batches)
        assert model.metrics.batch_tokens.total == sum(tokens for _, tokens in batches)
        assert {each.num_tokens for each in model.explain().recent} == {t for _, t in batches}

    run(config, scenario)


def test_with_a_budget_and_an_slo_times_are_learnt_by_tokens():
    policy = replace(BUDGET.batching, slo_latency_s=10.0)
    config = replace(BUDGET, batching=policy, options={"penstock.pack": "tokens"})

    async def scenario(model, puppets):
        paces = model.batcher.paces
        assert {geometry.row_shapes for geometry in paces} == {((2,),), ((16,),), ((64,),)}
        assert all(list(pace.times.means_s)[-1] == 64 for pace in paces.values())
        assert all(pace.times.is_known for pace in paces.values()), "from the warm-up"
        for n in (40, 30, 20):
            model.submit(ask(config, canary(n, (1, n))))
        await puppets.step_all()
        assert [record.num_tokens for record in model.history.recent] == [40, 50]
        assert model.explain().policy["max_tokens"] == "64"

    run(config, scenario)


def test_no_more_than_the_budget_is_warmed_up():
    """More might be more than there is memory for."""

    def warmed(config):
        proof = frames.Proof()
        _, by_bucket = warmups.warm_up_all(config, NullRunner(config), proof)
        return {bucket: list(timings) for bucket, timings in by_bucket.items()}

    assert warmed(PADDED) == {bucket: [1, 2, 4, 8] for bucket in (2, 16, 64)}
    assert warmed(BUDGET) == {2: [1, 2, 4, 8], 16: [1, 2, 4], 64: [1]}
    three = replace(BUDGET.batching, max_tokens=3 * 64)
    assert warmed(replace(BUDGET, batching=three))[64] == [1, 2, 3]


@pytest.mark.parametrize(("options", "num_runs"), [({"null.copy_ms": "0"}, 2), ({}, 1)])
def test_of_a_gpu_a_long_first_run_is_no_batch_time(monkeypatch, options, num_runs):
    """Kernels are compiled, tried out and captured then; on a CPU what is long stays long."""
    monkeypatch.setattr("penstock.serving.warmups.LONG_WARM_UP_S", 0.0)
    config = replace(FIXED, options=options)
    runner = NullRunner(config)
    ran: list[int] = []
    start = runner.start

    def counted(batch):
        ran.append(batch.num_rows)
        return start(batch)

    monkeypatch.setattr(runner, "start", counted)
    timings, _ = warmups.warm_up_all(config, runner, frames.Proof())
    assert ran == [rows for rows in timings for _ in range(num_runs)]


def test_what_fits_no_bucket_runs_with_others_of_its_shape():
    async def scenario(model, puppets):
        requests = [ask(PADDED, canary(i, (1, n))) for i, n in enumerate([65, 65, 66])]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for i, (n, request) in enumerate(zip([65, 65, 66], requests, strict=True)):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, n)))
        assert model.metrics.batch_sizes == {2: 1, 1: 1}

    run(PADDED, scenario)


@pytest.mark.parametrize("slo_s", [None, 1.0])
def test_a_model_whose_rows_influence_each_other_runs_one_request_at_a_time(tmp_path, slo_s):
    path = tmp_path / "model.py"
    path.write_text("def infer(inputs):\n    return {'y': inputs['x'].cumsum(axis=0)}\n")
    config = replace(
        FIXED,
        backend="python",
        artifact=str(path),
        padding=Padding((PadAxis("x", 0),)),
        batching=BatchPolicy(8, is_dynamic=True, slo_latency_s=slo_s),
    )

    async def scenario(model, puppets):
        requests = [ask(config, canary(i, (1, 4))) for i in range(5)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for i, request in enumerate(requests):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, 4)))
        assert model.metrics.batch_sizes == {1: 5}
        served, padded = model.host.notes
        assert "one request at a time: answers depend on what else is in the batch" in served
        assert padded == "not padded: the model is not batched"

    run(config, scenario)


def test_an_slo_that_was_not_kept_is_told_at_load(caplog):
    config = replace(FIXED, unkept_slo="p99 < 20ms (missed)")

    async def scenario(model, puppets):
        [note] = model.host.notes
        assert note.startswith("the evidence says that the SLO was not kept: p99 < 20ms (missed)")

    with caplog.at_level("WARNING"):
        run(config, scenario)
    assert sum("serving without it" in each.getMessage() for each in caplog.records) == 1


def test_an_unbatchable_model_under_an_slo_keeps_what_warm_up_measured(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "import time\n"
        "def infer(inputs):\n"
        "    time.sleep(0.005)\n"
        "    return {'y': inputs['x'].cumsum(axis=0)}\n"
    )
    config = replace(
        FIXED,
        backend="python",
        artifact=str(path),
        batching=BatchPolicy(8, is_dynamic=True, slo_latency_s=0.02),
    )

    async def scenario(model, puppets):
        requests = [ask(config, canary(i, (1, 4))) for i in range(50)]
        for request in requests:
            model.submit(request)
        assert sum(isinstance(r.sink.error, Overloaded) for r in requests) >= 40
        await puppets.step_all()

    run(config, scenario)


def test_tensors_without_elements_are_answered_on_a_padded_model():
    config = replace(
        PADDED,
        inputs=(TensorSpec("x", "INT64", (-1, -1)),),
        outputs=(TensorSpec("y", "INT64", (-1, -1)),),
    )

    async def scenario(model, puppets):
        shapes = [(1, 3, 0), (1, 0, 3), (2, 3, 5), (1, 3, 20)]
        requests = [ask(config, canary(i, shape)) for i, shape in enumerate(shapes)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for i, (shape, request) in enumerate(zip(shapes, requests, strict=True)):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, shape))
        assert model.num_waiting == model.memory.pool.num_in_use == 0

    run(config, scenario)


def test_a_request_that_cannot_be_placed_ends_with_an_error():
    async def scenario(model, puppets):
        request = ask(FIXED, canary(1, (1, 4)))
        # Characters, which cannot be copied into a slab of bytes.
        request.inputs[0].data = memoryview(bytes(request.inputs[0].data)).cast("c")
        model.submit(request)
        assert isinstance(request.sink.error, BackendFailed)
        good = ask(FIXED, canary(2, (1, 4)))
        model.submit(good)
        await puppets.step_all()
        np.testing.assert_array_equal(good.sink.outputs[0]["y"], canary(2, (1, 4)))
        assert model.num_waiting == model.memory.pool.num_in_use == 0

    run(FIXED, scenario)


def test_a_worker_that_comes_back_pads_as_was_agreed(monkeypatch):
    async def scenario(model, puppets):
        monkeypatch.setattr(worker_load, "prove", lambda *_: frames.Proof(unpadded="out of memory"))
        puppets.alive[0].kill()
        await puppets.step_all()
        await asyncio.sleep(0.01)
        await puppets.step_all()
        request = ask(PADDED, canary(1, (1, 3)))
        model.submit(request)
        await puppets.step_all()
        np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(1, (1, 3)))

    run(PADDED, scenario)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("{'y': x.astype('f8')}", "output 'y': numpy float64, expected int64 for INT64"),
        ("{'y': x[:, :2]}", "output 'y': shape [1, 2], expected [1, 4]"),
        ("{'z': x}", "the model gave no output 'y'; it gave ['z']"),
        ("{'y': x.__iadd__(1)}", "read-only"),
        ("__import__('sys').exit(3)", "the model's code ended the process: sys.exit(3)"),
    ],
)
def test_what_would_fail_every_request_fails_the_load(tmp_path, answer, text):
    path = tmp_path / "model.py"
    path.write_text(f"def infer(inputs):\n    x = inputs['x']\n    return {answer}\n")
    config = replace(FIXED, backend="python", artifact=str(path))
    with pytest.raises(ConfigError, match=re.escape(text)):
        run(config, lambda model, puppets: None)


def test_when_slabs_are_full_requests_keep_their_bytes_and_are_placed_later():
    async def scenario(model, puppets):
        requests = [ask(FIXED, canary(i, (3, 4))) for i in range(40)]
        for request in requests:
            model.submit(request)
        assert model.memory.pool.num_in_use == 2
        await puppets.step_all()
        for i, request in enumerate(requests):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (3, 4)))

    run(FIXED, scenario)


def test_invalid_requests_are_answered_at_once_and_disturb_nobody():
    async def scenario(model, puppets):
        good, bad = ask(FIXED, canary(1, (1, 4))), ask(FIXED, canary(2, (1, 5)))
        model.submit(good)
        model.submit(bad)
        assert isinstance(bad.sink.error, InvalidRequest)
        await puppets.step_all()
        assert good.sink.num_final == 1

    run(FIXED, scenario)


def test_inputs_larger_than_the_spill_are_refused_by_name():
    async def scenario(model, puppets):
        request = ask(UNBATCHED, canary(1, (1 << 14,)))
        model.submit(request)
        assert isinstance(request.sink.error, TooLarge)
        assert "penstock.spill_bytes" in str(request.sink.error)

    run(UNBATCHED, scenario)


LABELS = tuple(
    f"n{number:08d} a class of ImageNet-21k, with its synonyms" for number in range(21841)
)
LARGE = {
    "labels": replace(FIXED, outputs=(TensorSpec("y", "INT64", (4,), labels=LABELS),)),
    "parameters": replace(FIXED, options={f"parameter {n}": "v" * 20 for n in range(50_000)}),
    "inputs": replace(
        FIXED,
        inputs=tuple(TensorSpec(f"input {n}", "INT64", (4,)) for n in range(20_000)),
        max_batch_size=2,
        batching=BatchPolicy(2),
        memory=MemoryPolicy(max_slabs=1, spill_bytes=1 << 20),
    ),
}


@pytest.mark.parametrize("config", LARGE.values(), ids=LARGE.keys())
def test_configurations_larger_than_a_frame_are_loaded(config):
    assert len(frames.encode(frames.LoadModel(1, config))) > 300_000

    async def scenario(model, puppets):
        request = ask(config, *[canary(number, (1, 4)) for number in range(len(config.inputs))])
        model.submit(request)
        await puppets.step_all()
        np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(0, (1, 4)))

    run(config, scenario)


def test_an_answer_whose_description_fits_no_frame_fails_and_the_worker_lives(tmp_path):
    names = [f"{'n' * 200}{number}" for number in range(6000)]
    path = tmp_path / "model.py"
    path.write_text(
        "def infer(inputs):\n    x = inputs['x'].ravel()\n"
        "    names = ['n' * 200 + str(number) for number in range(6000)]\n"
        "    return {name: x for name in names}\n"
    )
    config = replace(
        UNBATCHED,
        backend="python",
        artifact=str(path),
        outputs=tuple(TensorSpec(name, "INT64", (-1,)) for name in names),
        memory=MemoryPolicy(spill_bytes=1 << 20),
    )

    async def scenario(model, puppets):
        request = ask(config, canary(1, (4,)))
        model.submit(request)
        await puppets.step_all()
        assert "does not fit a frame" in str(request.sink.error)
        assert model.metrics.num_restarts == 0

    run(config, scenario)


def test_a_load_with_thousands_of_problems_tells_the_first_ones(monkeypatch):
    def load(config):
        raise ConfigError([f"input {number}: {'x' * 200}" for number in range(20_000)])

    monkeypatch.setattr("penstock.serving.worker_load.backend", lambda name: load)
    with pytest.raises(ConfigError) as raised:
        run(FIXED, lambda model, puppets: None)
    assert raised.value.problems[0].startswith("input 0: xxx")
    assert raised.value.problems[-1] == "19900 more problems"


class Insistent(RecordingSink):
    """Sends the next request as soon as it has the answer to one."""

    def __init__(self, model: Model, requests: list[Request]) -> None:
        super().__init__()
        self._model = model
        self._requests = requests

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        super().respond(request, answer, final)
        if self._requests:
            request = self._requests.pop()
            request.sink = self
            self._model.submit(request)


def test_a_request_sent_on_an_answer_finds_the_room_of_that_answer():
    memory = MemoryPolicy(slab_bytes=1024, max_slabs=2, spill_bytes=1024)
    config = replace(VARIABLE, memory=memory)

    async def scenario(model, puppets):
        sink = Insistent(model, [ask(config, canary(i, (1, 100))) for i in range(3)])
        first = ask(config, canary(3, (1, 100)))
        first.sink = sink
        model.submit(first)
        await puppets.step_all()
        assert [answer["y"].tolist() for answer in sink.outputs] == [
            canary(i, (1, 100)).tolist() for i in (3, 2, 1, 0)
        ]

    run(config, scenario)


def test_outputs_larger_than_the_spill_fail_only_their_request():
    config = replace(
        FIXED,
        outputs=(TensorSpec("y", "INT64", (-1,)), TensorSpec("z", "FP64", (100_000,))),
        memory=MemoryPolicy(spill_bytes=1 << 12),
        max_batch_size=0,
        batching=BatchPolicy(1),
    )

    async def scenario(model, puppets):
        request = ask(config, canary(1, (4,)))
        model.submit(request)
        await puppets.step_all()
        assert isinstance(request.sink.error, BackendFailed)
        assert "do not fit the spill segment" in str(request.sink.error)
        assert model.memory.extents.num_held == 0

    run(config, scenario)


def test_a_cancelled_request_that_waits_never_runs():
    async def scenario(model, puppets):
        first, second = ask(FIXED, canary(1, (1, 4))), ask(FIXED, canary(2, (1, 4)))
        model.submit(first)
        await settle()
        model.submit(second)
        model.cancel(second)
        model.cancel(second)
        await puppets.step_all()
        assert isinstance(second.sink.error, Cancelled) and second.sink.num_final == 1
        assert first.sink.num_final == 1
        assert model.metrics.num_inferences == 1

    run(FIXED, scenario)


def test_holes_left_by_cancelled_requests_are_skipped():
    async def scenario(model, puppets):
        requests = [ask(FIXED, canary(i, (1, 4))) for i in range(6)]
        for request in requests:
            model.submit(request)
        for index in (0, 2, 3):
            model.cancel(requests[index])
        await puppets.step_all()
        for index in (1, 4, 5):
            (answer,) = requests[index].sink.outputs
            np.testing.assert_array_equal(answer["y"], canary(index, (1, 4)))
        assert model.metrics.batch_sizes == {3: 1}

    run(FIXED, scenario)


def test_after_a_death_the_batch_runs_again_one_by_one():
    async def scenario(model, puppets):
        requests = [ask(FIXED, canary(i, (1, 4))) for i in range(4)]
        for request in requests:
            model.submit(request)
        await settle()
        puppets.alive[0].kill()
        await puppets.step_all()
        for i, request in enumerate(requests):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, 4)))
        assert model.metrics.batch_sizes == {1: 4}
        assert model.metrics.num_restarts == 1

    run(FIXED, scenario)


def test_answers_sent_before_the_death_count():
    async def scenario(model, puppets):
        request = ask(FIXED, canary(1, (1, 4)))
        model.submit(request)
        await settle()
        while puppets.alive[0].has_work:
            puppets.alive[0].step()  # computes and answers; the core has not read it yet
        puppets.alive[0].kill()
        await puppets.step_all()
        assert request.sink.num_final == 1
        assert model.metrics.batch_sizes == {1: 1}

    run(FIXED, scenario)


def test_who_kills_its_worker_twice_fails_alone(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)

    async def scenario(model, puppets):
        requests = [ask(FIXED, canary(i, (1, 4))) for i in range(3)]
        for request in requests:
            model.submit(request)
        await settle()
        puppets.alive[0].kill()
        await settle()
        while not puppets.alive[0].has_work or not model.workers[0].batches:
            puppets.alive[0].step()
            await settle()
        puppets.alive[0].kill("was killed by SIGSEGV")
        while not all(request.is_done for request in requests):
            await puppets.step_all()
            await asyncio.sleep(0.001)
        assert isinstance(requests[0].sink.error, BackendFailed)
        assert "was killed by SIGSEGV while running it, twice" in str(requests[0].sink.error)
        assert [r.sink.error for r in requests[1:]] == [None, None]
        assert model.memory.pool.num_in_use == 0

    run(FIXED, scenario)


def test_a_batch_that_finds_no_room_beside_others_waits_for_them():
    config = replace(TEXT, num_instances=2, memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16))
    large = np.array([[b"x" * 40_000]], object)

    async def scenario(model, puppets):
        requests = [ask(config, large) for _ in range(4)]
        for request in requests:
            model.submit(request)
            await settle()
        assert model.num_running == 1 and model.num_waiting == 3
        await puppets.step_all()
        assert [request.sink.error for request in requests] == [None] * 4
        assert model.memory.extents.num_held == 0

    run(config, scenario)


class TestSharedWorker:
    def test_it_has_as_many_batches_as_instances(self):
        async def scenario(model, puppets):
            requests = [ask(SHARED, canary(i, (1, 4))) for i in range(3)]
            for request in requests:
                model.submit(request)
                await settle()
            assert len(puppets.alive) == 1
            (worker,) = model.workers
            assert [len(flight.requests) for flight in worker.batches] == [1, 1]
            assert model.num_waiting == 1 and model.num_running == 2
            await puppets.step_all()
            for i, request in enumerate(requests):
                np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, 4)))
            assert model.memory.pool.num_in_use == 0

        run(SHARED, scenario)

    def test_after_a_death_all_its_batches_run_again(self):
        async def scenario(model, puppets):
            requests = [ask(SHARED, canary(i, (1, 4))) for i in range(2)]
            for request in requests:
                model.submit(request)
                await settle()
            puppets.alive[0].kill()
            await puppets.step_all()
            for i, request in enumerate(requests):
                np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, 4)))
            assert model.metrics.num_restarts == 1

        run(SHARED, scenario)

    def test_who_runs_again_has_the_worker_for_itself(self, monkeypatch):
        monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)

        async def scenario(model, puppets):
            requests = [ask(SHARED, canary(i, (1, 4))) for i in range(3)]
            for request in requests[:2]:
                model.submit(request)
                await settle()
            puppets.alive[0].kill()
            await settle()
            model.submit(requests[2])
            while not puppets.alive[0].has_work or not model.workers[0].batches:
                puppets.alive[0].step()
                await settle()
            (flight,) = model.workers[0].batches
            assert flight.requests == [requests[0]]
            puppets.alive[0].kill("was killed by SIGSEGV")
            while not all(request.is_done for request in requests):
                await puppets.step_all()
                await asyncio.sleep(0.001)
            assert isinstance(requests[0].sink.error, BackendFailed)
            assert [r.sink.error for r in requests[1:]] == [None, None]

        run(SHARED, scenario)

    def test_nobody_joins_who_runs_again(self):
        async def scenario(model, puppets):
            first, second = (ask(SHARED, canary(i, (1, 4))) for i in range(2))
            model.submit(first)
            await settle()
            puppets.alive[0].kill()
            await settle()
            while not model.workers[0].batches:
                puppets.alive[0].step()
                await settle()
            model.submit(second)
            await settle()
            assert [flight.requests for flight in model.workers[0].batches] == [[first]]
            await puppets.step_all()
            assert [first.sink.error, second.sink.error] == [None, None]

        run(SHARED, scenario)

    def test_all_answers_sent_before_the_death_count(self):
        config = replace(SHARED, num_instances=4)

        async def scenario(model, puppets):
            requests = [ask(config, canary(i, (1, 4))) for i in range(4)]
            for request in requests:
                model.submit(request)
                await settle()
            while puppets.alive[0].has_work:
                puppets.alive[0].step()  # Computes and answers; the core has not read it yet.
            puppets.alive[0].kill()
            await puppets.step_all()
            assert [request.sink.num_final for request in requests] == [1] * 4
            assert [request.num_deaths for request in requests] == [0] * 4

        run(config, scenario)

    def test_a_worker_whose_device_is_lost_ends_without_an_answer(self, monkeypatch):
        """So that its batches run again elsewhere, and whoever takes it away twice is blamed."""
        died: list[bool] = []
        monkeypatch.setattr(worker_load, "backend", lambda name: Losable)
        config = replace(FIXED, options={"null.fail_on": "1000"})
        with worker_alone(config, lambda: died.append(True)) as run_batch:
            for Losable.lost in (False, True):
                run_batch()
                assert died == [True] * Losable.lost

    @pytest.mark.parametrize("has_own_process", [True, False], ids=["process", "thread"])
    def test_a_worker_that_keeps_its_memory_asks_to_be_replaced_once(
        self, monkeypatch, has_own_process
    ):
        """Before it answers, or the core would send it the next batch."""
        monkeypatch.setattr(worker, "MemoryLimit", FullMemory)
        config = replace(FIXED, options={"null.fail_on": "1000"}, memory_bytes=1 << 30)
        die = (lambda: None) if has_own_process else None
        with worker_alone(config, die) as run_batch:
            kinds = [[type(frame) for frame in run_batch()] for _ in range(2)]
        leaves = [frames.Leaving] if has_own_process else []
        assert kinds == [[*leaves, frames.BatchFailed], [frames.BatchFailed]]

    def test_answers_of_batches_that_run_ahead_are_those_of_their_requests(self):
        """In a thread of its own, with the thread that waits."""
        config = replace(SHARED, options={"null.copy_ms": "1", "null.a_ms": "1"})

        async def main() -> None:
            model = Model(config, start_life=supervisor.ThreadLife)
            await model.start()
            requests = [ask(config, canary(i, (1, 4))) for i in range(40)]
            for request in requests:
                model.submit(request)
                await asyncio.sleep(0.0005)
            await model.drain()
            for i, request in enumerate(requests):
                np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, 4)))
                assert request.sink.num_final == 1
            await model.close()

        asyncio.run(main())


def test_when_the_model_raises_only_the_guilty_request_fails():
    config = replace(FIXED, options={"null.fail_on": "2000"})

    async def scenario(model, puppets):
        requests = [ask(config, canary(i, (1, 4))) for i in range(4)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        failed = [i for i, request in enumerate(requests) if request.sink.error is not None]
        assert failed == [2]
        assert "a row starts with 2000" in str(requests[2].sink.error)
        assert model.metrics.num_restarts == 0

    run(config, scenario)


RAISES = [
    ("raise ValueError('not ascii: caf\\udce9')", "ValueError: not ascii: caf\\udce9"),
    ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", "E: <no text"),
    ("raise SystemExit(3)", "sys.exit(3)"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("raise StopIteration", "StopIteration"),
    ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    ("return {'\\ud800': x, 'z': 3}", "output 'z'"),
    ("return {'\\ud800': x}", "no output 'y'"),
    ("return {'y': [x]}", "output 'y'"),
]


def check_only_the_third_fails(path, text):
    """Of four requests to a Python model; the worker lives."""
    config = replace(FIXED, backend="python", artifact=str(path))

    async def scenario(model, puppets):
        requests = [ask(config, canary(i, (1, 4))) for i in range(4)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        assert [request.sink.error is not None for request in requests] == [0, 0, 1, 0]
        assert text in str(requests[2].sink.error)
        assert model.metrics.num_restarts == 0

    run(config, scenario)


@pytest.mark.parametrize(("code", "text"), RAISES)
def test_whatever_model_code_raises_is_an_answer_and_the_worker_lives(tmp_path, code, text):
    path = tmp_path / "model.py"
    path.write_text(
        f"def infer(inputs):\n    x = inputs['x']\n    if (x == 2000).any():\n"
        f"        {code}\n    return {{'y': x}}\n"
    )
    check_only_the_third_fails(path, text)


TRITON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, x):
        if (x == 2000).any():
            CODE
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("return pb_utils.InferenceResponse([], pb_utils.TritonError('caf\\udce9'))", "caf\\udce9"),
        ("raise pb_utils.TritonModelException('caf\\udce9')", "caf\\udce9"),
        ("raise SystemExit('bye')", "sys.exit(bye)"),
    ],
)
def test_whatever_a_triton_model_raises_is_an_answer(tmp_path, code, text):
    path = tmp_path / "model.py"
    path.write_text(TRITON_MODEL.replace("CODE", code))
    check_only_the_third_fails(path, text)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise SystemExit(3)", "line 1: the model's code ended the process: sys.exit(3)"),
        ("raise KeyboardInterrupt", "line 1: KeyboardInterrupt"),
        ("raise GeneratorExit('x')", "line 1: GeneratorExit: x"),
        ("raise ValueError('caf\\udce9')", "line 1: ValueError: caf\\udce9"),
        ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", "line 1: E: <no text"),
    ],
)
def test_whatever_model_code_raises_while_it_is_loaded_is_the_reason(tmp_path, code, text):
    path = tmp_path / "model.py"
    path.write_text(f"{code}\n")
    config = replace(FIXED, backend="python", artifact=str(path))
    with pytest.raises(ConfigError, match=re.escape(text)):
        run(config, lambda model, puppets: None)


def test_queue_limits_and_timeouts_answer_in_tritons_words():
    policy = QueuePolicy(max_queue_size=1, default_timeout_s=0.01)
    config = replace(FIXED, batching=BatchPolicy(8, is_dynamic=True, policies=(policy,)))
    clock = FakeClock()

    async def scenario(model, puppets):
        running, waiting, refused = (ask(config, canary(i, (1, 4))) for i in range(3))
        model.submit(running)
        await settle()
        model.submit(waiting)
        model.submit(refused)
        assert isinstance(refused.sink.error, Overloaded)
        assert "Exceeds maximum queue size" in str(refused.sink.error)
        clock.advance(0.02)
        model.readiness.tick()
        assert "Request timeout expired" in str(waiting.sink.error)
        await puppets.step_all()
        assert running.sink.error is None
        assert model.metrics.num_failures["REJECTED"] == 2

    run(config, scenario, clock)


SLO = replace(FIXED, batching=replace(FIXED.batching, slo_latency_s=0.05))


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    """Time passes only while a `null` model computes."""
    made = FakeClock()
    fake = SimpleNamespace(perf_counter=made, sleep=made.advance)
    for module in ("executor", "warmups", "worker_load"):
        monkeypatch.setattr(f"penstock.serving.{module}.time", fake)
    monkeypatch.setattr("penstock.backends.null.time", fake)
    return made


def test_slo_mode_refuses_at_once_what_would_be_late(clock):
    config = replace(SLO, options={"null.a_ms": "15"})

    async def scenario(model, puppets):
        requests = [ask(config, canary(i, (1, 4))) for i in range(40)]
        for request in requests:
            model.submit(request)
        refused = [request for request in requests if request.is_done]
        assert 8 <= len(refused) <= 32
        assert all(isinstance(request.sink.error, Overloaded) for request in refused)
        await puppets.step_all()
        assert all(request.sink.num_final == 1 for request in requests)
        assert model.metrics.num_failures["REJECTED"] >= len(refused)
        assert model.num_waiting == model.num_running == model.memory.pool.num_in_use == 0

    run(config, scenario, clock)


def test_slo_mode_refuses_those_whose_time_is_up(clock):
    async def scenario(model, puppets):
        running, waiting = ask(SLO, canary(1, (1, 4))), ask(SLO, canary(2, (1, 4)))
        model.submit(running)
        await settle()
        model.submit(waiting)
        clock.advance(0.1)
        model.readiness.tick()
        assert "Request timeout expired" in str(waiting.sink.error)
        await puppets.step_all()
        assert running.sink.error is None

    run(SLO, scenario, clock)


def test_slo_mode_survives_failing_batches_and_dying_workers(clock):
    config = replace(SLO, options={"null.fail_on": "2000"}, num_instances=2)

    async def scenario(model, puppets):
        for number in (1, 2, 3, 4):
            request = ask(config, canary(number, (1, 4)))
            model.submit(request)
            await puppets.step_all()
            assert isinstance(request.sink.error, BackendFailed) == (number == 2)
        lost = ask(config, canary(5, (1, 4)))
        model.submit(lost)
        await settle()
        puppets.alive[0].kill()
        await puppets.step_all()
        assert lost.sink.error is None
        after = ask(config, canary(6, (1, 4)))
        model.submit(after)
        await puppets.step_all()
        assert after.sink.error is None

    run(config, scenario, clock)


def test_preserve_ordering_holds_answers_back():
    batching = BatchPolicy(1, is_dynamic=True, preserve_ordering=True)
    config = replace(FIXED, max_batch_size=1, batching=batching, num_instances=2)
    order: list[int] = []

    class Noting(RecordingSink):
        def respond(self, request, answer, final):
            super().respond(request, answer, final)
            order.append(int(request.id))

    async def scenario(model, puppets):
        requests = []
        for i in range(2):
            request = ask(config, canary(i, (1, 4)))
            request.sink, request.id = Noting(), str(i)
            requests.append(request)
            model.submit(request)
        await settle()
        while puppets.alive[1].has_work:
            puppets.alive[1].step()
        await settle()
        assert order == []
        await puppets.step_all()
        assert order == [0, 1]
        for i, request in enumerate(requests):
            np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(i, (1, 4)))

    run(config, scenario)


def test_a_mirror_holds_no_answer_of_a_client_back():
    batching = BatchPolicy(1, is_dynamic=True, preserve_ordering=True)
    config = replace(FIXED, max_batch_size=1, batching=batching, num_instances=2)

    async def scenario(model, puppets):
        asked = ask(config, canary(0, (1, 4)))
        mirror = MirrorRequest(RecordingSink(), asked.inputs, asked.timings.received)
        request = ask(config, canary(1, (1, 4)))
        for each in (mirror, request):
            model.submit(each)
        await settle()
        while puppets.alive[1].has_work:
            puppets.alive[1].step()
        await settle()
        assert request.is_done and not mirror.is_done
        await puppets.step_all()
        assert mirror.is_done

    run(config, scenario)


def test_a_model_that_cannot_load_says_why():
    async def main() -> None:
        puppets = Puppets()
        config = replace(FIXED, options={"null.a_ms": "soon", "null.typo": "1"})
        model = Model(config, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        with pytest.raises(ConfigError, match="'soon' is not a number.*null.typo: unknown"):
            await starting
        request = ask(FIXED, canary(1, (1, 4)))
        model.submit(request)
        assert isinstance(request.sink.error, NotReady)
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()

    asyncio.run(main())


def test_three_deaths_while_loading_fail_the_load(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)

    async def main() -> None:
        puppets = Puppets()
        model = Model(FIXED, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        for _ in range(3):
            while not puppets.alive:
                await asyncio.sleep(0.001)
            puppets.alive[0].kill()
            await settle()
        with pytest.raises(ConfigError, match="was killed by SIGKILL while loading, 3 times"):
            await starting
        await model.close()

    asyncio.run(main())


def test_close_answers_everything_that_still_waits():
    async def main() -> None:
        puppets = Puppets()
        model = Model(FIXED, start_life=puppets)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        running, waiting = ask(FIXED, canary(1, (1, 4))), ask(FIXED, canary(2, (1, 4)))
        model.submit(running)
        await settle()
        model.submit(waiting)
        closing = asyncio.ensure_future(model.close())
        await settle()
        assert isinstance(waiting.sink.error, NotReady)
        while not closing.done():
            await puppets.step_all()
        assert running.sink.error is None and running.sink.num_final == 1

    asyncio.run(main())


def test_drain_returns_when_the_last_answer_is_out():
    async def scenario(model, puppets):
        request = ask(FIXED, canary(1, (1, 4)))
        model.submit(request)
        draining = asyncio.ensure_future(model.drain())
        await settle()
        assert not draining.done()
        await puppets.step_all()
        await draining
        assert request.is_done

    run(FIXED, scenario)


def test_drain_returns_when_the_last_request_cannot_be_sent():
    batching = BatchPolicy(8, is_dynamic=True, max_queue_delay_s=0.01)
    config = replace(VARIABLE, batching=batching)

    async def scenario(model, puppets):
        request = ask(config, canary(1, (1, 3)))
        request.parameters = {"p": "x" * (frames.MAX_FRAME_BYTES // 2)}
        model.submit(request)
        async with asyncio.timeout(60):
            await model.drain()
        assert isinstance(request.sink.error, TooLarge)

    run(config, scenario)


class KeepingSink(RecordingSink):
    """Keeps the memory of some answers for a while, as one whose client reads slowly."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._kept: list[tuple[memoryview, bytes]] = []
        self._release: Callable[[], None] | None = None

    def respond(self, request, answer, final) -> None:
        super().respond(request, answer, final)
        keeper = answer.keeper if isinstance(answer, Response) else None
        if keeper is not None and self._chance.random() < 0.3:
            self._kept = [(each.data, bytes(each.data)) for each in answer.outputs]
            self._release = keeper.keep(request)

    def release(self) -> None:
        for view, data in self._kept:
            assert view == data, "kept memory was given to another request"
        self._kept = []
        if self._release is not None:
            self._release()
            self._release = None


@dataclass
class Receiving:
    """A request whose bytes arrive in the memory that was reserved for it."""

    request: Request
    values: list[np.ndarray]
    reservation: Reservation
    num_received: int = 0

    def receive(self, num_bytes: int) -> None:
        """Fill from the front, as the connection does."""
        start, end = self.num_received, self.num_received + num_bytes
        for tensor, view in zip(self.request.inputs, self.reservation.views, strict=True):
            a, b = max(0, start), max(0, min(end, len(view)))
            if a < b:
                view[a:b] = memoryview(tensor.data)[a:b]
            start -= len(view)
            end -= len(view)
        self.num_received += num_bytes

    def submit(self, model: Model) -> None:
        self.receive(1 << 20)
        for tensor, view in zip(self.request.inputs, self.reservation.views, strict=True):
            tensor.data = view
        model.submit(self.request, self.reservation)
        self.reservation.drop()


class Chaos:
    """Random requests, cancels, steps and deaths; then everything must come to an end. Some
    requests are received into shared memory, and may be given up before they are complete."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.chance = random.Random(seed)
        self.num_made = 0
        self.sent: list[tuple[Request, list[np.ndarray]]] = []
        self.receiving: list[Receiving] = []
        self.forms: dict[object, object] = {}

    def send(self, model: Model) -> None:
        number = self.num_made
        self.num_made += 1
        rows = self.chance.randint(1, 4)
        values = []
        for spec in self.config.inputs:
            shape = tuple(s if s > 0 else self.chance.choice([1, 3, 40, 300]) for s in spec.shape)
            full = (rows, *shape) if self.config.max_batch_size else shape
            values.append(canary(number, full, spec.datatype))
        request = ask(self.config, *values)
        request.sink = KeepingSink(self.chance)
        request.form = self.forms.setdefault(tuple(each.shape for each in values), object())
        reservation = model.reserve(request.form) if self.chance.random() < 0.5 else None
        if reservation is not None:
            self.receiving.append(Receiving(request, values, reservation))
            return
        self.sent.append((request, values))
        model.submit(request)

    def receive(self, model: Model) -> None:
        """Let one of those that are being received go on, become slow, leave or be complete."""
        body = self.chance.choice(self.receiving)
        match self.chance.randrange(5):
            case 0:
                body.receive(self.chance.randrange(2000))
            case 1:
                body.reservation.move_out()
            case 2:
                self.receiving.remove(body)
                body.reservation.drop()
            case _:
                self.complete(body, model)

    def complete(self, body: Receiving, model: Model) -> None:
        self.receiving.remove(body)
        self.sent.append((body.request, body.values))
        body.submit(model)

    def release(self) -> None:
        for request, _ in self.sent:
            request.sink.release()

    async def __call__(self, model: Model, puppets: Puppets) -> None:
        for _ in range(self.chance.randrange(10, 60)):
            action = self.chance.random()
            if action < 0.4:
                self.send(model)
            elif action < 0.52 and self.receiving:
                self.receive(model)
            elif action < 0.54:
                self.release()
            elif action < 0.6 and self.sent:
                model.cancel(self.chance.choice(self.sent)[0])
            elif action < 0.85 and puppets.alive:
                self.chance.choice(puppets.alive).step()
            elif action < 0.92 and puppets.alive:
                self.chance.choice(puppets.alive).kill()
            else:
                await settle(self.chance.randrange(1, 8))
        for body in list(self.receiving):
            self.complete(body, model)
        for _ in range(2000):
            if all(request.is_done for request, _ in self.sent):
                break
            await puppets.step_all()
            await asyncio.sleep(0.0005)
        await puppets.step_all()
        self.release()
        self.check(model)

    def check(self, model: Model) -> None:
        for request, values in self.sent:
            sink = request.sink
            assert sink.num_final == len(sink.answers) == 1, request
            answer = sink.answers[0]
            if isinstance(answer, Response):
                for got, value in zip(sink.outputs[0].values(), values, strict=True):
                    assert got.tolist() == value.tolist(), "a foreign byte"
            else:
                ends = Cancelled | BackendFailed | Overloaded | Quarantined
                assert isinstance(answer, ends), answer
                if isinstance(answer, BackendFailed):
                    assert "twice" in str(answer)
        assert model.num_waiting == model.num_running == 0
        assert model.memory.pool.num_in_use == model.memory.extents.num_held == 0
        assert not any(slab.num_reserved for slab in model.memory.pool.slabs)
        self.check_counts(model.metrics)

    def check_counts(self, metrics: ModelMetrics) -> None:
        """What was counted is what the clients saw."""
        answers = [request.sink.answers[0] for request, _ in self.sent]
        assert metrics.num_success == sum(isinstance(a, Response) for a in answers)
        kinds = {"CANCELED": Cancelled, "BACKEND": BackendFailed, "REJECTED": Overloaded}
        for reason, kind in kinds.items():
            assert metrics.num_failures[reason] == sum(isinstance(a, kind) for a in answers)
        assert sum(n * size for size, n in metrics.batch_sizes.items()) == metrics.num_inferences
        assert {histogram.count for histogram in metrics.phases.values()} == {metrics.num_success}


@pytest.mark.parametrize(
    "config",
    [
        FIXED,
        replace(FIXED, num_instances=2),
        replace(VARIABLE, num_instances=2),
        replace(PADDED, num_instances=2),
        TEXT,
        UNBATCHED,
        # Its largest requests fit the spill only if no other one holds a part of it.
        replace(UNBATCHED, memory=MemoryPolicy(slab_bytes=1024, spill_bytes=2560)),
        replace(MIXED, num_instances=2),
        replace(
            VARIABLE,
            batching=BatchPolicy(8, is_dynamic=True, preserve_ordering=True, max_pending=9),
        ),
        SHARED,
        replace(MIXED, device="cuda", num_instances=3),
        replace(
            BUDGET,
            num_instances=2,
            batching=replace(
                BUDGET.batching,
                num_priorities=3,
                default_priority=2,
                preferred_batch_sizes=(4,),
                max_queue_delay_s=0.001,
                policies=(QueuePolicy(), QueuePolicy(), QueuePolicy("DELAY", 0.0001)),
            ),
        ),
        replace(
            BUDGET,
            device="cuda",
            num_instances=3,
            batching=replace(BUDGET.batching, slo_latency_s=0.5),
            options={"penstock.pack": "tokens"},
        ),
    ],
    ids=[
        "fixed",
        "two",
        "variable",
        "padded",
        "text",
        "unbatched",
        "tight",
        "mixed",
        "ordered",
        "shared",
        "shared mixed",
        "budget",
        "budget and slo",
    ],
)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_law_every_admitted_request_ends_exactly_once_with_its_own_bytes(config, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)
        run(config, Chaos(config, seed))


@pytest.mark.parametrize(("load_s", "patience_s"), [(1.0, 30.0), (40.0, 80.0)])
def test_requests_wait_for_a_worker_as_long_as_one_may_be_loading(load_s, patience_s):
    clock = FakeClock()

    async def scenario() -> None:
        puppets = Puppets()
        model = Model(FIXED, start_life=puppets, clock=clock)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        model.metrics.load_s = load_s
        (worker,) = puppets.alive
        worker.kill()
        await settle()
        request = ask(FIXED, canary(0, (1, 4)))
        model.submit(request)
        for seconds, is_refused in ((patience_s - 0.1, False), (0.2, True)):
            clock.advance(seconds)
            # As the supervisor does, twice a second.
            model.readiness.tick()
            assert request.is_done is is_refused
            # Its successors die while they load; no request waits longer for that.
            for loading in puppets.alive:
                loading.kill()
            await settle()
        assert isinstance(request.sink.error, NotReady)
        closing = asyncio.ensure_future(model.close())
        await puppets.step_all()
        await closing

    asyncio.run(scenario())


# What was waited for.


class Waiting:
    """Random arrivals and steps of workers; time passes only between them, so who waits for what
    is plain to see."""

    def __init__(self, seed: int, num_instances: int, delay_s: float) -> None:
        self.chance = random.Random(seed)
        self.config = replace(
            FIXED,
            num_instances=num_instances,
            batching=BatchPolicy(4, is_dynamic=True, max_queue_delay_s=delay_s, max_wait_s=0.0),
            # The supervisor looks by a clock of its own, and would kill a worker after 100 s.
            hang_s=1e9,
        )
        self.clock = FakeClock()
        self.sent: list[Request] = []
        # Seconds in the queue with an instance idle, and without.
        self.expected: dict[Request, list[float]] = {}

    async def run(self) -> None:
        puppets = Puppets()
        model = Model(self.config, start_life=puppets, clock=self.clock)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        for _ in range(60):
            await self.act(model, puppets)
        while not all(request.is_done for request in self.sent):
            self.pass_time(model, 100.0)
            self.send(model)
            await puppets.step_all()
        self.check(model)
        closing = asyncio.ensure_future(model.close())
        await puppets.step_all()
        await closing

    async def act(self, model: Model, puppets: Puppets) -> None:
        action = self.chance.random()
        if action < 0.5:
            self.send(model)
        elif action < 0.75:
            self.chance.choice(puppets.alive).step()
        await settle()
        self.pass_time(model, self.chance.choice([0.0, 0.001, 0.5]))

    def send(self, model: Model) -> None:
        request = ask(self.config, canary(len(self.sent), (1, 4)))
        request.timings.received = self.clock()
        self.sent.append(request)
        self.expected[request] = [0.0, 0.0]
        model.submit(request)

    def pass_time(self, model: Model, seconds: float) -> None:
        part = 0 if any(worker.is_idle for worker in model.workers) else 1
        for request in self.sent:
            if request.ticket.queue is not None:
                self.expected[request][part] += seconds
        self.clock.advance(seconds)

    def check(self, model: Model) -> None:
        for request in self.sent:
            timings, (batch_s, instance_s) = request.timings, self.expected[request]
            assert timings.instance_wait_s == pytest.approx(instance_s, abs=1e-6)
            queue_s = timings.dispatched - timings.queued
            assert queue_s - timings.instance_wait_s == pytest.approx(batch_s, abs=1e-6)
        phases = model.metrics.phases
        for name, part in (("queue_batch", 0), ("queue_instance", 1)):
            total = sum(waits[part] for waits in self.expected.values())
            assert phases[name].total == pytest.approx(total, abs=1e-4)
            assert phases[name].count == len(self.sent)
        both = phases["queue_batch"].total + phases["queue_instance"].total
        assert both == pytest.approx(phases["queue"].total)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), num_instances=st.integers(1, 2), is_delayed=st.booleans())
def test_time_in_the_queue_is_either_for_company_or_for_an_instance(
    seed, num_instances, is_delayed
):
    asyncio.run(Waiting(seed, num_instances, 5.0 if is_delayed else 0.0).run())


def test_each_batch_is_remembered_with_what_closed_it():
    async def scenario(model, puppets):
        for i in range(10):
            model.submit(ask(FIXED, canary(i, (1, 4))))
        await puppets.step_all()
        first, second = model.history.recent
        assert (first.num_rows, first.num_requests, first.closed_by) == (8, 8, "full")
        assert (second.num_rows, second.closed_by) == (2, "queue empty")
        assert second.shapes == ((4,),)
        assert first.instance == 0 and first.outcome == "answered"
        assert second.instance_wait_s > 0 == first.instance_wait_s

    run(FIXED, scenario)


def test_a_batch_that_failed_is_remembered_too():
    config = replace(FIXED, options={"null.fail_on": "3000"})

    async def scenario(model, puppets):
        for i in (1, 3):
            model.submit(ask(config, canary(i, (1, 4))))
        await puppets.step_all()
        told = [(record.outcome, record.closed_by) for record in model.history.recent]
        assert told == [
            ("the model failed", "queue empty"),
            ("answered", "rerun"),
            ("the model failed", "rerun"),
        ]

    run(config, scenario)


def test_refusals_are_counted_by_reason_and_overload_is_told_once(caplog):
    config = replace(FIXED, batching=BatchPolicy(8, is_dynamic=True, max_pending=2))

    async def scenario(model, puppets):
        for i in range(20):
            model.submit(ask(config, canary(i, (1, 4))))
        model.submit(ask(config, canary(1, (1, 3))))
        await puppets.step_all()
        counted = {name: n for name, n in model.metrics.num_refused.items() if n}
        assert counted == {"queue_full": 18, "invalid": 1}

    run(config, scenario)
    [line] = [r for r in caplog.records if "overloaded" in r.getMessage()]
    assert (line.model, line.version, line.reason) == ("echo", "1", "queue_full")


def test_a_request_that_times_out_in_the_queue_is_counted_as_such():
    queue = QueuePolicy(default_timeout_s=0.001)
    config = replace(FIXED, batching=BatchPolicy(1, is_dynamic=True, policies=(queue,)))
    clock = FakeClock()

    async def scenario(model, puppets):
        first, second = (ask(config, canary(i, (1, 4))) for i in range(2))
        model.submit(first)
        model.submit(second)
        await settle()
        clock.advance(0.002)
        model.readiness.tick()
        assert second.is_done and not first.is_done, "the first one runs"
        await puppets.step_all()
        assert model.metrics.num_refused["queue_timeout"] == 1
        assert model.metrics.num_success == 1

    run(config, scenario, clock)


class TestMaxWait:
    """Without a queue policy and without an SLO."""

    config = replace(FIXED, max_batch_size=1, batching=BatchPolicy(1, is_dynamic=True))

    def run(self, scenario: Callable[[Model, Puppets, FakeClock], Awaitable[None]]) -> None:
        clock = FakeClock()
        run(self.config, lambda model, puppets: scenario(model, puppets, clock), clock)

    def test_a_request_that_has_waited_too_long_is_refused_with_when_to_come_back(self):
        async def scenario(model, puppets, clock):
            requests = [ask(self.config, canary(i, (1, 4))) for i in range(3)]
            for request in requests:
                model.submit(request)
            await settle()
            clock.advance(0.5)
            (life,) = puppets.alive
            while not requests[0].is_done:
                life.step()
                await settle()
            clock.advance(100.0)
            model.readiness.tick()
            assert requests[0].sink.num_final == 1 and not requests[1].is_done, "it runs"
            error = requests[2].sink.error
            assert isinstance(error, Overloaded) and error.retry_after_s > 0
            assert model.metrics.num_refused["queue_timeout"] == 1
            await puppets.step_all()

        self.run(scenario)

    def test_requests_wait_for_a_worker_that_is_started_again(self):
        async def scenario(model, puppets, clock):
            requests = [ask(self.config, canary(i, (1, 4))) for i in range(20)]
            for request in requests:
                model.submit(request)
            await settle()
            (life,) = puppets.alive
            life.kill()
            await settle()
            clock.advance(20.0)
            model.readiness.tick()
            await puppets.step_all()
            assert [request.sink.num_final for request in requests] == [1] * 20
            assert not any(request.sink.error for request in requests)

        self.run(scenario)


class Losable(NullRunner):
    """On a device that may be lost."""

    lost = False

    def is_lost(self) -> bool:
        return self.lost


class FullMemory:
    """A limit that is reached at the first error."""

    def __init__(self, limit_bytes: int) -> None:
        assert limit_bytes == 1 << 30

    def restart_reason(self, errors) -> str:
        return "it is full" if any("null.fail_on" in error for error in errors) else ""


@contextmanager
def worker_alone(config: ModelConfig, die: Callable[[], None] | None):
    """A worker without a core; yields what runs a batch of 1000 and returns the frames it sent."""
    ours, theirs = socket_pair()
    core, control = socket_pair()
    inputs, outputs = Segment(1 << 16), Segment(1 << 16)
    with ours, core, control:
        made = worker.Worker(worker.Channel(control), die=die)
        core.send(frames.encode(frames.LoadModel(frames.VERSION, config)))
        socket.send_fds(core, [frames.encode(frames.Attach(0))], (theirs.fileno(),))
        theirs.close()
        hello = frames.encode(frames.Hello(frames.VERSION, 1 << 16))
        socket.send_fds(ours, [hello], (inputs.fd, outputs.fd))
        while made.has_work:
            assert made.step()
        buffer = bytearray(frames.MAX_FRAME_BYTES)

        def receive_all() -> list[frames.WorkerToShard]:
            received = []
            with suppress(BlockingIOError):
                while size := ours.recv_into(buffer):
                    received.append(frames.decode_worker_to_shard(memoryview(buffer)[:size]))
            return received

        def run_batch() -> list[frames.WorkerToShard]:
            extent = frames.Extent("x", "INT64", (1, 4), 0, 32)
            inputs.view[:32] = canary(1, (1, 4)).tobytes()
            part = frames.RequestPart("", 1, (extent,))
            ours.send(frames.encode(frames.Dispatch(7, (), requests=(part,))))
            assert made.step()
            return receive_all()

        receive_all()
        yield run_batch
        made.close()
    inputs.close()
    outputs.close()


class Restless(NullRunner):
    """Wants to be replaced from its third batch on."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.num_batches = 0

    def settle(self) -> None:
        """Those of the warm-up do not count."""
        self.num_batches = 0

    @property
    def restart_reason(self) -> str:
        return "its memory is in pieces" if self.num_batches > 2 else ""

    def start(self, batch):
        self.num_batches += 1
        return super().start(batch)


@pytest.mark.parametrize("config", [FIXED, SHARED], ids=["one slot", "two slots"])
def test_a_worker_that_wants_to_leave_is_replaced_and_nothing_is_lost(monkeypatch, caplog, config):
    monkeypatch.setattr(worker_load, "backend", lambda name: Restless)
    config = replace(config, max_batch_size=1, batching=BatchPolicy(1, is_dynamic=True))

    async def scenario(model, puppets):
        (first,) = puppets.alive
        requests = [ask(config, canary(i, (1, 4))) for i in range(9)]
        for request in requests:
            model.submit(request)
        await puppets.step_all()
        for number, request in enumerate(requests):
            assert request.sink.num_final == 1
            assert request.sink.outputs[0]["y"].tolist() == canary(number, (1, 4)).tolist()
            assert request.num_deaths == 0, "no batch was lost with a worker"
        assert first not in puppets.alive
        assert model.metrics.num_restarts >= 2
        assert model.metrics.num_deaths == {"crash": 0, "hang": 0}
        assert "its memory is in pieces" in caplog.text

    # Those that leave soon after they came wait before they start again; not here.
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)
    run(config, scenario)


TWO = replace(FIXED, num_instances=2)


class Poisoned:
    """A model whose workers die, before they run them, of the requests that were sent as poison."""

    def __init__(
        self, config: ModelConfig, *, has_room: bool = False, is_outside: bool = False
    ) -> None:
        """`is_outside`: another process kills workers while they run those requests."""
        self._is_outside = is_outside
        self.clock = FakeClock()
        self.puppets = Puppets(has_room=has_room)
        self.config = config
        self._deadly: set[Request] = set()
        # Workers that died so far.
        self.num_killed = 0

    async def __aenter__(self) -> "Poisoned":
        self.model = Model(self.config, start_life=self.puppets, clock=self.clock)
        starting = asyncio.ensure_future(self.model.start())
        await self.puppets.step_all()
        await starting
        return self

    async def __aexit__(self, *_: object) -> None:
        self._deadly.clear()
        closing = asyncio.ensure_future(self.model.close())
        while not closing.done():
            await self.puppets.step_all()
        await closing

    def send(self, number: int, *, kills: bool = False, key: bytes = b"") -> Request:
        shape = (4,) if self.config.inputs[0].is_fixed else (3,)
        if self.config.max_batch_size:
            shape = (1, *shape)
        datatype = self.config.inputs[0].datatype
        request = ask(self.config, canary(number, shape, datatype))
        request.caller = key
        if kills:
            self._deadly.add(request)
        self.model.submit(request)
        return request

    async def run(self) -> None:
        """Until nothing moves any more. Restarts with a delay do not happen here."""
        for _ in range(500):
            await settle()
            while self._kill():
                await settle()
            busy = [life for life in self.puppets.alive if life.has_work]
            if not busy:
                return
            for life in busy:
                life.step()
        raise AssertionError("the workers never came to rest")

    def _kill(self) -> int:
        """Returns how many died now."""
        num_before = self.num_killed
        for instance, link in zip(self.model.host.instances, self.model.workers, strict=True):
            running = {each for flight in link.batches for each in flight.requests}
            if instance.child is not None and running & self._deadly:
                instance.child.life.was_killed_outside = self._is_outside
                instance.child.life.kill("was killed by SIGSEGV")
                self.num_killed += 1
        return self.num_killed - num_before

    async def answer_some(self) -> None:
        request = self.send(1)
        await self.run()
        assert request.sink.error is None


@pytest.mark.parametrize(
    "config", [TWO, PADDED, TEXT, UNBATCHED], ids=["rows", "padded", "text", "unbatched"]
)
def test_a_body_that_killed_two_workers_is_refused_before_it_runs(config, caplog):
    async def main() -> None:
        async with Poisoned(config) as poisoned:
            await poisoned.answer_some()
            first = poisoned.send(7, kills=True)
            await poisoned.run()
            assert isinstance(first.sink.error, BackendFailed) and poisoned.num_killed == 2
            again = poisoned.send(7, kills=True)
            again.id = "another id"
            other = poisoned.send(8)
            await poisoned.run()
            assert isinstance(again.sink.error, Quarantined)
            assert "killed its worker of model 'echo' 2 times" in str(again.sink.error)
            assert "refuses it for 600 s more" in str(again.sink.error)
            assert poisoned.num_killed == 2 and other.sink.error is None
            assert poisoned.model.metrics.num_refused["quarantined"] == 1
            poisoned.clock.advance(QUARANTINE_S)
            later = poisoned.send(7)
            await poisoned.run()
            assert later.sink.error is None
            held = poisoned.model.memory
            assert held.pool.num_in_use == held.extents.num_held == 0

    asyncio.run(main())
    assert "a request is quarantined: it killed 2 workers" in caplog.text


def test_bodies_are_hashed_only_while_one_is_quarantined(monkeypatch):
    hashed = []
    real = quarantine.fingerprint

    def count(*args: object) -> bytes:
        hashed.append(args)
        return real(*args)

    monkeypatch.setattr(quarantine, "fingerprint", count)

    async def main() -> None:
        async with Poisoned(TWO) as poisoned:
            for _ in range(3):
                await poisoned.answer_some()
            assert hashed == []
            poisoned.send(7, kills=True)
            await poisoned.run()
            assert len(hashed) == 2, "once for each death"
            await poisoned.answer_some()
            assert len(hashed) == 3
            two_rows = ask(TWO, canary(9, (2, 4)))
            poisoned.model.submit(two_rows)
            await poisoned.run()
            assert two_rows.sink.error is None and len(hashed) == 3, "it has another size"
            poisoned.clock.advance(QUARANTINE_S)
            poisoned.model.readiness.tick()
            await poisoned.answer_some()
            assert len(hashed) == 3

    asyncio.run(main())


def test_deaths_that_a_request_caused_restart_at_once_and_count_as_no_crash_loop():
    async def main() -> None:
        async with Poisoned(TWO) as poisoned:
            for number in range(20):
                await poisoned.answer_some()
                poison = poisoned.send(100 + number, kills=True)
                await poisoned.run()
                assert isinstance(poison.sink.error, BackendFailed)
                assert [each.is_ready for each in poisoned.model.host.instances] == [True, True]
                assert [each.crashes.num_deaths for each in poisoned.model.host.instances] == [0, 0]
            assert poisoned.num_killed == 40

    asyncio.run(main())


def test_a_death_in_company_is_excused_once_the_culprit_is_found():
    async def main() -> None:
        async with Poisoned(TWO) as poisoned:
            for number in range(20):
                await poisoned.answer_some()
                requests = [poisoned.send(1000 + 10 * number + i, kills=i == 1) for i in range(4)]
                await poisoned.run()
                errors = [type(request.sink.error) for request in requests]
                assert errors == [type(None), BackendFailed, type(None), type(None)]
                assert [each.crashes.num_deaths for each in poisoned.model.host.instances] == [0, 0]
            assert poisoned.num_killed == 40

    asyncio.run(main())


def test_a_model_that_dies_on_any_request_backs_off_and_blames_nobody():
    async def main() -> None:
        async with Poisoned(FIXED) as poisoned:
            await poisoned.answer_some()
            requests = [poisoned.send(100, kills=True)]
            while poisoned.model.is_ready:
                await poisoned.run()
                requests.append(poisoned.send(100 + len(requests), kills=True))
                assert len(requests) < 20
            (instance,) = poisoned.model.host.instances
            assert instance.crashes.delay_s > 0
            assert not any(isinstance(each.sink.error, Quarantined) for each in requests)

    asyncio.run(main())


def test_a_key_whose_requests_killed_five_times_is_refused(caplog):
    async def main() -> None:
        async with Poisoned(TWO) as poisoned:
            for number in range(3):
                await poisoned.answer_some()
                poisoned.send(100 + number, kills=True, key=b"team-a")
                await poisoned.run()
            await poisoned.answer_some()
            refused = poisoned.send(1, key=b"team-a")
            answered = poisoned.send(1, key=b"team-b")
            await poisoned.run()
            assert isinstance(refused.sink.error, Quarantined)
            assert "API key" in str(refused.sink.error) and "5 times" in str(refused.sink.error)
            assert answered.sink.error is None

    asyncio.run(main())
    assert "an API key is quarantined" in caplog.text and "team-a" not in caplog.text


def test_kills_from_outside_are_not_held_against_a_key():
    async def main() -> None:
        async with Poisoned(TWO, is_outside=True) as poisoned:
            for number in range(10):
                await poisoned.answer_some()
                slow = poisoned.send(100 + number, kills=True, key=b"team-a")
                await poisoned.run()
                assert isinstance(slow.sink.error, BackendFailed)
            assert poisoned.num_killed == 20
            innocent = poisoned.send(1, key=b"team-a")
            same = poisoned.send(100, key=b"team-a")
            await poisoned.run()
            assert innocent.sink.error is None
            assert isinstance(same.sink.error, Quarantined), "this body died twice with its worker"

    asyncio.run(main())


def test_each_of_several_keys_is_quarantined_after_its_own_five_deaths():
    """Nobody else asks, so no answer shows that the model is well."""

    async def main() -> None:
        async with Poisoned(TWO) as poisoned:
            await poisoned.answer_some()
            keys = [b"team-a", b"team-b", b"team-c"]
            refused: list[bytes] = []
            for number in range(100):
                key = keys[number % len(keys)]
                poison = poisoned.send(100 + number, kills=True, key=key)
                poison_runs = asyncio.ensure_future(poisoned.run())
                while poison.sink.num_final == 0:
                    await asyncio.sleep(0.001)
                    if poison_runs.done():
                        poison_runs = asyncio.ensure_future(poisoned.run())
                await poison_runs
                if isinstance(poison.sink.error, Quarantined):
                    refused.append(key)
                if set(refused) == set(keys):
                    break
            assert set(refused) == set(keys)
            assert poisoned.num_killed <= 6 * len(keys)
            backoffs_s = [each.crashes.delay_s for each in poisoned.model.host.instances]
            assert max(backoffs_s) < 5, "others must not wait long for a worker"
            other = poisoned.send(1, key=b"team-d")
            while other.sink.num_final == 0:
                await asyncio.sleep(0.01)
                await poisoned.run()
            assert other.sink.error is None

    asyncio.run(main())


@pytest.mark.parametrize("slo_s", [None, 1.0])
def test_equal_requests_that_wait_are_refused_with_the_first(slo_s):
    config = replace(
        TWO, max_batch_size=1, batching=BatchPolicy(1, is_dynamic=True, slo_latency_s=slo_s)
    )

    async def main() -> None:
        async with Poisoned(config) as poisoned:
            await poisoned.answer_some()
            twins = [poisoned.send(7, kills=True) for _ in range(6)]
            await poisoned.run()
            kinds = {type(twin.sink.error) for twin in twins}
            assert kinds <= {BackendFailed, Quarantined} and Quarantined in kinds
            assert poisoned.num_killed <= 4, "two that ran at the same time, twice"
            await poisoned.answer_some()
            assert poisoned.model.num_waiting == 0 and poisoned.model.memory.pool.num_in_use == 0

    asyncio.run(main())


def test_a_poison_request_whose_client_leaves_counts_too():
    async def main() -> None:
        async with Poisoned(TWO) as poisoned:
            for _ in range(2):
                await poisoned.answer_some()
                poison = poisoned.send(7, kills=True)
                await settle()
                poisoned.model.cancel(poison)
                await poisoned.run()
            again = poisoned.send(7, kills=True)
            await poisoned.run()
            assert isinstance(again.sink.error, Quarantined)
            assert poisoned.num_killed == 2

    asyncio.run(main())


def test_a_spare_takes_the_place_of_a_worker_that_a_request_killed(caplog):
    async def main() -> None:
        async with Poisoned(TWO, has_room=True) as poisoned:
            model, puppets = poisoned.model, poisoned.puppets
            await poisoned.answer_some()
            assert len(puppets.alive) == 2, "no spare without a reason for one"
            for number in range(5):
                poisoned.send(100 + number, kills=True)
                await poisoned.run()
                await poisoned.answer_some()
                assert len(puppets.alive) == 3 and len(model.host.instances) == 2
            assert [each.index for each in model.host.instances] == [0, 1]
            assert model.num_running == 0 and model.is_ready
            # With a spare the place is never empty, so nothing has to wait for a load.
            spare_lives = set(puppets.alive) - {each.child.life for each in model.host.instances}
            assert len(spare_lives) == 1
            spare_lives.pop().kill()
            await poisoned.run()
            assert len(puppets.alive) == 2 and all(each.is_ready for each in model.host.instances)

    asyncio.run(main())
    assert "a spare takes over" in caplog.text and "lost its spare worker" in caplog.text


def test_slabs_made_while_a_spare_waits_are_known_to_it():
    config = replace(TWO, memory=MemoryPolicy(max_slabs=8, spill_bytes=1 << 16))

    async def main() -> None:
        async with Poisoned(config, has_room=True) as poisoned:
            await poisoned.answer_some()
            poisoned.send(100, kills=True)
            await poisoned.run()
            # More rows than the slabs so far have.
            many = [poisoned.send(200 + i) for i in range(40)]
            poisoned.send(101, kills=True)
            await poisoned.run()
            more = [poisoned.send(300 + i) for i in range(40)]
            await poisoned.run()
            for number, request in [*enumerate(many, 200), *enumerate(more, 300)]:
                np.testing.assert_array_equal(request.sink.outputs[0]["y"], canary(number, (1, 4)))

    asyncio.run(main())


def test_without_memory_for_it_there_is_no_spare():
    async def main() -> None:
        async with Poisoned(TWO, has_room=False) as poisoned:
            await poisoned.answer_some()
            poisoned.send(100, kills=True)
            await poisoned.run()
            assert len(poisoned.puppets.alive) == 2

    asyncio.run(main())


def test_suspects_spare_the_only_worker_that_is_left(monkeypatch):
    """Two instances, no memory for spares: while one of them starts, nothing that may kill runs on
    the other; what is known to be harmless does."""

    monkeypatch.setattr(Instance, "start_s", 1e9)

    async def main() -> None:
        async with Poisoned(TWO) as poisoned:
            model = poisoned.model
            await poisoned.answer_some()
            poisoned.send(100, kills=True)
            await poisoned.run()
            await poisoned.answer_some()
            # A new poison kills one of them; its next worker is not let load.
            poison = poisoned.send(101, kills=True)
            await settle()
            (dead,) = [model.host.instances[each.index] for each in model.workers if each.batches]
            dead.child.life.kill("was killed by SIGSEGV")
            await settle()
            (left,) = [each for each in model.host.instances if each.is_ready]
            assert not poison.is_done and model.num_running == 0 and model.num_waiting == 1
            for number in range(5):
                other = poisoned.send(200 + number)
                await settle()
                while left.child.life.has_work:
                    left.child.life.step()
                await settle()
                assert other.sink.error is None and other.is_done
            assert not poison.is_done and left.is_ready and model.num_waiting == 1
            # With both back it gets its second try, and only one more worker dies.
            await poisoned.run()
            assert isinstance(poison.sink.error, BackendFailed)
            assert model.num_waiting == 0

    asyncio.run(main())


def test_a_key_gets_its_share_of_the_queue_back_however_its_requests_end():
    config = replace(FIXED, batching=BatchPolicy(8, is_dynamic=True, max_pending=8))
    quotas = Quotas({b"team-a": Quota(queue_share=0.5)})

    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets, quotas=quotas)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        for _ in range(3):
            requests = [ask(config, canary(i, (1, 4))) for i in range(6)]
            for request in requests:
                request.caller = b"team-a"
                model.submit(request)
            full = [isinstance(each.sink.error, QuotaExceeded) for each in requests]
            assert full == [False] * 4 + [True] * 2
            model.cancel(requests[0])
            await puppets.step_all()
            assert all(request.is_done for request in requests)
        closing = asyncio.ensure_future(model.close())
        await puppets.step_all()
        await closing

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", [None, 0.001], ids=["full", "own deadline"])
def test_a_share_is_one_of_what_the_queue_holds_before_it_refuses(timeout_s):
    """8192 may wait, but the queue is full at 8: half of it is 4, whatever was promised."""
    policies = (QueuePolicy(max_queue_size=8),)
    config = replace(FIXED, batching=BatchPolicy(8, is_dynamic=True, policies=policies))
    quotas = Quotas({b"team-a": Quota(queue_share=0.5)})

    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets, quotas=quotas)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting

        async def send(count: int, caller: bytes) -> list[str]:
            requests = [ask(config, canary(i, (1, 4))) for i in range(count)]
            for request in requests:
                request.caller, request.timeout_s = caller, timeout_s
                model.submit(request)
            errors = [type(request.sink.error).__name__ for request in requests]
            await puppets.step_all()
            return errors

        taken, full, over_quota = "NoneType", "Overloaded", "QuotaExceeded"
        assert await send(9, b"team-a") == [taken] * 8 + [full]
        expected = [taken] * 4 + [over_quota] * 2 if timeout_s is None else [taken] * 6
        assert await send(6, b"team-a") == expected
        assert await send(6, b"team-b") == [taken] * 6
        closing = asyncio.ensure_future(model.close())
        await puppets.step_all()
        await closing

    asyncio.run(main())


def test_requests_of_a_low_level_take_no_share_from_those_of_a_higher_one():
    levels = BatchPolicy(8, is_dynamic=True, max_pending=4, num_priorities=2, default_priority=2)
    config = replace(FIXED, batching=levels)
    quotas = Quotas({b"team-a": Quota(queue_share=0.5)})

    async def main() -> None:
        puppets = Puppets()
        model = Model(config, start_life=puppets, quotas=quotas)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        for _ in range(2):
            requests = [ask(config, canary(i, (1, 4))) for i in range(6)]
            for request, priority in zip(requests, (2, 0, 0, 1, 1, 1), strict=True):
                request.caller, request.priority = b"team-a", priority
                model.submit(request)
            full = [isinstance(each.sink.error, QuotaExceeded) for each in requests]
            assert full == [False, False, True] * 2
            await puppets.step_all()
        closing = asyncio.ensure_future(model.close())
        await puppets.step_all()
        await closing

    asyncio.run(main())


def test_time_that_a_worker_waits_for_other_models_is_no_hang():
    clock = FakeClock()

    async def scenario(model, puppets):
        (first,), (place,) = puppets.alive, model.workers
        place.waited_s = 7.0
        model.submit(ask(FIXED, canary(1, (1, 4))))
        await until(lambda: place.batches)
        place.waited_s += 100.0
        clock.advance(FIXED.hang_s + 99)
        model.readiness.tick()
        assert first.is_alive
        clock.advance(2)
        model.readiness.tick()
        assert not first.is_alive

    run(FIXED, scenario, clock)


def test_a_model_refuses_requests_that_itself_waits_for():
    async def scenario(model, puppets):
        mine = ask(FIXED, canary(1, (1, 4)))
        mine.chain = ("other/1", f"{FIXED.name}/{FIXED.version}", "last/2")
        model.submit(mine)
        cycle = f"{FIXED.name}/{FIXED.version} -> last/2 -> {FIXED.name}/{FIXED.version}"
        assert cycle in str(mine.sink.error) and mine.sink.num_final == 1
        good = ask(FIXED, canary(2, (1, 4)))
        good.chain = ("other/1", f"{FIXED.name}/99")
        model.submit(good)
        await puppets.step_all()
        assert good.sink.error is None
        assert model.metrics.num_refused["unsupported"] == 1

    run(FIXED, scenario)
