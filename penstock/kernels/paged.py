"""Keys and values in blocks, as kernels take them; needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Paged:
    """Of a layer, [slots, heads, size] each, and whose they are: `table` has a row of blocks for
    each sequence."""

    keys: Any
    values: Any
    table: Any
    block_size: int
