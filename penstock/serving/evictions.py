"""Which models loaded on demand have memory, and which give theirs to others. Pure.

One plan is about one device: its limit, what is loaded there, and the models that wait for room,
the longest first. Models with requests or sequences stay. Among the others, those go that were used
least recently, and no more than the first waiting model needs. Knows no process: the actor
(`serving.model_memory`) starts and stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.serving.placement import gib

# Models that are named in a reason.
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Resident:
    """A version that has memory of the device: it is loaded, or loads, or leaves."""

    key: int
    name: str
    num_bytes: int
    last_used: float = 0.0
    # Why it stays; empty: it is idle.
    stays: str = ""
    # It is being stopped; its memory will be free.
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """A worker of a version that needs memory. `evicts`: other versions may have to go for it; this
    one has no other worker then."""

    key: int
    name: str
    num_bytes: int
    evicts: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What happens now, by key. A demand that can never be met is in `refused`; one that is in none
    of `start`, `refused` and `waits` has no room and may evict nothing."""

    start: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    # With the reasons.
    refused: Mapping[int, str] = field(default_factory=dict)
    waits: Mapping[int, str] = field(default_factory=dict)


def plan_memory(
    limit: int, residents: Sequence[Resident], demands: Sequence[MemoryDemand]
) -> MemoryPlan:
    """Decide for one device. Keys of residents differ, and so do those of demands."""
    used = sum(each.num_bytes for each in residents)
    # What is left when everything that leaves has gone and the first that waits has come, without
    # what is evicted now.
    later = used - sum(each.num_bytes for each in residents if each.is_leaving)
    evict = _least_recent(residents, later - limit)
    start: list[int] = []
    refused: dict[int, str] = {}
    waits: dict[int, str] = {}
    first = ""
    for demand in demands:
        need = demand.num_bytes
        if need > limit:
            text = f"it needs {gib(need)} of memory, and models loaded on demand have {gib(limit)}"
            refused[demand.key] = text
            continue
        if used + need <= limit and later - _total(evict) + need <= limit:
            start.append(demand.key)
            residents = [*residents, Resident(demand.key, demand.name, need, stays="loads")]
            used += need
            later += need
            continue
        if not demand.evicts:
            continue
        if first:
            waits[demand.key] = f"{_what_holds(limit, need, residents)}; {first} waits before it"
            continue
        first = demand.name
        enough = _least_recent(residents, later + need - limit)
        if later - _total(enough) + need <= limit:
            evict = enough
            later += need
            waits[demand.key] = "other models are being stopped"
        else:
            waits[demand.key] = _what_holds(limit, need, residents)
    return MemoryPlan(tuple(start), tuple(each.key for each in evict), refused, waits)


def _least_recent(residents: Sequence[Resident], excess: int) -> list[Resident]:
    """Return idle models with at least so many bytes together, or all of them: the least recently
    used first, without those that the rest can do without."""
    if excess <= 0:
        return []
    idle = [each for each in residents if not each.stays and not each.is_leaving]
    chosen: list[Resident] = []
    for each in sorted(idle, key=lambda each: (each.last_used, each.key)):
        if _total(chosen) >= excess:
            break
        chosen.append(each)
    for each in reversed(list(chosen)):
        if _total(chosen) - each.num_bytes >= excess:
            chosen.remove(each)
    return chosen


def _total(residents: Sequence[Resident]) -> int:
    return sum(each.num_bytes for each in residents)


def _what_holds(limit: int, need: int, residents: Sequence[Resident]) -> str:
    """Say which models have the memory that a demand waits for: those that stay, if there are."""
    holders = [each for each in residents if each.stays] or list(residents)
    holders.sort(key=lambda each: -each.num_bytes)
    named = ", ".join(
        f"{each.name} {gib(each.num_bytes)} ({each.stays or 'is being stopped'})"
        for each in holders[:MAX_NAMED]
    )
    if len(holders) > MAX_NAMED:
        named += f" and {len(holders) - MAX_NAMED} others"
    return f"it needs {gib(need)} of {gib(limit)}, which others use: {named}"
