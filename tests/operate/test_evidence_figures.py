"""Figures are found in evidence, whatever its form."""

import pytest
from committed_versions import evidence

from penstock.operate import evidence_figures as figures


def test_figures_are_found_by_their_paths() -> None:
    found = {kind.name: kind.find(evidence()) for kind in figures.KINDS}
    assert {name: value for name, value in found.items() if value is not None} == {
        "p50": 0.006,
        "p99": 0.012,
        "throughput": 200.0,
        "max rate": pytest.approx(166.7, abs=0.1),
        "accuracy": 0.91,
        "memory": 100 << 20,
        "cost per million": 0.5,
    }


def test_figures_of_language_models_are_found() -> None:
    interval = {"value": 0.2, "low": 0.1, "high": None}
    streams = {"ttft": interval, "tpot": interval, "tokens_per_s": 900}
    made = evidence(measured={"streams": streams}, gpu_memory_bytes=1 << 30)
    found = {kind.name: kind.find(made) for kind in figures.KINDS}
    assert (found["TTFT p99"], found["TPOT p99"], found["tokens/s"]) == (0.2, 0.2, 900.0)
    assert found["GPU memory"] == 1 << 30 and found["p99"] is None


@pytest.mark.parametrize(
    "made",
    [
        {},
        {"measured": None},
        {"measured": []},
        {"measured": {"p99": 3}},
        {"measured": {"p99": {"value": "fast"}}},
        {"measured": {"p99": {"value": None}}},
        {"measured": {"p99": {"value": True}}},
        {"hardware": 1, "lineage": "long"},
    ],
)
def test_other_forms_are_unknown(made: dict[str, object]) -> None:
    assert figures.P99.find(made) is None
    assert figures.steps_of(made) == []
    assert figures.hardware_of(made) == ""
    assert figures.text_at(made, "slo") == ""


def test_steps_and_machines_in_a_few_words() -> None:
    assert figures.steps_of(evidence()) == ["int8(granularity=tensor)", "fold"]
    assert figures.steps_of({"lineage": {"steps": ["by hand", {"pass": "x", "settings": 1}]}}) == [
        "by hand",
        "x",
    ]
    assert figures.hardware_of(evidence()) == "EPYC, 16 cores, 2 x H200"
    assert figures.hardware_of({"hardware": {"cpu": "EPYC", "num_cores": 1}}) == "EPYC, 1 core"
