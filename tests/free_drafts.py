"""Drafts that cost nothing, for tests of what becomes of them."""

from penstock.llm.sequence import Sequence
from penstock.llm.speculation import Speculation


class FreeDrafts(Speculation):
    """Drafts whenever there is a guess."""

    def length(self, sequence: Sequence) -> int:
        super().length(sequence)
        has_guess = sequence.history is not None and sequence.history.source is not None
        return self.max_tokens if has_guess else 0
