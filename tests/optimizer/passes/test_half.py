"""Sixteen bits where the hardware computes with them, read back from what was built."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from served_builds import a_config, a_situation
from suites.onnx_models import (
    AVX2,
    answers,
    batch,
    build_of,
    built,
    drawn_rows,
    opened,
    situation,
    stack,
    workshop,
)

from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts, file_facts
from penstock.optimizer.passes.half import Half

PASS = Half()
FP16 = Step("half", {"datatype": "fp16"})
BF16 = Step("half", {"datatype": "bf16"})


def test_weights_are_halved_and_tensors_keep_their_datatypes(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m")
    assert list(PASS.propose(situation(parent, is_exhaustive=True))) == [FP16]
    made, facts = built(PASS, parent, FP16, tmp_path)
    assert made.config.inputs == parent.config.inputs
    assert made.config.outputs == parent.config.outputs
    assert facts.weight_bytes["FP16"] == file_facts(parent).weight_bytes["FP32"] // 2
    feeds = batch(drawn_rows(parent, 4))
    wanted = answers(parent.artifact, feeds)
    assert np.allclose(answers(made.artifact, feeds), wanted, atol=0.02)


def test_fp16_on_cpus_is_skipped_with_the_reason(tmp_path: Path) -> None:
    (skip,) = PASS.propose(situation(build_of(stack(), tmp_path / "m")))
    assert isinstance(skip, Skip) and "few operators in FP16" in skip.reason and skip.step == FP16


def test_an_fp32_model_that_calls_itself_fp16_is_caught(tmp_path: Path) -> None:
    facts = file_facts(build_of(stack(), tmp_path / "m"))
    assert "still FP32" in PASS.check(FP16, facts, facts)[0]


def test_openvino_computes_in_bf16_where_the_processor_does(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m", 'backend: "openvino"')
    assert list(PASS.propose(situation(parent))) == [BF16]
    (skip,) = PASS.propose(situation(parent, AVX2))
    assert isinstance(skip, Skip) and "no instructions for BF16" in skip.reason
    target = tmp_path / "t" / "m"
    PASS.build(parent, BF16, target, workshop(tmp_path))
    made = opened(target)
    assert made.config.options["inference_precision"] == "bf16"
    assert made.config.tolerance is not None
    assert made.artifact.read_bytes() == parent.artifact.read_bytes()
    (skip,) = PASS.propose(situation(made))
    assert isinstance(skip, Skip) and "already" in skip.reason


def test_another_precision_than_asked_for_is_caught() -> None:
    before = Facts("openvino")
    asked = {"inference_precision_hint": "bf16"}
    assert PASS.check(BF16, before, Facts("openvino", built=asked)) == []
    got = {"inference_precision_hint": "f32"}
    assert PASS.check(BF16, before, Facts("openvino", built=got)) == ["asked for bf16, got f32"]
    assert PASS.check(BF16, before, Facts("pytorch", built={"dtype": "torch.bfloat16"})) == []
    assert PASS.check(BF16, before, Facts("openvino")) == ["asked for bf16, got not told"]


def on_gpu(config):
    return replace(config, backend="pytorch", device="cuda", artifact="module.py")


def test_torch_on_a_gpu_may_have_both(tmp_path: Path) -> None:
    assert list(PASS.propose(a_situation(on_gpu(a_config())))) == [FP16, BF16]
    cast = replace(on_gpu(a_config()), options={"penstock.dtype": "fp16"})
    (skip,) = PASS.propose(a_situation(cast))
    assert isinstance(skip, Skip) and "already computes in less" in skip.reason


def test_one_that_calls_itself_the_other_is_caught() -> None:
    def facts(dtype: str) -> Facts:
        return Facts("pytorch", built={"dtype": dtype})

    assert PASS.check(FP16, facts("float32"), facts("float16")) == []
    assert PASS.check(BF16, facts("float32"), facts("bfloat16")) == []
    assert PASS.check(FP16, facts("float32"), facts("bfloat16")) == ["asked for fp16, got bfloat16"]
    assert PASS.check(BF16, facts("float32"), facts("float16")) == ["asked for bf16, got float16"]
