"""The bytes of each token, and the text of a token stream.

A `Vocabulary` is plain data (see `token_reader`): it runs no code of a model folder, so the core
can use it on its event loop. The text of a sequence is the concatenation of its tokens' bytes, so
text that was sent never changes. Only bytes that are not UTF-8 are replaced.

`tokenizers.decoders.DecodeStream` gives the same text (0.23.3), but needs the tokenizer, whose
decoder comes from the model folder, in the core.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

# Bytes of the longest character in UTF-8.
MAX_CHARACTER_BYTES = 4
END_TYPE: Literal["I"] = "I"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The core's view of a model's text: the bytes of each token (part of a character, or several
    characters), its special tokens, and the chat settings of its files."""

    # All tokens concatenated, and the end of each, as unsigned 32-bit integers.
    data: bytes
    ends: bytes
    # Tokens with other bytes at the start of a text, where some tokenizers drop a space.
    first: Mapping[int, bytes] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    # Tokens that end an answer.
    stop_tokens: frozenset[int] = frozenset()
    # Special tokens by the names that templates use (`bos_token` and so on).
    names: Mapping[str, str] = field(default_factory=dict)
    # The chat template; shown to clients, never run here.
    template: str = ""
    # Characters of the longest token: a text of more than n times as many has more than n tokens.
    longest_token: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.ends) // array(END_TYPE).itemsize

    def has_text(self, token: int) -> bool:
        return token not in self.special and bool(self.piece(token))

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token within a text, or the name of a special one, or nothing."""
        ends = memoryview(self.ends).cast(END_TYPE)
        if not 0 <= token < len(ends):
            return b""
        return self.data[ends[token - 1] if token else 0 : ends[token]]

    def first_piece(self, token: int) -> bytes:
        """Return the bytes of a token at the start of a text."""
        found = self.first.get(token)
        return self.piece(token) if found is None else found

    def decode(self, tokens: Sequence[int], *, keeps_special: bool = False) -> str:
        """Decode tokens. Special ones are dropped or shown by name; invalid UTF-8 is replaced."""
        shown = [token for token in tokens if keeps_special or self.has_text(token)]
        start = [self.first_piece(token) for token in shown[:1]]
        return b"".join([*start, *map(self.piece, shown[1:])]).decode("utf-8", "replace")

    def token(self, token: int) -> str:
        """Return the text of one token within a text."""
        return self.piece(token).decode("utf-8", "replace")

    def stream(self, prompt: Sequence[int] = (), shown: Collection[int] = ()) -> Detokenizer:
        return Detokenizer(self, prompt, shown)

    def last_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the end of a text, from where its last character may begin."""
        found = b""
        for token in reversed(tokens):
            if len(found) >= MAX_CHARACTER_BYTES:
                break
            found = (self.piece(token) if self.has_text(token) else b"") + found
        return found


def pack(pieces: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return `data` and `ends` of a vocabulary."""
    return b"".join(pieces), array(END_TYPE, accumulate(map(len, pieces))).tobytes()


class Detokenizer:
    """Incremental detokenizer of one sequence. Emits characters when they are complete; together
    they are the text of all tokens without the prompt's."""

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int] = (), shown: Collection[int] = ()
    ) -> None:
        """`shown` are special tokens whose names are part of the text."""
        self._shown = shown
        self._vocabulary = vocabulary
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not any(vocabulary.has_text(token) for token in prompt)
        # A prompt may end within a character.
        self._characters.decode(vocabulary.last_bytes(prompt))
        self._is_broken = bool(self._characters.getstate()[0])

    def add(self, token: int) -> str:
        vocabulary = self._vocabulary
        if not vocabulary.has_text(token) and token not in self._shown:
            return ""
        found = vocabulary.first_piece(token) if self._is_first else vocabulary.piece(token)
        self._is_first = False
        return self._visible(self._characters.decode(found))

    def rest(self) -> str:
        """Return the rest at the end: held back bytes that never became a character."""
        return self._visible(self._characters.decode(b"", final=True))

    def _visible(self, text: str) -> str:
        """Drop a replaced character that the prompt began and nothing completed."""
        if not self._is_broken or not text:
            return text
        self._is_broken = False
        return text.removeprefix("\ufffd")
