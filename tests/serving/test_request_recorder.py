"""Recorded requests: what is sampled, redacted, dropped and written, through real models."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import RecordingSink

from penstock.config import BatchPolicy, ModelConfig, RecordPolicy
from penstock.data.recordings import Recording, open_recording
from penstock.errors import ConfigError, InvalidRequest
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model import Model
from penstock.serving.record_writer import MAX_HELD_BYTES, RecordWriter, RingState
from penstock.serving.recording_files import RingPlace, SegmentRing
from penstock.serving.request_recorder import (
    MAX_RECORD_BYTES,
    Recorders,
    RequestRecorder,
    hash_caller,
)
from penstock.serving.supervisor import ThreadLife
from penstock.types import Array, Request, Response, Tensor, TensorSpec, from_array

POLICY = RecordPolicy(4 * 10**6, 1.0)
CONFIG = ModelConfig(
    "m",
    "3",
    "null",
    "",
    (TensorSpec("x", "FP32", (2,)), TensorSpec("s", "BYTES", (1,))),
    (TensorSpec("y", "FP32", (2,)), TensorSpec("t", "BYTES", (1,))),
    4,
    BatchPolicy(4, is_dynamic=True),
    record=POLICY,
)


def tensor(name: str, datatype: str, array: Array) -> Tensor:
    made = from_array(name, datatype, array)
    return Tensor(name, datatype, made.shape, bytes(made.data))


def request(value: float, text: str = "hello") -> Request:
    x = tensor("x", "FP32", np.full((1, 2), value, np.float32))
    s = tensor("s", "BYTES", np.array([[text.encode()]], object))
    found = Request(RecordingSink(), [x, s], 10.0, id=f"r{value:g}")
    found.parameters = {"who": "me"}
    found.caller = b"digest of a key"
    return found


def serve(config: ModelConfig, folder: Path, requests: list[Request]) -> ModelMetrics:
    """Answer requests by a Model in this process, and close it."""

    async def run() -> ModelMetrics:
        recorders = Recorders(folder)
        model = Model(config, start_life=ThreadLife)
        await model.start()
        model.recorder = recorders.open(config, model.metrics)
        for each in requests:
            model.submit(each)
            while not each.is_done:
                await asyncio.sleep(0.001)
        await model.close()
        recorders.close()
        return model.metrics

    return asyncio.run(run())


def recorded(config: ModelConfig, folder: Path, requests: list[Request]) -> Recording:
    serve(config, folder, requests)
    return open_recording(folder)


def raw_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_requests_and_answers_are_recorded_bit_for_bit(tmp_path: Path) -> None:
    found = recorded(CONFIG, tmp_path, [request(1.5, "one"), request(-np.inf, "two")])
    assert [each.record.id for each in found.entries] == ["r1.5", "r-inf"]
    for entry, value, text in zip(found.entries, (1.5, -np.inf), (b"one", b"two"), strict=True):
        record = entry.record
        assert (record.status, record.version) == ("ok", "3")
        assert record.parameters == {"who": "me"} and record.latency_s > 0
        assert entry.inputs()["x"].tolist() == entry.outputs()["y"].tolist() == [[value] * 2]
        assert entry.inputs()["s"].tolist() == entry.outputs()["t"].tolist() == [[text]]


def test_no_key_is_recorded_but_requests_of_one_key_are_known(tmp_path: Path) -> None:
    other = request(2.0)
    other.caller = b"another digest"
    found = recorded(CONFIG, tmp_path, [request(1.0), request(1.0), other])
    first, second, third = (each.record.caller for each in found.entries)
    assert first == second != third and len(first) == 16
    assert b"digest" not in raw_bytes(tmp_path)
    assert hash_caller(b"") == ""


def test_refused_requests_are_recorded_with_their_error(tmp_path: Path) -> None:
    wrong = Request(RecordingSink(), [tensor("x", "FP32", np.zeros((1, 3), "f4"))], 10.0)
    found = recorded(CONFIG, tmp_path, [request(1.0), wrong])
    assert [each.record.status for each in found.entries] == ["ok", "InvalidRequest"]
    assert len(found.answered()) == len(found.replayable()) == 1
    assert isinstance(wrong.sink, object) and wrong.is_done


@pytest.mark.parametrize("redact", [("s", "t"), ("BYTES",)])
def test_redacted_values_are_nowhere_in_the_folder(tmp_path: Path, redact: tuple[str]) -> None:
    config = replace(CONFIG, record=replace(POLICY, redact=redact))
    found = recorded(config, tmp_path, [request(7.0, "very-secret-text")])
    data = raw_bytes(tmp_path)
    assert b"very-secret-text" not in data and np.float32(7.0).tobytes() in data
    (entry,) = found.entries
    assert entry.inputs()["s"].tolist() == [[b""]] and "t" not in entry.outputs()
    assert entry.inputs()["x"].tolist() == [[7.0, 7.0]]
    assert found.redacted == ["s"]


@pytest.mark.parametrize("redact", [("s",), ("BYTES",)])
def test_tensors_that_the_model_does_not_have_are_redacted_too(
    tmp_path: Path, redact: tuple[str]
) -> None:
    """A client that misspells a name sends the same secret."""
    x, text = np.zeros((1, 2), "f4"), np.array([[b"very-secret-text"]], object)
    wrong = [tensor("x", "FP32", x), tensor("S", "BYTES", text)]
    config = replace(CONFIG, record=replace(POLICY, redact=redact))
    found = recorded(config, tmp_path, [Request(RecordingSink(), wrong, 10.0)])
    assert [each.record.status for each in found.entries] == ["InvalidRequest"]
    assert found.redacted == ["S"] and b"very-secret-text" not in raw_bytes(tmp_path)


def test_a_redacted_datatype_is_that_of_the_request(tmp_path: Path) -> None:
    text = tensor("x", "BYTES", np.array([[b"very-secret-text"]], object))
    config = replace(CONFIG, record=replace(POLICY, redact=("BYTES",)))
    serve(config, tmp_path, [Request(RecordingSink(), [text], 10.0)])
    assert b"very-secret-text" not in raw_bytes(tmp_path)


def test_id_and_parameters_can_be_redacted(tmp_path: Path) -> None:
    config = replace(CONFIG, record=replace(POLICY, redact=("id", "parameters")))
    (entry,) = recorded(config, tmp_path, [request(7.0)]).entries
    assert entry.record.id == "" and entry.record.parameters == {}
    assert b"who" not in raw_bytes(tmp_path)


def test_answers_of_a_ring_are_bounded(tmp_path: Path) -> None:
    config = replace(CONFIG, record=RecordPolicy(100_000, 1.0))
    metrics = serve(config, tmp_path, [request(float(n), "x" * 1000) for n in range(100)])
    assert metrics.num_recorded == 100
    assert len(raw_bytes(tmp_path)) <= 100_000
    found = open_recording(tmp_path)
    assert 10 < len(found.entries) < 100 and found.entries[-1].record.id == "r99"


def recorder(
    policy: RecordPolicy = POLICY, writer: RecordWriter | None = None, folder: Path = Path()
) -> RequestRecorder:
    ring = SegmentRing(folder, "m", RingPlace())
    ring.policy = policy
    writer = writer or RecordWriter()
    metrics = ModelMetrics("m", "1")
    return RequestRecorder(
        RingState(ring, "m"), writer, metrics, "1", policy, frozenset(), random=random.Random(1)
    )


def answered(found: RequestRecorder, asked: Request) -> None:
    """Record a request that is refused; its client gets its answer."""
    sink = asked.sink
    found.see(asked)
    assert asked.respond(InvalidRequest("no")) and sink.num_final == 1


def test_long_parameters_count_towards_the_limits() -> None:
    found, long, many = recorder(), request(1.0), request(2.0)
    long.parameters = {"text": "a" * found.max_bytes}
    answered(found, long)
    assert found.metrics.num_unrecorded["too_large"] == 1
    assert found.writer.hold(MAX_HELD_BYTES - 20_000)
    many.parameters = {"text": "a" * 50_000}
    answered(found, many)
    assert found.metrics.num_unrecorded["queue_full"] == 1
    found.writer.give_back(MAX_HELD_BYTES - 20_000)
    assert found.writer.hold(MAX_HELD_BYTES), "nothing is held any more"


def test_a_number_that_a_record_cannot_hold_drops_one_request(tmp_path: Path) -> None:
    found, wrong = recorder(folder=tmp_path / "m"), request(1.0)
    wrong.parameters = {"seed": 1 << 70}
    answered(found, wrong)
    assert found.metrics.num_unrecorded["not_encodable"] == 1
    answered(found, request(2.0))
    found.writer.start()
    found.writer.close()
    assert [each.record.id for each in open_recording(tmp_path).entries] == ["r2"]
    assert found.writer.hold(MAX_HELD_BYTES)


def test_the_share_is_kept_on_average() -> None:
    found = recorder(replace(POLICY, share=0.02))
    num = sum(found.is_next() for _ in range(100_000))
    assert 1800 < num < 2200


def test_large_requests_are_dropped_and_counted_without_a_copy() -> None:
    found = recorder(RecordPolicy(10**9, 1.0))
    large = Request(RecordingSink(), [Tensor("x", "UINT8", (1,), bytes(MAX_RECORD_BYTES + 1))], 0.0)
    sink = large.sink
    found.see(large)
    assert large.sink is sink and found.metrics.num_unrecorded["too_large"] == 1


def test_a_record_is_dropped_if_its_answer_makes_it_too_large() -> None:
    found = recorder(RecordPolicy(400_000, 1.0))
    small, sink = request(1.0), RecordingSink()
    small.sink = sink
    found.see(small)
    small.respond(Response("m", "1", [Tensor("y", "UINT8", (1,), bytes(200_000))]))
    assert found.metrics.num_unrecorded["too_large"] == 1
    assert sink.num_final == 1 and found.writer.hold(MAX_HELD_BYTES)


def test_a_full_queue_drops_and_counts() -> None:
    found = recorder()
    assert found.writer.hold(MAX_HELD_BYTES)
    found.see(request(1.0))
    assert found.metrics.num_unrecorded["queue_full"] == 1


def test_requests_in_shared_memory_are_counted_as_dropped() -> None:
    found, shared = recorder(), request(1.0)
    shared.uses_regions = True
    found.see(shared)
    assert found.metrics.num_unrecorded["shared_memory"] == 1


def test_a_client_gets_its_answer_even_if_recording_fails() -> None:
    class Broken(RecordWriter):
        def put(self, job: object) -> None:
            raise RuntimeError("broken")

    found, asked = recorder(writer=Broken()), request(1.0)
    sink = asked.sink
    found.see(asked)
    assert asked.respond(InvalidRequest("no"))
    assert sink.num_final == 1


def test_a_model_that_wants_to_be_recorded_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start the server with --record DIR"):
        Recorders().check(CONFIG)
    Recorders().check(replace(CONFIG, record=None))
    Recorders().check(replace(CONFIG, record=RecordPolicy(0)))
    Recorders(tmp_path).check(CONFIG)


def test_models_are_recorded_by_default_where_there_is_a_folder(tmp_path: Path) -> None:
    recorders, metrics = Recorders(tmp_path), ModelMetrics("m", "1")
    default = recorders.open(replace(CONFIG, record=None), metrics)
    assert default is not None and default.policy == RecordPolicy()
    assert recorders.open(replace(CONFIG, record=RecordPolicy(0)), metrics) is None
    assert Recorders().open(CONFIG, metrics) is None
    recorders.close()


def test_versions_of_a_model_share_its_ring(tmp_path: Path) -> None:
    recorders = Recorders(tmp_path)
    first = recorders.open(CONFIG, ModelMetrics("m", "3"))
    second = recorders.open(replace(CONFIG, version="4"), ModelMetrics("m", "4"))
    assert first is not None and second is not None and first.state is second.state
    recorders.close()


def test_arrival_times_follow_a_clock_that_jumps() -> None:
    found = recorder()
    found.clock, walls = (lambda: 100.0), iter((1000.0, 1000.2, 2000.0))
    found.wall = lambda: next(walls)
    assert [found.arrival(90.0) for _ in range(3)] == [990.0, 990.0, 1990.0]
