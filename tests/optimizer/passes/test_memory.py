"""Memory is saved where it is promised, and what is saved is read back."""

from dataclasses import replace
from pathlib import Path

from served_builds import a_config, a_situation, mean_build, read

from penstock.backends import backend
from penstock.config import MemoryPolicy
from penstock.optimizer import passes
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import BuildContext
from penstock.optimizer.passes.memory import SMALL_SLABS, SMALL_SPILL, LessMemory
from penstock.optimizer.plan import Plan

NO_ARENA = Step("memory", {"arena": "off"})
SMALL = Step("memory", {"buffers": "small"})
HALF_BATCH = Step("memory", {"max_batch": "16"})
NO_GRAPHS = Step("memory", {"graphs": "off"})


def built(tmp_path: Path, write_onnx, step: Step):
    parent = mean_build(tmp_path, write_onnx)
    plan, machine = Plan("m", "model", "out"), Machine("a processor", 2, 1 << 33, ())
    target = tmp_path / "built" / "model"
    LessMemory().build(parent, step, target, BuildContext(plan, machine, None, tmp_path))
    return read(target).config


def test_is_found_by_name():
    assert isinstance(passes.find("memory"), LessMemory)


class TestPropose:
    def test_nothing_where_nobody_asks(self):
        assert LessMemory().propose(a_situation(a_config())) == [
            Skip("memory", "the SLO says nothing of memory")
        ]

    def test_all_there_is_where_memory_is_promised(self):
        situation = a_situation(a_config(), slo="p99 < 1s, memory <= 1GiB")
        assert LessMemory().propose(situation) == [NO_ARENA, SMALL]

    def test_on_a_gpu_its_batches_and_graphs_count(self):
        options = {"penstock.cuda_graphs": "on"}
        config = replace(a_config(), backend="pytorch", device="cuda", options=options)
        found = LessMemory().propose(a_situation(config, slo="memory <= 100 MiB"))
        assert found == [HALF_BATCH, NO_GRAPHS]

    def test_on_a_gpu_one_row_without_graphs_is_all(self):
        config = replace(a_config(max_batch=1), backend="pytorch", device="cuda")
        (skip,) = LessMemory().propose(a_situation(config, slo="memory <= 100 MiB"))
        assert skip.reason == "everything is as small as it can be"

    def test_or_where_everything_is_tried(self):
        assert LessMemory().propose(a_situation(a_config(), is_exhaustive=True)) == [
            NO_ARENA,
            SMALL,
        ]

    def test_only_onnxruntime_has_an_arena(self):
        config = replace(a_config(), backend="openvino")
        assert LessMemory().propose(a_situation(config, slo="memory <= 1GiB")) == [SMALL]

    def test_what_is_small_already(self):
        config = replace(
            a_config(),
            options={"enable_mem_arena": "0"},
            memory=MemoryPolicy(max_slabs=SMALL_SLABS, spill_bytes=SMALL_SPILL),
        )
        (skip,) = LessMemory().propose(a_situation(config, slo="memory <= 1GiB"))
        assert skip == Skip("memory", "everything is as small as it can be")


def test_the_runtime_has_no_arena_then(tmp_path: Path, write_onnx):
    config = built(tmp_path, write_onnx, NO_ARENA)
    after = Facts("onnxruntime", built=dict(backend("onnxruntime")(config).built()))
    assert after.built["enable_mem_arena"] == after.built["enable_mem_pattern"] == "0"
    assert LessMemory().check(NO_ARENA, Facts("onnxruntime"), after) == []


def test_an_arena_that_is_still_there_is_told(tmp_path: Path, write_onnx):
    config = mean_build(tmp_path, write_onnx).config
    after = Facts("onnxruntime", built=dict(backend("onnxruntime")(config).built()))
    (problem,) = LessMemory().check(NO_ARENA, Facts("onnxruntime"), after)
    assert problem == "asked for no arena, the runtime says enable_mem_arena 1"


def test_buffers_get_smaller_and_never_larger(tmp_path: Path, write_onnx):
    memory = built(tmp_path, write_onnx, SMALL).memory
    assert (memory.max_slabs, memory.spill_bytes) == (SMALL_SLABS, SMALL_SPILL)
    assert LessMemory().check(SMALL, Facts("onnxruntime"), Facts("onnxruntime")) == []


def test_a_smaller_batch_drops_preferred_sizes_beyond_it():
    config = a_config()
    sizes = replace(config.batching, preferred_batch_sizes=(8, 32))
    found = LessMemory().configured(replace(config, batching=sizes), HALF_BATCH, Plan("m", "m", ""))
    assert (found.max_batch_size, found.batching.max_batch_size) == (16, 16)
    assert found.batching.preferred_batch_sizes == (8,)


def test_graphs_that_are_still_there_are_reported():
    before, after = Facts("pytorch"), Facts("pytorch")
    assert LessMemory().check(NO_GRAPHS, before, after) == []
    after.built = {"cuda_graphs": "7"}
    assert LessMemory().check(NO_GRAPHS, before, after) == ["asked for no CUDA graphs, there are 7"]
