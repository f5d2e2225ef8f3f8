"""Is there a GPU to measure? Without one a benchmark says so and ends, before it reads or writes
any figures: those of an earlier run would look like its own."""

from __future__ import annotations

import sys

import torch


def require_gpu(device: str) -> None:
    """End the program with status 1 if `device` is a GPU and this machine has none that works."""
    if device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"device {device}: this machine has no usable GPU, so nothing was measured")
