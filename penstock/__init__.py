"""Optimise and serve models under a latency target: give a model, sample data and an SLO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.local import LocalModel

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str, *, version: str = "") -> LocalModel:
    """Load a model in this process: `penstock.load("models/digits").infer(image)`."""
    from penstock.local import LocalModel

    return LocalModel(path, version)
