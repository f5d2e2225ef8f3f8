"""Static INT8: built from ranges of the examples, read back, and layers kept in float by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from suites.onnx_models import (
    AVX2,
    Graph,
    answers,
    batch,
    build_of,
    built,
    cnn,
    cosine,
    drawn_rows,
    examples_of,
    opened,
    situation,
    stack,
    transformer,
    workshop,
)

from penstock.errors import ConfigError
from penstock.optimizer.candidates import Build, Skip, Step
from penstock.optimizer.examples import Examples, Split
from penstock.optimizer.facts import Facts, file_facts, optimised_operators
from penstock.optimizer.fallback import MAX_ROWS
from penstock.optimizer.passes import int8_static
from penstock.optimizer.passes.int8_static import Int8Static

PASS = Int8Static()


def proposed(build: Build) -> list[Step]:
    steps = PASS.propose(situation(build, examples=examples_of(build)))
    assert all(isinstance(step, Step) for step in steps)
    return [step for step in steps if isinstance(step, Step)]


@pytest.mark.parametrize("make", [cnn, stack, transformer])
def test_every_calibrator_gives_a_quantised_model_that_answers_nearly_alike(
    make: object, tmp_path: Path
) -> None:
    parent = build_of(make(), tmp_path / "m")  # type: ignore[operator]
    examples = examples_of(parent)
    rows = batch(drawn_rows(parent, 8, seed=5))
    wanted = answers(parent.artifact, rows)
    steps = proposed(parent)
    assert [step.settings["calibrator"] for step in steps] == ["minmax", "entropy", "percentile"]
    for step in steps:
        made, facts = built(PASS, parent, step, tmp_path, examples)
        assert sum(facts.quantised.values()) >= sum(file_facts(parent).quantisable.values())
        assert facts.weight_bytes["INT8"] > 0
        assert cosine(wanted, answers(made.artifact, rows)) > 0.98


def test_onnx_runtime_really_computes_in_bytes(tmp_path: Path) -> None:
    parent = build_of(cnn(), tmp_path / "m")
    made, facts = built(PASS, parent, proposed(parent)[0], tmp_path, examples_of(parent))
    facts.optimised_operators = optimised_operators(made.artifact, {})
    assert facts.optimised_operators["QLinearConv"] == 2
    assert PASS.check(proposed(parent)[0], file_facts(parent), facts) == []


def test_ranges_are_of_what_preprocessing_makes_of_the_examples(tmp_path: Path) -> None:
    config = """backend: "onnxruntime" max_batch_size: 8
    input { name: "text" data_type: TYPE_STRING dims: 1 }
    output { name: "y" data_type: TYPE_FP32 dims: 32 }
    parameters { key: "penstock.preprocess" value { string_value: "prepare.py:spread" } }
    parameters { key: "penstock.model_inputs" value { string_value: "x:FP32[32]" } }"""
    code = "import numpy as np\n\n\ndef spread(row):\n"
    code += "    return {'x': np.linspace(-1, float(row['text'][0]), 32, dtype=np.float32)}\n"
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "prepare.py").write_text(code)
    onnx.save_model(stack(), str(tmp_path / "m" / "1" / "model.onnx"))
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    parent = opened(tmp_path / "m")
    rows = [{"text": np.array([str(number).encode()], object)} for number in range(24)]
    split = Split(tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 24)))
    examples = Examples(rows, None, split, "digest", "made for the test")
    made, _ = built(PASS, parent, proposed(parent)[0], tmp_path, examples)
    record = json.loads((made.version_folder / "calibration.json").read_text())
    assert record["inputs"]["x"]["max"] == 7.0
    kept = Int8Static().fall_back(
        parent, proposed(parent)[0], workshop(tmp_path, examples), lambda step: True
    )
    assert kept[0] is not None and kept[1]


def test_ranges_lie_beside_the_model(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m")
    examples = examples_of(parent)
    made, _ = built(PASS, parent, proposed(parent)[0], tmp_path, examples)
    record = json.loads((made.version_folder / "calibration.json").read_text())
    rows = [examples.rows[index]["x"] for index in examples.split.calibration]
    assert record["method"] == "minmax" and record["num_examples"] == 8
    assert record["inputs"]["x"]["max"] == pytest.approx(float(np.max(rows)))
    assert record["tensors"]["x"] == pytest.approx([float(np.min(rows)), float(np.max(rows))])


def test_a_model_that_stayed_float_is_caught(tmp_path: Path) -> None:
    parent = build_of(cnn(), tmp_path / "m")
    facts = file_facts(parent)
    assert "built in float" in PASS.check(proposed(parent)[0], facts, facts)[0]


def test_a_model_of_which_a_part_is_quantised_is_caught(tmp_path: Path) -> None:
    parent = build_of(stack(8), tmp_path / "m")
    step = proposed(parent)[0]
    kept = ",".join(f"layer.{index}/dense/MatMul" for index in range(4))
    target = tmp_path / "half" / "m"
    PASS.build(
        parent,
        Step(step.pass_name, {**step.settings, "keep": kept}),
        target,
        workshop(tmp_path, examples_of(parent)),
    )
    after = file_facts(opened(target))
    assert PASS.check(step, file_facts(parent), after) == [
        "4 of 8 layers are quantised; expected 90%"
    ]


def test_runtime_that_computes_in_float_all_the_same_is_caught(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m")
    step = proposed(parent)[0]
    _, facts = built(PASS, parent, step, tmp_path, examples_of(parent))
    facts.optimised_operators = {"MatMul": 4, "QuantizeLinear": 4, "DequantizeLinear": 8}
    assert "in float" in PASS.check(step, file_facts(parent), facts)[0]


@pytest.mark.parametrize("seed", range(6))
def test_the_layer_that_int8_destroys_is_found_and_alone_kept(seed: int, tmp_path: Path) -> None:
    num_layers = 6
    destroyed = int(np.random.default_rng(seed).integers(1, num_layers))
    model = _with_outlier(stack(num_layers, seed=seed, residual=False), destroyed)
    parent = build_of(model, tmp_path / "m")
    examples = examples_of(parent)
    step = proposed(parent)[0]
    rows = batch(drawn_rows(parent, 16, seed=9))
    wanted = answers(parent.artifact, rows)
    judged: list[Step] = []

    def passes(candidate: Step) -> bool:
        judged.append(candidate)
        made, _ = built(PASS, parent, candidate, tmp_path, examples)
        return cosine(wanted, answers(made.artifact, rows)) > 0.99

    assert not passes(step)
    fallen, layers = Int8Static().fall_back(parent, step, workshop(tmp_path, examples), passes)
    assert fallen is not None
    assert [layer.name for layer in layers] == [f"layer.{destroyed}/dense/MatMul"]
    assert fallen.settings["keep"] == f"layer.{destroyed}/dense/MatMul"
    assert layers[0].operator == "MatMul" and layers[0].regained > 0.5
    assert len(judged) <= 6
    # Whatever is kept, nothing passes: the refusal names the layer first.
    none, worst = Int8Static().fall_back(
        parent, step, workshop(tmp_path, examples), lambda step: False
    )
    assert none is None
    assert worst[0].name == f"layer.{destroyed}/dense/MatMul" and worst[0].regained > 0.5


def _with_outlier(model: onnx.ModelProto, layer: int) -> onnx.ModelProto:
    """One row of the weights is huge and meets an activation that is always zero: it adds nothing,
    but takes all levels of a scale by column."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor).copy()
        if tensor.name == f"w{layer - 1}":
            array[:, 0] = 0
        elif tensor.name == f"w{layer}":
            array[0] *= 5000
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


def test_layers_are_compared_on_the_rows_that_differ_most(tmp_path: Path) -> None:
    """Rows, whatever batches they came in: large values are clipped."""
    parent = build_of(stack(), tmp_path / "m")
    ready = int8_static.prepared(parent, tmp_path)
    names = [node.input[0] for node in int8_static.layers(ready)]
    ranges = dict.fromkeys([*names, *(node.output[0] for node in ready.graph.node)], (-1.0, 1.0))
    rows = np.random.default_rng(0).uniform(-1, 1, (80, 32)).astype(np.float32)
    large = np.arange(3, 80, 5)
    rows[large] *= 50
    batches = [{"x": rows[start : start + 8]} for start in range(0, 80, 8)]
    scheme = int8_static.scheme_of(proposed(parent)[0])
    trial = int8_static.LayerTrial(ready, ranges, scheme, batches, is_batched=True)
    chosen = [batch["x"] for batch in trial.on_most_different().batches]
    assert [len(each) for each in chosen] == [8] * (MAX_ROWS // 8)
    kept = {row.tobytes() for each in chosen for row in each}
    assert {row.tobytes() for row in rows[large]} <= kept


def with_bias(shape: tuple[int, ...] | None, beta: float) -> onnx.ModelProto:
    """A convolution and a classifier with such a bias: x [4, 3, 8, 8] to y [4, 16]."""
    graph = Graph()
    first = graph.add("Conv", "x", graph.drawn("w1", 32, 3, 3, 3), name="first", pads=[1] * 4)
    flat = graph.add("Flatten", graph.add("GlobalAveragePool", graph.add("Relu", first)))
    inputs = [flat, graph.drawn("w3", 32, 16)]
    if shape is not None:
        drawn = np.random.default_rng(3).standard_normal(shape)
        inputs.append(graph.weight("bias", np.asarray(drawn, np.float32)))
    last = graph.add("Gemm", *inputs, name="classifier", beta=beta)
    return graph.model({"x": (TensorProto.FLOAT, [4, 3, 8, 8])}, last, [4, 16])


@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("shape", [None, (16,), (), (1,), (1, 16), (1, 1), (4, 16), (4, 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_classifier_with_any_bias(
    shape: tuple[int, ...] | None, beta: float, device: str, tmp_path: Path
) -> None:
    """One bias for all rows is quantised; with one by row the layer stays in float."""
    parent = build_of(with_bias(shape, beta), tmp_path / "m")
    parent = replace(parent, config=parent.config.on([device]))
    step = proposed(parent)[0]
    target = tmp_path / "b" / "m"
    PASS.build(parent, step, target, workshop(tmp_path, examples_of(parent)))
    made = opened(target)
    is_by_row = shape is not None and shape[:1] == (4,)
    assert file_facts(made).quantised.get("Gemm", 0) == (not is_by_row)
    (rows,) = drawn_rows(parent, 1, seed=5)
    wanted, found = answers(parent.artifact, rows), answers(made.artifact, rows)
    assert np.abs(wanted - found).max() < 0.05 * np.abs(wanted).max()


def test_a_layer_that_does_not_exist_cannot_be_kept(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m")
    step = Step("int8-static", {"calibrator": "minmax", "keep": "nowhere"})
    with pytest.raises(ConfigError, match="there is no layer 'nowhere'"):
        PASS.build(parent, step, tmp_path / "t" / "m", workshop(tmp_path, examples_of(parent)))


def test_a_calibrator_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    parent = build_of(stack(), tmp_path / "m")
    step = Step("int8-static", {"calibrator": "guess"})
    with pytest.raises(ConfigError, match="minmax, entropy, percentile"):
        PASS.build(parent, step, tmp_path / "t" / "m", workshop(tmp_path, examples_of(parent)))


def reason(*proposals: Step | Skip) -> str:
    (only,) = proposals
    assert isinstance(only, Skip)
    return only.reason


def test_what_cannot_gain_is_skipped_with_the_reason(tmp_path: Path) -> None:
    parent = build_of(cnn(), tmp_path / "m")
    examples = examples_of(parent)
    assert "no examples" in reason(*PASS.propose(situation(parent)))
    assert "VNNI" in reason(*PASS.propose(situation(parent, AVX2, examples)))
    small = build_of(stack(size=8), tmp_path / "small")
    assert "nothing to gain" in reason(*PASS.propose(situation(small, examples=examples)))
    made, _ = built(PASS, parent, proposed(parent)[0], tmp_path, examples)
    assert "quantised already" in reason(*PASS.propose(situation(made, examples=examples)))


def test_exhaustive_search_tries_old_processors_with_a_smaller_range(tmp_path: Path) -> None:
    parent = build_of(cnn(), tmp_path / "m")
    given = situation(parent, AVX2, examples_of(parent), is_exhaustive=True)
    steps = [step for step in PASS.propose(given) if isinstance(step, Step)]
    assert len(steps) == 6
    assert {step.settings["range"] for step in steps} == {"7 bits"}
    made, _ = built(PASS, parent, steps[0], tmp_path, examples_of(parent))
    model = onnx.load(str(made.artifact))
    weights = [
        numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.name.startswith("w") and tensor.data_type == onnx.TensorProto.INT8
    ]
    largest = max(int(np.abs(array.astype(int)).max()) for array in weights if array.ndim > 1)
    assert largest <= 64


def test_the_same_file_is_for_openvino(tmp_path: Path) -> None:
    config = 'backend: "openvino"'
    parent = build_of(cnn(), tmp_path / "m", config)
    made, _ = built(PASS, parent, proposed(parent)[0], tmp_path, examples_of(parent))
    assert made.config.backend == "openvino" and made.artifact.name == "model.onnx"


def on_gpu(build: Build) -> Build:
    return replace(build, config=build.config.on(["cuda"]))


def test_on_a_gpu_only_the_inputs_of_layers_are_quantised_and_without_a_zero(
    tmp_path: Path,
) -> None:
    parent = on_gpu(build_of(cnn(), tmp_path / "m"))
    step = proposed(parent)[0]
    assert step.settings["device"] == "gpu"
    PASS.build(parent, step, tmp_path / "b" / "m", workshop(tmp_path, examples_of(parent)))
    made = opened(tmp_path / "b" / "m")
    assert made.config.options["penstock.dtype"] == "fp16"
    model = onnx.load(made.artifact)
    zeros = [
        numpy_helper.to_array(each)
        for each in model.graph.initializer
        if each.name.endswith("zero_point")
    ]
    assert zeros
    assert not any(each.any() for each in zeros)
    rounded = {node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    made_by = {name: node.op_type for node in model.graph.node for name in node.output}
    # An image, and what a Relu or a Flatten gives: never the result of a layer.
    assert {made_by.get(name, "input") for name in rounded} == {"input", "Relu", "Flatten"}
    assert file_facts(made).weight_bytes["INT8"] > 0


def test_on_a_gpu_a_build_without_layers_in_int8_is_caught() -> None:
    step = Step("int8-static", {"device": "gpu"})
    before = Facts("onnxruntime")
    inside = Facts("onnxruntime", built={"fusion": "0 convolutions, 54 layers in INT8"})
    assert PASS.check(step, before, inside) == []
    outside = Facts("onnxruntime", built={"fusion": "54 convolutions: 54 cudnn"})
    assert PASS.check(step, before, outside) == [
        "no layer computes in INT8: 54 convolutions: 54 cudnn"
    ]
    (problem,) = PASS.check(step, before, Facts("onnxruntime"))
    assert problem == "no layer computes in INT8: nothing is fused"
