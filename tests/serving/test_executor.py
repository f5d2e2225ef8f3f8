"""Batches with tensors in clients' memory, in the worker: one runner on a CPU, and one on a GPU
that copies from pinned pages. Whatever is beside a request, its answer is its own."""

import os
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs

from penstock.backends import Batch, PerRequest, PlacedPieces, Runner
from penstock.backends.finished import Finished
from penstock.config import BatchPolicy, ModelConfig
from penstock.processes.channel import Channel, socket_pair
from penstock.serving.executor import BatchExecutor, Part
from penstock.serving.plan import column_bytes
from penstock.serving.shard_link import ShardLink, ShardMemory
from penstock.serving.slab import Layout, Segment
from penstock.types import TensorSpec
from penstock.wire import frames

WIDTH = 20_000
ROW = WIDTH * 4
CAPACITY = 16
SHAPES = ((WIDTH,), (1,))


class Sums(Runner):
    """y = x + z. As on a GPU, `pieces` shows where the rows lie."""

    def __init__(self, pins: bool, answers_each: bool = False) -> None:
        self.pins = pins
        self.answers_each = answers_each
        self.pieces: list[list[tuple[int, int]]] = []
        self.are_placed: list[bool] = []

    def pin_foreign(self, memory: memoryview) -> bool:
        return self.pins

    def start(self, batch: Batch) -> Finished:
        pieces = [(each["x"].ctypes.data, len(each["x"])) for each in batch.all_pieces]
        self.pieces.append(pieces)
        self.are_placed.append(isinstance(batch.pieces, PlacedPieces))
        if isinstance(batch.pieces, PlacedPieces):
            # A device copies from there without looking at the arrays.
            addresses = [place.address for place in batch.pieces.places["x"]]
            assert addresses == [address for address, _ in pieces]
        values = batch.inputs["x"] + batch.inputs.get("z", 0)
        if self.answers_each:
            counts = [request.num_rows for request in batch.requests]
            rows = np.split(values, np.cumsum(counts)[:-1])
            return Finished(PerRequest([{"y": each} for each in rows]))
        return Finished({"y": values})


def config(device: str, num_inputs: int = 2) -> ModelConfig:
    return ModelConfig(
        "m",
        "1",
        backend="null",
        artifact="",
        inputs=(TensorSpec("x", "FP32", (WIDTH,)), TensorSpec("z", "FP32", (1,)))[:num_inputs],
        outputs=(TensorSpec("y", "FP32", (WIDTH,)),),
        max_batch_size=8,
        batching=BatchPolicy(8, is_dynamic=True),
        device=device,
    )


class Worker:
    """An executor, a shard's slab, and a client's file of two rows of x for each request."""

    def __init__(self, runner: Sums, device: str = "cpu", num_inputs: int = 2) -> None:
        self.runner = runner
        made = config(device, num_inputs)
        self.shapes = SHAPES[:num_inputs]
        self.executor = BatchExecutor(made, runner, frames.Proof(), may_pin=True)
        ours, theirs = socket_pair()
        ours.close()
        self.link = ShardLink(1, Channel(theirs))
        spills = Segment(1 << 16), Segment(1 << 16)
        self.link.memory = ShardMemory(made, 1 << 16, [os.dup(s.fd) for s in spills])
        self.layout = Layout.of(column_bytes(made, self.shapes), CAPACITY)
        self.slab = Segment(self.layout.nbytes)
        self.link.memory.map_slab(0, self.slab.nbytes, os.dup(self.slab.fd))
        for spill in spills:
            spill.close()
        self.fd = os.memfd_create("client")
        os.ftruncate(self.fd, 32 * ROW)
        frame = frames.MapRegion(5, "r", 0, 32 * ROW)
        self.executor.regions.open(frame, [os.dup(self.fd)], 1)

    def column(self, index: int) -> np.ndarray:
        start, size = self.layout.offsets[index], self.layout.row_bytes[index]
        raw = self.slab.view[start : start + size * CAPACITY]
        return np.frombuffer(raw, np.float32).reshape(CAPACITY, -1)

    def close(self) -> None:
        self.executor.regions.close_all()
        self.link.close()
        self.slab.close()
        os.close(self.fd)


@pytest.fixture(params=["cpu", "gpu"])
def worker(request: pytest.FixtureRequest):
    made = Worker(Sums(request.param == "gpu"), "cpu" if request.param == "cpu" else "cuda:0")
    yield made
    made.close()


def fill(worker: Worker, kinds: Sequence[str], rows_each: int = 1, start: int = 0) -> Part:
    """A part with a request of each kind: p (plain), r (read from the region), w (also written
    there)."""
    requests, x = [], worker.column(0)
    for index, kind in enumerate(kinds):
        first = start + index * rows_each
        values = expected_input(start + index, rows_each)
        if len(worker.shapes) > 1:
            worker.column(1)[first : first + rows_each] = 1000 * (start + index)
        place, nbytes = 2 * (start + index) * rows_each * ROW, rows_each * ROW
        reads = writes = ()
        if kind == "p":
            x[first : first + rows_each] = values
        else:
            x[first : first + rows_each] = -1
            os.pwrite(worker.fd, values.tobytes(), place)
            reads = (frames.RegionSpan("x", 5, place, nbytes),)
        if kind == "w":
            writes = (frames.RegionSpan("y", 5, place + nbytes, nbytes),)
        requests.append(frames.RequestPart("", rows_each, reads=reads, writes=writes))
    runs = (frames.RowRange(0, start, len(kinds) * rows_each),)
    has_regions = any(kind != "p" for kind in kinds)
    shown = tuple(requests) if has_regions or worker.runner.answers_each else ()
    frame = frames.Dispatch(9, runs, worker.shapes, CAPACITY, shown, has_regions=has_regions)
    return Part.of(worker.link, frame)


def expected_input(number: int, rows: int) -> np.ndarray:
    generator = np.random.default_rng(number)
    return generator.integers(0, 100, (rows, WIDTH)).astype(np.float32)


def check(worker: Worker, kinds: Sequence[str], rows_each: int = 1, start: int = 0) -> None:
    for index, kind in enumerate(kinds):
        wanted = expected_input(start + index, rows_each)
        if len(worker.shapes) > 1:
            wanted += 1000 * (start + index)
        if kind == "w":
            place = (2 * (start + index) + 1) * rows_each * ROW
            raw = os.pread(worker.fd, rows_each * ROW, place)
            found = np.frombuffer(raw, np.float32).reshape(rows_each, WIDTH)
        else:
            first = start + index * rows_each
            found = worker.column(len(worker.shapes))[first : first + rows_each]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kinds", ["r", "w", "pr", "rp", "prwp", "rrww", "pprppw", "pp"])
@pytest.mark.parametrize("rows_each", [1, 2])
def test_every_request_gets_its_own_answer(worker: Worker, kinds: str, rows_each: int):
    part = fill(worker, kinds, rows_each)
    (done,) = worker.executor.finish(worker.executor.begin([part]))
    assert isinstance(done, frames.Done) and not done.errors and not done.outputs
    check(worker, kinds, rows_each)
    (pieces,) = worker.runner.pieces
    if worker.runner.pins and set(kinds) != {"p"}:
        base = np.frombuffer(worker.link.memory.inputs[1], np.uint8).ctypes.data
        places = [(address - base) // ROW for address, _ in pieces]
        in_region = [not 0 <= place < CAPACITY for place in places]
        assert sum(in_region) == len(kinds) - kinds.count("p")
        joined = [count for (_, count), away in zip(pieces, in_region, strict=True) if not away]
        runs = [len(run) * rows_each for run in kinds.replace("w", "r").split("r") if run]
        assert joined == runs, "adjacent rows stay together"
        assert (worker.column(0)[list(kinds).index(kinds.strip("p")[0]) * rows_each] == -1).all()
    else:
        assert len(pieces) == 1, "all is in the rows"


@pytest.mark.parametrize("kinds", ["rr", "ww", "rwrr", "prr", "rp"])
def test_inputs_that_all_lie_in_pinned_memory_are_placed(kinds: str):
    worker = Worker(Sums(pins=True), "cuda:0", num_inputs=1)
    try:
        parts = [fill(worker, kinds), fill(worker, "rw", start=5)]
        answers = worker.executor.finish(worker.executor.begin(parts))
        assert not any(each.errors for each in answers)
        check(worker, kinds)
        check(worker, "rw", start=5)
        assert worker.runner.are_placed == ["p" not in kinds]
    finally:
        worker.close()


def test_memory_without_room_for_an_output_fails_only_its_request():
    worker = Worker(Sums(pins=True), "cuda:0", num_inputs=1)
    try:
        part = fill(worker, "www")
        short = frames.RegionSpan("y", 5, 3 * ROW, ROW - 4)
        requests = list(part.frame.requests)
        requests[1] = structs.replace(requests[1], writes=(short,))
        part.frame = structs.replace(part.frame, requests=tuple(requests))
        (done,) = worker.executor.finish(worker.executor.begin([part]))
        assert list(done.errors) == [1] and done.invalid == (1,)
        assert f"({ROW - 4} bytes) should be at least {ROW}" in done.errors[1]
        check(worker, "w")
        check(worker, "w", start=2)
    finally:
        worker.close()


def test_parts_of_several_shards_with_and_without_regions(worker: Worker):
    parts = [fill(worker, "pw"), fill(worker, "ppp", start=2), fill(worker, "rp", start=5)]
    answers = worker.executor.finish(worker.executor.begin(parts))
    assert [each.total_rows for each in answers] == [7, 7, 7]
    for kinds, start in (("pw", 0), ("ppp", 2), ("rp", 5)):
        check(worker, kinds, start=start)


@pytest.mark.parametrize("answers_each", [False, True])
def test_a_request_whose_memory_is_gone_fails_alone(answers_each: bool):
    worker = Worker(Sums(pins=False, answers_each=answers_each))
    part = fill(worker, "pwrp")
    os.ftruncate(worker.fd, 3 * ROW)  # The input of the second is there, its output is not.
    (done,) = worker.executor.finish(worker.executor.begin([part]))
    assert sorted(done.errors) == [1, 2] and done.invalid == (1, 2)
    assert all("region 'r': its file is shorter" in text for text in done.errors.values())
    for number in (0, 3):
        wanted = expected_input(number, 1)[0] + 1000 * number
        np.testing.assert_array_equal(worker.column(2)[number], wanted)
    worker.close()
