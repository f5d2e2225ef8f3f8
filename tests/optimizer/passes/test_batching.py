"""Batching is proposed where it is predicted to pay, and built so that it reads back."""

from pathlib import Path

import pytest
from served_builds import TEXT, a_config, a_situation, a_table, mean_build, read, texts

from penstock.optimizer import passes
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import BuildContext
from penstock.optimizer.passes.batching import MAX_STEPS, Batching
from penstock.optimizer.plan import Plan
from penstock.slo import parse

GAINS = a_table(0.010, 0.0005)


def workshop(tmp_path: Path, slo: str = "p99 < 20ms") -> BuildContext:
    plan = Plan("m.onnx", "model", "out", slo=parse(slo) if slo else None)
    return BuildContext(plan, Machine("a processor", 2, 1 << 33, ()), None, tmp_path / "cache")


def test_is_found_by_name():
    assert isinstance(passes.find("batching"), Batching)


class TestPropose:
    def test_what_is_predicted_to_do_more(self):
        found = Batching().propose(a_situation(a_config(max_batch=1, is_dynamic=False), GAINS))
        assert 1 <= len(found) <= MAX_STEPS
        assert all(isinstance(each, Step) for each in found)
        assert int(found[0].settings["max_batch"]) >= 16

    def test_nothing_where_nothing_is_gained(self):
        flat = a_table(0.0, 0.010)
        situation = a_situation(a_config(max_batch=1, is_dynamic=False), flat, slo="p99 < 1s")
        (skip,) = Batching().propose(situation)
        assert isinstance(skip, Skip) and "no other setting is predicted to do more" in skip.reason

    def test_a_model_without_batch_dimension(self):
        (skip,) = Batching().propose(a_situation(a_config(max_batch=0, is_dynamic=False), GAINS))
        assert skip == Skip("batching", "the model has no batch dimension")

    def test_rows_that_influence_each_other_are_taken_apart(self):
        facts = Facts("onnxruntime", batching_problem="answers depend on what else is there")
        found = Batching().propose(a_situation(a_config(), GAINS, facts=facts))
        assert found == [
            Skip("batching", "answers depend on what else is there"),
            Step("batching", {"mode": "off"}),
        ]

    def test_and_are_left_apart_where_they_are(self):
        facts = Facts("onnxruntime", batching_problem="mixes")
        situation = a_situation(a_config(is_dynamic=False), GAINS, facts=facts)
        assert Batching().propose(situation) == [Skip("batching", "mixes")]

    def test_without_times_the_usual_is_proposed(self):
        found = Batching().propose(a_situation(a_config(TEXT), rows=texts(range(1, 50))))
        assert {step.settings["mode"] for step in found} == {"fixed", "slo"}
        assert all("buckets" in step.settings for step in found)

    def test_one_row_at_a_time(self):
        table = a_table()
        table.seconds = {0: {1: 0.005}}
        (skip,) = Batching().propose(a_situation(a_config(max_batch=1), table))
        assert skip == Skip("batching", "the model takes one row at a time")


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "off"},
        {"mode": "fixed", "max_batch": "16"},
        {"mode": "slo", "max_batch": "4", "buckets": "4,8,30"},
    ],
    ids=lambda settings: settings["mode"],
)
def test_what_is_built_reads_back(tmp_path: Path, write_onnx, settings):
    parent = mean_build(tmp_path, write_onnx)
    target = tmp_path / "built" / "model"
    Batching().build(parent, Step("batching", settings), target, workshop(tmp_path))
    config = read(target).config
    assert config.batching.is_dynamic == (settings["mode"] != "off")
    assert config.batching.slo_latency_s == (0.020 if settings["mode"] == "slo" else None)
    if settings["mode"] != "off":
        assert config.max_batch_size == int(settings["max_batch"])
    if "buckets" in settings:
        assert config.padding is not None and config.padding.buckets == (4, 8, 30)


def test_check_reads_what_the_load_found():
    before = Facts("onnxruntime")
    step = Step("batching", {"mode": "fixed", "max_batch": "8", "buckets": "8,16"})
    assert Batching().check(step, before, Facts("onnxruntime")) == []
    unpadded = Facts("onnxruntime", padding_problem="padding changes answers")
    assert Batching().check(step, before, unpadded) == ["padding changes answers"]
    unbatched = Facts("onnxruntime", batching_problem="rows mix")
    assert Batching().check(step, before, unbatched) == ["rows mix"]
    assert Batching().check(Step("batching", {"mode": "off"}), before, unbatched) == []
