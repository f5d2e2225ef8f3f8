"""INT8 with ranges by batch: for MatMul, and never for convolutions."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from suites.onnx_models import (
    AVX2,
    answers,
    batch,
    build_of,
    built,
    cnn,
    cosine,
    drawn_rows,
    situation,
    stack,
    transformer,
)

from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import file_facts, optimised_operators
from penstock.optimizer.passes.half import Half
from penstock.optimizer.passes.int8_dynamic import TOLERANCE, Int8Dynamic
from penstock.optimizer.passes.transformer_fusion import TransformerFusion

PASS = Int8Dynamic()


@pytest.mark.parametrize("make", [stack, transformer])
def test_products_with_weights_become_integers(make: object, tmp_path: Path) -> None:
    parent = build_of(make(), tmp_path / "m")  # type: ignore[operator]
    (step,) = PASS.propose(situation(parent))
    assert isinstance(step, Step)
    made, facts = built(PASS, parent, step, tmp_path)
    assert facts.quantised["MatMulInteger"] == sum(file_facts(parent).quantisable.values())
    feeds = batch(drawn_rows(parent, 6))
    assert cosine(answers(parent.artifact, feeds), answers(made.artifact, feeds)) > 0.99
    assert any(
        "Integer" in name or "Dynamic" in name for name in optimised_operators(made.artifact, {})
    )
    # One range for all rows of a batch: the server's proof needs to know.
    assert made.config.tolerance == TOLERANCE


def test_fused_attention_is_quantised_too(tmp_path: Path) -> None:
    parent = build_of(transformer(), tmp_path / "m")
    fused, _ = built(
        TransformerFusion(), parent, Step("transformer-fusion", {"attention": "packed"}), tmp_path
    )
    (step,) = PASS.propose(situation(fused))
    assert isinstance(step, Step)
    made, facts = built(PASS, fused, step, tmp_path)
    assert facts.quantised["QAttention"] == 2
    feeds = batch(drawn_rows(parent, 6))
    assert cosine(answers(parent.artifact, feeds), answers(made.artifact, feeds)) > 0.99


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    """Not even where attention is left to do."""
    parent = situation(build_of(transformer(), tmp_path / "m"))
    operators = {**parent.facts.operators, "Attention": 2}
    facts = msgspec.structs.replace(parent.facts, operators=operators, quantised={"MatMul": 4})
    (skip,) = PASS.propose(replace(parent, facts=facts))
    assert isinstance(skip, Skip) and "quantised already" in skip.reason


def test_weights_in_fp16_are_left_to_a_parent_in_fp32(tmp_path: Path) -> None:
    parent = build_of(transformer(), tmp_path / "m")
    half, _ = built(Half(), parent, Step("half", {"datatype": "fp16"}), tmp_path)
    (skip,) = PASS.propose(situation(half))
    assert isinstance(skip, Skip) and "FP16" in skip.reason


def test_a_model_that_stayed_float_is_caught(tmp_path: Path) -> None:
    facts = file_facts(build_of(stack(), tmp_path / "m"))
    assert "built in float" in PASS.check(Step(PASS.name), facts, facts)[0]


def test_what_would_be_slower_is_skipped_with_the_reason(tmp_path: Path) -> None:
    (skip,) = PASS.propose(situation(build_of(cnn(), tmp_path / "cnn")))
    assert isinstance(skip, Skip) and "convolutions" in skip.reason and skip.step is not None
    parent = build_of(stack(), tmp_path / "m")
    (skip,) = PASS.propose(situation(parent, AVX2))
    assert isinstance(skip, Skip) and "VNNI" in skip.reason
    (step,) = PASS.propose(situation(parent, AVX2, is_exhaustive=True))
    assert isinstance(step, Step) and step.settings["range"] == "7 bits"
    other = build_of(stack(), tmp_path / "ov", 'backend: "openvino"')
    (skip,) = PASS.propose(situation(other))
    assert isinstance(skip, Skip) and "only ONNX Runtime" in skip.reason
