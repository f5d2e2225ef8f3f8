"""KV cache of all sequences, in blocks, and attention over it in plain torch.

One tensor holds the keys of all layers and one the values. A *slot* is the place of a token: block
number times block size, plus the offset in the block. The scheduler assigns blocks to sequences.
GPU kernels read the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.exact_attention import cap_scores
from penstock.llm.models.shape import PLAIN, AttentionForm, DecoderShape
from penstock.llm.scheduler import BatchStep

if TYPE_CHECKING:
    from penstock.llm.models.decoder import Attend


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
        # By layer. All layers share block tables, so those with a window keep all keys too.
        self.forms = [shape.attention_form(number) for number in range(shape.num_layers)]


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


def attend_sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, form: AttentionForm = PLAIN
) -> Tensor:
    """Attend from the last tokens, [tokens, heads, size], to all, [tokens, kv heads, size]."""
    num = len(queries)
    if form.window and len(keys) >= num + form.window:
        # No token sees the keys before.
        first = len(keys) - num - form.window + 1
        keys, values = keys[first:], values[first:]
    length = len(keys)
    mask = None
    if num > 1:
        own = torch.arange(length - num, length, device=queries.device)[:, None]
        places = torch.arange(length, device=queries.device)
        mask = places <= own
        if form.window:
            mask &= places > own - form.window
    by_head = [each.transpose(0, 1)[None] for each in (queries, keys, values)]
    return attend_masked(by_head[0], by_head[1], by_head[2], mask, form.cap)[0].transpose(0, 1)


def attend_masked(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, cap: float
) -> Tensor:
    """Attend from [batch, heads, rows, size] to [batch, kv heads, keys, size]; `mask` says what is
    seen, or is added to scores."""
    is_grouped = queries.shape[1] != keys.shape[1]
    if not cap:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=is_grouped
        )
    if is_grouped:
        group = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = (queries @ keys.transpose(2, 3)).float() * queries.shape[3] ** -0.5
    scores = cap_scores(scores, cap)
    if mask is not None:
        is_seen = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if is_seen else scores + mask
    return scores.softmax(3).to(values.dtype) @ values


def attend_alone(shape: DecoderShape) -> Attend:
    """Return the attention of one sequence without a cache, all tokens at once."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend_sdpa(queries, keys, values, shape.attention_form(layer))

    return attend
