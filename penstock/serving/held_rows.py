"""Inputs that stay where the caller has them, for workers in this process.

Requests refer to rows of arrays; a `Dispatch` frame carries the number of a batch of such rows, and
the worker's thread finds the arrays here. They live as long as the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from penstock.types import Array

_numbers = itertools.count(1)


class HeldRows:
    """Rows `start` to `stop` of arrays by input name. Nobody may change them before the answer."""

    __slots__ = ("arrays", "start", "stop")

    def __init__(self, arrays: Mapping[str, Array], start: int, stop: int) -> None:
        self.arrays = arrays
        self.start = start
        self.stop = stop

    def views(self) -> dict[str, Array]:
        rows = slice(self.start, self.stop)
        return {name: array[rows] for name, array in self.arrays.items()}


class HeldBatch:
    """The inputs of one batch, found by its number while somebody has it."""

    def __init__(self, parts: Iterable[HeldRows]) -> None:
        joined: list[HeldRows] = []
        for part in parts:
            last = joined[-1] if joined else None
            if last is not None and last.arrays is part.arrays and last.stop == part.start:
                joined[-1] = HeldRows(last.arrays, last.start, part.stop)
            else:
                joined.append(part)
        self.pieces: Sequence[Mapping[str, Array]] = [part.views() for part in joined]
        self.number = next(_numbers)
        _batches[self.number] = self


_batches: WeakValueDictionary[int, HeldBatch] = WeakValueDictionary()


def find(number: int) -> HeldBatch:
    return _batches[number]
