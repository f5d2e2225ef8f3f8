"""The KV cache of a layer, as kernels take it; needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values of a layer, [slots, heads, size] each, and the block table, with a row for
    each sequence."""

    keys: Tensor
    values: Tensor
    table: Tensor
    block_size: int
