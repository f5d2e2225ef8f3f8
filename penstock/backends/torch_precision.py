"""In which precision a GPU multiplies FP32: as FP32, or rounded to TF32, with ten bits of mantissa
instead of 23, which tensor cores do several times as fast.

By itself torch rounds convolutions (cuDNN) and leaves products of matrices alone. `penstock.dtype`
may ask for more or less of it. torch has one setting for all models of a process, and a model's own
code may change it; `rounded` says what holds.
"""

from __future__ import annotations

import warnings

import torch

# Inductor's advice, which is a step of its own here: it changes answers.
ADVICE = "TensorFloat32 tensor cores"


def set_precision(dtype: str) -> None:
    """Of `penstock.dtype`: tf32 rounds both, fp32 neither, all else is as torch has it. It is said
    in any case: another model of the process may have said otherwise."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype != "fp32"
    warnings.filterwarnings("ignore", ADVICE, UserWarning)


def rounded() -> str:
    """What is rounded to TF32: `matrices`, `convolutions`, both or, as `off`, nothing."""
    settings = {
        "matrices": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": torch.backends.cudnn.conv.fp32_precision,
    }
    return ",".join(name for name, found in settings.items() if found == "tf32") or "off"
