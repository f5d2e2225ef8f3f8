"""Sample tokens from logits, for all sequences of a step at once.

A token is sampled by adding Gumbel noise to the logits and taking the argmax, so no cumulative sum
is needed and nothing leaves the device. The noise of a sequence depends only on its seed and its
number of tokens: the same seed samples the same tokens, whatever else is in the batch. torch runs
on the device of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.sampling_params import SamplingParams

# Constants of a 32-bit hash (murmur3's finaliser), computed in 64-bit integers.
FACTORS = 0x85EBCA6B, 0xC2B2AE35
MASK = 0xFFFFFFFF
# Strides between positions and between tokens, so that neighbours get unrelated hashes.
STEPS = 0x9E3779B1, 0x7FEB352D


@dataclass(frozen=True, slots=True)
class SamplingRow:
    params: SamplingParams
    # Number of tokens that it has.
    position: int
    # Needed for penalties only.
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    # Tokens that may not be sampled now.
    banned: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens, one for each row, with their logprobs and the most likely tokens with theirs, for as
    many places as the largest request in the batch (None if no row wants them)."""

    tokens: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
    """Sample a token for each row of `logits` [rows, vocabulary], which is left unchanged."""
    logits = logits.float()
    wanted = [row.params.num_logprobs for row in rows if row.params.num_logprobs is not None]
    changed = process_logits(logits, rows)
    places = [place for place, row in enumerate(rows) if not row.params.is_greedy]
    if places:
        sampled_rows = [rows[place] for place in places]
        index = torch.tensor(places, device=logits.device)
        # `logits` may be the model's own storage.
        changed = changed.clone() if changed is logits else changed
        changed[index] = add_noise(changed[index], sampled_rows)
    tokens = changed.argmax(1)
    if not wanted:
        return Sampled(tokens)
    # Before any logits processor.
    logprobs = logits.log_softmax(1)
    top = logprobs.topk(max(wanted), 1) if any(wanted) else None
    return Sampled(
        tokens,
        logprobs.gather(1, tokens[:, None])[:, 0],
        None if top is None else top.indices,
        None if top is None else top.values,
    )


def process_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    found = logits
    for place, row in enumerate(rows):
        params = row.params
        if not params.logit_bias and not params.has_penalties and not row.banned:
            continue
        found = found.clone() if found is logits else found
        if params.has_penalties:
            found[place] = penalised(found[place], row)
        if params.logit_bias:
            tokens = torch.tensor(list(params.logit_bias), device=logits.device)
            values = torch.tensor(list(params.logit_bias.values()), device=logits.device)
            found[place, tokens] += values
        # Tokens outside the vocabulary cannot be sampled anyway.
        if banned := [token for token in row.banned if token < logits.shape[1]]:
            found[place, banned] = float("-inf")
    return found


def penalised(logits: Tensor, row: SamplingRow) -> Tensor:
    params, device = row.params, logits.device
    if params.repetition_penalty != 1:
        seen = torch.tensor([*row.prompt, *row.generated], device=device).unique()
        values = logits[seen]
        factor = params.repetition_penalty
        logits = logits.index_copy(
            0, seen, torch.where(values > 0, values / factor, values * factor)
        )
    if row.generated and (params.presence_penalty or params.frequency_penalty):
        generated = torch.tensor(list(row.generated), device=device)
        counts = generated.bincount(minlength=len(logits)).to(logits.dtype)
        logits = logits - params.frequency_penalty * counts
        logits = logits - params.presence_penalty * (counts > 0)
    return logits


def add_noise(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply temperature and cuts, and add noise: the argmax is a random sample."""
    device = logits.device
    params = [row.params for row in rows]
    temperatures = torch.tensor([each.temperature for each in params], device=device)
    logits = logits / temperatures[:, None]
    if any(each.is_cut for each in params):
        logits = cut(logits, params)
    return logits + gumbel(rows, logits.shape[1], device)


def cut(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    device = logits.device
    most = torch.tensor([each.top_k for each in params], device=device)
    share = torch.tensor([each.top_p for each in params], device=device)
    least = torch.tensor([each.min_p for each in params], device=device)
    return without(logits, most, share, least)


def without(logits: Tensor, most: Tensor, share: Tensor, least: Tensor) -> Tensor:
    """Mask the tokens that top_k, top_p and min_p of each row exclude; the most likely one always
    stays."""
    device, size = logits.device, logits.shape[1]
    most = torch.where(most > 0, most, size)
    # top_p of 1 excludes nothing, whatever the rounding of sums.
    share = torch.where(share < 1, share, math.inf)
    ordered, places = logits.sort(1, descending=True)
    is_out = torch.arange(size, device=device)[None, :] >= most[:, None]
    probabilities = ordered.masked_fill(is_out, float("-inf")).softmax(1)
    # Tokens before it already reach top_p.
    is_out |= (probabilities.cumsum(1) - probabilities) >= share[:, None]
    is_out |= probabilities < least[:, None] * probabilities[:, :1]
    is_out[:, 0] = False
    ordered = ordered.masked_fill(is_out, float("-inf"))
    return torch.empty_like(logits).scatter_(1, places, ordered)


def gumbel(rows: Sequence[SamplingRow], size: int, device: torch.device) -> Tensor:
    """Return Gumbel noise [rows, size], from each row's seed and position."""
    keys = [key_of(row.params.seed or 0, row.position) for row in rows]
    return noise(torch.tensor(keys, device=device), size)


def noise(keys: Tensor, size: int) -> Tensor:
    tokens = torch.arange(size, device=keys.device) * STEPS[1]
    bits = _mixed(keys[:, None] ^ _mixed(tokens)[None, :])
    # In the open interval (0, 1).
    uniform = (bits.double() + 0.5) / (MASK + 1)
    return -(-uniform.log()).log().float()


def key_of(seed: int, position: int) -> int:
    """Return a 32-bit key for a seed of any size."""
    folded = (seed ^ (seed >> 32)) & MASK
    return (folded * FACTORS[0] + position * STEPS[0]) & MASK


def _mixed(numbers: Tensor) -> Tensor:
    """Hash: every output bit depends on every input bit."""
    numbers = numbers & MASK
    for factor, shift in zip(FACTORS, (16, 13), strict=True):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & MASK
    return numbers ^ (numbers >> 16)
