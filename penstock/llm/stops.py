"""Text that ends a sequence, found in a stream of pieces whatever their borders.

Pure. What could be the beginning of such a text is held back until it is clear whether it is one;
nobody is sent a part of what is then cut off.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Of one sequence. Whoever may be sent to is given all text in order, up to what ends it."""

    def __init__(self, texts: Sequence[str], *, is_kept: bool = False) -> None:
        """`is_kept`: the text that ends it is sent too."""
        assert all(texts), "nothing ends with the empty text"
        self._texts = texts
        self._is_kept = is_kept
        self._held = ""
        # The one that was found.
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """What may be sent now. Nothing is added once one was found."""
        assert self.found is None
        if not self._texts:
            return piece
        text = self._held + piece
        if (hit := self._first(text)) is not None:
            place, self.found = hit
            self._held = ""
            return text[: place + len(self.found)] if self._is_kept else text[:place]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def rest(self) -> str:
        """It has ended otherwise: what was held back was none."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """The one that ends first; of those the longest. As if each character came alone."""
        hits = [(place, each) for each in self._texts if (place := text.find(each)) >= 0]
        if not hits:
            return None
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))

    def _num_held(self, text: str) -> int:
        """Of the longest end that one of them begins with."""
        most = max(map(len, self._texts)) - 1
        for size in range(min(most, len(text)), 0, -1):
            end = text[len(text) - size :]
            if any(each.startswith(end) for each in self._texts):
                return size
        return 0
