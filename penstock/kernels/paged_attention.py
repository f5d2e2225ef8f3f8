"""Paged attention: keys and values are in KV blocks, which a sequence finds by its row of the block
table. All query heads that share a KV head go through one matmul, so keys and values are read once
for them.

`attend_one` is for decode; with few sequences it splits the context of each token into parts.
`attend_many` is for prompts and chunks of prompts. All per-step inputs are tensors on the device,
so a CUDA graph can hold `attend_one`. `llm.operations` calls both and has the same in plain torch.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from penstock.kernels import Paged
from penstock.kernels.varlen import fold

# Minimum rows of a matmul on tensor cores.
LEAST_ROWS = 16
# Programs that fill a GPU: eight for each multiprocessor of an H200.
NUM_PROGRAMS = 8 * 132
MAX_SPLITS = 64
# Keys per iteration by head size, with warps and stages: decode is bound by memory,
# so it keeps many loads in flight.
ONE_KEYS, ONE_WARPS, ONE_STAGES = {16: 64, 32: 64, 64: 128, 128: 64}, 4, 3
# Rows (tokens times heads) of a prompt per program.
MANY_ROWS, MANY_KEYS, MANY_WARPS, MANY_STAGES = 128, 64, 8, 3
# Shared memory for 3 stages with heads of 128; smaller GPUs have room for 2.
MANY_BYTES, FEW_STAGES = 131_104, 2
HEAD_SIZES = tuple(ONE_KEYS)
LOG2E = math.log2(math.e)
# Score of a key that a token does not see.
HIDDEN = tl.constexpr(-1e30)


@triton.jit
def _slots(block, at, PIECE: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the slots of keys, given the block and position of each contiguous piece."""
    first = block.to(tl.int64) * BLOCK + at % BLOCK
    return tl.reshape(first[:, None] + tl.arange(0, PIECE)[None, :], [BN])


@triton.jit
def _capped(scores, cap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        scores = cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / cap)) - 1.0)
    return scores


@triton.jit
def _attend_one(
    queries, keys, values, table, positions, rows, out, parts, sums,
    query_stride, row_stride, table_stride, token_stride, out_stride, qk_scale, cap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, IS_SPLIT: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Attend to one part of one token's context, for the query heads that share a KV head."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    length = tl.load(positions + token * row_stride) + 1
    blocks = table + tl.load(rows + token * row_stride).to(tl.int64) * table_stride
    # The first key that the token sees, and the tile that has it.
    lowest = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    lowest_tile = lowest // BN * BN
    share = tl.cdiv(tl.cdiv(length - lowest_tile, num_splits), BN) * BN
    begin = lowest_tile + split * share
    end = tl.minimum(begin + share, length)
    group = tl.arange(0, BM)
    places = tl.arange(0, SIZE)
    heads = head * GROUP + group
    is_mine = (group < GROUP)[:, None]
    at_query = token.to(tl.int64) * query_stride + heads[:, None] * SIZE + places[None, :]
    asked = tl.load(queries + at_query, mask=is_mine, other=0.0)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, SIZE], tl.float32)
    columns = tl.arange(0, BN)
    # Contiguous keys; `begin` is at the start of a piece.
    PIECE: tl.constexpr = BN if BN < BLOCK else BLOCK
    pieces = begin + tl.arange(0, BN // PIECE) * PIECE
    block = tl.load(blocks + pieces // BLOCK, mask=pieces < end, other=0)
    for start in range(begin, end, BN):
        is_seen = (start + columns < end) & (start + columns >= lowest)
        slot = _slots(block, pieces, PIECE, BN, BLOCK) * token_stride + head * SIZE
        # Block numbers are loaded one iteration ahead, so that keys are fetched early.
        pieces += BN
        block = tl.load(blocks + pieces // BLOCK, mask=pieces < end, other=0)
        some = tl.load(keys + slot[None, :] + places[:, None], mask=is_seen[None, :], other=0.0)
        scores = _capped(tl.dot(asked, some) * qk_scale, cap, HAS_CAP)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        given = tl.load(values + slot[:, None] + places[None, :], mask=is_seen[:, None], other=0.0)
        peak, total, mixed = fold(scores, given, peak, total, mixed)
    # Padding rows see nothing.
    total = tl.where(total > 0, total, 1.0)
    mixed = mixed / total[:, None]
    if IS_SPLIT:
        num_heads = tl.num_programs(0) * GROUP
        part = (token.to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(parts + part[:, None] * SIZE + places[None, :], mixed, mask=is_mine)
        tl.store(sums + part, peak + tl.log2(total), mask=group < GROUP)
    else:
        target = out + token.to(tl.int64) * out_stride + heads[:, None] * SIZE + places[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=is_mine)


@triton.jit
def _join(
    parts, sums, out, out_stride,
    SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one head of one token, by their weights."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, NUM_SPLITS)
    places = tl.arange(0, SIZE)
    part = (token * tl.num_programs(1) + head) * NUM_SPLITS + splits
    weighs = tl.load(sums + part)
    peak = tl.max(weighs, 0)
    weights = tl.exp2(weighs - tl.where(peak > float("-inf"), peak, 0.0))
    total = tl.sum(weights, 0)
    found = tl.load(parts + part[:, None] * SIZE + places[None, :])
    mixed = tl.sum(found * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    target = out + token * out_stride + head * SIZE + places
    tl.store(target, mixed.to(out.dtype.element_ty))


@triton.jit
def _attend_many(
    queries, keys, values, table, lines, out,
    query_stride, table_stride, token_stride, out_stride, qk_scale, cap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Attend for some tokens of one prompt, for the query heads that share a KV head. A line (query
    tile) is (row of the block table, first token, end of the prompt's tokens, position of the
    first)."""
    head = tl.program_id(0)
    line = lines + tl.program_id(1) * 4
    blocks = table + tl.load(line).to(tl.int64) * table_stride
    first = tl.load(line + 1)
    last = tl.load(line + 2)
    position = tl.load(line + 3)
    TOKENS: tl.constexpr = BM // GROUP
    packed = tl.arange(0, BM)
    tokens = first + packed // GROUP
    heads = head * GROUP + packed % GROUP
    is_mine = ((packed < TOKENS * GROUP) & (tokens < last))[:, None]
    places = tl.arange(0, SIZE)
    at_query = tokens.to(tl.int64)[:, None] * query_stride + heads[:, None] * SIZE + places[None, :]
    asked = tl.load(queries + at_query, mask=is_mine, other=0.0)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, SIZE], tl.float32)
    columns = tl.arange(0, BN)
    end = position + tl.minimum(TOKENS, last - first)
    PIECE: tl.constexpr = BN if BN < BLOCK else BLOCK
    # The tile with the first key that any token sees.
    begin = tl.maximum(position + 1 - WINDOW, 0) // BN * BN if WINDOW else 0
    pieces = begin + tl.arange(0, BN // PIECE) * PIECE
    block = tl.load(blocks + pieces // BLOCK, mask=pieces < end, other=0)
    # No mask needed: all tokens see these keys, unless there is a window.
    whole = begin if WINDOW else (position + 1) // BN * BN
    for _ in range(begin, whole, BN):
        slot = _slots(block, pieces, PIECE, BN, BLOCK) * token_stride + head * SIZE
        pieces += BN
        block = tl.load(blocks + pieces // BLOCK, mask=pieces < end, other=0)
        some = tl.load(keys + slot[None, :] + places[:, None])
        given = tl.load(values + slot[:, None] + places[None, :])
        scores = _capped(tl.dot(asked, some) * qk_scale, cap, HAS_CAP)
        peak, total, mixed = fold(scores, given, peak, total, mixed)
    limit = position + packed // GROUP
    for start in range(whole, end, BN):
        at = start + columns
        is_there = at < end
        slot = _slots(block, pieces, PIECE, BN, BLOCK) * token_stride + head * SIZE
        pieces += BN
        block = tl.load(blocks + pieces // BLOCK, mask=pieces < end, other=0)
        some = tl.load(keys + slot[None, :] + places[:, None], mask=is_there[None, :], other=0.0)
        given = tl.load(values + slot[:, None] + places[None, :], mask=is_there[:, None], other=0.0)
        scores = _capped(tl.dot(asked, some) * qk_scale, cap, HAS_CAP)
        is_seen = is_there[None, :] & (at[None, :] <= limit[:, None])
        if WINDOW:
            is_seen = is_seen & (at[None, :] > limit[:, None] - WINDOW)
        # Finite: a token may see nothing of its first tile.
        scores = tl.where(is_seen, scores, HIDDEN)
        peak, total, mixed = fold(scores, given, peak, total, mixed)
    mixed = mixed / total[:, None]
    target = out + tokens.to(tl.int64)[:, None] * out_stride + heads[:, None] * SIZE
    tl.store(target + places[None, :], mixed.to(out.dtype.element_ty), mask=is_mine)


def num_splits(num_tokens: int, num_kv_heads: int) -> int:
    """Return into how many parts the context of each token is split: a power of two."""
    wanted = NUM_PROGRAMS / (num_tokens * num_kv_heads)
    return min(MAX_SPLITS, triton.next_power_of_2(math.ceil(wanted))) if wanted > 1 else 1


def tokens_of_line(group: int) -> int:
    """Return the most tokens of a line of `attend_many`."""
    return MANY_ROWS // group


def attend_one(
    queries: torch.Tensor,
    paged: Paged,
    positions: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    splits: int,
) -> None:
    """Attend for queries [tokens, heads, size] with their positions (-1 for padding) and rows of
    the block table, into `out` of the same shape. Their keys and values are in the cache already.
    Put the longest contexts first: one that starts last would delay the end."""
    num_tokens, num_heads, size = queries.shape
    num_kv_heads = paged.keys.shape[1]
    group = num_heads // num_kv_heads
    assert size in HEAD_SIZES and positions.stride(0) == rows.stride(0)
    assert _is_power_of_two(paged.block_size)
    assert queries.stride(1) == out.stride(1) == size
    parts = sums = out
    if splits > 1:
        shape = num_tokens, num_heads, splits
        parts = torch.empty((*shape, size), dtype=torch.float32, device=queries.device)
        sums = torch.empty(shape, dtype=torch.float32, device=queries.device)
    # Heads of a token run next to each other, as their keys are next to each other.
    _attend_one[(num_kv_heads, num_tokens, splits)](
        queries, paged.keys, paged.values, paged.table, positions, rows, out, parts, sums,
        queries.stride(0), positions.stride(0), paged.table.stride(0), paged.keys.stride(0),
        out.stride(0), LOG2E / math.sqrt(size), LOG2E * paged.cap,
        group, size, max(LEAST_ROWS, triton.next_power_of_2(group)), ONE_KEYS[size],
        paged.block_size, splits > 1, paged.window, paged.cap > 0,
        num_warps=ONE_WARPS, num_stages=ONE_STAGES,
    )  # fmt: skip
    if splits > 1:
        _join[(num_tokens, num_heads)](
            parts, sums, out, out.stride(0), size, splits, num_warps=1 if splits < 16 else 4
        )


def attend_many(
    queries: torch.Tensor,
    paged: Paged,
    lines: torch.Tensor,
    out: torch.Tensor,
    num_stages: int | None = None,
) -> None:
    """Attend for queries [tokens, heads, size]; `lines` [lines, 4] assign them to sequences. Their
    keys and values are in the cache already."""
    num_heads, size = queries.shape[1:]
    num_kv_heads = paged.keys.shape[1]
    assert size in HEAD_SIZES and queries.stride(1) == out.stride(1) == size
    assert _is_power_of_two(paged.block_size)
    _attend_many[(num_kv_heads, lines.shape[0])](
        queries, paged.keys, paged.values, paged.table, lines, out,
        queries.stride(0), paged.table.stride(0), paged.keys.stride(0), out.stride(0),
        LOG2E / math.sqrt(size), LOG2E * paged.cap, num_heads // num_kv_heads, size, MANY_ROWS,
        MANY_KEYS, paged.block_size, paged.window, paged.cap > 0, num_warps=MANY_WARPS,
        num_stages=num_stages or _stages(queries.device),
    )  # fmt: skip


@functools.cache
def _stages(device: torch.device) -> int:
    if device.type != "cuda":
        return MANY_STAGES
    properties = torch.cuda.get_device_properties(device)
    return MANY_STAGES if properties.shared_memory_per_block_optin >= MANY_BYTES else FEW_STAGES


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
