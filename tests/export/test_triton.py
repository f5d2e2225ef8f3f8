"""config.pbtxt for Triton: Triton's own message types, nothing of Penstock's, notes of the rest."""

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penstock.config import ModelConfig
from penstock.export import triton
from penstock.repository import pbtxt

TEXT = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
dynamic_batching { preferred_batch_size: 4 }
optimization { cuda { graphs: true } }
metric_tags { key: "team" value: "vision" }
"""
OPTIONS = "".join(
    f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}'
    for key, text in {
        "penstock.slo": "p99 < 20ms",
        "penstock.max_instances": "3",
        "intra_op_thread_count": "2",
    }.items()
)


def resolve(text: str, root: Path, file: str = "model.onnx") -> ModelConfig:
    version = root / "net" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / file).write_bytes(b"")
    return pbtxt.resolve(pbtxt.parse(text), "net", version)


def read(made: triton.TritonConfig) -> model_config_pb2.ModelConfig:
    return text_format.Parse(made.text, model_config_pb2.ModelConfig())


def test_fields_of_triton_stay_and_those_of_penstock_go(tmp_path: Path):
    config = resolve('backend: "onnxruntime"' + TEXT + OPTIONS, tmp_path)
    made = triton.configure(config)
    message = read(made)
    assert message.name == "net"
    assert (message.platform, message.backend) == ("onnxruntime_onnx", "onnxruntime")
    assert message.max_batch_size == 8
    assert list(message.input[0].dims) == [-1]
    assert list(message.dynamic_batching.preferred_batch_size) == [4]
    assert message.optimization.cuda.graphs
    assert dict(message.metric_tags) == {"team": "vision"}
    assert list(message.parameters) == ["intra_op_thread_count"]
    assert list(message.instance_group) == []
    for words in ("penstock.slo is left out: the SLO", "penstock.max_instances is left out"):
        assert any(note.startswith(words) for note in made.notes)
        assert f"# note: {words}" in made.text
    assert made.text.startswith(triton.FILE_MARK)


def test_tensors_of_one_value_get_a_dimension(tmp_path: Path):
    text = TEXT.replace("dims: -1", "dims: [ ]").replace("dims: 4", "dims: [ ]")
    config = resolve('backend: "onnxruntime"' + text, tmp_path)
    made = triton.configure(config)
    message = read(made)
    for item in (message.input[0], message.output[0]):
        assert list(item.dims) == [1]
        assert item.HasField("reshape") and list(item.reshape.shape) == []
    assert "x, y: shape [rows, 1] for clients, where Penstock has [rows]" in made.notes
    alone = replace(config, max_batch_size=0)
    assert triton.problem(alone).startswith("a model with a scalar input and no batch dimension")


def test_instance_groups_stay_as_written(tmp_path: Path):
    group = "instance_group { count: 2 kind: KIND_CPU }"
    message = read(triton.configure(resolve('backend: "onnxruntime"' + TEXT + group, tmp_path)))
    [found] = message.instance_group
    assert (found.count, found.kind) == (2, model_config_pb2.ModelInstanceGroup.KIND_CPU)


@pytest.mark.parametrize(
    ("backend", "artifact", "platform", "file"),
    [
        ("onnxruntime", "net.onnx", "onnxruntime_onnx", "model.onnx"),
        ("pytorch", "net.pt", "pytorch_libtorch", "model.pt"),
        ("pytorch", "net.pth", "pytorch_libtorch", "model.pt"),
        ("pytorch", "net.pt2", "torch_aoti", "model.pt2"),
        ("tensorrt", "net.plan", "tensorrt_plan", "model.plan"),
        ("openvino", "net.xml", "", "model.xml"),
        ("python", "model.py", "", "model.py"),
    ],
)
def test_each_file_has_the_platform_and_name_that_triton_expects(
    tmp_path: Path, backend: str, artifact: str, platform: str, file: str
):
    config = resolve('backend: "null"' + TEXT, tmp_path)
    config = replace(config, backend=backend, artifact=str(tmp_path / artifact), file=artifact)
    assert triton.problem(config) == ""
    message = read(triton.configure(config))
    assert (message.platform, message.backend) == (platform, backend)
    assert message.default_model_filename == ""
    assert triton.file_name(config) == file


@pytest.mark.parametrize(
    ("backend", "artifact", "words"),
    [
        ("llm", "config.json", "a language model"),
        ("pytorch", "module.py", "a module.py, which Triton does not load"),
        ("pytorch", "config.json", "a Hugging Face folder"),
        ("null", "", "backend 'null', which Triton does not have"),
    ],
)
def test_models_that_triton_cannot_serve_say_why(
    tmp_path: Path, backend: str, artifact: str, words: str
):
    config = resolve('backend: "null"' + TEXT, tmp_path)
    assert words in triton.problem(replace(config, backend=backend, artifact=artifact))
