"""Assign rows of the device's block table to sequences, and track what the device does not know
yet. Integers only; `cuda_runner` sends them.

A sequence keeps its row while it is in steps. Rows of sequences that are not in a step may be
reassigned: such a sequence has no state that only the device knows.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from penstock.llm.scheduler import Chunk


@dataclass(slots=True)
class HeldRow:
    row: int
    # The sequence's value when its blocks were sent.
    num_evictions: int
    # How many of its blocks were sent.
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class Changes:
    """Flat indices of changed table entries, and their new blocks."""

    entries: list[int]
    blocks: list[int]


class TableRows:
    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._held: dict[int, HeldRow] = {}
        self._free = list(range(num_rows))

    def take(self, chunks: Many[Chunk]) -> tuple[list[HeldRow], list[int], Changes]:
        """Return the row of each chunk of a step, the places of chunks that got a new row, and the
        changes of the table."""
        held: list[HeldRow] = []
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

    def _begin(self, chunk: Chunk, chunks: Many[Chunk]) -> HeldRow:
        if not self._free:
            kept = {each.sequence.id for each in chunks}
            for number in [each for each in self._held if each not in kept]:
                self._free.append(self._held.pop(number).row)
        mine = HeldRow(self._free.pop(), chunk.num_evictions)
        self._held[chunk.sequence.id] = mine
        return mine
