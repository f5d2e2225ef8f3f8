"""Arrays of callers in this process, for workers in this process: inputs stay where the caller has
them, and outputs are copied once, into memory that becomes the caller's.

A `Dispatch` frame carries the number of a batch, by which the worker's thread finds its arrays
here. They live as long as the batch. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from penstock.types import Array, TensorSpec, from_array, to_array

# Smaller outputs of a batch are copied together: a caller that keeps one answer keeps at most this.
MAX_TOGETHER_BYTES = 16 * 1024
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
    """One batch, found by its number as long as it is referenced. `counts` are the rows of each
    request, `pieces` its inputs; none if they are in shared memory. The worker adds `answers`, the
    outputs of each request."""

    def __init__(self, counts: Sequence[int], parts: Iterable[HeldRows] = ()) -> None:
        joined: list[HeldRows] = []
        for part in parts:
            last = joined[-1] if joined else None
            if last is not None and last.arrays is part.arrays and last.stop == part.start:
                joined[-1] = HeldRows(last.arrays, last.start, part.stop)
            else:
                joined.append(part)
        self.counts = counts
        self.pieces: Sequence[Mapping[str, Array]] = [part.views() for part in joined]
        self.answers: Sequence[dict[str, Array]] = ()
        self.number = next(_numbers)
        _batches[self.number] = self

    def split(self, values: Array) -> list[Array]:
        """Return copies of the rows of each request."""
        if len(self.counts) == 1:
            return [values.copy()]
        is_together = values.nbytes <= MAX_TOGETHER_BYTES
        if is_together:
            values = values.copy()
        found: list[Array] = []
        row = 0
        for count in self.counts:
            own = values[row : row + count]
            found.append(own if is_together else own.copy())
            row += count
        return found


def private(spec: TensorSpec, values: Array) -> Array:
    """Return a copy of an output; texts as bytes."""
    if spec.datatype == "BYTES":
        return to_array(from_array(spec.name, spec.datatype, values))
    return values.copy()


_batches: WeakValueDictionary[int, HeldBatch] = WeakValueDictionary()


def find(number: int) -> HeldBatch:
    return _batches[number]
