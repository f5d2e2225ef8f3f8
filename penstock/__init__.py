"""Optimise and serve models under a latency target: give a model, sample data and an SLO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.python_model import TensorType as Tensor
from penstock.python_model import model

if TYPE_CHECKING:
    from penstock.local import LocalModel

__version__ = "0.1.0"
__all__ = ["Tensor", "__version__", "load", "model"]


def load(path: str, *, version: str = "") -> LocalModel:
    """Load a model in this process: `penstock.load("models/digits").infer(image)`."""
    from penstock.local import LocalModel

    return LocalModel(path, version)
