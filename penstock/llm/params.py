"""Sampling parameters of a request, and logprobs. Values are validated at the protocol layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Temperatures below it count as 0; the logits are divided by the temperature.
COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Logprob of a sampled token, and the most likely tokens with theirs."""

    logprob: float
    top_tokens: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Logprobs of prompt tokens, the first of them at `start`; position 0 never has one."""

    start: int
    likelihoods: Sequence[Likelihood]


@dataclass(frozen=True, slots=True)
class Sampling:
    # 0: always the most likely token.
    temperature: float = 1.0
    # Keep the most likely tokens with this total probability.
    top_p: float = 1.0
    # Keep this many of the most likely tokens; 0: all.
    top_k: int = 0
    # Keep tokens with at least this share of the highest probability.
    min_p: float = 0.0
    # Subtracted from the logits of generated tokens: once, and once per occurrence.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Divides positive logits of all earlier tokens, prompt included; multiplies negative ones.
    repetition_penalty: float = 1.0
    # The same seed samples the same tokens, whatever else is in the batch.
    seed: int = 0
    # Added to logits, by token.
    bias: Mapping[int, float] = field(default_factory=dict)
    # Return the logprobs of this many of the most likely tokens; None: not even of the sampled one.
    num_logprobs: int | None = None
    # The same for prompt tokens; the prompt is then computed without the prefix cache.
    num_prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def is_cut(self) -> bool:
        """Whether top_p, top_k or min_p excludes tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)
