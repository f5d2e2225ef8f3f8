"""Operations between the linear layers of a language model, each in one pass over memory: residual
with RMSNorm; norms and RoPE of queries and keys, with keys and values written to the KV cache;
SwiGLU. The first and the last also in e4m3, with a scale per row, as input of an FP8 GEMM.
`llm.operations` calls them and has the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels import Paged

E4M3_MAX = tl.constexpr(448.0)
# Lower bound of a row's range, for rows that are all zero.
SMALLEST = tl.constexpr(1e-6)
# Heads of one token that one program rotates.
HEADS_TOGETHER = 8
# Elements per program of SwiGLU.
ELEMENTS = 1024


@triton.jit
def _to_e4m3(values, scales, row):
    """Scale a row to e4m3, and store its scale."""
    scale = tl.maximum(tl.max(tl.abs(values), 0), SMALLEST) / E4M3_MAX
    tl.store(scales + row, scale)
    return tl.minimum(tl.maximum(values * (1.0 / scale), -E4M3_MAX), E4M3_MAX)


@triton.jit
def _add_norm(
    added, residual, total, weight, out, scales, epsilon,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HAS_ADDED: tl.constexpr, TO_FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_inside = columns < WIDTH
    at = row * WIDTH + columns
    x = tl.load(residual + at, mask=is_inside, other=0.0)
    if HAS_ADDED:
        sums = x.to(tl.float32) + tl.load(added + at, mask=is_inside, other=0.0).to(tl.float32)
        x = sums.to(total.dtype.element_ty)
        tl.store(total + at, x, mask=is_inside)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    factor = tl.load(weight + columns, mask=is_inside, other=0.0)
    # Rounded before the weight is applied, as in training.
    normed = (factor.to(tl.float32) * wide.to(factor.dtype).to(tl.float32)).to(factor.dtype)
    if TO_FP8:
        small = _to_e4m3(normed.to(tl.float32), scales, row)
        tl.store(out + at, small.to(out.dtype.element_ty), mask=is_inside)
    else:
        tl.store(out + at, normed, mask=is_inside)


@triton.jit
def _apply_rope(
    qkv, keys, values, table, rope_table, positions, rows, query_norm, key_norm,
    qkv_stride, row_stride, table_stride, token_stride, epsilon,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Process some heads of one token; heads are queries, then keys, then values. PLACES is half a
    head, rounded up to a power of two: Triton knows no other ranges."""
    HALF: tl.constexpr = SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token * row_stride)
    if position >= 0:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        places = tl.arange(0, PLACES)[None, :]
        is_place = places < HALF
        asks = (heads < NUM_HEADS)[:, None]
        is_query = asks & is_place
        is_key = ((heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV))[:, None] & is_place
        is_value = (heads >= NUM_HEADS + NUM_KV) & (heads < NUM_HEADS + 2 * NUM_KV)
        is_value = is_value[:, None] & is_place
        is_head = (heads < NUM_HEADS + 2 * NUM_KV)[:, None] & is_place
        at = qkv + token * qkv_stride + heads[:, None] * SIZE + places
        first = tl.load(at, mask=is_head, other=0.0)
        second = tl.load(at + HALF, mask=is_head, other=0.0)
        one, two = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORMS:
            squares = tl.sum(one * one, 1) + tl.sum(two * two, 1)
            scale = tl.rsqrt(squares / SIZE + epsilon)[:, None]
            by_one = tl.where(
                asks,
                tl.load(query_norm + places, mask=is_place, other=0.0),
                tl.load(key_norm + places, mask=is_place, other=0.0),
            )
            by_two = tl.where(
                asks,
                tl.load(query_norm + HALF + places, mask=is_place, other=0.0),
                tl.load(key_norm + HALF + places, mask=is_place, other=0.0),
            )
            one = (one * scale).to(first.dtype).to(tl.float32) * by_one.to(tl.float32)
            two = (two * scale).to(first.dtype).to(tl.float32) * by_two.to(tl.float32)
            one = one.to(first.dtype).to(tl.float32)
            two = two.to(first.dtype).to(tl.float32)
        angles = rope_table + position.to(tl.int64) * SIZE + places
        cosines = tl.load(angles, mask=is_place, other=0.0)
        sines = tl.load(angles + HALF, mask=is_place, other=0.0)
        rotated_one = (one * cosines - two * sines).to(first.dtype)
        rotated_two = (two * cosines + one * sines).to(first.dtype)
        tl.store(at, rotated_one, mask=is_query)
        tl.store(at + HALF, rotated_two, mask=is_query)
        row = tl.load(rows + token * row_stride).to(tl.int64)
        block = tl.load(table + row * table_stride + position // BLOCK).to(tl.int64)
        slot = (block * BLOCK + position % BLOCK) * token_stride
        to_key = keys + slot + (heads - NUM_HEADS)[:, None] * SIZE + places
        tl.store(to_key, rotated_one, mask=is_key)
        tl.store(to_key + HALF, rotated_two, mask=is_key)
        to_value = values + slot + (heads - NUM_HEADS - NUM_KV)[:, None] * SIZE + places
        tl.store(to_value, first, mask=is_value)
        tl.store(to_value + HALF, second, mask=is_value)


@triton.jit
def _gate(x, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = columns < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + columns, mask=is_inside, other=0.0)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + columns, mask=is_inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + columns, gated.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _gate_to_e4m3(x, out, scales, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_inside = columns < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + columns, mask=is_inside, other=0.0).to(tl.float32)
    small = _to_e4m3(gate / (1.0 + tl.exp(-gate)) * up, scales, row)
    tl.store(out + row * WIDTH + columns, small.to(out.dtype.element_ty), mask=is_inside)


def add_norm(
    added: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorm of the sum (of the residual without `added`), and the sum. With `scales`
    [rows, 1] the former is in e4m3, and its scales are stored there."""
    num_rows, width = residual.shape
    assert residual.is_contiguous() and (added is None or added.is_contiguous())
    total = residual if added is None else torch.empty_like(residual)
    dtype = residual.dtype if scales is None else torch.float8_e4m3fn
    out = torch.empty_like(residual, dtype=dtype)
    columns = triton.next_power_of_2(width)
    _add_norm[(num_rows,)](
        residual if added is None else added, residual, total, weight, out,
        out if scales is None else scales, epsilon, width, columns, added is not None,
        scales is not None, num_warps=4 if columns <= 2048 else 8,
    )  # fmt: skip
    return out, total


def apply_rope(
    qkv: torch.Tensor,
    paged: Paged,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> None:
    """Apply RoPE to qkv [tokens, queries, keys and values]: queries in place, keys and values to
    the sequence's KV blocks. `rope_table` [positions, 2, half a head] has cosines and sines;
    `norms` are those of queries and keys, or None. Positions below 0 are skipped."""
    num_kv_heads, size = paged.keys.shape[1:]
    num_heads = qkv.shape[1] // size - 2 * num_kv_heads
    assert qkv.stride(1) == 1 and positions.stride(0) == rows.stride(0)
    query_norm, key_norm = (qkv, qkv) if norms is None else norms
    groups = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_TOGETHER)
    _apply_rope[(qkv.shape[0], groups)](
        qkv, paged.keys, paged.values, paged.table, rope_table, positions, rows,
        query_norm, key_norm,
        qkv.stride(0), positions.stride(0), paged.table.stride(0), paged.keys.stride(0), epsilon,
        num_heads, num_kv_heads, size, triton.next_power_of_2(size // 2), HEADS_TOGETHER,
        paged.block_size, norms is not None, num_warps=2,
    )  # fmt: skip


def gate(x: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Apply SwiGLU: [rows, gate and up] to SiLU(gate) times up. With `scales` [rows, 1] the result
    is in e4m3, and its scales are stored there."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    assert x.is_contiguous()
    dtype = x.dtype if scales is None else torch.float8_e4m3fn
    out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    if scales is None:
        grid = num_rows, triton.cdiv(width, ELEMENTS)
        _gate[grid](x, out, width, ELEMENTS, num_warps=4)
    else:
        columns = triton.next_power_of_2(width)
        _gate_to_e4m3[(num_rows,)](
            x, out, scales, width, columns, num_warps=16 if columns > 8192 else 8
        )
    return out
