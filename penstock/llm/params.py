"""What a request says about how tokens are drawn. Values are checked where they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Below it logits would be divided by nothing.
COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of a token that was drawn, as a logarithm; and the most likely ones with theirs."""

    logprob: float
    top_tokens: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PromptPart:
    """How likely tokens of a prompt were, the first of them at `start`; that at 0 never is one."""

    start: int
    likelihoods: Sequence[Likelihood]


@dataclass(frozen=True, slots=True)
class Sampling:
    # 0: always the most likely token.
    temperature: float = 1.0
    # Of the most likely tokens those that together have so much.
    top_p: float = 1.0
    # So many of the most likely; 0: all.
    top_k: int = 0
    # Those that have at least so much of what the most likely one has.
    min_p: float = 0.0
    # Of logits: for each that was generated, and once more for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Divides the logits of all that came before, prompt included, or multiplies those below 0.
    repetition_penalty: float = 1.0
    # The same seed draws the same tokens, whoever else is in the batch.
    seed: int = 0
    # Added to logits, by token.
    bias: Mapping[int, float] = field(default_factory=dict)
    # So many of the most likely are told with every token; None: not even its own.
    num_logprobs: int | None = None
    # The same of the prompt's tokens, which are then all computed, whoever has done so before.
    num_prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def is_cut(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)
