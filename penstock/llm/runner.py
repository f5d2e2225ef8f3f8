"""Run steps on CPUs: from a planned step to its sampled tokens.

Knows the decoder, the cache and sampling, but not which sequences exist; that is the scheduler's
task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.llm.batched_attention import Shelves
from penstock.llm.cache import Cache
from penstock.llm.models.decoder import Decoder
from penstock.llm.params import Likelihood, PromptPart, Sampling
from penstock.llm.sampling import Row, Sampled, sample
from penstock.llm.scheduler import Chunk, Step
from penstock.llm.sequence import Sequence

# Prompt positions whose logits are computed at a time: a vocabulary is large.
MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a step, in the order of its sampled chunks."""

    sampled: Sampled
    # Number of top logprobs that each sequence wants; None: not even that of its token.
    wanted: Many[int | None] = ()
    # By sequence id.
    prompts: Mapping[int, PromptPart] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        found: list[int] = self.sampled.tokens.tolist()
        return found

    @property
    def likelihoods(self) -> list[Likelihood | None]:
        sampled = self.sampled
        if sampled.logprobs is None:
            return [None] * len(sampled.tokens)
        own: list[float] = sampled.logprobs.tolist()
        tokens: list[list[int]] = [[]] * len(own)
        logprobs: list[list[float]] = [[]] * len(own)
        if sampled.top_tokens is not None and sampled.top_logprobs is not None:
            tokens, logprobs = sampled.top_tokens.tolist(), sampled.top_logprobs.tolist()
        return [
            None
            if num is None
            else Likelihood(own[place], tokens[place][:num], logprobs[place][:num])
            for place, num in enumerate(self.wanted)
        ]


class Runner:
    """Synchronous runner, on the calling thread."""

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self._decoder = decoder
        self._shelves = Shelves(cache)

    def run(self, step: Step, samplings: dict[int, Sampling]) -> Ran:
        """Run a step whose tokens are all known; `samplings` are by sequence id."""
        with torch.inference_mode():
            return self._ran(step, samplings)

    def _ran(self, step: Step, samplings: dict[int, Sampling]) -> Ran:
        tokens = torch.tensor(
            [t for chunk in step.chunks for t in chunk.sequence.tokens[chunk.start : chunk.end]]
        )
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in step.chunks])
        hidden = self._decoder.hidden(tokens, positions, self._shelves.attention(step))
        wanted = [
            samplings[chunk.sequence.id].num_logprobs for chunk in step.chunks if chunk.is_sampled
        ]
        prompts = prompts_of(step, samplings, hidden, self._decoder.logits)
        return Ran(self._sampled(step, hidden, samplings), wanted, prompts)

    def _sampled(self, step: Step, hidden: Tensor, samplings: dict[int, Sampling]) -> Sampled:
        places, rows, end = [], [], 0
        for chunk in step.chunks:
            end += chunk.count
            if chunk.is_sampled:
                places.append(end - 1)
                rows.append(row_of(chunk, samplings[chunk.sequence.id]))
        if not rows:
            return Sampled(torch.empty(0, dtype=torch.int64))
        return sample(self._decoder.logits(hidden[places]), rows)


def prompts_of(
    step: Step,
    samplings: Mapping[int, Sampling],
    hidden: Tensor,
    logits: Callable[[Tensor], Tensor],
) -> dict[int, PromptPart]:
    """Return the prompt logprobs of the requests that want them, by sequence id."""
    found: dict[int, PromptPart] = {}
    first = 0
    for chunk in step.chunks:
        num, count = samplings[chunk.sequence.id].num_prompt_logprobs, num_told(chunk)
        if num is not None and count > 0:
            likelihoods: list[Likelihood] = []
            for start in range(0, count, MAX_ROWS):
                end = min(start + MAX_ROWS, count)
                tokens = chunk.sequence.tokens[chunk.start + start + 1 : chunk.start + end + 1]
                likelihoods += likely(logits(hidden[first + start : first + end]), tokens, num)
            found[chunk.sequence.id] = PromptPart(chunk.start + 1, likelihoods)
        first += chunk.count
    return found


def num_told(chunk: Chunk) -> int:
    """Return how many tokens of the chunk are followed by a prompt token."""
    return min(chunk.end, chunk.sequence.num_prompt - 1) - chunk.start


def likely(logits: Tensor, tokens: Many[int], num: int) -> list[Likelihood]:
    """Return the logprob of each token from its row of logits, with the `num` most likely
    tokens."""
    logprobs = logits.float().log_softmax(1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    own: list[float] = logprobs.gather(1, index)[:, 0].tolist()
    top = logprobs.topk(num, 1)
    rows = zip(own, top.indices.tolist(), top.values.tolist(), strict=True)
    return [Likelihood(*row) for row in rows]


def row_of(chunk: Chunk, sampling: Sampling) -> Row:
    sequence: Sequence = chunk.sequence
    ending, tokens = sequence.ending, sequence.tokens
    # Counted by position, as tokens may still be in flight.
    is_held = chunk.end - sequence.num_prompt < ending.min_tokens
    banned = sorted(ending.stop_tokens) if is_held else ()
    if not sampling.has_penalties:
        return Row(sampling, chunk.end, banned=banned)
    prompt, generated = tokens[: sequence.num_prompt], tokens[sequence.num_prompt :]
    return Row(sampling, chunk.end, prompt, generated, banned)
