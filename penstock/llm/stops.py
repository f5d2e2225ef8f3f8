"""Find stop strings in a stream of text pieces, also across piece borders.

Pure. Text that could be the beginning of a stop string is held back until it is clear whether
it is one, so a client never receives a part of one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Stop strings of one sequence. Passes on all text in order, up to the stop string."""

    def __init__(self, texts: Sequence[str]) -> None:
        assert all(texts), "nothing ends with the empty text"
        self._texts = texts
        self._held = ""
        # The stop string that was found.
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Return the text that may be sent now. Not to be called once one was found."""
        assert self.found is None
        if not self._texts:
            return piece
        text = self._held + piece
        if (hit := self._first(text)) is not None:
            place, self.found = hit
            self._held = ""
            return text[:place]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def rest(self) -> str:
        """Return the text held back, after the sequence has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return the match that ends first, and the longest of several."""
        hits = [(place, each) for each in self._texts if (place := text.find(each)) >= 0]
        if not hits:
            return None
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix that is the beginning of a stop string."""
        most = max(map(len, self._texts)) - 1
        for size in range(min(most, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(each.startswith(end) for each in self._texts):
                return size
        return 0
