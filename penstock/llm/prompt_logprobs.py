"""Logprobs of prompt tokens, for the requests that want them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from penstock.llm.messages import Logprobs, PromptLogprobsChunk
from penstock.llm.scheduler import BatchStep, Chunk

# Prompt positions whose logits are computed at a time: a vocabulary is large.
MAX_ROWS = 256


def wants_prompts(chunks: Many[Chunk]) -> bool:
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


def _token_logprobs(logits: Tensor, tokens: Many[int], num: int) -> list[Logprobs]:
    """Return the logprobs of each token and of the `num` most likely ones, from its logits."""
    logprobs = logits.float().log_softmax(1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    own: list[float] = logprobs.gather(1, index)[:, 0].tolist()
    top = logprobs.topk(num, 1)
    rows = zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
    return [Logprobs(*row) for row in rows]
