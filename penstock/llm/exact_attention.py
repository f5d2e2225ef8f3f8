"""Batch-invariant attention on CPUs: a token's result does not depend on the rest of the batch.

With datatypes that round activations (int4, int8, bfloat16, float16), the last bit of a sum can
change a token, and BLAS orders sums by the sizes of its matrices. So every sum here has a fixed
order: scores are sums over a head, whose size is fixed; the weighted sum of values runs over blocks
of `BLOCK` keys, added one after the other; and matrices have multiples of `ROWS` rows, below which
BLAS uses other kernels. Keys past the end are zeros and add nothing, so padding changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.shape import PLAIN, AttentionForm

# Keys in a block. Row lengths in `batched_attention` are multiples of it.
BLOCK = 64
ROWS = 4
# Tokens of a prompt that are computed together; limits the memory for their scores.
TILE = 64


def pad_length(num_keys: int) -> int:
    return -(-num_keys // BLOCK) * BLOCK


def cap_scores(scores: Tensor, cap: float) -> Tensor:
    """Cap scores softly, in place."""
    return scores.div_(cap).tanh_().mul_(cap)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, ends: Tensor, form: AttentionForm = PLAIN
) -> Tensor:
    """Return [batch, rows, size] in FP32; each row sees the keys before its end. Keys and values
    are [batch, length, size], where length is a multiple of BLOCK and all numbers are finite;
    `ends` are [batch or 1, rows]."""
    batch, num_rows, size = queries.shape
    padded = F.pad(queries.float() * size**-0.5, (0, 0, 0, -num_rows % ROWS))
    seen = F.pad(ends, (0, -num_rows % ROWS), value=1)
    keys, values = keys.float(), values.float()
    scores = torch.bmm(padded, keys.transpose(1, 2))
    if form.cap:
        cap_scores(scores, form.cap)
    places = torch.arange(keys.shape[1])
    hidden = places >= seen[:, :, None]
    if form.window:
        hidden |= places < seen[:, :, None] - form.window
    scores.masked_fill_(hidden, float("-inf"))
    weights = scores.sub_(scores.amax(2, keepdim=True)).exp_()
    mixed = torch.zeros(batch, padded.shape[1], size)
    for start in range(0, keys.shape[1], BLOCK):
        mixed.baddbmm_(weights[:, :, start : start + BLOCK], values[:, start : start + BLOCK])
    # A running sum adds one block after the other, where `sum` would depend on their number.
    total = weights.unflatten(2, (-1, BLOCK)).sum(3).cumsum(2)[:, :, -1:]
    return (mixed / total)[:, :num_rows]


def attend_prompt(
    queries: Tensor, keys: Tensor, values: Tensor, form: AttentionForm = PLAIN
) -> Tensor:
    """Attend from the last tokens of a sequence, [tokens, heads, size], to all its tokens, [tokens,
    kv heads, size]."""
    num, num_heads, size = queries.shape
    length, num_kv_heads = keys.shape[:2]
    found = torch.empty_like(queries)
    first = length - num
    missing = pad_length(length) - length
    all_keys, all_values = (
        F.pad(each.transpose(0, 1), (0, 0, 0, missing)) for each in (keys, values)
    )
    for start in range(0, num, TILE):
        tile = queries[start : start + TILE]
        count = len(tile)
        # Group the query heads that share keys, and pad each token's group to a multiple of ROWS.
        rows = tile.reshape(count, num_kv_heads, -1, size).transpose(0, 1)
        group = rows.shape[2]
        rows = F.pad(rows, (0, 0, 0, -group % ROWS))
        ends = torch.arange(first + start + 1, first + start + count + 1)
        seen = ends[:, None].expand(count, rows.shape[2]).reshape(1, -1)
        room = pad_length(first + start + count)
        mixed = attend(rows.flatten(1, 2), all_keys[:, :room], all_values[:, :room], seen, form)
        mixed = mixed.unflatten(1, (count, -1))[:, :, :group].transpose(0, 1)
        found[start : start + count] = mixed.reshape(count, num_heads, size).to(found.dtype)
    return found
