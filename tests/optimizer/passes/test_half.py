"""Sixteen bits where the hardware computes with them, read back from what was built."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
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

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.examples import Examples, Split
from penstock.optimizer.facts import Facts, file_facts
from penstock.optimizer.passes.half import Half
from penstock.repository import pbtxt
from penstock.types import TensorSpec

PASS = Half()
FP16 = Step("half", {"datatype": "fp16"})
BF16 = Step("half", {"datatype": "bf16"})
TF32 = Step("half", {"datatype": "tf32"})


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


def test_torch_on_a_gpu_may_have_all() -> None:
    assert list(PASS.propose(a_situation(on_gpu(a_config())))) == [FP16, BF16, TF32]
    cast = replace(on_gpu(a_config()), options={"penstock.dtype": "fp16"})
    (skip,) = PASS.propose(a_situation(cast))
    assert isinstance(skip, Skip) and "already computes in less" in skip.reason


def test_images_on_a_gpu_are_turned_for_tensor_cores() -> None:
    config = on_gpu(a_config(TensorSpec("image", "FP32", (3, 8, 8))))
    turned = {"memory_format": "channels_last"}
    fp16, bf16, tf32 = PASS.propose(a_situation(config))
    assert fp16 == Step("half", {"datatype": "fp16", **turned})
    assert bf16 == Step("half", {"datatype": "bf16", **turned})
    assert tf32 == TF32
    already = replace(config, options={"penstock.memory_format": "channels_last"})
    assert PASS.propose(a_situation(already))[0] == FP16


def test_the_step_turns_them(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text("import torch\nfactory = torch.nn.Identity\n")
    config = replace(on_gpu(a_config()), name="m", file="module.py")
    (tmp_path / "m" / "config.pbtxt").write_text(pbtxt.write(config))
    step = Step("half", {"datatype": "fp16", "memory_format": "channels_last"})
    PASS.build(opened(tmp_path / "m"), step, tmp_path / "t" / "m", workshop(tmp_path))
    made = opened(tmp_path / "t" / "m").config
    assert made.options["penstock.dtype"] == "fp16"
    assert made.options["penstock.memory_format"] == "channels_last"


def test_an_exported_program_keeps_its_datatypes() -> None:
    (skip,) = PASS.propose(a_situation(replace(on_gpu(a_config()), artifact="model.pt2")))
    assert isinstance(skip, Skip) and "exported program" in skip.reason


def test_tf32_is_what_the_device_was_told() -> None:
    def facts(rounded: str) -> Facts:
        return Facts("pytorch", built={"dtype": "float32", "tf32": rounded})

    assert PASS.check(TF32, facts("off"), facts("matrices,convolutions")) == []
    (problem,) = PASS.check(TF32, facts("off"), facts("convolutions"))
    assert problem == "asked for tf32, got TF32 for convolutions"


def test_one_that_calls_itself_the_other_is_caught() -> None:
    def facts(dtype: str) -> Facts:
        return Facts("pytorch", built={"dtype": dtype})

    assert PASS.check(FP16, facts("float32"), facts("float16")) == []
    assert PASS.check(BF16, facts("float32"), facts("bfloat16")) == []
    assert PASS.check(FP16, facts("float32"), facts("bfloat16")) == ["asked for fp16, got bfloat16"]
    assert PASS.check(BF16, facts("float32"), facts("float16")) == ["asked for bf16, got float16"]


WIDTH = 64


@pytest.fixture(params=["module.py", "model.onnx"])
def overflows(request, tmp_path: Path):
    """An MLP whose middle layer gives millions, which the next one takes back, as a build."""
    pytest.importorskip("safetensors")
    from linear_models import MLP, write_module, write_onnx

    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    source = MLP.replace("FACTOR = 1", "FACTOR = 1e7")
    is_code = request.param == "module.py"
    path = write_module(folder, source) if is_code else write_onnx(folder, source, (WIDTH,))
    tensors = (TensorSpec("x", "FP32", (WIDTH,)),), (TensorSpec("y", "FP32", (WIDTH,)),)
    batching = BatchPolicy(8, is_dynamic=True)
    backend_name = "pytorch" if is_code else "onnxruntime"
    config = ModelConfig("m", "1", backend_name, str(path), *tensors, 8, batching, file=path.name)
    (tmp_path / "m" / "config.pbtxt").write_text(pbtxt.write(config))
    found = opened(tmp_path / "m")
    return replace(found, config=replace(found.config, backend="pytorch"))


def numbers(num: int = 8) -> Examples:
    random = np.random.default_rng(0)
    made = [{"x": random.standard_normal(WIDTH).astype(np.float32)} for _ in range(num)]
    half = num // 2
    return Examples(made, None, Split(tuple(range(half)), tuple(range(half, num)), ()), "", "")


def answered(config: ModelConfig, artifact: Path):
    runner = backend("pytorch")(replace(config, backend="pytorch", artifact=str(artifact)))
    rows = np.stack([row["x"] for row in numbers().rows])
    (found,) = runner.start(Batch({"x": rows}, len(rows))).wait()
    return found["y"].copy()


def test_layers_that_overflow_stay_in_fp32(overflows, tmp_path: Path) -> None:
    wanted = answered(overflows.config, overflows.artifact)
    work = replace(workshop(tmp_path), examples=numbers())
    PASS.build(overflows, FP16, tmp_path / "whole" / "m", work)
    whole = opened(tmp_path / "whole" / "m")
    assert not np.isfinite(answered(whole.config, whole.artifact)).all()
    asked = []

    def passes(step: Step) -> bool:
        asked.append(step)
        target = tmp_path / f"t{len(asked)}" / "m"
        PASS.build(overflows, step, target, work)
        made = opened(target)
        return np.allclose(answered(made.config, made.artifact), wanted, atol=0.01)

    step, layers = PASS.fall_back(overflows, FP16, work, passes)
    assert len(asked) == 1
    is_code = overflows.artifact.name == "module.py"
    names = ["middle", "back"] if is_code else ["layer_1", "layer_2"]
    assert step == Step("half", {"datatype": "fp16", "keep": ",".join(names)})
    assert [(each.name, each.operator) for each in layers] == [(n, "overflows") for n in names]


def test_layers_that_lose_most_stay_in_fp32(overflows, tmp_path: Path) -> None:
    """BF16 has the range, so nothing overflows; the last layer's rounding is what is left."""
    work = replace(workshop(tmp_path), examples=numbers())
    last = "last" if overflows.artifact.name == "module.py" else "layer_3"

    def passes(step: Step) -> bool:
        return last in step.settings["keep"].split(",")

    step, layers = PASS.fall_back(overflows, BF16, work, passes)
    assert step is not None
    assert step.settings == {"datatype": "bf16", "keep": last}
    assert [each.operator for each in layers] == ["Linear"]
    none, worst = PASS.fall_back(overflows, BF16, work, lambda step: False)
    assert none is None and last in [each.name for each in worst]
    assert PASS.fall_back(overflows, TF32, work, passes) == (None, [])


def test_without_examples_no_layer_is_looked_for(overflows, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no examples"):
        PASS.fall_back(
            overflows, FP16, replace(workshop(tmp_path), examples=None), lambda step: True
        )
