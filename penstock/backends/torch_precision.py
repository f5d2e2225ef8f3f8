"""Precision of FP32 GEMMs and convolutions on GPUs: FP32, or TF32, which has ten bits of mantissa
instead of 23 and is several times as fast on tensor cores.

By default torch uses TF32 for convolutions (cuDNN) but not for GEMMs; `penstock.dtype` overrides
that. torch has one setting for all models of a process, and a model's own code may change it;
`rounded` returns the effective one.
"""

from __future__ import annotations

import warnings

import torch

# Advice of Inductor to use TF32, which is a separate option here because it changes answers.
ADVICE = "TensorFloat32 tensor cores"


def set_precision(dtype: str) -> None:
    """Apply `penstock.dtype`: tf32 for both, fp32 for neither, otherwise torch's default. Always
    set, as another model of the process may have changed it."""
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype != "fp32"
    warnings.filterwarnings("ignore", ADVICE, UserWarning)


def rounded() -> str:
    """Return what uses TF32: `matrices`, `convolutions`, both, or `off`."""
    settings = {
        "matrices": torch.backends.cuda.matmul.fp32_precision,
        "convolutions": torch.backends.cudnn.conv.fp32_precision,
    }
    return ",".join(name for name, found in settings.items() if found == "tf32") or "off"
