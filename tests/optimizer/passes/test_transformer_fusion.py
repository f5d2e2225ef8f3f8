"""Attention fused, with the same answers, or a failure that says so."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from suites.onnx_models import (
    answers,
    batch,
    build_of,
    built,
    cnn,
    drawn_rows,
    situation,
    transformer,
    workshop,
)

from penstock.errors import BackendFailed
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import file_facts
from penstock.optimizer.passes.transformer_fusion import TransformerFusion

PASS = TransformerFusion()
OPERATORS = {"packed": "Attention", "heads": "MultiHeadAttention"}


def test_both_forms_give_the_answers_of_the_original(tmp_path: Path) -> None:
    parent = build_of(transformer(), tmp_path / "m")
    steps = [step for step in PASS.propose(situation(parent)) if isinstance(step, Step)]
    assert [step.settings["attention"] for step in steps] == ["packed", "heads"]
    feeds = batch(drawn_rows(parent, 3, size=7))
    feeds["mask"][1, 4:] = 0
    wanted = answers(parent.artifact, feeds)
    for step in steps:
        made, facts = built(PASS, parent, step, tmp_path)
        assert facts.operators[OPERATORS[step.settings["attention"]]] == 2
        assert "Softmax" not in facts.operators
        assert np.allclose(answers(made.artifact, feeds), wanted, atol=1e-4)
        assert made.config.inputs == parent.config.inputs


@pytest.mark.parametrize("has_sympy", [True, False])
def test_a_graph_that_nobody_can_fuse_is_not_built(
    has_sympy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is asked too; what it needs for that is not in the base install."""
    if not has_sympy:
        monkeypatch.setitem(sys.modules, "sympy", None)
    model = transformer(num_blocks=1)
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(
            softmax.output[0], onnx.TensorProto.FLOAT, ["b", 4, "s", "s"]
        )
    )
    parent = build_of(model, tmp_path / "m")
    step = Step(PASS.name, {"attention": "heads"})
    target = tmp_path / "next" / "m"
    with pytest.raises(BackendFailed, match="attention was not fused"):
        PASS.build(parent, step, target, workshop(tmp_path))
    assert not target.exists()


def test_a_fusion_that_matched_nothing_is_caught(tmp_path: Path) -> None:
    parent = build_of(transformer(), tmp_path / "m")
    facts = file_facts(parent)
    step = Step(PASS.name, {"attention": "packed"})
    assert PASS.check(step, facts, facts) == ["nothing was fused: no pattern fits this graph"]
    after = file_facts(parent)
    after.operators["BiasGelu"] = 2
    assert "attention was not fused, only 2 BiasGelu" in PASS.check(step, facts, after)[0]


def test_what_is_no_transformer_or_fused_already_is_skipped(tmp_path: Path) -> None:
    (skip,) = PASS.propose(situation(build_of(cnn(), tmp_path / "cnn")))
    assert isinstance(skip, Skip) and "no transformer" in skip.reason
    parent = build_of(transformer(), tmp_path / "m")
    made, _ = built(PASS, parent, Step(PASS.name, {"attention": "packed"}), tmp_path)
    (skip,) = PASS.propose(situation(made))
    assert isinstance(skip, Skip) and "fused already" in skip.reason
    (skip,) = PASS.propose(
        situation(build_of(transformer(), tmp_path / "ov", 'backend: "openvino"'))
    )
    assert isinstance(skip, Skip) and "ONNX Runtime's own" in skip.reason
