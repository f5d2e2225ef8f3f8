"""CUDA graphs where shapes come again, and only if some were captured."""

from dataclasses import replace
from pathlib import Path

from served_builds import TEXT, a_config, a_situation
from suites.onnx_models import opened, workshop

from penstock.config import PadAxis, Padding
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes.cuda_graphs import CudaGraphs
from penstock.repository import pbtxt

PASS = CudaGraphs()
ON = Step("cuda-graphs", {"graphs": "on"})


def on_gpu(config):
    return replace(config, backend="pytorch", device="cuda", artifact="module.py")


def reason(config) -> str:
    (skip,) = PASS.propose(a_situation(config))
    assert isinstance(skip, Skip)
    return skip.reason


def test_proposed_where_shapes_come_again() -> None:
    assert list(PASS.propose(a_situation(on_gpu(a_config())))) == [ON]
    padded = replace(on_gpu(a_config(TEXT)), padding=Padding((PadAxis("tokens", 0),), (16, 64)))
    assert list(PASS.propose(a_situation(padded))) == [ON]


def test_skipped_with_the_reason() -> None:
    assert "on a GPU" in reason(a_config())
    assert "any length" in reason(on_gpu(a_config(TEXT)))
    autotuned = replace(on_gpu(a_config()), options={"penstock.compile": "max-autotune"})
    assert "has them already" in reason(autotuned)
    assert "decided" in reason(replace(on_gpu(a_config()), options={"penstock.cuda_graphs": "off"}))


def test_only_the_configuration_changes(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text("import torch\nfactory = torch.nn.Identity\n")
    config = replace(on_gpu(a_config()), name="m", file="module.py")
    (tmp_path / "m" / "config.pbtxt").write_text(pbtxt.write(config))
    parent = opened(tmp_path / "m")
    PASS.build(parent, ON, tmp_path / "t" / "m", workshop(tmp_path))
    made = opened(tmp_path / "t" / "m")
    assert made.config.options["penstock.cuda_graphs"] == "on"
    assert made.artifact.read_bytes() == parent.artifact.read_bytes()


def test_a_model_that_was_not_captured_is_caught() -> None:
    before = Facts("pytorch")
    assert PASS.check(ON, before, Facts("pytorch", built={"cuda_graphs": "6"})) == []
    (problem,) = PASS.check(ON, before, Facts("pytorch", built={"cuda_graphs": "off"}))
    assert problem == "no graph was captured"
    built = {"cuda_graphs": "0", "without_cuda_graph": "2 shapes: not permitted"}
    (problem,) = PASS.check(ON, before, Facts("pytorch", built=built))
    assert "2 shapes: not permitted" in problem
