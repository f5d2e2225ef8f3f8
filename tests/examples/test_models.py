"""The models under `examples/repository`: their configs, their signatures and their answers."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when onnxruntime is imported
import onnxruntime

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REPOSITORY = EXAMPLES / "repository"
ONNX_MODELS = ["digits", "identity", "simple"]
MAX_BATCH = {"digits": 64, "identity": 64, "simple": 8, "text_length": 8}
ELEMENT_TYPES = {
    model_config_pb2.TYPE_FP32: "tensor(float)",
    model_config_pb2.TYPE_INT32: "tensor(int32)",
}


def config_of(name: str) -> model_config_pb2.ModelConfig:
    text = (REPOSITORY / name / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def model_path(name: str) -> Path:
    return REPOSITORY / name / "1" / "model.onnx"


def session_of(name: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model_path(name), providers=["CPUExecutionProvider"])


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_digits() -> ModuleType:
    return load_script("train_digits")


@pytest.mark.parametrize("name", MAX_BATCH)
def test_config_asks_for_batching_on_one_cpu_instance(name: str) -> None:
    config = config_of(name)
    assert config.name == name
    assert config.backend == ("onnxruntime" if name in ONNX_MODELS else "python")
    assert config.max_batch_size == MAX_BATCH[name]
    assert config.HasField("dynamic_batching")
    [group] = config.instance_group
    assert group.count == 1
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU


@pytest.mark.parametrize("name", ONNX_MODELS)
def test_config_agrees_with_the_model(name: str) -> None:
    config, session = config_of(name), session_of(name)
    for declared, actual in [
        (config.input, session.get_inputs()),
        (config.output, session.get_outputs()),
    ]:
        assert [tensor.name for tensor in declared] == [tensor.name for tensor in actual]
        assert [["batch", *tensor.dims] for tensor in declared] == [t.shape for t in actual]
        assert [ELEMENT_TYPES[tensor.data_type] for tensor in declared] == [t.type for t in actual]


@pytest.mark.parametrize("name", ONNX_MODELS)
def test_model_is_valid_opset_17(name: str) -> None:
    model = onnx.load(model_path(name))
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 9
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]


def test_identity_file_is_what_its_script_writes() -> None:
    assert onnx.load(model_path("identity")) == load_script("make_identity").identity_model()


@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_identity_returns_its_input_bit_for_bit(num_rows: int) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (num_rows, 16), dtype=np.uint32)
    bits[0, :4] = [0x7FC00001, 0xFF800000, 0x80000000, 0x00000001]  # NaN, -inf, -0, subnormal
    [output] = session_of("identity").run(None, {"INPUT0": bits.view(np.float32)})
    assert np.array_equal(output.view(np.uint32), bits)


def test_simple_file_is_what_its_script_writes() -> None:
    assert onnx.load(model_path("simple")) == load_script("make_simple").simple_model()


def test_simple_adds_and_subtracts() -> None:
    a, b = np.random.default_rng(0).integers(-(2**30), 2**30, (2, 3, 16), dtype=np.int32)
    total, difference = session_of("simple").run(None, {"INPUT0": a, "INPUT1": b})
    assert np.array_equal(total, a + b)
    assert np.array_equal(difference, a - b)


def test_digits_has_one_label_per_class() -> None:
    [output] = config_of("digits").output
    labels = (REPOSITORY / "digits" / output.label_filename).read_text().splitlines()
    assert " ".join(labels) == "zero one two three four five six seven eight nine"
    assert len(labels) == output.dims[0]


def test_digits_accuracy_is_the_one_it_states(train_digits: ModuleType) -> None:
    session, held_out = session_of("digits"), train_digits.held_out()
    [logits] = session.run(["logits"], {"image": held_out.images})
    accuracy = float((logits.argmax(axis=1) == held_out.labels).mean())
    stated = session.get_modelmeta().custom_metadata_map
    assert int(stated["split_seed"]) == train_digits.SPLIT_SEED
    assert int(stated["num_test"]) == len(held_out.labels)
    assert accuracy == pytest.approx(float(stated["accuracy"]), abs=1e-12)
    assert accuracy >= 0.98


def test_digits_split_shares_no_image(train_digits: ModuleType) -> None:
    training, held_out = train_digits.training(), train_digits.held_out()
    assert len(training.labels) + len(held_out.labels) == 1797
    assert set(np.bincount(held_out.labels)) <= set(range(43, 47))  # stratified
    seen = {image.tobytes() for image in training.images}
    assert not any(image.tobytes() in seen for image in held_out.images)


def test_digits_rows_do_not_depend_on_their_batch(train_digits: ModuleType) -> None:
    session, images = session_of("digits"), train_digits.held_out().images[:64]
    [together] = session.run(["logits"], {"image": images})
    alone = [session.run(["logits"], {"image": image[None]})[0][0] for image in images]
    np.testing.assert_allclose(np.stack(alone), together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_right", [0, 225, 441, 450])
def test_wilson_interval_ends_where_the_score_test_does(
    train_digits: ModuleType, num_right: int
) -> None:
    for end in train_digits.wilson_interval(num_right, 450):
        squared_error = (num_right / 450 - end) ** 2
        assert squared_error == pytest.approx(1.959964**2 * end * (1 - end) / 450, abs=1e-12)
