"""TensorFlow's models are refused with a command that tf2onnx takes."""

import argparse
import shlex
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.repository import foreign_models, pbtxt

TENSORS = (
    'input { name: "image" data_type: TYPE_FP32 dims: 3 } '
    'input { name: "mask:1" data_type: TYPE_FP32 dims: 3 } '
    'output { name: "scores" data_type: TYPE_FP32 dims: 2 }'
)


def tf2onnx() -> argparse.ArgumentParser:
    """The flags of `python -m tf2onnx.convert` that matter here, from its documentation (1.17).
    Abbreviations are not allowed, so a flag that does not exist is an error."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    source = parser.add_mutually_exclusive_group(required=True)
    for flag in ("--saved-model", "--checkpoint", "--tflite", "--tfjs", "--input", "--graphdef"):
        source.add_argument(flag)
    for flag in ("--inputs", "--outputs", "--rename-inputs", "--rename-outputs", "--tag"):
        parser.add_argument(flag)
    parser.add_argument("--output", required=True)
    parser.add_argument("--opset", type=int)
    return parser


def problem(folder: Path, text: str) -> str:
    version = folder / "net" / "1"
    version.mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigError) as caught:
        pbtxt.resolve(pbtxt.parse(text), "net", version)
    [found] = caught.value.problems
    return found


def command(text: str) -> argparse.Namespace:
    words = shlex.split(text.partition(" with ")[2].partition(" and then ")[0])
    assert words[:3] == ["python", "-m", "tf2onnx.convert"]
    return tf2onnx().parse_args(words[3:])


@pytest.mark.parametrize(
    "text", [f'platform: "tensorflow_savedmodel" {TENSORS}', f'backend: "tensorflow" {TENSORS}', ""]
)
def test_saved_model_is_converted_by_one_command(tmp_path: Path, text: str):
    folder = tmp_path / "has space" / "net" / "1" / foreign_models.SAVED_MODEL
    folder.mkdir(parents=True)
    found = problem(tmp_path / "has space", text)
    options = command(found)
    assert options.saved_model == str(folder)
    assert options.output == str(folder.parent / "model.onnx")
    assert found.endswith('then set platform: "onnxruntime_onnx"')


@pytest.mark.parametrize(
    "text", [f'platform: "tensorflow_graphdef" {TENSORS}', f'backend: "tensorflow" {TENSORS}']
)
def test_graph_is_converted_with_its_tensors_under_the_same_names(tmp_path: Path, text: str):
    (tmp_path / "net" / "1").mkdir(parents=True)
    (tmp_path / "net" / "1" / foreign_models.GRAPHDEF).write_bytes(b"")
    options = command(problem(tmp_path, text))
    assert options.graphdef == str(tmp_path / "net" / "1" / foreign_models.GRAPHDEF)
    assert (options.inputs, options.rename_inputs) == ("image:0,mask:1", "image,mask:1")
    assert (options.outputs, options.rename_outputs) == ("scores:0", "scores")


def test_converted_model_beside_the_original_is_served(tmp_path: Path):
    version = tmp_path / "net" / "1"
    (version / foreign_models.SAVED_MODEL).mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"")
    config = pbtxt.resolve(pbtxt.parse(TENSORS), "net", version)
    assert config.backend == "onnxruntime"
