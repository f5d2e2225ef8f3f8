"""Guess the next tokens of a sequence from its own tokens: what followed the last n-gram before.

Pure. Guesses are compared with every new token, drafted or not, so the share of right ones is known
before anything is spent on drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

# Tokens that must have occurred before for a guess: fewer guess more often and worse.
SIZE = 3
# Prompt tokens that are looked at, from its end: they take about 200 bytes each.
MAX_PROMPT = 1 << 14
# Share of right guesses that is assumed at first, and the weight of the newest guess.
FIRST_RATE, NEWEST = 0.5, 0.1


@dataclass(slots=True)
class NgramHistory:
    """`note` gets all tokens of the sequence each time, old ones included."""

    num_prompt: int
    # Moving average of the share of guesses that were right.
    rate: float = FIRST_RATE
    # Where the guess for the next token is; None without a guess.
    source: int | None = None
    _num_seen: int = 0
    # The place after the last occurrence of each n-gram.
    _places: dict[tuple[int, ...], int] = field(default_factory=dict)

    def note(self, tokens: Many[int]) -> None:
        if not self._num_seen:
            self._note_prompt(tokens)
        for place in range(self._num_seen, len(tokens)):
            source = self.source
            if source is not None:
                is_right = tokens[source] == tokens[place]
                if place >= self.num_prompt:
                    self.rate += NEWEST * (is_right - self.rate)
                self.source = source + 1 if is_right else None
            last = tuple(tokens[max(0, place + 1 - SIZE) : place + 1])
            if self.source is None:
                self.source = self._places.get(last)
            self._places[last] = place + 1
        self._num_seen = len(tokens)

    def guess(self, tokens: Many[int], count: int) -> list[int]:
        """Return the next `count` tokens as they followed before; none without a guess."""
        if self.source is None or count <= 0:
            return []
        found = list(tokens[self.source : self.source + count])
        # What followed may reach into the guess itself, when few tokens repeat.
        period = len(tokens) - self.source
        while len(found) < count:
            found.append(found[-period])
        return found

    def _note_prompt(self, tokens: Many[int]) -> None:
        """Note all prompt tokens but the last, for which a guess is then looked up."""
        end = self.num_prompt - 1
        start = max(0, end - MAX_PROMPT)
        some = tokens[start:end]
        ngrams = zip(*(some[place:] for place in range(SIZE)), strict=False)
        self._places.update(zip(ngrams, range(start + SIZE, end + 1), strict=False))
        self._num_seen = end
