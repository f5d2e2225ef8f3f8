"""Which sequence has which row of the device's table of blocks, and what of it the device does not
know yet. Whole numbers only; `cuda_runner` sends them.

A row is a sequence's while it is in steps; those of sequences that a step does not have may be
given to others, for whoever comes back has nothing there that only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from penstock.llm.scheduler import Chunk


@dataclass(slots=True)
class Held:
    row: int
    # Of the sequence, when its blocks were sent.
    num_evictions: int
    # How many of its blocks were sent.
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """Entries of the table, counted from its first, and the blocks that they are now."""

    entries: list[int]
    blocks: list[int]


class TableRows:
    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._held: dict[int, Held] = {}
        self._free = list(range(num_rows))

    def take(self, chunks: Many[Chunk]) -> tuple[list[Held], list[int], Changes]:
        """Of each chunk of a step its row; the places in the step of those that are new to theirs;
        and what is to be changed in the table."""
        held: list[Held] = []
        new: list[int] = []
        changes = Changes([], [])
        for place, chunk in enumerate(chunks):
            mine = self._held.get(chunk.sequence.id)
            if mine is None:
                mine = self._begin(chunk, chunks)
                new.append(place)
            elif mine.num_evictions != chunk.num_evictions:
                mine.num_evictions, mine.num_sent = chunk.num_evictions, 0
            held.append(mine)
            if mine.num_sent < len(chunk.blocks):
                first = mine.row * self._max_blocks
                changes.entries.extend(range(first + mine.num_sent, first + len(chunk.blocks)))
                changes.blocks.extend(chunk.blocks[mine.num_sent :])
                mine.num_sent = len(chunk.blocks)
        return held, new, changes

    def _begin(self, chunk: Chunk, chunks: Many[Chunk]) -> Held:
        if not self._free:
            kept = {each.sequence.id for each in chunks}
            for number in [each for each in self._held if each not in kept]:
                self._free.append(self._held.pop(number).row)
        mine = Held(self._free.pop(), chunk.num_evictions)
        self._held[chunk.sequence.id] = mine
        return mine
