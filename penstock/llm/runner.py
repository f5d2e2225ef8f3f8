"""Run steps on CPUs: from a planned step to its sampled tokens.

Knows the decoder, the cache and sampling, but not which sequences exist; that is the scheduler's
task.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.llm.batched_attention import KvBuckets
from penstock.llm.cache import Cache
from penstock.llm.constrained import TokenMasks
from penstock.llm.logits import SamplingRow, prompt_logprobs
from penstock.llm.messages import Logprobs, PromptLogprobsChunk
from penstock.llm.models.decoder import Decoder
from penstock.llm.sampling import Sampled, sample
from penstock.llm.scheduler import BatchStep, SampledPlace

NOTHING = Sampled(torch.empty(0, dtype=torch.int64))


@dataclass(slots=True)
class SampledStep:
    """Result of a step, in the order of its sampled places."""

    sampled: Sampled
    # Number of top logprobs that each sequence wants; None: not even that of its token.
    wanted: Many[int | None] = ()
    prompt_logprobs: Many[PromptLogprobsChunk] = ()
    # Samples the step, which waits for its masks.
    sample: Callable[[TokenMasks], Sampled] | None = None

    def constrain(self, masks: TokenMasks) -> None:
        assert self.sample is not None, "a sequence of the step is constrained"
        with torch.inference_mode():
            self.sampled = self.sample(masks)

    @property
    def tokens(self) -> list[int]:
        found: list[int] = self.sampled.tokens.tolist()
        return found

    @property
    def logprobs(self) -> list[Logprobs | None]:
        own, top = self.sampled.logprobs, self.sampled.top
        if own is None or top is None:
            return [None] * len(self.sampled.tokens)
        parts = own.tolist(), top.indices.tolist(), top.values.tolist()
        return [
            None if num is None else Logprobs(logprob, tokens[:num], logprobs[:num])
            for num, logprob, tokens, logprobs in zip(self.wanted, *parts, strict=True)
        ]


class CpuRunner:
    """Synchronous runner, on the calling thread."""

    num_ahead = 0

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self._decoder = decoder
        self._buckets = KvBuckets(cache)

    def run(self, step: BatchStep) -> SampledStep:
        """Run a step whose tokens are all known."""
        tokens = [token for chunk in step.chunks for token in chunk.known]
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in step.chunks])
        wanted = [place.chunk.sequence.params.num_logprobs for place in step.sampled]
        with torch.inference_mode():
            attention = self._buckets.attention(step)
            hidden = self._decoder.hidden(torch.tensor(tokens), positions, attention)
            prompts: Many[PromptLogprobsChunk] = ()
            if any(chunk.sequence.params.num_prompt_logprobs is not None for chunk in step.chunks):
                prompts = prompt_logprobs(step, hidden, self._decoder.logits)
            logits, rows = self._logits(step, hidden)
            if any(row.params.constraint is not None for row in rows):
                return SampledStep(NOTHING, wanted, prompts, partial(sample, logits, rows))
            return SampledStep(sample(logits, rows) if rows else NOTHING, wanted, prompts)

    def _logits(self, step: BatchStep, hidden: Tensor) -> tuple[Tensor, list[SamplingRow]]:
        """Return the logits of the sampled places, and how they are sampled."""
        places, end = list[int](), 0
        for chunk in step.chunks:
            end += chunk.count
            if chunk.is_sampled:
                places += range(end - 1 - len(chunk.draft), end)
        rows = [row_of(place) for place in step.sampled]
        if not rows:
            return hidden, rows
        return self._decoder.logits(hidden[places]), rows


def row_of(place: SampledPlace) -> SamplingRow:
    chunk = place.chunk
    sequence, params = chunk.sequence, chunk.sequence.params
    # Counted by position, as tokens may still be in flight.
    is_held = place.end - sequence.num_prompt < params.min_tokens
    # Masks hold the stop tokens of constrained sequences back.
    is_held = is_held and params.constraint is None
    banned = sorted(params.stop_token_ids) if is_held else ()
    if not params.has_penalties:
        return SamplingRow(params, place.end, banned=banned)
    tokens = [*sequence.tokens, *chunk.draft[: place.num_drafted]]
    prompt, generated = tokens[: sequence.num_prompt], tokens[sequence.num_prompt :]
    return SamplingRow(params, place.end, prompt, generated, banned)
