"""The experts of a mixture, all in one GEMM: each tile of rows belongs to one expert, whose weights
it multiplies. Which rows those are is decided on the device, so a CUDA graph can hold it.
`llm.models.experts` calls it and has the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels import decoding

# Rows of a tile: few while most experts have few tokens, which is when weights are the bottleneck.
FEW_ROWS, MANY_ROWS = 16, 64
COLUMNS, DEPTH = 64, 64
WARPS, STAGES = 4, 3


@triton.jit
def _grouped(
    x, weights, out, order, ends, shares, num_columns, depth, x_stride, out_stride,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, PER_ROW: tl.constexpr,
    HAS_SHARES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply one tile. A *pair* is a token and one of its experts; `order` has pairs by expert,
    and those of an expert end at `ends`. Row `pair // PER_ROW` of x is the pair's input."""
    tile = tl.program_id(1)
    numbers = tl.arange(0, EXPERTS)
    is_expert = numbers < NUM_EXPERTS
    end_of = tl.load(ends + numbers, mask=is_expert, other=0)
    start_of = tl.load(ends + numbers - 1, mask=is_expert & (numbers > 0), other=0)
    tiles = tl.where(is_expert, (end_of - start_of + BM - 1) // BM, 0)
    before = tl.cumsum(tiles, 0) - tiles
    is_mine = (before <= tile) & (tile < before + tiles)
    # One expert, or none: there are more programs than tiles.
    end = tl.sum(tl.where(is_mine, end_of, 0), 0)
    if end > 0:
        expert = tl.sum(tl.where(is_mine, numbers, 0), 0).to(tl.int64)
        first = tl.sum(tl.where(is_mine, start_of + (tile - before) * BM, 0), 0)
        places = first + tl.arange(0, BM)
        is_there = places < end
        pair = tl.load(order + places, mask=is_there, other=0).to(tl.int64)
        columns = tl.program_id(0) * BN + tl.arange(0, BN)
        is_inside = columns < num_columns
        steps = tl.arange(0, BK)
        at_x = x + (pair // PER_ROW)[:, None] * x_stride + steps[None, :]
        own = weights + expert * num_columns * depth
        at_weight = own + columns[None, :].to(tl.int64) * depth + steps[:, None]
        total = tl.zeros([BM, BN], tl.float32)
        for start in range(0, depth, BK):
            is_deep = start + steps < depth
            rows = tl.load(at_x + start, mask=is_there[:, None] & is_deep[None, :], other=0.0)
            part = tl.load(at_weight + start, mask=is_deep[:, None] & is_inside[None, :], other=0.0)
            total += tl.dot(rows, part)
        if HAS_SHARES:
            share = tl.load(shares + pair, mask=is_there, other=0.0).to(tl.float32)
            total = total * share[:, None]
        target = out + pair[:, None] * out_stride + columns[None, :]
        mask = is_there[:, None] & is_inside[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def run_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of each token's experts, [tokens, width]. `gate_up` is [experts, gate and up,
    width], `down` [experts, width, inner]; `chosen` [tokens, experts of a token] are the experts,
    and `shares` their factors."""
    num_used = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(gate_up), dtype=flat.dtype, device=x.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0)
    hidden = _multiply(x, gate_up, order, ends, num_used, None)
    hidden = decoding.gate(hidden)
    found = _multiply(hidden, down, order, ends, 1, shares.flatten())
    return found.unflatten(0, (-1, num_used)).sum(1)


def _multiply(
    x: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    per_row: int,
    shares: torch.Tensor | None,
) -> torch.Tensor:
    num_experts, num_columns, depth = weights.shape
    num_pairs = len(order)
    assert x.stride(1) == 1 and weights.is_contiguous()
    out = torch.empty(num_pairs, num_columns, dtype=x.dtype, device=x.device)
    rows = MANY_ROWS if num_pairs >= MANY_ROWS * num_experts else FEW_ROWS
    # Each expert has at most one tile that is not full.
    num_tiles = num_pairs // rows + min(num_experts, num_pairs)
    _grouped[(triton.cdiv(num_columns, COLUMNS), num_tiles)](
        x, weights, out, order, ends, out if shares is None else shares, num_columns, depth,
        x.stride(0), out.stride(0), num_experts, triton.next_power_of_2(num_experts), per_row,
        shares is not None, rows, COLUMNS, DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
