"""Models for those of Triton's examples whose weights or code are not in its repositories: the same
names, types and shapes, made here. Networks for images answer LABEL whatever they are shown, so
that the labels of the answer can be checked."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.types import Array

LABEL = "VULTURE"
OPSET = 17
IR_VERSION = 9

PREPROCESS = '''
"""Encoded images to the pixels that the network takes."""
import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            encoded = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            pixels = [self.decode(each) for each in encoded.reshape(-1)]
            tensor = pb_utils.Tensor("PIXELS", np.stack(pixels))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses

    def decode(self, encoded):
        image = Image.open(io.BytesIO(encoded)).convert("RGB").resize((299, 299))
        return np.asarray(image, np.float32) / 127.5 - 1
'''

# The sum of a sequence's values; its last answer has the correlation id added, as in the example
# backend whose configuration this model is given.
STRING_SEQUENCE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        start, end, value = (self.scalar(request, name) for name in ("START", "END", "INPUT"))
        correlation = pb_utils.get_input_tensor_by_name(request, "CORRID").as_numpy().reshape(-1)[0]
        key = bytes(correlation)
        total = value if start else self.sums.get(key, 0) + value
        self.sums[key] = total
        if end:
            del self.sums[key]
            total += int(key) if key.isdigit() else 0
        tensor = pb_utils.Tensor("OUTPUT", np.array([[total]], np.int32))
        return pb_utils.InferenceResponse([tensor])

    def scalar(self, request, name):
        return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0])
"""

# What Triton's `identity` backend does that its tests use.
IDENTITY = """
import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        delay = config.get("parameters", {}).get("execute_delay_ms", {})
        self.delay_s = int(delay.get("string_value", 0)) / 1000

    def execute(self, requests):
        time.sleep(self.delay_s)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensors = [
            pb_utils.Tensor(each.name().replace("INPUT", "OUTPUT"), each.as_numpy())
            for each in request.inputs()
        ]
        return pb_utils.InferenceResponse(tensors)
"""

ENSEMBLE = """
name: "preprocess_inception_ensemble"
platform: "ensemble"
max_batch_size: 8
input { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] }
output {
  name: "INCEPTION" data_type: TYPE_FP32 dims: [ 1001 ] label_filename: "inception_labels.txt"
}
ensemble_scheduling {
  step {
    model_name: "preprocess_image" model_version: -1
    input_map { key: "INPUT" value: "INPUT" }
    output_map { key: "PIXELS" value: "pixels" }
  }
  step {
    model_name: "inception_of_pixels" model_version: -1
    input_map { key: "pixels" value: "pixels" }
    output_map { key: "scores" value: "INCEPTION" }
  }
}
"""


def add_python_model(root: Path, name: str, code: str, config: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    (root / name / "config.pbtxt").write_text(config)


def add_string_sequence(root: Path, like: Path) -> None:
    """Add a copy of a dynamic sequence model that takes strings as correlation ids."""
    name = "simple_string_dyna_sequence"
    config = (like / "config.pbtxt").read_text().replace(like.name, name)
    config = re.sub(r"^platform:.*$", 'backend: "python"', config, flags=re.M)
    ids = r"(CONTROL_SEQUENCE_CORRID\s+data_type:) TYPE_UINT64"
    config = re.sub(ids, r"\1 TYPE_STRING", config)
    add_python_model(root, name, STRING_SEQUENCE, config)


def fill_in_identities(root: Path) -> None:
    """Give models of the `identity` backend, which is written in C++, code in Python."""
    for config in root.glob("*/config.pbtxt"):
        text = config.read_text()
        if 'backend: "identity"' in text:
            (config.parent / "1").mkdir(exist_ok=True)
            (config.parent / "1" / "model.py").write_text(IDENTITY)
            config.write_text(text.replace('backend: "identity"', 'backend: "python"'))
        elif "ensemble_scheduling" in text:
            (config.parent / "1").mkdir(exist_ok=True)


def add_identity(root: Path, name: str, datatype: str, max_batch: int = 8) -> None:
    """Add an ONNX model that answers INPUT0, of one dimension, as OUTPUT0."""
    kind = getattr(TensorProto, {"FP32": "FLOAT"}.get(datatype, datatype))
    shape = ["rows", "values"] if max_batch else ["values"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        name,
        [helper.make_tensor_value_info("INPUT0", kind, shape)],
        [helper.make_tensor_value_info("OUTPUT0", kind, shape)],
    )
    save(graph, root / name)
    (root / name / "config.pbtxt").write_text(
        f'name: "{name}" platform: "onnxruntime_onnx" max_batch_size: {max_batch}\n'
        f'input {{ name: "INPUT0" data_type: TYPE_{datatype} dims: [ -1 ] }}\n'
        f'output {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: [ -1 ] }}\n'
    )


def add_pair(root: Path, name: str, size: int) -> None:
    """Add an ONNX model that answers two FP32 inputs, INPUT0 and INPUT1, as OUTPUT0 and OUTPUT1."""
    pairs = [(f"INPUT{each}", f"OUTPUT{each}") for each in (0, 1)]
    graph = helper.make_graph(
        [helper.make_node("Identity", [given], [answered]) for given, answered in pairs],
        name,
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, [size]) for each, _ in pairs],
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, [size]) for _, each in pairs],
    )
    save(graph, root / name)
    tensor = f"data_type: TYPE_FP32 dims: [ {size} ]"
    lines = [f'name: "{name}" platform: "onnxruntime_onnx" max_batch_size: 0']
    for given, answered in pairs:
        lines.append(f'input {{ name: "{given}" {tensor} }}')
        lines.append(f'output {{ name: "{answered}" {tensor} }}')
    (root / name / "config.pbtxt").write_text("\n".join(lines))


def add_densenet(folder: Path) -> None:
    """Make the network that the configuration in the folder describes."""
    labels = folder / "densenet_labels.txt"
    add_classifier(folder, "data_0", [1, 3, 224, 224], "fc6_1", [1, 1000, 1, 1], labels)


def add_inception(folder: Path) -> None:
    labels, output = folder / "inception_labels.txt", "InceptionV3/Predictions/Softmax:0"
    add_classifier(folder, "input:0", [1, 299, 299, 3], output, [1, 1001], labels)


def add_resnet(folder: Path) -> None:
    """Make an ONNX network in place of the TensorRT engine that the configuration describes."""
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace("tensorrt_plan", "onnxruntime_onnx"))
    image = ["rows", 3, "height", "width"]
    add_classifier(folder, "input", image, "output", ["rows", 1000], folder / "labels.txt")


def add_image_ensemble(root: Path, labels: Path) -> None:
    add_python_model(
        root,
        "preprocess_image",
        PREPROCESS,
        'name: "preprocess_image" backend: "python" max_batch_size: 8\n'
        'input { name: "INPUT" data_type: TYPE_STRING dims: [ 1 ] }\n'
        'output { name: "PIXELS" data_type: TYPE_FP32 dims: [ 299, 299, 3 ] }\n',
    )
    name = "inception_of_pixels"
    add_classifier(root / name, "pixels", ["rows", 299, 299, 3], "scores", ["rows", 1001], labels)
    (root / name / "config.pbtxt").write_text(
        f'name: "{name}" platform: "onnxruntime_onnx" max_batch_size: 8\n'
        'input { name: "pixels" data_type: TYPE_FP32 dims: [ 299, 299, 3 ] }\n'
        'output { name: "scores" data_type: TYPE_FP32 dims: [ 1001 ] }\n'
    )
    ensemble = root / "preprocess_inception_ensemble"
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text(ENSEMBLE)
    shutil.copy(labels, ensemble)


def add_classifier(
    folder: Path,
    input: str,
    image: list[int | str],
    output: str,
    scores: list[int | str],
    labels: Path,
) -> None:
    """Add a network whose highest score is that of LABEL."""
    num_classes = int(scores[1])
    names = [line.strip().upper() for line in labels.read_text().splitlines()]
    bias = np.zeros(num_classes, np.float32)
    bias[next(index for index, name in enumerate(names) if name.startswith(LABEL))] = 100
    # Channels are the first axis of densenet's images, and the last of the others'.
    is_first = image[1] == 3
    weights = np.random.default_rng(0).normal(size=(3, num_classes)).astype(np.float32)
    axes = [2, 3] if is_first else [1, 2]
    shape = np.array([0 if isinstance(scores[0], str) else 1, *scores[1:]], np.int64)
    nodes = [
        helper.make_node("ReduceMean", [input], ["means"], axes=axes, keepdims=0),
        helper.make_node("Gemm", ["means", "weights", "bias"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], [output]),
    ]
    constants: dict[str, Array] = {"weights": weights, "bias": bias, "shape": shape}
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info(input, TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, scores)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    save(graph, folder)


def save(graph: onnx.GraphProto, folder: Path) -> None:
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    (folder / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "1" / "model.onnx")
