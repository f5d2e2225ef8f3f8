"""Logits processors: penalties, biases and bans, and the cuts of top_k, top_p and min_p. Also the
logprobs of prompt tokens, for the requests that want them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.llm.constrained import TokenMasks
from penstock.llm.messages import Logprobs, PromptLogprobsChunk
from penstock.llm.scheduler import BatchStep, Chunk
from penstock.sampling_params import SamplingParams

# Prompt positions whose logits are computed at a time: a vocabulary is large.
MAX_ROWS = 256


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


def forbid(logits: Tensor, masks: TokenMasks) -> Tensor:
    """Return logits without the tokens that the masks of their rows exclude."""
    words = torch.from_numpy(masks.words).to(logits.device)
    if list(masks.places) == list(range(len(logits))):
        return forbid_rows(logits, words)
    places = torch.tensor(masks.places, device=logits.device)
    found = logits.clone()
    found[places] = forbid_rows(logits[places], words)
    return found


def forbid_rows(logits: Tensor, words: Tensor) -> Tensor:
    """The same for one row of words for each row of logits."""
    is_allowed, size = _unpacked(words), logits.shape[1]
    # Tokens that only the model has are not in any text.
    is_allowed = F.pad(is_allowed, (0, max(0, size - is_allowed.shape[1])))[:, :size]
    return logits.masked_fill(~is_allowed, float("-inf"))


def _unpacked(words: Tensor) -> Tensor:
    """Return the bits of 32-bit words as booleans."""
    if words.device.type == "cpu":
        # Several times as fast as shifts.
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & 1).flatten(1).bool()


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


# Prompts.


def wants_prompts(chunks: Sequence[Chunk]) -> bool:
    return any(
        chunk.sequence.params.num_prompt_logprobs is not None and _num_followed(chunk) > 0
        for chunk in chunks
    )


def prompt_logprobs(
    step: BatchStep, hidden: Tensor, logits: Callable[[Tensor], Tensor]
) -> list[PromptLogprobsChunk]:
    """Return the prompt logprobs of the requests that want them."""
    found: list[PromptLogprobsChunk] = []
    first = 0
    for chunk in step.chunks:
        sequence, count = chunk.sequence, _num_followed(chunk)
        num = sequence.params.num_prompt_logprobs
        if num is not None and count > 0:
            logprobs: list[Logprobs] = []
            for start in range(0, count, MAX_ROWS):
                end = min(start + MAX_ROWS, count)
                tokens = sequence.tokens[chunk.start + start + 1 : chunk.start + end + 1]
                logprobs += _token_logprobs(
                    logits(hidden[first + start : first + end]), tokens, num
                )
            found.append(PromptLogprobsChunk(sequence.request, chunk.start + 1, logprobs))
        first += chunk.count
    return found


def _num_followed(chunk: Chunk) -> int:
    """Return how many tokens of the chunk are followed by a prompt token."""
    return min(chunk.end, chunk.sequence.num_prompt - 1) - chunk.start


def _token_logprobs(logits: Tensor, tokens: Sequence[int], num: int) -> list[Logprobs]:
    """Return the logprobs of each token and of the `num` most likely ones, from its logits."""
    logprobs = logits.float().log_softmax(1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    own: list[float] = logprobs.gather(1, index)[:, 0].tolist()
    top = logprobs.topk(num, 1)
    rows = zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
    return [Logprobs(*row) for row in rows]
