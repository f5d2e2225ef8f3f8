"""Instances and threads: what is worth a try, and that the runtime has what was asked."""

from dataclasses import replace
from pathlib import Path

from served_builds import a_config, a_situation, a_table, mean_build, null_build, read

from penstock.optimizer import passes
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import BuildContext
from penstock.optimizer.passes.instances import Instances
from penstock.optimizer.plan import Plan

ONE_BY_ONE = Step("instances", {"instances": "1", "threads": "1"})
TWO_BY_ONE = Step("instances", {"instances": "2", "threads": "1"})


def test_is_found_by_name():
    assert isinstance(passes.find("instances"), Instances)


class TestPropose:
    def test_what_was_not_measured_is_worth_a_try(self):
        assert Instances().propose(a_situation(a_config())) == [ONE_BY_ONE, TWO_BY_ONE]

    def test_the_other_way_round(self):
        config = replace(a_config(), num_instances=2)
        found = Instances().propose(a_situation(config))
        assert found == [Step("instances", {"instances": "1", "threads": "2"}), ONE_BY_ONE]

    def test_what_is_predicted_to_be_slower_is_not(self):
        one = a_table(0.004, 0.001)
        two = a_table(0.012, 0.004, instances=2, threads=1)
        found = Instances().propose(a_situation(a_config(), one, two))
        assert ONE_BY_ONE in found and TWO_BY_ONE not in found
        (skip,) = [each for each in found if isinstance(each, Skip)]
        assert skip.step == TWO_BY_ONE and "are predicted" in skip.reason

    def test_what_is_predicted_to_be_faster_is(self):
        tables = [a_table(0.004, 0.001), a_table(0.005, 0.0012, instances=2, threads=1)]
        tables.append(a_table(0.008, 0.002, instances=1, threads=1))
        found = Instances().propose(a_situation(a_config(), *tables))
        assert found[0] == TWO_BY_ONE
        assert isinstance(found[1], Skip) and found[1].step == ONE_BY_ONE

    def test_never_more_threads_than_cores(self):
        found = Instances().propose(a_situation(a_config(), num_cores=16))
        assert len(found) == 3
        for step in found:
            assert int(step.settings["instances"]) * int(step.settings["threads"]) <= 16

    def test_one_core(self):
        (skip,) = Instances().propose(a_situation(a_config(), num_cores=1))
        assert skip == Skip("instances", "there is one core")

    def test_a_gpu(self):
        config = replace(a_config(), backend="pytorch", device="cuda", artifact="module.py")
        (step,) = Instances().propose(a_situation(config, num_cores=16))
        assert step == Step("instances", {"instances": "2", "threads": "16"})


def test_what_is_built_reads_back(tmp_path: Path, write_onnx):
    parent = mean_build(tmp_path, write_onnx)
    target = tmp_path / "built" / "model"
    plan, machine = Plan("m", "model", "out"), Machine("a processor", 2, 1 << 33, ())
    Instances().build(parent, TWO_BY_ONE, target, BuildContext(plan, machine, None, tmp_path))
    config = read(target).config
    assert config.num_instances == 2
    assert config.options == {"intra_op_thread_count": "1"}


def test_what_is_on_several_gpus_stays_there(tmp_path: Path):
    parent = null_build(tmp_path, a_ms=1)
    path = parent.folder / "config.pbtxt"
    path.write_text(path.read_text() + "instance_group { kind: KIND_GPU gpus: [ 0, 1 ] }")
    step = Step("instances", {"instances": "4", "threads": "8"})
    plan, machine = Plan("m", "model", "out"), Machine("a processor", 8, 1 << 33, ())
    target = tmp_path / "built" / "model"
    Instances().build(
        read(parent.folder), step, target, BuildContext(plan, machine, None, tmp_path)
    )
    assert read(target).config.workers == (("cuda:0", 2), ("cuda:1", 2))


def test_check_compares_with_what_the_runtime_says():
    before = Facts("onnxruntime")
    good, bad = (
        Facts("onnxruntime", built={"intra_op_thread_count": count}) for count in ("1", "2")
    )
    assert Instances().check(TWO_BY_ONE, before, good) == []
    problems = Instances().check(TWO_BY_ONE, before, bad)
    assert problems == ["asked for 1 threads, the runtime has 2"]
