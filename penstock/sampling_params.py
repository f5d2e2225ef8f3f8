"""Sampling parameters of a text request: one type, from the decoder of any protocol to the engine.

Names are those of OpenAI's API and vLLM. The decoders in `wire/` check the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

# Temperatures below it count as 0; the logits are divided by the temperature.
COLDEST = 1e-5
# The parameter of the same name, as the field of an error: protocols know where it came from.
CONSTRAINT = "constraint"


class Constraint(msgspec.Struct, frozen=True):
    """What the generated text must be: JSON that fits a schema, a match of a regular expression, or
    a text of a grammar, in llguidance's Lark or as EBNF."""

    kind: Literal["json_schema", "regex", "lark", "ebnf"]
    text: str
    # The names of the tools that the rules f0, f1, … describe, if the server has made the grammar;
    # None if the client has. Errors name what the client sent.
    tools: tuple[str, ...] | None = None


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
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
    # The same seed samples the same tokens, whatever else is in the batch. None: the model picks a
    # random one; an engine takes it as 0.
    seed: int | None = None
    # Added to logits, by token.
    logit_bias: Mapping[int, float] = {}
    # Limit of generated tokens. None: as many as fit the context.
    max_tokens: int | None = None
    # Stop tokens and stop strings are ignored before this many tokens.
    min_tokens: int = 0
    # Stop strings.
    stop: tuple[str, ...] = ()
    # Stop tokens; the model adds its own unless `ignore_eos`.
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    # Sequences to generate from the prompt.
    n: int = 1
    # Return the logprobs of this many of the most likely tokens; None: not even of the sampled one.
    num_logprobs: int | None = None
    # The same for prompt tokens; the prompt is then computed without the prefix cache.
    num_prompt_logprobs: int | None = None
    # The text fits it when it ends by itself; see `llm.grammars`.
    constraint: Constraint | None = None
    # Lower values come first.
    priority: int = 0
    # Only requests with the same salt share cached prompts.
    cache_salt: str = ""

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
