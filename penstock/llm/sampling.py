"""Sample tokens from logits, for all sequences of a step at once.

A token is sampled by adding Gumbel noise to the logits and taking the argmax, so no cumulative sum
is needed and nothing leaves the device. The noise of a sequence depends only on its seed and its
number of tokens: the same seed samples the same tokens, whatever else is in the batch. torch runs
on the device of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.llm.constrained import TokenMasks
from penstock.llm.logits import SamplingRow, cut, forbid, process_logits

# Constants of a 32-bit hash (murmur3's finaliser), computed in 64-bit integers.
FACTORS = 0x85EBCA6B, 0xC2B2AE35
MASK = 0xFFFFFFFF
# Strides between positions and between tokens, so that neighbours get unrelated hashes.
STEPS = 0x9E3779B1, 0x7FEB352D


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens, one for each row, with their logprobs and the most likely tokens with theirs, for as
    many places as the largest request in the batch (None if no row wants them)."""

    tokens: Tensor
    logprobs: Tensor | None = None
    top: torch.return_types.topk | None = None


def sample(logits: Tensor, rows: Sequence[SamplingRow], masks: TokenMasks | None = None) -> Sampled:
    """Sample a token for each row of `logits` [rows, vocabulary], which is left unchanged."""
    logits = logits.float()
    wanted = [row.params.num_logprobs for row in rows if row.params.num_logprobs is not None]
    changed = logits
    if any(row.banned or row.params.logit_bias or row.params.has_penalties for row in rows):
        changed = process_logits(logits, rows)
    if masks is not None and masks.places:
        changed = forbid(changed, masks)
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
    return Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs.topk(max(wanted), 1))


def add_noise(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply temperature and cuts, and add noise: the argmax is a random sample."""
    device = logits.device
    params = [row.params for row in rows]
    temperatures = torch.tensor([each.temperature for each in params], device=device)
    logits = logits / temperatures[:, None]
    if any(each.is_cut for each in params):
        logits = cut(logits, params)
    return logits + gumbel(rows, logits.shape[1], device)


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
