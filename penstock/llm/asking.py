"""Turn the sampling parameters of a request, from any protocol, into a `Generation`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.llm.engine import Limits
from penstock.llm.generation import Generation, GenerationSink
from penstock.llm.params import Sampling
from penstock.llm.sequence import Ending
from penstock.wire.openai_v1 import CONTEXT_LENGTH_EXCEEDED, Invalid, Wishes

if TYPE_CHECKING:
    from penstock.llm.text_model import TextModel

# Limit of sequences per request.
MAX_CHOICES = Limits().max_sequences_of_request


def generation_of(
    model: TextModel, wishes: Wishes, tokens: Sequence[int], sink: GenerationSink, salt: str
) -> Generation:
    """Return the generation; raise Invalid if prompt and output exceed the model's length."""
    if wishes.num > MAX_CHOICES:
        raise Invalid(f"n is {wishes.num}; expected at most {MAX_CHOICES}", "n")
    left = model.max_length - len(tokens)
    # 0: the client wants the prompt only. Prefill still samples one token, which is dropped.
    is_prompt_only = wishes.max_tokens == 0
    if left < (0 if is_prompt_only else wishes.max_tokens or 1):
        asked = f" and {wishes.max_tokens} are to follow" if wishes.max_tokens else ""
        raise Invalid(
            f"the prompt has {len(tokens)} tokens{asked}; expected at most {model.max_length} "
            "together",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    stops = frozenset(wishes.stop_tokens)
    if not wishes.ignores_end:
        stops |= model.vocabulary.stop_tokens
    sampling = Sampling(
        temperature=wishes.temperature,
        top_p=wishes.top_p,
        top_k=wishes.top_k,
        min_p=wishes.min_p,
        presence_penalty=wishes.presence_penalty,
        frequency_penalty=wishes.frequency_penalty,
        repetition_penalty=wishes.repetition_penalty,
        seed=secrets.randbits(62) if wishes.seed is None else wishes.seed,
        bias=wishes.bias,
        num_logprobs=wishes.num_logprobs,
    )
    most = 1 if is_prompt_only else wishes.max_tokens or left
    ending = Ending(most, stops, wishes.min_tokens)
    return Generation(
        tokens, sampling, ending, sink, wishes.stops, wishes.num, wishes.priority, salt
    )
