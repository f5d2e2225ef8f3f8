"""How batches get to a GPU and back, on one that is none; on a real one: tests/gpu."""

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu

from penstock.backends import PinnedTensor, PlacedPieces
from penstock.backends.gpu_memory import Use
from penstock.backends.torch_cuda import (
    LOOK_EVERY,
    WATCHERS,
    Arena,
    GatheredRows,
    Pipeline,
    alias,
    has_ranges,
    open_device,
)


def doubled(inputs):
    return {"y": inputs["x"] * 2, "rows": torch.full((len(inputs["x"]), 1), len(inputs["x"]))}


def pipeline(gpu: FakeGpu, num_slots: int = 1, is_captured: bool = False) -> Pipeline:
    return Pipeline(gpu, doubled, num_slots, is_captured)


def rows(count: int, start: float = 0.0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(count * 3, dtype=torch.float32).reshape(count, 3) + start}


def answers(execution) -> dict[str, np.ndarray]:
    (outputs,) = execution.wait()
    return {name: values.copy() for name, values in outputs.items()}


def test_a_cpu_has_no_way_to_it():
    assert open_device("cpu") is None


class TestPipeline:
    def test_answers_are_those_of_the_rows_that_were_sent(self):
        found = answers(pipeline(FakeGpu()).start([rows(3)], 3, 4))
        np.testing.assert_array_equal(found["y"], rows(3)["x"].numpy() * 2)
        assert found["rows"].tolist() == [[4]] * 3

    @pytest.mark.parametrize("has_empty_rows", [False, True])
    def test_rows_that_nobody_sent_are_the_last_again_or_empty(self, has_empty_rows):
        seen = []

        def kept(inputs):
            seen.append(inputs["x"].clone())
            return inputs

        Pipeline(FakeGpu(), kept, 1, False, has_empty_rows).start([rows(3, 1)], 3, 4).wait()
        last = torch.zeros(3) if has_empty_rows else rows(3, 1)["x"][2]
        assert torch.equal(seen[0][3], last)

    def test_without_rows_it_runs_as_it_is(self):
        found = answers(pipeline(FakeGpu()).start([rows(2)], None, 1))
        assert found["y"].shape == (2, 3)

    def test_each_lane_follows_the_one_before(self):
        gpu = FakeGpu()
        pipeline(gpu).start([rows(2)], 2, 2)
        # Marks: begun, copied (2), computing begins, computed (4), out.
        assert gpu.did == ["in", "compute after 2", "compute", "out after 4", "out"]

    def test_nothing_is_waited_for_before_it_is_asked_for(self):
        gpu = FakeGpu()
        execution = pipeline(gpu).start([rows(2)], 2, 2)
        assert gpu.waited == []
        execution.wait()
        assert gpu.waited == [5]
        assert execution.prepare_s == pytest.approx(0.001)
        assert execution.finish_s == pytest.approx(0.001)

    def test_batches_on_their_way_have_memory_of_their_own(self):
        running = pipeline(FakeGpu(), num_slots=2)
        first, second = running.start([rows(2)], 2, 2), running.start([rows(2, 100)], 2, 2)
        np.testing.assert_array_equal(answers(first)["y"], rows(2)["x"].numpy() * 2)
        np.testing.assert_array_equal(answers(second)["y"], rows(2, 100)["x"].numpy() * 2)

    def test_memory_is_taken_once(self):
        gpu = FakeGpu()
        running = pipeline(gpu)
        answers(running.start([rows(4)], 4, 4))
        num_allocated = len(gpu.allocated)
        for count in (1, 2, 4):
            answers(running.start([rows(count)], count, count))
        assert len(gpu.allocated) == num_allocated

    def test_shared_memory_is_pinned_once(self):
        gpu = FakeGpu()
        running = pipeline(gpu)
        running.pin(memoryview(bytearray(100)))
        assert gpu.pinned_bytes == [100]
        assert running.facts()["copies"] == "from shared memory"

    @pytest.mark.parametrize("num_run", [6, 8])
    @pytest.mark.parametrize("row_bytes", [12, 64 << 10], ids=["small rows", "large rows"])
    @pytest.mark.parametrize("is_pinned", [False, True])
    def test_pieces_are_the_same_as_one(self, num_run, row_bytes, is_pinned):
        gpu = FakeGpu()
        slabs = [memoryview(bytearray(4 * row_bytes)) for _ in range(3)]
        running = Pipeline(gpu, lambda inputs: {"y": inputs["x"] * 2}, 1, False)
        pieces = []
        for number, (slab, count) in enumerate(zip(slabs, (1, 3, 2), strict=True)):
            if is_pinned:
                running.pin(slab)
            array = np.frombuffer(slab, np.float32).reshape(4, -1)[1 : 1 + count]
            array[...] = np.arange(array.size).reshape(array.shape) + 1000 * number
            array.flags.writeable = False
            pieces.append({"x": alias(array)})
        num_before = gpu.num_pinned
        found = answers(running.start(pieces, 6, num_run))["y"]
        np.testing.assert_array_equal(found, torch.cat([each["x"] for each in pieces]) * 2)
        is_direct = is_pinned and row_bytes > 12
        # The answers have a pinned buffer in any case.
        assert gpu.num_pinned - num_before == (1 if is_direct else 2)

    @pytest.mark.parametrize("row_bytes", [12, 64 << 10], ids=["small rows", "large rows"])
    @pytest.mark.parametrize("has_rows", [True, False])
    def test_only_the_device_reads_foreign_memory(self, monkeypatch, row_bytes, has_rows):
        """What is beside it may be staged; the CPU could fault on memory of another process."""
        slabs = [memoryview(bytearray(2 * row_bytes)) for _ in range(3)]
        running = Pipeline(FakeGpu(), lambda inputs: {"y": inputs["x"] + inputs["z"]}, 1, False)
        assert running.pin_foreign(slabs[1])
        arrays = [np.frombuffer(slab, np.float32).reshape(2, -1) for slab in slabs]
        for number, array in enumerate(arrays):
            array[...] = np.arange(array.size).reshape(array.shape) + 1000 * number
        own, foreign, other = map(alias, arrays)
        pieces = [{"x": own, "z": other}, {"x": foreign, "z": own}, {"x": other, "z": own}]
        pieces = pieces if has_rows else pieces[1:2]
        read_by_cpu, copy = [], torch.Tensor.copy_

        def noted(target, source, non_blocking=False):
            if not non_blocking:
                read_by_cpu.append(source.data_ptr())
            return copy(target, source, non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        count = len(pieces) * 2
        found = answers(
            running.start(pieces, count if has_rows else None, count if has_rows else 1)
        )
        expected = torch.cat([piece["x"] + piece["z"] for piece in pieces])
        np.testing.assert_array_equal(found["y"], expected)
        assert own.data_ptr() in read_by_cpu, "it is not pinned"
        assert foreign.data_ptr() not in read_by_cpu
        running.unpin(slabs[1])
        answers(running.start(pieces, count if has_rows else None, count if has_rows else 1))
        assert foreign.data_ptr() in read_by_cpu, "it is memory like any other now"

    @pytest.mark.parametrize("has_empty_rows", [False, True])
    def test_rows_that_lie_apart_are_gathered_by_one_call(self, has_empty_rows):
        gpu, seen = FakeGpu(), []

        def kept(inputs):
            seen.append(inputs["x"].clone())
            return {"y": inputs["x"] * 2}

        memory = np.arange(64, dtype=np.float32)
        base = memory.ctypes.data
        places = [
            PinnedTensor(memoryview(memory).cast("B"), 4 * at, 12 * count, base + 4 * at)
            for at, count in ((40, 1), (3, 2), (20, 1))
        ]
        pieces = PlacedPieces({"x": places}, [1, 2, 1], {"x": (memory.dtype, (3,))})
        assert [each["x"].tolist() for each in pieces][1] == [[3, 4, 5], [6, 7, 8]]
        forms = {"x": (torch.float32, (3,))}
        inputs = GatheredRows(gpu, pieces, forms, has_empty_rows)
        running = Pipeline(gpu, kept, 1, False, has_empty_rows)
        found = answers(running.start(inputs, 4, 6))["y"]
        expected = np.concatenate([each["x"] for each in pieces])
        np.testing.assert_array_equal(found, expected * 2)
        assert gpu.num_gathers == 1
        last = np.zeros(3) if has_empty_rows else expected[-1]
        np.testing.assert_array_equal(seen[0][4:], [last] * 2)

    def test_foreign_memory_that_cannot_be_pinned_is_refused(self):
        assert not pipeline(FakeGpu(may_pin=False)).pin_foreign(memoryview(bytearray(100)))

    def test_memory_that_was_unpinned_is_staged_again(self):
        gpu = FakeGpu()
        running = pipeline(gpu)
        slabs = [memoryview(bytearray(120)) for _ in range(2)]
        for slab in slabs:
            running.pin(slab)
        array = np.frombuffer(slabs[0], np.float32).reshape(10, 3)
        answers(running.start([{"x": alias(array)}], 10, 10))
        assert gpu.num_pinned == 1
        running.unpin(slabs[0])
        running.unpin(slabs[0])
        assert gpu.pinned_bytes == [120]
        answers(running.start([{"x": alias(array)}], 10, 10))
        assert gpu.num_pinned == 2

    def test_memory_that_cannot_be_pinned_is_said(self):
        running = pipeline(FakeGpu(may_pin=False))
        running.pin(memoryview(bytearray(100)))
        assert running.facts()["copies"] == "by way of pinned memory"

    def test_slots_take_turns_on_streams(self):
        gpu = FakeGpu()
        running = Pipeline(gpu, doubled, 4, False, num_streams=2)
        for start in range(4):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        lanes = [each for each in gpu.did if each in ("compute", "compute 1")]
        assert lanes == ["compute 1", "compute", "compute 1", "compute"]
        assert running.facts()["streams"] == "2"

    def test_the_time_of_computing_is_known(self):
        execution = pipeline(FakeGpu()).start([rows(2)], 2, 2)
        execution.wait()
        assert execution.compute_s == pytest.approx(0.001)

    def test_ranges_show_the_stages_of_a_batch(self):
        gpu = FakeGpu()
        Pipeline(gpu, doubled, 2, False, label="resnet").start([rows(3)], 3, 4)
        assert gpu.notes == [
            (0, "resnet: batch of 4 on slot 1"),
            (1, "resnet: copy in"),
            (1, "resnet: compute"),
            (1, "resnet: copy out"),
        ]

    def test_without_a_label_there_are_no_ranges(self):
        gpu = FakeGpu()
        running = pipeline(gpu)
        running.start([rows(3)], 3, 4)
        assert gpu.notes == []
        assert "nvtx" not in running.facts()


@pytest.mark.parametrize("name", WATCHERS)
def test_ranges_are_there_if_asked_for_or_if_somebody_watches(monkeypatch, name):
    for each in WATCHERS:
        monkeypatch.delenv(each, raising=False)
    assert [has_ranges(option) for option in ("on", "off", "")] == [True, False, False]
    monkeypatch.setenv(name, "1")
    assert [has_ranges(option) for option in ("on", "off", "")] == [True, False, True]


class TestGraphs:
    def test_each_stream_has_its_own(self):
        gpu = FakeGpu()
        running = Pipeline(gpu, doubled, 2, True, num_streams=2)
        for start in range(5):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        # Both are captured when the shape comes first, so that no batch waits for it later.
        assert (gpu.num_captures, gpu.num_replays) == (2, 4)
        assert running.facts()["cuda_graphs"] == "1"

    def test_a_stream_without_memory_for_its_graph_gets_it_later(self):
        gpu = FakeGpu()
        running = Pipeline(gpu, doubled, 2, True, num_streams=2)
        full = [torch.OutOfMemoryError("CUDA out of memory")] * 2
        capture = gpu.capture

        def failing(run, number=0):
            if number == 1 and full:
                raise full.pop()
            return capture(run, number)

        gpu.capture = failing
        for start in range(LOOK_EVERY + 6):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        assert gpu.num_captures == 2
        assert not running.postponed

    def test_a_shape_is_captured_when_it_comes_first_and_replayed_from_then_on(self):
        gpu = FakeGpu()
        running = pipeline(gpu, is_captured=True)
        for start in (0, 10, 20):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        assert (gpu.num_captures, gpu.num_replays) == (1, 2)
        assert running.facts()["cuda_graphs"] == "1"

    def test_each_shape_has_its_own(self):
        gpu = FakeGpu()
        running = pipeline(gpu, is_captured=True)
        for count in (1, 2, 1, 2):
            assert answers(running.start([rows(count)], count, count))["y"].shape == (count, 3)
        assert (gpu.num_captures, gpu.num_replays) == (2, 2)

    def test_each_variant_has_its_own(self):
        gpu = FakeGpu()
        running = pipeline(gpu, is_captured=True)
        for variant in (64, 128, 64, 128):
            running.start([rows(2)], 2, 2, variant)
        assert (gpu.num_captures, gpu.num_replays) == (2, 2)

    def test_an_answer_outlives_the_next_replay(self):
        running = pipeline(FakeGpu(), num_slots=2, is_captured=True)
        answers(running.start([rows(2)], 2, 2))
        first, second = running.start([rows(2, 1)], 2, 2), running.start([rows(2, 2)], 2, 2)
        np.testing.assert_array_equal(answers(first)["y"], rows(2, 1)["x"].numpy() * 2)
        np.testing.assert_array_equal(answers(second)["y"], rows(2, 2)["x"].numpy() * 2)

    def test_what_cannot_be_captured_runs_without_and_is_said(self):
        gpu = FakeGpu(may_capture=False)
        running = pipeline(gpu, is_captured=True)
        for start in (0, 10):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        facts = running.facts()
        assert facts["cuda_graphs"] == "0"
        assert "1 shapes: operation not permitted" in facts["without_cuda_graph"]

    @pytest.mark.parametrize("is_captured", [False, True])
    def test_inputs_that_are_there_already_are_only_computed(self, is_captured):
        gpu = FakeGpu()
        running = pipeline(gpu, is_captured=is_captured)
        for start in (0.0, 5.0, 9.0):
            found = running.run(rows(2, start))
            assert torch.equal(found["y"], rows(2, start)["x"] * 2)
        assert gpu.did == ["compute"] * 3 and gpu.waited == []
        assert gpu.num_replays == (2 if is_captured else 0)

    def test_off_unless_asked_for(self):
        gpu = FakeGpu()
        running = pipeline(gpu)
        answers(running.start([rows(2)], 2, 2))
        assert gpu.num_captures == 0 and running.facts()["cuda_graphs"] == "off"


def test_an_arena_gives_aligned_tensors_that_do_not_overlap():
    arena = Arena(lambda n: torch.zeros(n, dtype=torch.uint8))
    taken = arena.take(
        {"a": (torch.float32, (3,)), "b": (torch.int8, (5,)), "c": (torch.int64, ())}
    )
    for index, each in enumerate(taken.values()):
        each.fill_(index + 1)
    assert [each.reshape(-1).tolist() for each in taken.values()] == [[1.0] * 3, [2] * 5, [3]]
    first = taken["a"].data_ptr()
    assert all((each.data_ptr() - first) % 256 == 0 for each in taken.values())


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.float16, np.bool_])
def test_an_alias_is_the_same_memory_even_of_what_must_not_be_written(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    array.flags.writeable = False
    found = alias(array)
    assert found.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(found.numpy(), array)


def test_an_alias_of_nothing():
    assert alias(np.empty((0, 3), np.float32)).shape == (0, 3)


class TestMemory:
    NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
    OF_CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    OF_CUDNN = RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")

    def failing(self, num_failures: int, error: Exception = NO_MEMORY):
        """Finds no memory so many times."""
        left = [num_failures]

        def compute(inputs):
            if left[0]:
                left[0] -= 1
                raise error
            return doubled(inputs)

        return compute

    @pytest.mark.parametrize("error", [NO_MEMORY, OF_CUBLAS, OF_CUDNN])
    def test_a_batch_without_memory_is_tried_again_with_what_can_be_given_back(self, error):
        gpu = FakeGpu()
        running = Pipeline(gpu, self.failing(1, error), 1, False)
        found = answers(running.start([rows(2)], 2, 2))
        np.testing.assert_array_equal(found["y"], rows(2)["x"].numpy() * 2)
        assert gpu.num_shrinks == 1
        assert running.facts()["memory_given_back"] == "1 times"

    def test_if_that_is_not_enough_only_this_batch_fails(self):
        running = Pipeline(FakeGpu(), self.failing(2), 1, False)
        with pytest.raises(torch.OutOfMemoryError):
            running.start([rows(2)], 2, 2)
        found = answers(running.start([rows(2, 50)], 2, 2))
        np.testing.assert_array_equal(found["y"], rows(2, 50)["x"].numpy() * 2)

    def test_an_error_that_says_little_is_believed_where_the_gpu_is_full(self):
        error = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
        gpu = FakeGpu()
        with pytest.raises(RuntimeError, match="INTERNAL"):
            Pipeline(gpu, self.failing(1, error), 1, False).start([rows(2)], 2, 2)
        assert gpu.num_shrinks == 0
        gpu.use = Use(1 << 30, 1 << 30, 1 << 20)
        answers(Pipeline(gpu, self.failing(1, error), 1, False).start([rows(2)], 2, 2))
        assert gpu.num_shrinks == 1

    def test_a_graph_that_found_no_memory_is_captured_later(self):
        gpu = FakeGpu()
        ended = RuntimeError("CUDA error: operation failed due to a previous error during capture")
        ended.__context__ = self.OF_CUBLAS
        gpu.capture_errors = [ended, ended]
        running = pipeline(gpu, is_captured=True)
        for start in range(LOOK_EVERY):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        assert (gpu.num_captures, gpu.num_shrinks) == (0, 1)
        assert running.facts()["cuda_graphs_postponed"] == "1 shapes: no memory"
        assert "without_cuda_graph" not in running.facts()
        for start in range(2):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        assert (gpu.num_captures, gpu.num_replays) == (1, 1)
        assert "cuda_graphs_postponed" not in running.facts()

    def test_what_is_kept_for_later_is_given_back_for_a_graph(self):
        gpu = FakeGpu()
        gpu.capture_errors = [self.NO_MEMORY]
        running = pipeline(gpu, is_captured=True)
        for start in range(2):
            found = answers(running.start([rows(2, start)], 2, 2))
            np.testing.assert_array_equal(found["y"], rows(2, start)["x"].numpy() * 2)
        assert (gpu.num_captures, gpu.num_replays, gpu.num_shrinks) == (1, 1, 1)
        assert "cuda_graphs_postponed" not in running.facts()

    def test_a_batch_that_fails_does_not_give_its_turn_to_a_slot_in_use(self):
        """One is on its way, the next fails, and the one after it must not write over the first."""
        fails = []

        def compute(inputs):
            if fails:
                raise ValueError(fails.pop())
            return doubled(inputs)

        running = Pipeline(FakeGpu(), compute, 2, False)
        first = running.start([rows(2)], 2, 2)
        fails.append("not today")
        with pytest.raises(ValueError, match="not today"):
            running.start([rows(2, 50)], 2, 2)
        second = running.start([rows(2, 100)], 2, 2)
        np.testing.assert_array_equal(answers(first)["y"], rows(2)["x"].numpy() * 2)
        np.testing.assert_array_equal(answers(second)["y"], rows(2, 100)["x"].numpy() * 2)

    def looked(self, gpu: FakeGpu, running: Pipeline) -> None:
        """As many batches as it takes to look at the memory once."""
        for _ in range(LOOK_EVERY):
            running.start([rows(1)], 1, 1)

    def test_a_full_gpu_gets_back_what_is_kept_and_then_a_new_worker(self):
        gpu = FakeGpu()
        gpu.use = Use(1 << 30, 1 << 30, 1 << 40)
        running = pipeline(gpu)
        running.settle()
        gpu.use = Use(1 << 30, 4 << 30, 1 << 20)
        self.looked(gpu, running)
        assert (running.num_shrinks, running.restart_reason) == (1, "")
        self.looked(gpu, running)
        assert (gpu.num_shrinks, running.num_shrinks) == (1, 1)
        assert running.restart_reason == "it holds 4096 MiB of GPU memory, and 1 MiB are left"

    @pytest.mark.parametrize("is_captured", [False, True])
    def test_what_models_were_tried_out_in_is_given_back_where_graphs_have_their_own(
        self, is_captured
    ):
        gpu = FakeGpu()
        running = pipeline(gpu, is_captured=is_captured)
        running.settle()
        assert (gpu.num_shrinks, running.num_shrinks) == (int(is_captured), 0)

    def test_a_gpu_with_room_is_left_alone(self):
        gpu = FakeGpu()
        running = pipeline(gpu)
        running.settle()
        gpu.use = Use(1 << 30, 64 << 30, 1 << 40)
        self.looked(gpu, running)
        assert (running.num_shrinks, running.restart_reason) == (0, "")
