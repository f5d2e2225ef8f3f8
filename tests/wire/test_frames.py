"""Frames: what one process writes the other reads, and nothing else."""

import contextlib
from typing import Any

import msgspec
import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import (
    BatchPolicy,
    GrpcConfig,
    HttpLimits,
    MemoryPolicy,
    ModelConfig,
    QueuePolicy,
    ScalingConfig,
)
from penstock.types import TensorSpec
from penstock.wire import frames
from penstock.wire.trace_records import TracedStep, TracedTensor, TraceRecord

FULL_CONFIG = ModelConfig(
    name="modèle",
    version="12",
    backend="onnxruntime",
    artifact="/repository/m/12/model.onnx",
    inputs=(
        TensorSpec("image", "FP32", (3, -1, -1)),
        TensorSpec("text", "BYTES", (), is_optional=True),
    ),
    outputs=(TensorSpec("logits", "FP16", (10,), label_file="labels.txt"),),
    max_batch_size=64,
    batching=BatchPolicy(
        max_batch_size=64,
        is_dynamic=True,
        preferred_batch_sizes=(8, 16),
        max_queue_delay_s=0.0005,
        preserve_ordering=True,
        num_priorities=2,
        default_priority=1,
        policies=(
            QueuePolicy(),
            QueuePolicy("DELAY", 1.5, allow_timeout_override=True, max_queue_size=7),
            QueuePolicy("REJECT", 0.25),
        ),
        max_pending=99,
    ),
    num_instances=3,
    device="cuda:1",
    scaling=ScalingConfig(0, 8, 5.0, 60.0, 10.0),
    memory=MemoryPolicy(slab_bytes=1 << 20, max_slabs=4, spill_bytes=1 << 22),
    hang_s=12.5,
    options={"null.a_ms": "1", "intra_op": "2"},
    slo="p99 < 20ms",
    is_slo_from_evidence=True,
    manifest="/repository/m/12/manifest.json",
)
EXTENT = frames.Extent("x", "FP32", (2, 3), 64, 24)
SPAN = frames.RegionSpan("x", 3, 4096, 64)
REGION = frames.MapRegion(3, "r", 64, 4096, True)
PART = frames.RequestPart("id", 2, (EXTENT,), ("y",), {"b": True, "i": -1, "f": 0.5, "s": "é"})

TO_WORKER = [
    frames.LoadModel(frames.VERSION, FULL_CONFIG),
    frames.Enclosed(1 << 21),
    frames.Attach(3, 2),
    frames.Attach(3, 2, 5, 1),
    frames.SetExecutors(3),
    frames.Leave("fewer are needed"),
    frames.Stop(),
]
FROM_WORKER = [
    frames.WorkerReady(frames.VERSION, 0.5, {"provider": "CPU"}, {1: 0.25, 64: 1.5}, True),
    frames.StartFailed(("config: wrong", "input: missing")),
    frames.Leaving("its memory is in pieces"),
    frames.Sketched((frames.QuantityCounts("x", "value", 20, 1, (0.5, 9.0), (0.25, 8.0)),)),
    frames.Measured((frames.MetricChange("n", "é", "counter", (("a", "b"),), value=0.5),)),
    frames.Measured(
        (frames.MetricChange("n", "", "histogram", (), (0.5,), 2.0, True, True, [1, 0]),)
    ),
]
WANT = frames.Want((5, 2), (50, 20), 12.5, 2, 8, "rows x [16]", 1e3, 64)
SHARD_TO_WORKER = [
    frames.Hello(frames.VERSION, 1 << 28),
    frames.Hello(frames.VERSION, 1 << 28, True, True),
    frames.MapSlab(1, 4096),
    REGION,
    frames.MapRegion(4, "g", 0, 4096, handle=bytes(64), device=1),
    frames.UnmapRegion(3),
    frames.Dispatch(
        6,
        (frames.RowRange(1, 0, 4),),
        ((16,),),
        64,
        (frames.RequestPart("", 4, reads=(SPAN,), writes=(SPAN, SPAN)),),
        has_regions=True,
    ),
    WANT,
    frames.Dispatch(
        7, (frames.RowRange(1, 0, 4), frames.RowRange(2, 9, 1)), ((16,), (3, 4)), 64, (PART,)
    ),
    frames.Dispatch(8, (), requests=(PART, PART)),
    frames.Dispatch(9, (), (), 0, (PART,), "extents", True, 77, 3, WANT),
    frames.Decline(3),
    frames.Decline(3, frames.Want(())),
    frames.Recall(3),
    frames.Release((0, 64)),
    frames.CancelRequest(3, 1),
]
WORKER_TO_SHARD = [
    frames.Started(3, True),
    frames.Recalled(3),
    frames.Claim(3, 16),
    frames.Claim(3, 16, 48, 12.5, True, "rows x [16]", 512.0, False),
    frames.Done(7, 0.1, 0.2, 0.3),
    frames.Done(7, 0.1, 0.2, 0.3, ((EXTENT,), ()), {1: "bad row"}),
    frames.Done(7, 0.1, 0.2, 0.3, total_rows=64, total_tokens=99, is_first=False),
    frames.Done(7, 0.1, 0.2, 0.3, parameters={1: {"n": 1, "s": "é"}}),
    frames.BatchFailed(7, "out of memory", True),
    frames.Leaving("its memory is in pieces"),
    frames.Responded(3, 1),
    frames.Responded(3, 0, (EXTENT,), True, False, "why", {"n": 1}),
]
PIECE = frames.TensorHeader("x", "FP32", (1, 2), 8)
INLINE = frames.Parcel((PIECE,), b"12345678")
AT_OFFSET = frames.Parcel((PIECE, PIECE), offset=64)
STEP = TracedStep("m", 1.0, 1.5, (0.25, 0.5, 0.25), 3.0)
TENSOR = TracedTensor("TENSOR_QUEUE_INPUT", "x", "FP32", (1, 2), "0.5,1")
TRACE = TraceRecord("", "http", "m", "2", "é", 0.5, STEP, 3.5, 4.0, "", (TENSOR,), "0f")
FROM_SHARD = [
    frames.Traced(TRACE),
    frames.FromPart(3, frames.Lost(7, 1, b"body", b"key", 1)),
    frames.FromPart(3, frames.MayTry(True)),
    frames.FromPart(3, frames.PartLoad(12, 3, 0.5, {1: 0.25, 8: 0.5}, 1.5, 9, 2)),
    frames.FromPart(3, frames.Wake()),
    frames.FromPart(3, frames.EngineHung(2, 60.0)),
    frames.Lease(b"key", -3),
    frames.TakeTokens(1, b"key", 12),
    frames.UseTokens(b"key", 3),
    frames.Manage(1, "index", "m", "2", {"ready": True}, b"key"),
    frames.ShardAnswer(9, frames.Parcel((), b"answer"), "an error"),
    frames.Listening(frames.VERSION),
    frames.StartFailed(("cannot start",)),
    frames.Cancel(1),
    frames.Release((0, 64)),
    frames.Forward(1, 0.5, b"GET", b"/v2?a", {b"host": b"\xff"}, True, False, INLINE),
    frames.Pong(),
    frames.Pong(7),
]
TO_SHARD = [
    frames.ToPart(3, frames.SetWorker(1, 7, {1: 0.5, 8: 0.75})),
    frames.ToPart(3, frames.Verdict(7, True, False, True)),
    frames.ToPart(3, frames.Scaled(0, 1.5)),
    frames.ToPart(3, frames.SetQuarantine({b"body": 1.5}, {b"key": 2.5})),
    frames.ToPart(3, frames.SetEngine(2, frames.EngineReady(2, 1.5, 10, 64, 50, {"a": "b"}), 9, 8)),
    frames.ToPart(3, frames.EngineEnded("was killed", "its engine was killed", 1.5, 0.5)),
    frames.Leased(b"key", 3, 0.5),
    frames.OpenRegion(b"key", REGION),
    frames.CloseRegion(3),
    frames.MoveClients(7),
    frames.TokensTaken(1, 0.25),
    frames.Managed(1, INLINE),
    frames.Managed(1, frames.Parcel(), "NotFound", "é"),
    frames.AskShard(9, frames.Parcel((), b"question")),
    frames.Release((64,)),
    frames.OpenShard(frames.VERSION, 1, 4096),
    frames.OpenShard(frames.VERSION, 1, 4096, {b"\xff\0": ("infer", "admin")}),
    frames.OpenShard(frames.VERSION, 1, 4096, limits=HttpLimits(7), hosts=("a",)),
    frames.OpenShard(frames.VERSION, 1, grpc=GrpcConfig(0, 7, "gzip"), token_rates={b"k": 0.5}),
    frames.Forwarded(1, INLINE, True),
    frames.Forwarded(1, frames.Parcel(), is_cut=True),
    frames.Ping(),
    frames.NameKeys({b"d" * 32: "team-a"}),
    frames.SetKeys({b"d" * 32: ("infer", "admin")}),
    frames.Drain(),
    frames.Stop(),
]

OPEN = "94a46f70656e0102cd1000"


def decode_from_shard(data: bytes) -> frames.FromShard:
    """As the core reads it: one of the frames of a datagram."""
    (frame,) = frames.decode_all_from_shard(frames.join([data]))
    return frame


DIRECTIONS = {
    "to worker": (frames.decode_to_worker, TO_WORKER),
    "from worker": (frames.decode_from_worker, FROM_WORKER),
    "shard to worker": (frames.decode_shard_to_worker, SHARD_TO_WORKER),
    "worker to shard": (frames.decode_worker_to_shard, WORKER_TO_SHARD),
    "from shard": (decode_from_shard, FROM_SHARD),
    "to shard": (frames.decode_to_shard, TO_SHARD),
}
CASES = [
    pytest.param(decode, frame, id=f"{direction}, {type(frame).__name__}")
    for direction, (decode, each) in DIRECTIONS.items()
    for frame in each
]


@pytest.mark.parametrize(("decode", "frame"), CASES)
def test_a_frame_is_read_as_it_was_written(decode: Any, frame: frames.Frame) -> None:
    copy = decode(frames.encode(frame))
    assert type(copy) is type(frame)
    assert copy == frame


QUESTIONS = [
    frames.OpenModel(5, FULL_CONFIG, (6, 7), (0, 3)),
    frames.Publish(2, {"m": (5,)}, {"bad": ("why",)}, ("soon",)),
    frames.DrainModel(5),
    frames.RetireModel(5),
    frames.ReadModels(),
    frames.ExplainModel(5),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: type(each).__name__)
def test_a_question_to_a_shard_is_read_as_it_was_written(question: frames.Frame) -> None:
    assert frames.decode_shard_question(frames.encode(question)) == question
    assert {type(each) for each in QUESTIONS} == set(frames.ShardQuestion.__args__)


def test_every_frame_of_every_direction_is_covered_here() -> None:
    for union, (_, each) in zip(
        (
            frames.ToWorker,
            frames.FromWorker,
            frames.ShardToWorker,
            frames.WorkerToShard,
            frames.FromShard,
            frames.ToShard,
        ),
        DIRECTIONS.values(),
        strict=True,
    ):
        assert set(union.__args__) == {type(frame) for frame in each}


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300])
def test_frames_that_are_joined_are_read_one_by_one(count: int) -> None:
    sent = (FROM_SHARD * count)[:count]
    joined = frames.join([frames.encode(frame) for frame in sent])
    assert frames.decode_all_from_shard(joined) == sent
    with pytest.raises(msgspec.DecodeError):
        frames.decode_all_from_shard(joined + b"\x00")


def test_a_model_config_arrives_whole_and_of_the_same_types() -> None:
    loaded = frames.decode_to_worker(frames.encode(frames.LoadModel(1, FULL_CONFIG)))
    assert isinstance(loaded, frames.LoadModel)
    assert loaded.model == FULL_CONFIG
    assert isinstance(loaded.model, ModelConfig)
    assert isinstance(loaded.model.inputs[0], TensorSpec)
    assert isinstance(loaded.model.batching.policies[1], QueuePolicy)
    assert loaded.model.inputs[0].shape == (3, -1, -1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_frame_from_another_direction_is_refused(direction: str) -> None:
    decode, own = DIRECTIONS[direction]
    for other, (_, each) in DIRECTIONS.items():
        for frame in each:
            if other != direction and type(frame) not in {type(one) for one in own}:
                with pytest.raises(msgspec.ValidationError):
                    decode(frames.encode(frame))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "message", [["zzz", 1], ["LOAD", 1], [7, 1], [], [None], {"type": "stop"}, "stop", None]
)
def test_what_is_not_a_known_frame_is_refused(direction: str, message: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        DIRECTIONS[direction][0](msgspec.msgpack.encode(message))


@pytest.mark.parametrize(("decode", "frame"), CASES)
def test_a_frame_that_was_cut_or_grew_is_refused(decode: Any, frame: frames.Frame) -> None:
    data = frames.encode(frame)
    for length in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            decode(data[:length])
    with pytest.raises(msgspec.DecodeError):
        decode(data + b"\x00")


@pytest.mark.parametrize(
    "message",
    [
        ["run", "7", []],
        ["run", 7, [["r", 1, 2, "3"]]],
        ["run", 7, [["e", 1, 2, 3]]],
        ["run", 7],
        ["map", 1, 4096.5],
        ["run", 7, [], [], 0, [], "", False, 0, 0, ["pass", 1]],
        ["run", 7, [], [], 0, [], "", 1],
        ["rel", [None]],
        ["want", 1.5],
        ["want", [1], [], "soon"],
        ["pass"],
        ["hi", 2],
    ],
)
def test_fields_of_the_wrong_type_are_refused(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        frames.decode_shard_to_worker(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("message", [["load", 1, {"name": "m"}], ["att"], ["att", "0"]])
def test_fields_of_the_cores_frames_have_types_too(message: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        frames.decode_to_worker(msgspec.msgpack.encode(message))


def test_fields_may_be_added_at_the_end_without_a_new_version() -> None:
    decode = frames.decode_shard_to_worker
    assert decode(msgspec.msgpack.encode(["map", 1, 2, "new"])) == frames.MapSlab(1, 2)
    assert decode(msgspec.msgpack.encode(["run", 7, []])) == frames.Dispatch(7, ())


@pytest.mark.parametrize(
    ("decode", "frame", "written"),
    [
        (frames.decode_shard_to_worker, frames.Hello(2, 4096), "95a2686902cd1000c2c2"),
        (frames.decode_shard_to_worker, frames.MapSlab(1, 4096), "93a36d617001cd1000"),
        (
            frames.decode_shard_to_worker,
            frames.Dispatch(7, (frames.RowRange(1, 0, 4),), ((16,),), 64),
            "9ba372756e079194a1720100049191104090a0c20000c0",
        ),
        (
            frames.decode_shard_to_worker,
            frames.Want((5,), (), 0.5, 2, 0, "g", 2.5),
            "99a477616e74910590cb3fe00000000000000200a167cb400400000000000000",
        ),
        (frames.decode_shard_to_worker, frames.Decline(3), "93a47061737303c0"),
        (frames.decode_shard_to_worker, frames.Release((0, 64)), "92a372656c920040"),
        (
            frames.decode_worker_to_shard,
            frames.Claim(3, 16, 48, 0.5, True),
            "99a3636c6d031030cb3fe0000000000000c3c0cb7ff0000000000000c3",
        ),
        (
            frames.decode_worker_to_shard,
            frames.Done(7, 0.1, 0.2, 0.3),
            "9ba26f6b07cb3fb999999999999acb3fc999999999999acb3fd33333333333339080900000c3",
        ),
        (frames.decode_worker_to_shard, frames.BatchFailed(7, "bad"), "94a365727207a3626164c2"),
        (frames.decode_to_worker, frames.Attach(1, 2), "93a36174740102"),
        (frames.decode_to_worker, frames.Stop(), "91a473746f70"),
        (
            frames.decode_from_worker,
            frames.WorkerReady(1, 0.5, {"a": "b"}, {1: 0.25}),
            "98a372647901cb3fe000000000000081a161a1628101cb3fd0000000000000c295a3707266a0a0909080",
        ),
        (frames.decode_from_worker, frames.StartFailed(("no",)), "92a362616491a26e6f"),
        (frames.decode_to_shard, frames.OpenShard(1, 2, 4096), OPEN),
        (decode_from_shard, frames.Listening(1), "92a36c697301"),
        (decode_from_shard, frames.Cancel(5), "92a4696e666305"),
        (
            frames.decode_to_shard,
            frames.Managed(5, frames.Parcel(offset=64)),
            "95a46d6e67640594a370636c90c40040a0a0",
        ),
    ],
)
def test_version_5_reads_what_version_5_wrote(decode: Any, frame: Any, written: str) -> None:
    assert frames.VERSION == 5, "a new version needs new bytes here"
    assert decode(bytes.fromhex(written)) == frame


def test_a_dispatch_of_a_large_batch_fits_a_datagram() -> None:
    runs = tuple(frames.RowRange(slab, row, 1) for slab in range(8) for row in range(0, 256, 2))
    assert len(frames.encode(frames.Dispatch(2**63, runs, ((3, 224, 224),), 64))) < 16 * 1024


sizes = st.integers(0, 2**63 - 1)
dimensions = st.lists(st.integers(-1, 2**63 - 1), max_size=4).map(tuple)
parameters = st.dictionaries(
    st.text(max_size=5),
    st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    max_size=3,
)
extents = st.builds(frames.Extent, st.text(), st.text(), dimensions, sizes, sizes)
extent_tuples = st.lists(extents, max_size=3).map(tuple)
parts = st.builds(
    frames.RequestPart,
    st.text(),
    sizes,
    extent_tuples,
    st.lists(st.text(), max_size=2).map(tuple),
    parameters,
)
pieces = st.builds(frames.TensorHeader, st.text(), st.text(), dimensions, sizes)
parcels = st.builds(
    frames.Parcel,
    st.lists(pieces, max_size=3).map(tuple),
    st.binary(max_size=20),
    st.none() | sizes,
)
runs = st.builds(frames.RowRange, sizes, sizes, sizes)
seconds = st.floats(0, 1e6)
amounts = st.lists(sizes, max_size=3).map(tuple)
wants = st.builds(
    frames.Want, amounts, amounts, seconds, sizes, sizes, st.none() | st.text(), seconds, sizes
)


@settings(deadline=None, max_examples=at_most(150))
@given(
    st.builds(
        frames.Dispatch,
        sizes,
        st.lists(runs, max_size=3).map(tuple),
        st.lists(dimensions, max_size=3).map(tuple),
        sizes,
        st.lists(parts, max_size=2).map(tuple),
        st.text(),
        st.booleans(),
        sizes,
        sizes,
        st.none() | wants,
    )
)
def test_any_dispatch_is_read_as_it_was_written(frame: frames.Dispatch) -> None:
    assert frames.decode_shard_to_worker(frames.encode(frame)) == frame


@settings(deadline=None, max_examples=at_most(150))
@given(
    st.builds(
        frames.Done,
        sizes,
        seconds,
        seconds,
        seconds,
        st.lists(extent_tuples, max_size=3).map(tuple),
        st.dictionaries(sizes, st.text(), max_size=2),
        amounts,
        sizes,
        sizes,
        st.booleans(),
    )
)
def test_any_done_is_read_as_it_was_written(frame: frames.Done) -> None:
    assert frames.decode_worker_to_shard(frames.encode(frame)) == frame


@settings(deadline=None, max_examples=at_most(150))
@given(
    st.builds(
        frames.Forward,
        sizes,
        seconds,
        st.binary(max_size=8),
        st.binary(max_size=20),
        st.dictionaries(st.binary(max_size=8), st.binary(max_size=8), max_size=2),
        st.booleans(),
        st.booleans(),
        parcels,
    )
)
def test_any_message_is_read_as_it_was_written(frame: frames.Forward) -> None:
    assert decode_from_shard(frames.encode(frame)) == frame


@settings(deadline=None, max_examples=at_most(300))
@given(st.binary(max_size=40), st.sampled_from(sorted(DIRECTIONS)))
def test_random_bytes_are_refused_without_harm(data: bytes, direction: str) -> None:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        DIRECTIONS[direction][0](data)
