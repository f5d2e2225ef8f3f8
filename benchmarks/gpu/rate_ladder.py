"""Two servers at the same rates, in turns: who is asked what next, and which rate counts.

A rate is a share of what the better of the two answers in a closed loop. Round by round, size by
size, rate by rate both are asked, so that wherever it ends both were asked the same. Knows nothing
of servers, clocks and files; `beside_triton.py` asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARES = (0.70, 0.80, 0.85, 0.90, 0.95, 1.00)
SIDES = ("penstock", "triton")
# Of the limit: who is this late at a rate would only be later at higher ones.
CLEARLY = 4.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One server at one rate, in one round, which count from 1."""

    round: int
    size: str
    share: float
    side: str

    def __str__(self) -> str:
        return f"round {self.round}; {self.size}; {self.share:.2f}; {self.side}"


def pairs(num_rounds: int, sizes: Sequence[str]) -> Iterator[tuple[Turn, ...]]:
    """In order. Nobody is always the first: they change with every rate, and with every round."""
    for number in range(1, num_rounds + 1):
        for size in sizes:
            for rung, share in enumerate(SHARES):
                sides = SIDES if (number + rung) % 2 else SIDES[::-1]
                yield tuple(Turn(number, size, share, side) for side in sides)


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest share that is kept; 0: none. `is_open`: more was not asked of both."""

    share: float
    is_open: bool


@dataclass(frozen=True, slots=True)
class Ladder:
    """What was measured, by turn: `p99_ms` and `num_failed` of each."""

    levels: Mapping[Turn, Mapping[str, Any]]
    limit_ms: float

    def is_kept(self, turn: Turn) -> bool:
        level = self.levels.get(turn)
        return level is not None and self._is_within(level, self.limit_ms)

    def _is_within(self, level: Mapping[str, Any], limit_ms: float) -> bool:
        p99_ms = level["p99_ms"]
        return p99_ms is not None and p99_ms < limit_ms and not level["num_failed"]

    def is_decided(self, turn: Turn) -> bool:
        """Measured, or missed for certain: a lower rate of this round was missed clearly."""
        if turn in self.levels:
            return True
        lower = (Turn(turn.round, turn.size, each, turn.side) for each in below(turn.share))
        return any(each in self.levels and self._is_clear_miss(each) for each in lower)

    def _is_clear_miss(self, turn: Turn) -> bool:
        return not self._is_within(self.levels[turn], CLEARLY * self.limit_ms)

    def open_turns(self, pair: Sequence[Turn]) -> list[Turn]:
        return [turn for turn in pair if not self.is_decided(turn)]

    def verdicts(self, size: str, share: float, side: str) -> list[bool]:
        """Whether it was kept, for each round in which it is decided for both."""
        last = max((turn.round for turn in self.levels), default=0)
        rounds = [
            number
            for number in range(1, last + 1)
            if all(self.is_decided(Turn(number, size, share, each)) for each in SIDES)
        ]
        return [self.is_kept(Turn(number, size, share, side)) for number in rounds]

    def highest(self, size: str, side: str) -> Highest:
        """A rate is kept in half of the rounds or more, and all lower ones are as well."""
        best = 0.0
        for share in SHARES:
            verdicts = self.verdicts(size, share, side)
            if not verdicts:
                return Highest(best, is_open=True)
            if 2 * sum(verdicts) < len(verdicts):
                return Highest(best, is_open=False)
            best = share
        return Highest(best, is_open=True)


def below(share: float) -> list[float]:
    return [each for each in SHARES if each < share]


def times(ours: Highest, theirs: Highest) -> str:
    """What is known of how many times theirs ours is. One who keeps no rate, or keeps all, is known
    to be below the lowest or above the last."""
    if not (ours.share or theirs.share) or (ours.is_open and theirs.is_open):
        return "?"
    lowest = SHARES[0]
    ratio = (ours.share or lowest) / (theirs.share or lowest)
    if not theirs.share or ours.is_open:
        return f">= {ratio:.2f}"
    if not ours.share or theirs.is_open:
        return f"<= {ratio:.2f}"
    return f"{ratio:.2f}"
