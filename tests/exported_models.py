"""Python models of every form that `penstock export triton` writes, and inputs for them."""

from pathlib import Path

import numpy as np

CONFIG = """
backend: "python" max_batch_size: 8 dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: 3 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 3 }}
{}
"""
SLO = 'parameters { key: "penstock.tolerance" value { string_value: "0.1" } }'
TRITON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            tensors = [pb_utils.Tensor("y", x * 2)]
            answers.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return answers
"""
ARRAYS = """
class Model:
    def load(self):
        self.factor = 3

    def infer(self, inputs):
        return {"y": inputs["x"] * self.factor}
"""
DECLARED = """
from typing import Annotated

import numpy as np
import penstock

from .helper import FACTOR

Rows = Annotated[np.ndarray, penstock.Tensor("FP32", [-1, 3])]


@penstock.model(max_batch_size=8)
def scaled(x: Rows) -> Rows:
    return x * np.float32(FACTOR)
"""
ROWS = """
from dataclasses import dataclass


@dataclass
class Answer:
    shout: str
    count: int


def shouted(text: str, times: int = 1) -> Answer:
    return Answer(text.upper() * times, len(text))
"""
LATER = """
import asyncio


async def infer(x: list[float]) -> list[float]:
    await asyncio.sleep(0)
    return [each + 1 for each in x]
"""
# The code of each, and its config.pbtxt if it needs one.
MODELS = {
    "triton": (TRITON, CONFIG.format("")),
    "arrays": (ARRAYS, CONFIG.format(SLO)),
    "declared": (DECLARED, ""),
    "rows": (ROWS, ""),
    "later": (LATER, ""),
}


def add_models(root: Path) -> None:
    for name, (code, config) in MODELS.items():
        version = root / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        if config:
            (version.parent / "config.pbtxt").write_text(config)
    (root / "declared" / "1" / "helper.py").write_text("FACTOR = 5\n")


def inputs_of(name: str) -> dict[str, np.ndarray]:
    if name == "rows":
        texts = np.array([b"ab", "é".encode(), b""], np.object_)
        return {"text": texts, "times": np.array([2, 1, 3], np.int64)}
    if name == "later":
        return {"x": np.arange(6, dtype=np.float64).reshape(2, 3)}
    return {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}


def triton_inputs_of(name: str) -> dict[str, np.ndarray]:
    """The same for the exported model: rows of one value have a dimension more in Triton."""
    found = inputs_of(name)
    return {key: a[:, None] if a.ndim == 1 else a for key, a in found.items()}
