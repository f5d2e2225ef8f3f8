"""Logprobs of one choice: its tokens with their bytes, and with their offsets in its text."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import TYPE_CHECKING

from penstock.llm.generation import Generation
from penstock.llm.messages import Logprobs, TokenEvent
from penstock.wire.openai_logprobs import TokenLogprob

if TYPE_CHECKING:
    from penstock.llm.token_bytes import Vocabulary


class ChoiceLogprobs:
    """Names tokens in the order given. `has_prompt`: those of the prompt are the first."""

    def __init__(self, vocabulary: Vocabulary, generation: Generation, has_prompt: bool) -> None:
        tokens = generation.request.tokens
        self._piece = vocabulary.piece
        # Measures the offsets of tokens, in characters.
        self._stream = vocabulary.stream(() if has_prompt else tokens)
        self._num_chars = 0
        pairs = zip_longest(tokens, generation.prompt_logprobs) if has_prompt else ()
        self._prompt = [self._name(token, logprobs) for token, logprobs in pairs]

    def take(self, event: TokenEvent | None) -> list[TokenLogprob]:
        """Return the logprobs of a token; before the first, those of the prompt if wanted."""
        found, self._prompt = self._prompt, []
        if event is not None and event.logprobs is not None:
            found.append(self._name(event.token, event.logprobs))
        return found

    def _name(self, token: int, logprobs: Logprobs | None) -> TokenLogprob:
        """Return a token with its logprob; NaN for the first token of a prompt, which has none."""
        piece, place = self._piece, self._num_chars
        self._num_chars += len(self._stream.add(token))
        if logprobs is None:
            return TokenLogprob(piece(token), math.nan, offset=place)
        pairs = zip(logprobs.top_tokens, logprobs.top_logprobs, strict=True)
        top = [(piece(other), logprob) for other, logprob in pairs]
        return TokenLogprob(piece(token), logprobs.logprob, top, place)
