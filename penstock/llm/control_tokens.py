"""Keep user text from becoming special tokens.

A chat template puts special tokens such as `<|im_start|>` between messages. The same characters
within a message are plain text: `escape` marks them before the template runs, and `encode`
tokenizes marked characters as ordinary text, while those of the template become special tokens.
Only strings that contain the name of a special token, or end within one, are changed; templates see
all other strings as they were sent.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TypeVar, cast

from tokenizers import AddedToken, Tokenizer

# Characters that Unicode will never assign. BREAK follows each character of a name that must stay
# text; START and END enclose the number of a special token.
Value = TypeVar("Value")
BREAK, START, END = "\ufdd0", "\ufdd1", "\ufdd2"
_RESERVED = dict.fromkeys(map(ord, (BREAK, START, END)), "\ufffd")


class ControlTokens:
    """The special tokens of one tokenizer. Safe for several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._tokens = {number: token for number, token in added.items() if token.special}
        self._numbers = {token.content: number for number, token in self._tokens.items()}
        names = sorted(filter(None, self._numbers), key=len, reverse=True)
        self._starts = {name[:size] for name in names for size in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        either = "|".join(map(re.escape, names)) or r"(?!)"
        self._pattern = re.compile(f"(?:{either})(?!{BREAK})")

    def escape(self, value: Value) -> Value:
        """Return the same strings, lists and mappings, with special tokens marked as text."""
        escaped: object = value
        if isinstance(value, str):
            escaped = self._escape_text(value)
        elif isinstance(value, list | tuple):
            escaped = [self.escape(each) for each in value]
        elif isinstance(value, Mapping):
            escaped = {self.escape(key): self.escape(each) for key, each in value.items()}
        return cast("Value", escaped)

    def encode(self, rendered: str) -> list[int] | None:
        """Return the tokens of a text with marks; None if it has none and is encoded as usual."""
        if BREAK not in rendered:
            return None
        text = self._pattern.sub(lambda match: alias(self._numbers[match[0]]), rendered)
        with self._lock:
            plain = self._plain
        (found,) = plain.encode_batch_fast([text.replace(BREAK, "")], add_special_tokens=False)
        numbers = self._numbers_of_aliases
        return [numbers.get(token, token) for token in found.ids]

    def _escape_text(self, text: str) -> str:
        text = text.translate(_RESERVED)
        text = self._pattern.sub(lambda match: "".join(c + BREAK for c in match[0]), text)
        # The next string must not complete a token that this one begins.
        ends = (text[-size:] for size in range(1, min(self._longest, len(text) + 1)))
        return text + BREAK if any(end in self._starts for end in ends) else text

    @cached_property
    def _plain(self) -> Tokenizer:
        """A copy of the tokenizer for which special tokens are text, and aliases are special."""
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        fields = ("single_word", "lstrip", "rstrip", "normalized")
        flags = {n: {f: getattr(token, f) for f in fields} for n, token in self._tokens.items()}
        plain.add_tokens([AddedToken(alias(n), **each, special=False) for n, each in flags.items()])
        return plain

    @cached_property
    def _numbers_of_aliases(self) -> dict[int, int]:
        found = {number: self._plain.token_to_id(alias(number)) for number in self._tokens}
        return {own: number for number, own in found.items() if own is not None}


def alias(number: int) -> str:
    return f"{START}{number}{END}"
