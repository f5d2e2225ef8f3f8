"""Sample tokens from 16-bit logits, without sorting and without leaving the device: `cut` finds
the lowest logit that may be sampled, `sample` adds Gumbel noise and takes the argmax. The noise is
that of `llm.sampling`: it depends only on a row's key and the token. Sampling parameters are
tensors with one value per row, so a CUDA graph can hold both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Logits that a program reads at a time.
CUT_CHUNK, SAMPLE_CHUNK = 8192, 1024
# Parts of a row, each with a program of its own.
NUM_PARTS = 16
# Range of the integers that order like 16-bit logits.
LOWEST, HIGHEST = tl.constexpr(-32768), tl.constexpr(32767)
NUM_BITS = tl.constexpr(16)
# Same as in `llm.sampling`.
FIRST, SECOND, STEP = tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35), tl.constexpr(0x7FEB352D)
UNIT = tl.constexpr(2.0**-32)
HALF = tl.constexpr(1 << 31)
# Below it, log(1 - x) is computed as a power series.
SMALL = tl.constexpr(2.0**-8)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _ordered(logits):
    """Map logits to integers of the same order."""
    bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@triton.jit
def _share(row, low, peak, scale, size, CHUNK: tl.constexpr):
    """Return how many logits are at least `low`, and their total weight."""
    columns = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.int32)
    weight = tl.zeros([CHUNK], tl.float32)
    for start in range(0, size, CHUNK):
        at = start + columns
        is_inside = at < size
        x = tl.load(row + at, mask=is_inside, other=float("-inf"))
        is_kept = is_inside & (_ordered(x) >= low)
        count += is_kept.to(tl.int32)
        weight += tl.where(is_kept, tl.exp2((x.to(tl.float32) - peak) * scale), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _cut(
    logits, lowest, temperatures, most, shares, least, row_stride, size,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the lowest logit of one row that may be sampled."""
    number = tl.program_id(0).to(tl.int64)
    at = number * row_stride
    temperature = tl.load(temperatures + at)
    top_k = tl.load(most + at)
    top_p = tl.load(shares + at)
    min_p = tl.load(least + at)
    found = float("-inf")
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row = logits + number * size
        scale = LOG2_E / temperature
        columns = tl.arange(0, CHUNK)
        peaks = tl.full([CHUNK], float("-inf"), tl.float32)
        for start in range(0, size, CHUNK):
            is_inside = start + columns < size
            x = tl.load(row + start + columns, mask=is_inside, other=float("-inf"))
            peaks = tl.maximum(peaks, x.to(tl.float32))
        peak = tl.max(peaks, 0)
        low = LOWEST
        if (top_k > 0) & (top_k < size):
            # Binary search: logits from `low` on are enough, those from `high` on are not.
            high = HIGHEST + 1
            for _ in range(NUM_BITS):
                middle = (low + high) // 2
                count, _weight = _share(row, middle, peak, scale, size, CHUNK)
                is_enough = count >= top_k
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle)
        if top_p < 1:
            _count, total = _share(row, low, peak, scale, size, CHUNK)
            high = HIGHEST + 1
            for _ in range(NUM_BITS):
                middle = (low + high) // 2
                _count, weight = _share(row, middle, peak, scale, size, CHUNK)
                is_enough = weight >= top_p * total
                low = tl.where(is_enough & (middle > low), middle, low)
                high = tl.where(is_enough, high, middle)
        bits = tl.where(low < 0, low ^ 0x7FFF, low).to(tl.int16)
        found = bits.to(logits.dtype.element_ty, bitcast=True).to(tl.float32)
        if low == LOWEST:
            found = float("-inf")
        if min_p > 0:
            # Rounding must not exclude the largest.
            found = tl.minimum(tl.maximum(found, peak + tl.log2(min_p) / scale), peak)
    tl.store(lowest + number, found)


@triton.jit
def _mixed(numbers):
    """Hash: every output bit depends on every input bit."""
    numbers = (numbers ^ (numbers >> 16)) * FIRST
    numbers = (numbers ^ (numbers >> 13)) * SECOND
    return numbers ^ (numbers >> 16)


@triton.jit
def _noise(key, tokens):
    """Return Gumbel noise. Near 1, the logarithm is computed from the difference to 1."""
    numbers = _mixed(key ^ _mixed(tokens.to(tl.uint32) * STEP))
    missing = (0xFFFFFFFF - numbers).to(tl.float32) * UNIT + 0.5 * UNIT
    is_low = numbers < HALF
    uniform = tl.where(is_low, numbers.to(tl.float32) * UNIT + 0.5 * UNIT, 1.0 - missing)
    powers = missing * (1.0 + missing * (0.5 + missing * (0.3333333 + missing * 0.25)))
    exponential = tl.where(missing < SMALL, powers, -tl.log(uniform))
    return -tl.log(exponential)


@triton.jit
def _sample(
    logits, lowest, temperatures, keys, bests, places, row_stride, size,
    CHUNK: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Find the best token of one part of one row."""
    number = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + number * row_stride)
    key = tl.load(keys + number * row_stride).to(tl.uint32, bitcast=True)
    low = tl.load(lowest + number)
    share = tl.cdiv(tl.cdiv(size, NUM_PARTS), CHUNK) * CHUNK
    begin = part * share
    end = tl.minimum(begin + share, size)
    columns = tl.arange(0, CHUNK)
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    place = tl.zeros([CHUNK], tl.int32)
    row = logits + number * size
    for start in range(begin, end, CHUNK):
        at = start + columns
        x = tl.load(row + at, mask=at < end, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            x = tl.where(x >= low, x / temperature + _noise(key, at), float("-inf"))
            x = tl.where(at < end, x, float("-inf"))
        is_better = x > best
        best = tl.where(is_better, x, best)
        place = tl.where(is_better, at, place)
    peak = tl.max(best, 0)
    tl.store(bests + number * NUM_PARTS + part, peak)
    # The first of equals. A NaN is never better, so it is never chosen.
    tl.store(places + number * NUM_PARTS + part, tl.min(tl.where(best == peak, place, size), 0))


@triton.jit
def _choose(
    bests, places, sampled, last, rows, row_stride, size, NUM_PARTS: tl.constexpr
):  # fmt: skip
    """Store the best token of a row in `sampled`, and in `last` for its sequence."""
    number = tl.program_id(0).to(tl.int64)
    parts = number * NUM_PARTS + tl.arange(0, NUM_PARTS)
    best = tl.load(bests + parts)
    place = tl.load(places + parts)
    token = tl.min(tl.where(best == tl.max(best, 0), place, size), 0)
    token = tl.minimum(token, size - 1)
    tl.store(sampled + number, token)
    tl.store(last + tl.load(rows + number * row_stride), token)


def cut(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    most: torch.Tensor,
    shares: torch.Tensor,
    least: torch.Tensor,
) -> torch.Tensor:
    """Return for each row the lowest logit that may be sampled, by top_k in `most` (0: off), top_p
    in `shares` (1: off) and min_p in `least` (0: off). Tokens as likely as the last one stay too.
    Rows with temperature 0 are not cut."""
    num_rows, size = logits.shape
    assert logits.is_contiguous() and logits.dtype.itemsize == 2
    lowest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _cut[(num_rows,)](
        logits, lowest, temperatures, most, shares, least, temperatures.stride(0), size,
        CUT_CHUNK, num_warps=16,
    )  # fmt: skip
    return lowest


def sample(
    logits: torch.Tensor,
    lowest: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    sampled: torch.Tensor,
    last: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Sample a token for each row into `sampled`, and into `last` at the row's target in `rows`. No
    noise at temperature 0."""
    num_rows, size = logits.shape
    assert temperatures.stride(0) == keys.stride(0) == rows.stride(0)
    bests = torch.empty(num_rows, NUM_PARTS, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, NUM_PARTS, dtype=torch.int32, device=logits.device)
    _sample[(num_rows, NUM_PARTS)](
        logits, lowest, temperatures, keys, bests, places, keys.stride(0), size,
        SAMPLE_CHUNK, NUM_PARTS, num_warps=4,
    )  # fmt: skip
    _choose[(num_rows,)](
        bests, places, sampled, last, rows, rows.stride(0), size, NUM_PARTS, num_warps=1
    )
