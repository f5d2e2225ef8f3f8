"""GPU kernels, and which of them runs. Three interfaces: `convolution` for fused convolutions,
`packed_encoder` for encoder layers, `pixels` for decoded images; `gemm` chooses algorithms for the
second. They use what there is on the device and fall back to torch, so callers never name a kernel.

The kernels themselves are in Triton, one file for each kind of layer, and know tensors only.
Importing one needs Triton, so those with a fallback import it on use. `cublaslt` calls a library.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Files in a version's folder: the implementations chosen for its convolutions and GEMMs, and our
# own compiled kernels among them.
CHOICES, KERNELS = "fusion.json", "fusion.bin"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of a layer in the KV cache, [slots, heads, size] each, and the block table,
    with a row for each sequence."""

    keys: Tensor
    values: Tensor
    table: Tensor
    block_size: int
    # How many tokens a token sees, itself included; 0: all before it.
    window: int = 0
    # Scores x become cap x tanh(x / cap); 0: they stay.
    cap: float = 0.0
