"""ONNX files on the PyTorch engine: answers, options, refusals, and the way back to the CPU."""

import hashlib
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from suites.backend import model_config

from penstock.backends import COMPILED, GPU_FALLBACK, Batch, Runner, backend
from penstock.backends.checks import read_code
from penstock.config import ModelConfig, PadAxis, Padding
from penstock.errors import BackendFailed, ConfigError
from penstock.repository.manifest import FileEntry, Manifest
from penstock.types import DATATYPES, Array, TensorSpec

pytest.importorskip("torch")

import torch

from penstock.backends.torch_onnx import limited_inputs, load_graph, read_fixed


def answer(runner: Runner, inputs: dict[str, Array]) -> dict[str, Array]:
    (found,) = runner.start(Batch(inputs, len(next(iter(inputs.values()))))).wait()
    return dict(found)


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: dict[str, Array],
    outputs: Sequence[str] = ("y",),
) -> Path:
    """A model of rows of eight numbers."""
    graph = helper.make_graph(
        list(nodes),
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    random = np.random.default_rng(0)
    weights = {"w": random.random((8, 4), np.float32), "b": random.random(4, np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
    ]
    path = write(tmp_path / "model.onnx", nodes, weights, ("z", "y"))
    inputs, outputs = [TensorSpec("x", "FP32", (8,))], [TensorSpec("y", "FP32", (4,))]
    return model_config("pytorch", path, inputs, outputs)


ROWS = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)


def by_onnx_runtime(config: ModelConfig) -> Array:
    return answer(backend("onnxruntime")(replace(config, backend="onnxruntime")), {"x": ROWS})["y"]


def test_answers_are_those_of_onnx_runtime(config: ModelConfig) -> None:
    runner = backend("pytorch")(config)
    assert runner.built()["form"] == "ONNX"
    np.testing.assert_allclose(answer(runner, {"x": ROWS})["y"], by_onnx_runtime(config), rtol=1e-5)


def test_outputs_come_by_name_in_any_order(config: ModelConfig) -> None:
    outputs = (TensorSpec("y", "FP32", (4,)), TensorSpec("z", "FP32", (4,)))
    found = answer(backend("pytorch")(replace(config, outputs=outputs)), {"x": ROWS})
    assert list(found) == ["y", "z"]
    np.testing.assert_array_equal(found["y"], np.maximum(found["z"], 0))


def test_half_precision_keeps_the_datatypes_of_inputs_and_outputs(config: ModelConfig) -> None:
    runner = backend("pytorch")(replace(config, options={"penstock.dtype": "bf16"}))
    found = answer(runner, {"x": ROWS})["y"]
    assert (found.dtype, runner.built()["dtype"]) == (np.float32, "bfloat16")
    np.testing.assert_allclose(found, by_onnx_runtime(config), rtol=0.05, atol=0.05)


def test_a_wrong_signature_is_named(config: ModelConfig) -> None:
    wrong = replace(config, inputs=(TensorSpec("x", "FP32", (9,)),))
    with pytest.raises(ConfigError, match="input 'x'"):
        backend("pytorch")(wrong)


def test_an_operator_that_is_missing_is_named_with_the_alternative(
    config: ModelConfig, tmp_path: Path
) -> None:
    path = write(tmp_path / "random.onnx", [helper.make_node("RandomNormalLike", ["x"], ["y"])], {})
    with pytest.raises(ConfigError) as caught:
        backend("pytorch")(replace(config, artifact=str(path)))
    (problem,) = caught.value.problems
    assert "1/random.onnx: operator RandomNormalLike" in problem
    assert "KIND_CPU in instance_group runs the model on ONNX Runtime" in problem
    assert "penstock.gpu_engine: 'onnxruntime'" in problem


def test_a_file_for_one_cpu_is_named(config: ModelConfig, tmp_path: Path) -> None:
    """As ONNX Runtime writes it at its highest level, where the CPU has such kernels."""
    node = helper.make_node("ReorderInput", ["x"], ["y"], domain="com.microsoft.nchwc")
    path = write(tmp_path / "blocked.onnx", [node], {})
    with pytest.raises(ConfigError, match="level 'all', for one kind of CPU; use the original"):
        backend("pytorch")(replace(config, artifact=str(path)))


def test_missing_weights_are_missing_everywhere(config: ModelConfig, tmp_path: Path) -> None:
    """No other engine is proposed, and the path is the file's own."""
    weights = {"w": np.eye(4, dtype=np.float32)}
    path = write(tmp_path / "model.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], weights)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    data = (tmp_path / "w.bin").read_bytes()
    config = replace(config, artifact=str(path))
    (tmp_path / "w.bin").write_bytes(data[:8])
    with pytest.raises(ConfigError, match="external data 'w.bin' has no 64 bytes at offset 0$"):
        backend("pytorch")(config)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ConfigError, match="'w.bin' is missing; it belongs beside the model$"):
        backend("pytorch")(config)


@pytest.mark.parametrize("length", [3, 32, 50])
def test_lengths_that_no_sample_had(tmp_path: Path, length: int) -> None:
    """Reshape to sizes that are computed from the input's."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Gather", ["s", "one"], ["m"]),
        helper.make_node("Mul", ["n", "m"], ["nm"]),
        helper.make_node("Concat", ["nm", "two"], ["flat"], axis=0),
        helper.make_node("Reshape", ["x", "flat"], ["a"]),
        helper.make_node("Concat", ["n", "m", "two"], ["whole"], axis=0),
        helper.make_node("Reshape", ["a", "whole"], ["y"]),
    ]
    weights = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m", 2])
    graph = helper.make_graph(
        nodes,
        "made",
        [value],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m", 2])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = tmp_path / "model.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    specs = [TensorSpec(name, "FP32", (-1, 2)) for name in "xy"]
    config = model_config("pytorch", path, specs[:1], specs[1:])
    rows = np.random.default_rng(0).random((3, length, 2), np.float32)
    np.testing.assert_array_equal(answer(backend("pytorch")(config), {"x": rows})["y"], rows)


@pytest.mark.parametrize("buckets", [(2,), (24,), (8, 24)])
@pytest.mark.parametrize("length", [1, 2, 7, 24, 30])
def test_lengths_beside_the_buckets(tmp_path: Path, buckets: tuple[int, ...], length: int) -> None:
    """Rows beyond the last bucket come as they are, as do all if padding would change answers."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["m"]),
        helper.make_node("Slice", ["places", "zero", "m", "zero"], ["first"]),
        helper.make_node("Add", ["x", "first"], ["y"]),
    ]
    places = np.random.default_rng(1).random(64).astype(np.float32)
    weights = {"zero": np.array([0]), "one": np.array([1]), "places": places}
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m"])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    path = tmp_path / "model.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    specs = [TensorSpec(name, "FP32", (-1,)) for name in "xy"]
    config = model_config("pytorch", path, specs[:1], specs[1:])
    config = replace(config, padding=Padding((PadAxis("x", 0),), buckets))
    rows = np.random.default_rng(0).random((3, length), np.float32)
    found = answer(backend("pytorch")(config), {"x": rows})["y"]
    np.testing.assert_array_equal(found, rows + places[:length])


def sized(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: dict[str, Array],
    *shapes: Sequence[str | int],
) -> ModelConfig:
    """A model without a batch dimension, whose inputs x0, x1, ... have these sizes."""
    inputs = [
        helper.make_tensor_value_info(f"x{n}", TensorProto.FLOAT, shape)
        for n, shape in enumerate(shapes)
    ]
    graph = helper.make_graph(
        list(nodes),
        "made",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    specs = [
        TensorSpec(f"x{n}", "FP32", tuple(-1 if isinstance(size, str) else size for size in shape))
        for n, shape in enumerate(shapes)
    ]
    return model_config("pytorch", path, specs, [TensorSpec("y", "FP32", (-1, -1))], 0)


def same_as_onnx_runtime(config: ModelConfig, *arrays: Array) -> None:
    inputs = {f"x{n}": array for n, array in enumerate(arrays)}
    found = answer(backend("pytorch")(config), inputs)["y"]
    expected = answer(backend("onnxruntime")(replace(config, backend="onnxruntime")), inputs)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 7)])
def test_sizes_that_are_swapped(tmp_path: Path, shape: tuple[int, int]) -> None:
    nodes = [
        helper.make_node("Shape", ["x0"], ["s"]),
        helper.make_node("Gather", ["s", "order"], ["t"]),
        helper.make_node("Reshape", ["x0", "t"], ["y"]),
    ]
    config = sized(tmp_path / "m.onnx", nodes, {"order": np.array([1, 0])}, ["h", "w"])
    same_as_onnx_runtime(config, np.random.default_rng(0).random(shape, np.float32))


@pytest.mark.parametrize("length", [1, 3, 33, 2500])
def test_a_size_in_whole_blocks(tmp_path: Path, length: int) -> None:
    """Pad to a multiple of four: the remainder is 0 for most sizes that one would try."""
    nodes = [
        helper.make_node("Shape", ["x0"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Neg", ["n"], ["m"]),
        helper.make_node("Mod", ["m", "four"], ["rest"]),
        helper.make_node("Concat", ["zeros", "rest"], ["pads"], axis=0),
        helper.make_node("Pad", ["x0", "pads"], ["y"]),
    ]
    weights = {"one": np.array([1]), "four": np.array([4]), "zeros": np.array([0, 0, 0])}
    config = sized(tmp_path / "m.onnx", nodes, weights, [2, "n"])
    same_as_onnx_runtime(config, np.random.default_rng(0).random((2, length), np.float32))


def test_inputs_of_different_lengths(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x1"], ["s"]),
        helper.make_node("Expand", ["x0", "s"], ["y"]),
    ]
    config = sized(tmp_path / "m.onnx", nodes, {}, [2, "n"], [2, "m"])
    random = np.random.default_rng(0)
    same_as_onnx_runtime(
        config, random.random((2, 1), np.float32), random.random((2, 5), np.float32)
    )


def test_integer_sums_are_not_cast_to_sixteen_bits(config: ModelConfig, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["z"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["z", "scale"], ["y"]),
    ]
    path = write(tmp_path / "int8.onnx", nodes, {"w": np.ones((8, 4), np.uint8)})
    config = replace(config, artifact=str(path))
    with pytest.raises(ConfigError, match="MatMulInteger: the model is quantised"):
        backend("pytorch")(replace(config, options={"penstock.dtype": "fp16"}))
    whole = backend("pytorch")(replace(config, options={"penstock.dtype": "fp32"}))
    np.testing.assert_allclose(answer(whole, {"x": ROWS})["y"], by_onnx_runtime(config), rtol=1e-5)


class TestTheEngineOfAnOnnxFile:
    def test_is_onnx_runtime_on_a_cpu_and_ours_on_a_gpu(self, config: ModelConfig) -> None:
        config = replace(config, backend="onnxruntime")
        assert config.engine == "onnxruntime"
        assert replace(config, device="cuda:0").engine == "pytorch"

    def test_is_onnx_runtime_if_its_providers_are_chosen(self, config: ModelConfig) -> None:
        options = {"providers": "CUDAExecutionProvider"}
        chosen = replace(config, backend="onnxruntime", device="cuda:0", options=options)
        assert chosen.engine == "onnxruntime"

    def test_instances_on_one_gpu_share_a_worker(self, config: ModelConfig) -> None:
        config = replace(config, backend="onnxruntime", device="cuda:0", num_instances=2)
        assert config.workers == (("cuda:0", 2),)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda: None


def test_a_model_without_a_kind_runs_on_the_cpu_instead(
    config: ModelConfig, without_gpu: object, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, backend="onnxruntime", device="cuda:7", is_gpu_optional=True)
    runner = backend("onnxruntime")(config)
    assert "cuda:7" in runner.built()[GPU_FALLBACK]
    assert "runs on the CPU" in caplog.text
    np.testing.assert_allclose(
        answer(runner, {"x": ROWS})["y"], by_onnx_runtime(config_on_cpu(config))
    )


def normalised_by_place() -> onnx.NodeProto:
    names = ["a", "b", "b", "b", "b"]
    node = helper.make_node("BatchNormalization", names, ["y"])
    node.attribute.append(helper.make_attribute("spatial", 0))
    return node


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["a"])
REFUSED = {
    "operator RandomNormalLike": [PRODUCT, helper.make_node("RandomNormalLike", ["a"], ["y"])],
    "BatchNormalization: spatial = 0": [PRODUCT, normalised_by_place()],
    "sparse weights": [helper.make_node("MatMul", ["x", "thin"], ["y"])],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_the_engine_cannot_read_runs_on_the_cpu_only_without_a_kind(
    config: ModelConfig, tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
    path = write(tmp_path / "refused.onnx", REFUSED[reason], weights)
    model = onnx.load(path)
    if reason == "sparse weights":
        values = numpy_helper.from_array(np.array([2.0], np.float32), "thin")
        places = numpy_helper.from_array(np.array([9]), "places")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [8, 4]))
    model.opset_import[0].version = 8 if "spatial" in reason else 17
    onnx.save(model, path)
    # Any machine has this device, and it is not the CPU.
    config = replace(config, artifact=str(path), backend="onnxruntime", device="meta")
    with pytest.raises(ConfigError, match=rf"1/refused\.onnx: {reason}.*KIND_CPU"):
        backend("onnxruntime")(config)
    runner = backend("onnxruntime")(replace(config, is_gpu_optional=True))
    assert reason in runner.built()[GPU_FALLBACK]
    assert f"runs on the CPU: 1/refused.onnx: {reason}" in caplog.text
    assert answer(runner, {"x": ROWS})["y"].shape == (3, 4)


def config_on_cpu(config: ModelConfig) -> ModelConfig:
    return replace(config, device="cpu")


def test_a_model_that_asks_for_a_gpu_is_refused_without(
    config: ModelConfig, without_gpu: object
) -> None:
    with pytest.raises(ConfigError, match="device: 'cuda:7' cannot be used"):
        backend("onnxruntime")(replace(config, backend="onnxruntime", device="cuda:7"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fuse": ""}, "fuse: '' is not one of convolutions, transformer, on"),
        ({"dtype": "fp16", "keep_fp32": "a,,b"}, "keep_fp32: 'a,,b' has an empty name"),
        ({"fp8": "rowwise", "fp8_keep": ","}, "fp8_keep: ',' has an empty name"),
    ],
)
def test_empty_values_are_refused(config: ModelConfig, options: dict, problem: str) -> None:
    named = {f"penstock.{key}": text for key, text in options.items()}
    with pytest.raises(ConfigError) as caught:
        backend("pytorch")(replace(config, options=named))
    assert f"parameters.penstock.{problem}" in caught.value.problems


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ({"fuse": "convolutions"}, ["fuse: has no effect; the model has no layers"]),
        ({"memory_format": "channels_last"}, ["memory_format: has no effect; the model has no"]),
        (
            {"memory_format": "channels_last", "fuse": "on"},
            ["memory_format: has no effect; penstock.fuse has channels last already"],
        ),
        ({"gpu_engine": "onnxruntime"}, ["gpu_engine: has no effect; backend 'pytorch' runs"]),
        ({"fuse": "transformer", "dtype": "fp32"}, []),
    ],
)
def test_options_without_effect_are_named(
    config: ModelConfig, caplog: pytest.LogCaptureFixture, options: dict, warnings: list[str]
) -> None:
    named = {f"penstock.{key}": text for key, text in options.items()}
    backend("pytorch")(replace(config, options=named)).close()
    found = [each.getMessage() for each in caplog.records]
    assert len(found) == len(warnings)
    for message, expected in zip(found, warnings, strict=True):
        assert message.startswith(f"parameters.penstock.{expected}")


class TestFixedInputs:
    """A branch that an input chooses, as Silero VAD's `sr` does."""

    X, RATE = TensorSpec("x", "FP32", (-1, 8)), TensorSpec("sr", "INT64", ())

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        branches = []
        for name, factor in (("then", 2.0), ("else", 3.0)):
            weight = numpy_helper.from_array(np.array(factor, np.float32), "factor")
            value = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
            node = helper.make_node("Mul", ["x", "factor"], [f"{name}_y"])
            branches.append(helper.make_graph([node], name, [], [value], [weight]))
        rate = numpy_helper.from_array(np.array(16000, np.int64), "rate")
        nodes = [
            helper.make_node("Equal", ["sr", "rate"], ["is_so"]),
            helper.make_node(
                "If", ["is_so"], ["y"], then_branch=branches[0], else_branch=branches[1]
            ),
        ]
        graph = helper.make_graph(
            nodes,
            "made",
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8]),
                helper.make_tensor_value_info("sr", TensorProto.INT64, []),
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
            [rate],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    def config(self, path: Path, fixed: str, *inputs: TensorSpec, max_batch: int = 0):
        options = {"penstock.fixed_inputs": fixed}
        y = TensorSpec("y", "FP32", (8,) if max_batch else (-1, 8))
        return model_config("pytorch", path, inputs, [y], max_batch, options)

    @pytest.mark.parametrize(
        ("fixed", "factor"), [("sr=16000", 2), (" sr = 8000 ", 3), ('{"sr": 16000}', 2)]
    )
    def test_the_branch_is_chosen_at_load(self, path: Path, fixed: str, factor: int) -> None:
        runner = backend("pytorch")(self.config(path, fixed, self.X))
        assert np.array_equal(answer(runner, {"x": ROWS})["y"], factor * ROWS)
        assert [spec.name for spec in runner.inputs] == ["x"]

    def test_with_batches(self, path: Path) -> None:
        x = replace(self.X, shape=(8,))
        runner = backend("pytorch")(self.config(path, "sr=8000", x, max_batch=4))
        assert np.array_equal(answer(runner, {"x": ROWS})["y"], 3 * ROWS)
        with pytest.raises(ConfigError, match="with batches, leave it out of `input`"):
            rate = replace(self.RATE, shape=(1,))
            backend("pytorch")(self.config(path, "sr=8000", x, rate, max_batch=4))

    def test_a_declared_input_must_have_the_value(self, path: Path) -> None:
        runner = backend("pytorch")(self.config(path, "sr=16000", self.X, self.RATE))
        given = {"x": ROWS, "sr": np.array(16000, np.int64)}
        assert np.array_equal(answer(runner, given)["y"], 2 * ROWS)
        expected = r"input 'sr': 8000, expected 16000: .*penstock\.fixed_inputs"
        with pytest.raises(BackendFailed, match=expected):
            answer(runner, {"x": ROWS, "sr": np.array(8000, np.int64)})
        zeros = Batch({"x": ROWS, "sr": np.array(0, np.int64)}, 1)
        [warm] = runner.rehearsals(zeros)
        assert warm.inputs["sr"] == 16000

    @pytest.mark.parametrize(
        ("fixed", "problem"),
        [
            ("rate=1", "'rate': the model has only x, sr"),
            ("sr", "'sr': expected \"name=number"),
            ("sr=fast", "'sr=fast': expected"),
            ("sr=1.5", "'sr': 1.5 is not INT64"),
            ('{"sr": [1, 2]}', r"'sr': shape \[2\] does not fit \[\]"),
            ('{"sr": "x"}', "'sr': \"x\" is not INT64"),
            ("sr=true", "'sr': true is not INT64"),
            ("sr=1, sr=1", "'sr': given 2 times"),
            ('{"sr": 1, "sr": 2}', "'sr': given 2 times"),
        ],
    )
    def test_wrong_values_are_named(self, path: Path, fixed: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=rf"parameters\.penstock\.fixed_inputs: {problem}"):
            backend("pytorch")(self.config(path, fixed, self.X))

    @pytest.mark.parametrize(
        ("datatype", "text", "value"),
        [
            ("FP32", "0.1", 0.1),
            ("FP32", "3", 3),
            ("FP16", "0.1", 0.1),
            ("FP64", "0.1", 0.1),
            ("BOOL", "true", True),
        ],
    )
    def test_numbers_are_rounded_to_the_datatype(self, path, datatype, text, value) -> None:
        spec = TensorSpec("s", datatype, (2,))
        found = read_fixed(self.config(path, f"s={text}"), [spec])["s"]
        assert found.dtype == DATATYPES[datatype].numpy
        assert np.array_equal(found, np.full(2, value).astype(found.dtype))

    @pytest.mark.parametrize(
        ("datatype", "text"),
        [("FP32", "1e400"), ("FP16", "70000"), ("FP32", "true"), ("BOOL", "1"), ("UINT8", "-1")],
    )
    def test_numbers_that_a_datatype_does_not_hold(self, path, datatype, text) -> None:
        with pytest.raises(ConfigError, match=f"is not {datatype}"):
            read_fixed(self.config(path, f"s={text}"), [TensorSpec("s", datatype, (1,))])

    def test_without_it_the_option_is_not_needed_elsewhere(self, path: Path) -> None:
        with pytest.raises(ConfigError, match="its condition is not a constant"):
            backend("pytorch")(self.config(path, "", self.X, self.RATE))


class TestCompilersCache:
    """The cache of torch.compile holds code; an ONNX file does not."""

    @pytest.fixture
    def version(self, config: ModelConfig) -> Path:
        folder = Path(config.artifact).parent
        (folder / "compiled.bin").write_bytes(b"code")
        return folder

    def listed(self, config: ModelConfig, content: bytes) -> ModelConfig:
        entry = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        folder = Path(config.artifact).parent
        manifest = Manifest(1, "now", {"compiled.bin": entry})
        (folder / "manifest.json").write_bytes(manifest.encode())
        return replace(config, manifest=str(folder / "manifest.json"))

    def test_is_read_if_the_manifest_has_its_digest(self, config, version) -> None:
        assert read_code(self.listed(config, b"code"), COMPILED) == b"code"

    def test_is_not_read_without_a_manifest(self, config, version) -> None:
        assert read_code(config, COMPILED) is None
        # One that the server has not read and checked does not count.
        self.listed(config, b"code")
        assert read_code(config, COMPILED) is None

    def test_is_not_read_if_it_was_changed_or_added(self, config, version) -> None:
        assert read_code(self.listed(config, b"other"), COMPILED) is None
        (version / "manifest.json").write_bytes(Manifest(1, "now", {}).encode())
        manifest = str(version / "manifest.json")
        assert read_code(replace(config, manifest=manifest), COMPILED) is None

    def test_a_link_out_of_the_version_is_not_read(self, config, version, tmp_path_factory) -> None:
        elsewhere = tmp_path_factory.mktemp("elsewhere") / "compiled.bin"
        elsewhere.write_bytes(b"code")
        (version / "compiled.bin").unlink()
        (version / "compiled.bin").symlink_to(elsewhere)
        assert read_code(self.listed(config, b"code"), COMPILED) is None

    @pytest.mark.parametrize(("name", "is_read"), [("module.py", True), ("model.pt2", False)])
    def test_beside_code_and_exported_programs(self, config, version, name, is_read) -> None:
        other = replace(config, artifact=str(version / name))
        assert (read_code(other, COMPILED) == b"code") == is_read
        assert (read_code(self.listed(other, b"code"), COMPILED) == b"code") == is_read


@pytest.mark.parametrize("options", [{"fuse": "on"}, {"memory_format": "channels_last"}])
def test_three_dimensional_convolutions_are_not_channels_last(
    tmp_path: Path, options: dict[str, str]
) -> None:
    random = np.random.default_rng(0)
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape])
        for name, shape in (("x0", (2, 6, 6, 6)), ("y", (3, 4, 4)))
    ]
    weights = {"w": random.random((4, 2, 3, 3, 3), np.float32) / 27}
    weights |= {"flat": np.array([-1, 16, 4, 4]), "w2": random.random((3, 16, 1, 1), np.float32)}
    nodes = [
        helper.make_node("Conv", ["x0", "w"], ["a"]),
        helper.make_node("Reshape", ["a", "flat"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "made",
        values[:1],
        values[1:],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    specs = [TensorSpec("x0", "FP32", (2, 6, 6, 6))], [TensorSpec("y", "FP32", (3, 4, 4))]
    given = {f"penstock.{key}": value for key, value in options.items()}
    config = replace(model_config("pytorch", path, *specs), options=given)
    same_as_onnx_runtime(config, random.random((2, 2, 6, 6, 6), np.float32))


class TestMasksThatAreInputs:
    """Numbers that 16 bits do not hold mask as they do in FP32."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> ModelConfig:
        nodes = [
            helper.make_node("Add", ["x0", "x1"], ["s"]),
            helper.make_node("Softmax", ["s"], ["y"], axis=-1),
        ]
        return sized(tmp_path / "model.onnx", nodes, {}, [3, 8], [3, 8])

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    @pytest.mark.parametrize("lowest", [-131008, -1e9, -3e38, np.finfo(np.float32).min])
    def test_finite_ones_stay_finite(self, config: ModelConfig, lowest: float, dtype: str) -> None:
        mask = np.zeros((3, 8), np.float32)
        mask[0, 5:] = mask[2] = lowest
        inputs = {"x0": ROWS, "x1": mask}
        theirs = backend("onnxruntime")(replace(config, backend="onnxruntime"))
        runner = backend("pytorch")(replace(config, options={"penstock.dtype": dtype}))
        found, expected = answer(runner, inputs)["y"], answer(theirs, inputs)["y"]
        np.testing.assert_allclose(found[:2], expected[:2], atol=5e-3)
        # All tokens are hidden: it is the sum's precision that decides between them.
        assert np.isfinite(found).all() and np.isfinite(expected).all()

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    def test_infinity_and_nan_stay(self, config: ModelConfig, dtype: str) -> None:
        mask = np.zeros((3, 8), np.float32)
        mask[0, 5:] = mask[2] = -np.inf
        mask[1, 0] = np.nan
        runner = backend("pytorch")(replace(config, options={"penstock.dtype": dtype}))
        found = answer(runner, {"x0": ROWS, "x1": mask})["y"]
        assert (found[0, 5:] == 0).all()
        assert np.isnan(found[1:]).all()

    def test_also_where_the_input_itself_stays_in_fp32(self, tmp_path: Path) -> None:
        """It is compared, and added to scores."""
        nodes = [
            helper.make_node("Greater", ["x1", "limit"], ["is_seen"]),
            helper.make_node("Add", ["x0", "x1"], ["s"]),
            helper.make_node("Softmax", ["s"], ["p"], axis=-1),
            helper.make_node("Where", ["is_seen", "p", "limit"], ["y"]),
        ]
        weights = {"limit": np.float32(-1)}
        config = sized(tmp_path / "model.onnx", nodes, weights, [3, 8], [3, 8])
        runner = backend("pytorch")(replace(config, options={"penstock.dtype": "fp16"}))
        mask = np.zeros((3, 8), np.float32)
        mask[2] = -1e9
        found = answer(runner, {"x0": ROWS, "x1": mask})["y"]
        assert np.isfinite(found).all() and (found[2] == -1).all()

    def test_a_module_gets_the_same(self, tmp_path: Path) -> None:
        code = """
            import torch

            class Masked(torch.nn.Module):
                def forward(self, x0, x1):
                    return torch.softmax(x0 + x1, -1)

            def factory():
                return Masked()
        """
        (tmp_path / "module.py").write_text(textwrap.dedent(code))
        specs = [TensorSpec(name, "FP32", (3, 8)) for name in ("x0", "x1", "y")]
        options = {"penstock.dtype": "fp16"}
        config = model_config("pytorch", tmp_path / "module.py", specs[:2], specs[2:], 0, options)
        mask = np.full((3, 8), -1e9, np.float32)
        assert np.isfinite(answer(backend("pytorch")(config), {"x0": ROWS, "x1": mask})["y"]).all()


@pytest.mark.parametrize(
    ("nodes", "limited"),
    [
        (["MatMul x0 w a", "Softmax a y"], set()),
        (["Sub x0 half s", "Mul s half t", "MatMul t w a", "Softmax a y"], set()),
        (["MatMul x0 w a", "Add a x1 s", "Softmax s y"], {"x1"}),
        (["MatMul x0 w a", "Mul x1 half t", "Add a t s", "Softmax s y"], {"x1"}),
        (["MatMul x0 w a", "Add x0 a y"], {"x0"}),
    ],
)
def test_inputs_of_layers_are_cast_as_they_are(
    tmp_path: Path, nodes: list[str], limited: set[str]
) -> None:
    made = [helper.make_node(n.split()[0], n.split()[1:-1], n.split()[-1:]) for n in nodes]
    used = {name for node in made for name in node.input}
    weights = {"w": np.eye(8, dtype=np.float32), "half": np.float32(0.5)}
    weights = {name: each for name, each in weights.items() if name in used}
    shapes = [[2, 8]] * (1 + ("x1" in used))
    graph = load_graph(sized(tmp_path / "m.onnx", made, weights, *shapes), torch.float16)
    assert limited_inputs(graph) == limited


class TestBranchesOnSizes:
    @pytest.mark.parametrize("opset", [13, 18])
    @pytest.mark.parametrize("max_batch", [0, 4])
    def test_after_padding_that_is_computed(
        self, tmp_path: Path, opset: int, max_batch: int
    ) -> None:
        """The exporter writes an If for a squeeze, and pads that only folding makes constants."""
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.LocalResponseNorm(5, 2.0))
        x = torch.randn(2, 3, 9, 9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network.eval(),
                (x,),
                tmp_path / "model.onnx",
                input_names=["x0"],
                output_names=["y"],
                dynamic_axes={"x0": {0: "n"}, "y": {0: "n"}} if max_batch else None,
                opset_version=opset,
                dynamo=False,
            )
        rows = () if max_batch else (2,)
        specs = (
            TensorSpec("x0", "FP32", (*rows, 3, 9, 9)),
            TensorSpec("y", "FP32", (*rows, 8, 7, 7)),
        )
        path = tmp_path / "model.onnx"
        config = model_config("pytorch", path, specs[:1], specs[1:], max_batch)
        same_as_onnx_runtime(config, x.numpy())

    def branching(self, path: Path, nodes: Sequence[onnx.NodeProto], last: object) -> ModelConfig:
        """A model that doubles its input, or triples it if a condition holds."""
        branches = {}
        for name, factor in (("then_branch", 3.0), ("else_branch", 2.0)):
            weight = numpy_helper.from_array(np.array(factor, np.float32), "factor")
            value = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
            node = helper.make_node("Mul", ["x0", "factor"], [f"{name}_y"])
            branches[name] = helper.make_graph([node], name, [], [value], [weight])
        nodes = [*nodes, helper.make_node("If", ["condition"], ["y"], "choice", **branches)]
        weights = {"last": np.array(1), "four": np.array(4), "large": np.array(1 << 40)}
        weights["zero"] = np.array(0, np.float32)
        return sized(path, nodes, weights, [2, last])

    @pytest.mark.parametrize("last", [4, 5])
    def test_of_a_size_that_is_fixed(self, tmp_path: Path, last: int) -> None:
        nodes = [
            helper.make_node("Shape", ["x0"], ["s0"]),
            helper.make_node("Tile", ["x0", "s0"], ["b"]),
            helper.make_node("Shape", ["b"], ["s"]),
            helper.make_node("Gather", ["s", "last"], ["n"]),
            helper.make_node("Mod", ["n", "four"], ["m"]),
            helper.make_node("Cast", ["m"], ["condition"], to=TensorProto.BOOL),
        ]
        config = self.branching(tmp_path / "m.onnx", nodes, last)
        same_as_onnx_runtime(config, np.random.default_rng(0).random((2, last), np.float32))

    @pytest.mark.parametrize("limit", ["four", "large"])
    def test_of_a_size_that_varies_are_refused(self, tmp_path: Path, limit: str) -> None:
        """Also if all lengths that were tried are below the limit."""
        nodes = [
            helper.make_node("Shape", ["x0"], ["s"]),
            helper.make_node("Gather", ["s", "last"], ["n"]),
            helper.make_node("Greater", ["n", limit], ["condition"]),
        ]
        with pytest.raises(ConfigError, match=r"control flow If \(node 'choice'\) .* sizes"):
            backend("pytorch")(self.branching(tmp_path / "m.onnx", nodes, "n"))

    @pytest.mark.parametrize("is_size", [False, True])
    def test_of_data_are_refused(self, tmp_path: Path, is_size: bool) -> None:
        """A sum, and how many numbers are not zero."""
        nodes = [
            helper.make_node("NonZero", ["x0"], ["places"]),
            helper.make_node("Shape", ["places"], ["s"]),
            helper.make_node("Gather", ["s", "last"], ["n"]),
            helper.make_node("Greater", ["n", "four"], ["condition"]),
        ]
        if not is_size:
            nodes = [
                helper.make_node("ReduceSum", ["x0"], ["n"], keepdims=0),
                helper.make_node("Greater", ["n", "zero"], ["condition"]),
            ]
        with pytest.raises(ConfigError, match=r"control flow If \(node 'choice'\)"):
            backend("pytorch")(self.branching(tmp_path / "m.onnx", nodes, 4))
