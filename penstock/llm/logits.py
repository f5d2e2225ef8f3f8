"""Logits processors: penalties, biases and bans, and the cuts of top_k, top_p and min_p."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.sampling_params import SamplingParams


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


def process_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return changed logits; `logits` stay as they are, as logprobs are those of the model."""
    found = logits.clone()
    for place, row in enumerate(rows):
        params = row.params
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


def cut(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    columns = zip(*((each.top_k, each.top_p, each.min_p) for each in params), strict=True)
    return without(logits, *(torch.tensor(each, device=logits.device) for each in columns))


def without(logits: Tensor, most: Tensor, share: Tensor, least: Tensor) -> Tensor:
    """Mask the tokens that top_k, top_p and min_p of each row exclude, all but one at most."""
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
