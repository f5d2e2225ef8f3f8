"""Answers in the order in which their requests arrived (`preserve_ordering`). Pure.

With several shards, each sequences its own requests and shows the others when the oldest of those
that are not computed came. An answer leaves once every earlier request of any shard has been
computed. `replies` sends them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere
from penstock.types import Request, Response

Answered = tuple[Request, Response | PenstockError]


class AnswerSequencer:
    """Turns are numbers in this shard; over all shards, the time at which a request came counts."""

    def __init__(
        self, clock: Callable[[], float], elsewhere: Elsewhere = NOTHING_ELSEWHERE
    ) -> None:
        self._clock = clock
        self._elsewhere = elsewhere
        self._next_turn = 0
        # When each request came that is not computed, in order of turns.
        self._open: OrderedDict[int, float] = OrderedDict()
        # The computed ones that have not left: when they came, and their answers.
        self._computed: dict[int, tuple[float, Answered]] = {}
        self._first = 0

    @property
    def waits_for_others(self) -> bool:
        """Whether an answer is held back only by requests of other shards."""
        return self._first in self._computed

    def enter(self) -> int:
        if not self._open:
            # Shown before the time is taken: shards that take a later one see it.
            self._elsewhere.show_oldest(self._clock())
        turn = self._next_turn
        self._next_turn += 1
        self._open[turn] = self._clock()
        return turn

    def finish(self, turn: int, answer: Answered) -> list[Answered]:
        """Record the answer of `turn`; return the answers that may leave now, in order."""
        came = self._open.pop(turn, None)
        if came is None:
            return []  # It has already ended, for instance by a cancel; the first answer counts.
        self._computed[turn] = came, answer
        self.show()
        return self.release()

    def show(self) -> None:
        """Show other shards how far this one is."""
        self._elsewhere.show_oldest(next(iter(self._open.values()), 0.0))

    def release(self, *, waits: bool = True) -> list[Answered]:
        """Return the answers that may leave now, in order; if it `waits`, not before those of other
        shards."""
        ready: list[Answered] = []
        if self._first in self._computed:
            limit = self._elsewhere.oldest(self._clock()) if waits else None
            while self._first in self._computed:
                came, answer = self._computed[self._first]
                if limit is not None and came > limit:
                    break
                del self._computed[self._first]
                ready.append(answer)
                self._first += 1
        return ready
