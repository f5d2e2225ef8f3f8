"""The cases of the benchmark of language models, as small as they come."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    sys.modules.pop("llm", None)
    import llm

    yield llm
    sys.modules.pop("llm", None)


@pytest.fixture
def bench(llm, tmp_path):
    return llm.Bench("cpu", True, False, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-8b", "llama-8b-fp8"])
def test_all_tokens_come(llm, bench, name):
    found = llm.CASES[name](bench)
    scale = bench.scale
    pairs = [(scale.length, scale.length)] * scale.num_queued
    wanted = sum(num_out for _, num_out in (pairs if "fp8" in name else llm.uniform(scale)))
    assert found["output_tokens"] == wanted and found["is_whole"]
    assert found["output_tokens_per_s"] == pytest.approx(wanted / found["took_s"])
    assert found["generating_steps"] + found["prompt_steps"] == found["steps"]


def test_times_of_one_sequence_and_of_a_prefix(llm, bench):
    assert llm.CASES["itl"](bench)["itl_ms"] > 0
    found = llm.CASES["prefix"](bench)
    assert found["ratio"] == pytest.approx(found["hit_ms"] / found["miss_ms"])


def test_structured_output_beside_none(llm, bench):
    pytest.importorskip("llguidance")
    found = llm.CASES["structured-0.6b"](bench)
    assert found["ratio"] == pytest.approx(found["structured_per_s"] / found["free_per_s"])


@pytest.mark.slow
def test_a_case_that_was_measured_is_not_measured_again(llm, tmp_path, monkeypatch, capsys):
    out = tmp_path / "found.json"
    command = ["llm.py", "--tiny", "--device", "cpu", "--case", "itl", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    llm.main()
    first = out.read_text()
    assert json.loads(first)["itl"]["machine"] == "CPU, no figures"
    llm.main()
    assert out.read_text() == first
    assert "itl: measured already" in capsys.readouterr().out
