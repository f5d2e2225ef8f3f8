"""What is optimised, in whatever form it came: made a model's folder that can be served as it is.

An ONNX file, a PyTorch factory (`package.module:factory`), a `.pt2` file, a Hugging Face folder, or
a model's folder of a repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.optimizer.candidates import Build
from penstock.optimizer.plan import Plan


@dataclass(frozen=True, slots=True)
class Subject:
    build: Build
    # "ONNX", "PyTorch module", "exported program", "Hugging Face", "served version 3"
    kind: str
    # Of every byte of the model.
    digest: str
    # "ONNX, 22.7 M parameters, FP32"
    text: str


def open_subject(plan: Plan, target: Path) -> Subject:
    """Write the original as a model's folder at `target`; ConfigError says what is wrong."""
    raise NotImplementedError
