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

from penstock.llm import exact_attention
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
        self.block_size = block_size
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


class PlainAttention:
    """Attention of one step, one sequence at a time."""

    def __init__(self, cache: Cache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._spans = spans
        own = [span.slots[len(span.slots) - (span.end - span.first) :] for span in spans]
        self._slots = torch.cat(own)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.keep(layer, keys, values)
        found = torch.empty_like(queries)
        for span in self._spans:
            found[span.first : span.end] = self.attended(layer, span, queries, keys, values)
        return found

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values of all the step's tokens to the cache."""
        self._cache.keys[layer].index_copy_(0, self._slots, keys)
        self._cache.values[layer].index_copy_(0, self._slots, values)

    def attended(
        self, layer: int, span: Span, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Return the attention of one span, whose keys and values are in the cache."""
        own = slice(span.first, span.end)
        attend = exact_attention.attend_prompt if self._cache.is_exact else attend_sdpa
        if len(span.slots) == span.end - span.first:
            # A prompt from its first token: everything that it sees is in this step.
            return attend(queries[own], keys[own], values[own])
        seen = self._cache.keys[layer][span.slots], self._cache.values[layer][span.slots]
        return attend(queries[own], *seen)


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
