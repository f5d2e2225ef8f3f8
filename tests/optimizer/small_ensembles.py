"""A small ensemble for the tests of the optimiser: `whole` parses texts in Python and runs a small
network on the numbers."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
from suites import onnx_models

from penstock import slo
from penstock.optimizer.plan import Plan

SIZE = 32
ROW = 'name: "{}" data_type: TYPE_FP32 dims: 32'
HEAD = 'max_batch_size: 8 backend: "{}"\n'
PARSE = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().ravel()
        rows = np.stack([np.array(text.split(b","), np.float32) for text in texts])
        return pb_utils.InferenceResponse([pb_utils.Tensor("x", rows)])
"""
STEP = 'step {{ model_name: "{}" model_version: -1 input_map {{ {} }} output_map {{ {} }} }}\n'
STEPS = STEP.format("parse", 'key: "text" value: "TEXT"', 'key: "x" value: "numbers"') + (
    STEP.format("net", 'key: "x" value: "numbers"', 'key: "y" value: "SCORES"')
)
WHOLE = (
    'max_batch_size: 8 platform: "ensemble"\n'
    'input { name: "TEXT" data_type: TYPE_STRING dims: 1 }\n'
    f"output {{ {ROW.format('SCORES')} }}\n"
    "ensemble_scheduling {\n" + STEPS + "}\n"
)


def write_model(root: Path, name: str, config: str, files: dict[str, bytes]) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    for file, content in files.items():
        (root / name / "1" / file).write_bytes(content)


def write_ensemble(root: Path, whole: str = WHOLE) -> Path:
    """Write the repository; return the folder of the ensemble."""
    text, x = 'input { name: "text" data_type: TYPE_STRING dims: 1 }', ROW.format("x")
    config = f"{HEAD.format('python')}{text} output {{ {x} }} dynamic_batching {{ }}"
    write_model(root, "parse", config, {"model.py": PARSE.encode()})
    config = f"{HEAD.format('onnxruntime')}input {{ {x} }} output {{ {ROW.format('y')} }}"
    network = onnx_models.stack(2).SerializeToString()
    write_model(root, "net", config, {"model.onnx": network})
    write_model(root, "whole", whole, {})
    return root / "whole"


def rows(count: int = 40) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(count, SIZE)).astype(np.float32)


def answers(values: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(onnx_models.stack(2).SerializeToString())
    return session.run(None, {"x": values})[0]


def text_of(row: np.ndarray) -> str:
    return ",".join(map(repr, row.tolist()))


def write_data(path: Path, count: int = 40, name: str = "TEXT") -> str:
    """Write texts and labels, one in ten of which is wrong."""
    values = rows(count)
    labels = answers(values).argmax(axis=1)
    labels[::10] = (labels[::10] + 1) % SIZE
    lines = [
        json.dumps({name: [text_of(row)], "label": int(label)})
        for row, label in zip(values, labels, strict=True)
    ]
    path.write_text("\n".join(lines))
    return str(path)


def plan_of(folder: Path, **changes: object) -> Plan:
    """Write ensemble and data, and plan a short run with an SLO that anything keeps."""
    plan = {
        "model": str(write_ensemble(folder / "models")),
        "name": "whole",
        "out": str(folder / "out"),
        "slo": slo.parse("p99 < 2s at 20/s"),
        "data": write_data(folder / "data.jsonl", 100),
        "member": "net",
        "duration_s": 1.0,
        "budget_s": 45.0,
    }
    return Plan(**(plan | changes))
