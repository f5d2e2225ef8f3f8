"""What the other shards of a model have queued and what its workers run, for batchers. Pure.

A batcher with the whole queue of its model needs none of this: `NOTHING_ELSEWHERE`. One that has a
part of it predicts waits and applies limits with the sums of all parts. Everything here is a hint
that may be old or wrong: it may change what is refused, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.serving.shares import Queued


@dataclass(slots=True, eq=False)
class OtherShards:
    """Sums over the other shards, and the batches that run."""

    # Queued requests, their rows (or tokens, with a token budget), and the time that these take one
    # executor; by level, each including the levels above.
    num_requests: Sequence[float] = (0,)
    sizes: Sequence[float] = (0,)
    work_s: Sequence[float] = (0.0,)
    # Rows (or tokens) that arrive per second, of all geometries.
    arrivals_per_s: float = 0.0
    # Predicted ends of the running batches, also of this shard's; sorted.
    ends: list[float] = field(default_factory=list)


class ShardLoad(msgspec.Struct, frozen=True):
    """What a shard publishes: its queue, and by level its number of requests and their work."""

    queued: Queued
    num_requests: Sequence[int]
    work_s: Sequence[float]


class Elsewhere(Protocol):
    def look(self, now: float, *, is_fresh: bool = False) -> OtherShards:
        """Return the present figures, or those of a moment ago unless `is_fresh`; valid until the
        next call."""

    def publish(self, load: ShardLoad, now: float) -> None:
        """Show the other shards and the workers what is queued here."""

    def arrived(self, level: int, num_requests: int, size: int, due: float | None) -> None:
        """Show the queue of this level after an arrival, without waiting for `publish`. `due` is
        the request's, if nothing was queued before."""

    def show_oldest(self, came: float) -> None:
        """Show the arrival time of the oldest request without an answer; 0 if there is none."""

    def oldest(self, now: float) -> float | None:
        """Return the earliest such time of the other shards; None if they have none."""

    def show_held(self, key: int, counts: Sequence[int]) -> None:
        """Show how many requests of an API key this shard has admitted and not answered, by level.
        Keys with a share of the queue have a number each."""

    def num_held(self, key: int, level: int) -> int:
        """Return how many of this level and above all other shards have."""

    def show_admitted(self, count: int) -> None:
        """Show how many requests of all keys this shard has admitted and not answered. Shown only
        while keys have shares."""

    def num_admitted(self) -> int:
        """Return how many all other shards have."""


class NothingElsewhere:
    """For the batcher of a model that is served by one shard."""

    def __init__(self) -> None:
        self._nothing = OtherShards()

    def look(self, now: float, *, is_fresh: bool = False) -> OtherShards:
        return self._nothing

    def publish(self, load: ShardLoad, now: float) -> None:
        """Nobody reads it."""

    def arrived(self, level: int, num_requests: int, size: int, due: float | None) -> None:
        """Nobody reads it."""

    def show_oldest(self, came: float) -> None:
        """Nobody reads it."""

    def oldest(self, now: float) -> float | None:
        return None

    def show_held(self, key: int, counts: Sequence[int]) -> None:
        """Nobody reads it."""

    def num_held(self, key: int, level: int) -> int:
        return 0

    def show_admitted(self, count: int) -> None:
        """Nobody reads it."""

    def num_admitted(self) -> int:
        return 0


NOTHING_ELSEWHERE = NothingElsewhere()
