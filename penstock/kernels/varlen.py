"""Attention over packed sequences, without padding: the softmax is computed online, one block of
keys and values at a time, and each block of queries sees only its own sequence. `packed_encoder`
calls it; `packed_encoder.padded_attention` is the same in plain torch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# Query rows per program; the table of blocks is made for this size.
BLOCK = 64
# Keys per iteration, warps and stages: the fastest of twelve on an H200, with sequences of 177
# tokens on average and heads of 64 (133 us for 32,768 tokens; 139 with 64 keys, 162 with blocks of
# 128). Larger blocks compute more masked scores.
KEYS, NUM_WARPS, NUM_STAGES = 32, 4, 3
HEAD_SIZES = (16, 32, 64, 128)
# Heads of this size need more shared memory, so they get fewer stages.
LARGE_HEAD, FEW_STAGES = 128, 2
MAX_ELEMENTS = 1 << 31
TYPES = (torch.float16, torch.bfloat16)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _score(queries, keys, qk_scale, is_inside):
    scores = tl.dot(queries, keys) * qk_scale
    return tl.where(is_inside[None, :], scores, float("-inf"))


@triton.jit
def fold(scores, values, peak, total, mixed):
    """Update the online softmax with one more block of keys."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None])
    return new_peak, total, mixed


@triton.jit
def _attend(
    qkv, out, table, inverse, stride, out_stride, qk_scale,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TO_FP8: tl.constexpr,
):  # fmt: skip
    """Attend for one block of queries of one head; its line of the table is (first query, begin and
    end of its sequence), and an end of 0 means unused. Heads of a block run next to each other, as
    their rows are next to each other."""
    NUM_HEADS: tl.constexpr = WIDTH // SIZE
    line = table + tl.program_id(0) // NUM_HEADS * 3
    head = tl.program_id(0) % NUM_HEADS
    first = tl.load(line)
    begin = tl.load(line + 1)
    end = tl.load(line + 2)
    if end > 0:
        rows = first + tl.arange(0, BM)
        is_mine = (rows < end)[:, None]
        places = tl.arange(0, SIZE)
        base = qkv + head * SIZE
        queries = tl.load(base + rows[:, None] * stride + places[None, :], mask=is_mine, other=0.0)
        peak = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        mixed = tl.zeros([BM, SIZE], tl.float32)
        columns = tl.arange(0, BN)
        whole = begin + ((end - begin) // BN) * BN
        for start in range(begin, whole, BN):
            at = start + columns
            keys = tl.load(base + WIDTH + at[None, :] * stride + places[:, None])
            values = tl.load(base + 2 * WIDTH + at[:, None] * stride + places[None, :])
            scores = tl.dot(queries, keys) * qk_scale
            peak, total, mixed = fold(scores, values, peak, total, mixed)
        if whole < end:
            at = whole + columns
            is_inside = at < end
            keys = tl.load(
                base + WIDTH + at[None, :] * stride + places[:, None],
                mask=is_inside[None, :], other=0.0,
            )  # fmt: skip
            values = tl.load(
                base + 2 * WIDTH + at[:, None] * stride + places[None, :],
                mask=is_inside[:, None], other=0.0,
            )  # fmt: skip
            scores = _score(queries, keys, qk_scale, is_inside)
            peak, total, mixed = fold(scores, values, peak, total, mixed)
        mixed = mixed / total[:, None]
        target = out + rows[:, None] * out_stride + head * SIZE + places[None, :]
        if TO_FP8:
            mixed = mixed * tl.load(inverse)
            mixed = tl.minimum(tl.maximum(mixed, -E4M3_MAX), E4M3_MAX)
        tl.store(target, mixed.to(out.dtype.element_ty), mask=is_mine)


def attend(
    qkv: torch.Tensor, table: torch.Tensor, num_heads: int, inverse: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend within sequences: [tokens, 3 x width], queries, keys and values side by side, to
    [tokens, width]; with `inverse`, multiplied by it and in e4m3. Rows outside all blocks stay
    uninitialised."""
    num_tokens, width = qkv.shape[0], qkv.shape[1] // 3
    size = width // num_heads
    assert size in HEAD_SIZES and qkv.dtype in TYPES and qkv.stride(1) == 1
    assert qkv.numel() < MAX_ELEMENTS, "places are counted in 32 bits"
    dtype = qkv.dtype if inverse is None else torch.float8_e4m3fn
    out = torch.empty(num_tokens, width, dtype=dtype, device=qkv.device)
    _attend[(table.shape[0] * num_heads,)](
        qkv, out, table, qkv if inverse is None else inverse, qkv.stride(0), out.stride(0),
        math.log2(math.e) / math.sqrt(size), width, size, BLOCK, KEYS, inverse is not None,
        num_warps=NUM_WARPS, num_stages=FEW_STAGES if size == LARGE_HEAD else NUM_STAGES,
    )  # fmt: skip
    return out
