"""What tokens stand for, as bytes, and a stream of them as text while it grows.

Tokenizers put together a text from all of its tokens. Here each token has its bytes, once, and a
text is these one after the other; what has been told of it is never another later. That holds for
tokenizers of bytes (GPT-2, Llama 3, Qwen) as for those of words with spaces that fall back to bytes
(Llama 2, Mistral). Of bytes that are no characters the latter's library replaces all in a row, and
only those that are wrong are replaced here.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache, cached_property

from tokenizers import Tokenizer

# How tokenizers write a byte that is a token.
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# A character of UTF-8 has at most so many.
MAX_CHARACTER_BYTES = 4


class TokenBytes:
    """What each token of a tokenizer stands for, in bytes of UTF-8: one may be less than a
    character. A text is what its tokens are, one after the other, but for its first: tokenizers
    that begin every word with a space leave out the one before a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _kinds(tokenizer)
        self._has_letters = kinds == {"ByteLevel"}
        self._has_bytes = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        # Of those that were asked for; at most as many as there are.
        self._found: dict[int, bytes] = {}

    def has_text(self, token: int) -> bool:
        return bool(self.of(token)) and token not in self._special

    def of(self, token: int) -> bytes:
        """Behind others; special ones by their names."""
        found = self._found.get(token)
        if found is None:
            found = self._found[token] = self._find(token)
        return found

    def of_first(self, token: int) -> bytes:
        """Where a text begins."""
        whole = self.of(token)
        if token in self._special:
            return whole
        try:
            whole.decode()
        except UnicodeDecodeError:  # A part of a character, which no space is.
            return whole
        return str(self._tokenizer.decode([token])).encode()

    def end_of(self, tokens: Sequence[int]) -> bytes:
        """Where a character may have begun."""
        found = b""
        for token in reversed(tokens):
            if len(found) >= MAX_CHARACTER_BYTES:
                break
            found = (self.of(token) if self.has_text(token) else b"") + found
        return found

    def _find(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._special:
            return str(name).encode()
        if self._has_letters:
            return _of_letters(name)
        if self._has_bytes and (match := BYTE.fullmatch(name)):
            return bytes([int(match[1], 16)])
        before, text = (self._tokenizer.decode(each) for each in (self._any, [*self._any, token]))
        return str(text[len(before) :]).encode()

    @cached_property
    def _any(self) -> list[int]:
        """Some token with a text, for another to come after."""
        for token in range(self._tokenizer.get_vocab_size()):
            name = self._tokenizer.id_to_token(token)
            is_word = name and token not in self._special and not BYTE.fullmatch(name)
            if is_word and self._tokenizer.decode([token]).strip():
                return [token]
        return []


def _kinds(tokenizer: Tokenizer) -> set[str]:
    """Of what makes a text of tokens."""
    if tokenizer.decoder is None:
        return set()
    told = json.loads(tokenizer.decoder.__getstate__())
    return {each["type"] for each in told.get("decoders", [told])}


@cache
def _bytes_of_letters() -> dict[str, int]:
    """A letter for each byte: those that can be seen are their own, the others follow."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    shown += range(ord("®"), ord("ÿ") + 1)
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


def _of_letters(name: str) -> bytes:
    letters = _bytes_of_letters()
    if all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    # It was added as it is.
    return name.encode()


class Stream:
    """Of one sequence: text as it grows. Characters come when they are whole, and all of them
    together are the text of all tokens without that of the prompt."""

    def __init__(self, tokens: TokenBytes, prompt: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not any(tokens.has_text(token) for token in prompt)
        # A prompt may end within a character.
        self._characters.decode(tokens.end_of(prompt))
        self._is_broken = bool(self._characters.getstate()[0])

    def add(self, token: int) -> str:
        if not self._tokens.has_text(token):
            return ""
        found = self._tokens.of_first(token) if self._is_first else self._tokens.of(token)
        self._is_first = False
        return self._told(self._characters.decode(found))

    def rest(self) -> str:
        """It has ended: what was held back of a character that was never whole."""
        return self._told(self._characters.decode(b"", final=True))

    def _told(self, text: str) -> str:
        """What a prompt broke off is the prompt's, unless it is made whole."""
        if not self._is_broken or not text:
            return text
        self._is_broken = False
        return text.removeprefix("\ufffd")
