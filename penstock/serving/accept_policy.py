"""Which shards accept new connections, and how many clients move between them. Pure.

At low rates one shard accepts: its batches are as large, and its answers as quick, as with one
process. When the event loops of those that accept are busy, more of them accept, and clients move
until each has about as many. Nothing here is needed for a correct answer: all figures are hints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Shards accept that the work of all would keep busy to this share of a core each; the queue of a
# loop that is busy to 0.5 is one request long on average.
TARGET = 0.5
# More shards accept if one is busier than this for GROW_S. A loop busier than SATURATED may have
# any amount of work, so twice as many accept.
GROW_AT, SATURATED = 0.6, 0.85
GROW_S = 0.4
# Fewer accept if these would be less busy than this for SHRINK_S.
SHRINK_AT = 0.35
SHRINK_S = 30.0
# Clients that were asked to move have connected again after this time.
SETTLE_S = 0.5
# Clients move from a busy shard that has this many times the mean; from any with more than the mean
# while one has less than this share of it.
UNEVEN, STARVED = 1.25, 0.5


@dataclass(frozen=True, slots=True)
class AcceptorUse:
    """What a shard that lives shows: the share of a core that its loop uses, and its clients that
    sent something lately, without those that were asked to move."""

    busy: float
    num_clients: int
    num_moving: int = 0


@dataclass(frozen=True, slots=True)
class AcceptDecision:
    """`targets` get the next connections: the shards that accept, or those of them with fewest
    clients while others move there. `moves`: by shard, how many clients should connect again."""

    accepting: tuple[int, ...]
    targets: tuple[int, ...]
    moves: Mapping[int, int] = field(default_factory=dict)


class AcceptPolicy:
    def __init__(self, num_shards: int, accepts_all: bool = False) -> None:
        self._num_shards = num_shards
        self.accepts_all = accepts_all
        # Shards that should accept; fewer do while some are dead.
        self.number = num_shards if accepts_all else 1
        self._busy_since: float | None = None
        self._calm_since: float | None = None
        self._moved_at = -math.inf
        # When shards last accepted.
        self._accepted_at: dict[int, float] = {}

    def decide(self, now: float, uses: Mapping[int, AcceptorUse]) -> AcceptDecision:
        """Decide by the use of the shards that live. A shard that does not live gets no connections
        unless none lives."""
        if not uses:
            everyone = tuple(range(self._num_shards))
            return AcceptDecision(everyone, everyone)
        alive = sorted(uses)
        if self.accepts_all:
            return AcceptDecision(tuple(alive), tuple(alive))
        self._resize(now, uses, alive[: self.number])
        accepting = tuple(alive[: self.number])
        self._accepted_at.update(dict.fromkeys(accepting, now))
        moves = self._moves(now, uses, accepting)
        targets = accepting
        if moves:
            self._moved_at = now
            mean = _mean(uses, accepting)
            targets = tuple(n for n in accepting if uses[n].num_clients < mean) or accepting
        return AcceptDecision(accepting, targets, moves)

    def _resize(
        self, now: float, uses: Mapping[int, AcceptorUse], accepting: Sequence[int]
    ) -> None:
        total, peak = sum(use.busy for use in uses.values()), max(uses[n].busy for n in accepting)
        wanted = math.ceil(total / TARGET)
        if peak >= SATURATED:
            wanted = max(wanted, 2 * self.number)
        wanted = min(self._num_shards, wanted)
        if wanted > self.number and peak >= GROW_AT:
            self._calm_since = None
            if self._busy_since is None:
                self._busy_since = now
            elif now - self._busy_since >= GROW_S:
                self.number, self._busy_since = wanted, None
            return
        self._busy_since = None
        if max(1, math.ceil(total / SHRINK_AT)) >= self.number:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= SHRINK_S:
            self.number, self._calm_since = self.number - 1, now

    def _moves(
        self, now: float, uses: Mapping[int, AcceptorUse], accepting: Sequence[int]
    ) -> dict[int, int]:
        if now - self._moved_at < SETTLE_S:
            return {}
        mean, moves = _mean(uses, accepting), {}
        is_starved = any(uses[n].num_clients < STARVED * mean for n in accepting)
        most = mean if is_starved else UNEVEN * mean + 0.5
        for number, use in uses.items():
            if number not in accepting:
                is_late = now - self._accepted_at.setdefault(number, now) >= SHRINK_S
                count = use.num_clients if is_late else 0
            elif use.busy >= GROW_AT and use.num_clients > most:
                count = use.num_clients - math.ceil(mean)
            else:
                count = 0
            if count:
                moves[number] = count
        return moves


def _mean(uses: Mapping[int, AcceptorUse], accepting: Sequence[int]) -> float:
    """Return the clients of a shard that accepts, on average; those that move count too."""
    return sum(uses[n].num_clients + uses[n].num_moving for n in accepting) / len(accepting)
