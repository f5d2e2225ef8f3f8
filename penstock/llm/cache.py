"""KV cache of all sequences, in blocks, and attention over it in plain torch.

One tensor holds the keys of all layers and one the values. A *slot* is the place of a token: block
number times block size, plus the offset in the block. The scheduler assigns blocks to sequences.
GPU kernels read the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.shape import DecoderShape
from penstock.llm.scheduler import BatchStep


class Cache:
    """Keys and values of all layers. `is_exact`: the attention of a token does not depend on the
    rest of the batch (`exact_attention`); CPUs only."""

    def __init__(
        self,
        shape: DecoderShape,
        num_blocks: int,
        block_size: int,
        device: str,
        dtype: torch.dtype,
        *,
        is_exact: bool = False,
    ) -> None:
        sizes = (shape.num_layers, num_blocks * block_size, shape.num_kv_heads, shape.head_size)
        self.keys = torch.zeros(sizes, dtype=dtype, device=device)
        self.values = torch.zeros(sizes, dtype=dtype, device=device)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.is_exact = is_exact


def bytes_of_block(shape: DecoderShape, block_size: int, dtype: torch.dtype) -> int:
    heads = shape.num_kv_heads * shape.head_size
    size: int = dtype.itemsize
    return 2 * shape.num_layers * block_size * heads * size


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in a step: their range among the step's tokens, and the slots of all
    tokens that they see."""

    first: int
    end: int
    slots: Tensor


def spans_of(step: BatchStep, block_size: int) -> list[Span]:
    spans: list[Span] = []
    first = 0
    for chunk in step.chunks:
        slots = slots_of(chunk.blocks, chunk.end, block_size)
        spans.append(Span(first, first + chunk.count, slots))
        first += chunk.count
    return spans


def slots_of(blocks: Sequence[int], num_tokens: int, block_size: int) -> Tensor:
    some = torch.tensor(blocks[: -(-num_tokens // block_size)], dtype=torch.int64)
    return (some[:, None] * block_size + torch.arange(block_size)).flatten()[:num_tokens]


def attend_sdpa(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from the last tokens, [tokens, heads, size], to all, [tokens, kv heads, size]."""
    num, length = len(queries), len(keys)
    mask = None
    if num > 1:
        places = torch.arange(length - num, length, device=queries.device)
        mask = torch.arange(length, device=queries.device)[None, :] <= places[:, None]
    mixed = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return mixed[0].transpose(0, 1)
