"""When each request is due. Pure: a load and a seed give the same times, always.

Arrivals are a renewal process of rate one (constant, Poisson, gamma) that a profile of rates
(flat, ramp, steps) stretches; a replay brings its own times. Every process of a run computes the
same times and takes every n-th, so that what arrives in all is the process that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.types import Array


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """So many requests under way at all times: the next is sent when one is answered."""

    concurrency: int


class Step(msgspec.Struct, frozen=True):
    rate: float
    duration_s: float


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    rate: float


class Ramp(msgspec.Struct, frozen=True, tag="ramp"):
    first: float
    last: float
    duration_s: float


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    steps: tuple[Step, ...]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Requests are due when they are due, whatever became of those before."""

    profile: Flat | Ramp | Steps
    arrivals: str = "poisson"  # or constant, gamma
    cv: float = 1.0  # of gamma arrivals


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Arrivals of a recorded trace, in seconds from its first; `scale` multiplies their rate."""

    times: tuple[float, ...]
    scale: float = 1.0
    name: str = ""


Load = Closed | Open | Replay


def due_times(load: Open | Replay, seed: int) -> Iterator[Array]:
    """Seconds from the start, ascending, in chunks; endless for flat loads."""
    raise NotImplementedError
