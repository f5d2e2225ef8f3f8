"""A worker's sketch of live inputs: a few rows a second, measured against the version's evidence.

A row is copied while its batch is there, and measured after the batch was answered, so that no
answer waits. The counts go to the core about once a second, which judges them (`drift`). The time
that this takes is bounded as a share of a core.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.backends import Batch
from penstock.serving.input_statistics import ReferenceQuantity, num_finite, sample, shares_at
from penstock.types import Array
from penstock.wire.frames import QuantityCounts, Sketched, encode

# Elements of a row by input, and their distance in it.
SeenRow = Mapping[str, tuple[Array, int]]
# At most one row in this time.
ROW_EVERY_S = 0.05
# At most this share of a core.
MAX_SHARE = 0.004
SEND_EVERY_S = 1.0


@dataclass(slots=True)
class QuantitySketch:
    """Counts of one quantity since they were sent last."""

    reference: ReferenceQuantity
    edges: Array
    num_rows: int = 0
    num_outside: int = 0
    sums: Array = field(init=False)
    squares: Array = field(init=False)

    def __post_init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.num_rows = self.num_outside = 0
        self.sums, self.squares = np.zeros(len(self.edges)), np.zeros(len(self.edges))

    def add(self, values: Array) -> None:
        """Count one row, by its sorted values."""
        known = num_finite(values)
        is_strange = known < values.size and not self.reference.takes_not_finite
        if known < values.size:
            values = values[np.isfinite(values)]
        if not values.size and not is_strange:
            return
        self.num_rows += 1
        if not values.size:
            self.num_outside += 1
            return
        low, high = self.reference.low, self.reference.high
        self.num_outside += bool(is_strange or values[0] < low or values[-1] > high)
        if len(self.edges):
            shares = shares_at(values, self.edges)
            self.sums += shares
            self.squares += np.square(shares)

    def take(self) -> QuantityCounts:
        """Return the counts, and start over."""
        reference = self.reference
        counts = QuantityCounts(
            reference.input.spec.name,
            reference.quantity,
            self.num_rows,
            self.num_outside,
            tuple(self.sums.tolist()),
            tuple(self.squares.tolist()),
        )
        self._clear()
        return counts


class InputSketch:
    """Used by one thread. `take` and `add` follow each other."""

    def __init__(
        self,
        references: Sequence[ReferenceQuantity],
        send: Callable[[bytes], None],
        *,
        has_batch: bool,
        clock: Callable[[], float] = time.monotonic,
        random_source: random.Random | None = None,
    ) -> None:
        """`send` tells the core; BlockingIOError if it does not read."""
        self._send = send
        self._has_batch = has_batch
        self._clock = clock
        self._random = random_source or random.Random()
        self._sketches = [QuantitySketch(each, np.array(each.edges)) for each in references]
        self._inputs = list({each.input.spec.name: each.input for each in references}.values())
        self._next_at = 0.0
        self._sent_at = clock()

    def is_due(self, now: float) -> bool:
        """Whether it is time to look at another row."""
        return now >= self._next_at

    def take(self, batch: Batch, now: float) -> SeenRow:
        """Copy a row of a batch, while it is valid."""
        self._next_at = now + ROW_EVERY_S
        pieces = batch.all_pieces
        piece = pieces[self._random.randrange(len(pieces))]
        names = [each.spec.name for each in self._inputs]
        rows = {name: piece[name] for name in names if name in piece}
        if self._has_batch and rows:
            number = self._random.randrange(len(next(iter(rows.values()))))
            rows = {name: array[number : number + 1] for name, array in rows.items()}
        return {name: sample(array) for name, array in rows.items()}

    def add(self, taken: SeenRow) -> None:
        """Measure a row, after its batch was answered; tell the core about once a second."""
        began = self._clock()
        measured = {
            each.spec.name: each.quantify(*taken[each.spec.name])
            for each in self._inputs
            if each.spec.name in taken
        }
        for sketch in self._sketches:
            reference = sketch.reference
            if (quantities := measured.get(reference.input.spec.name)) is not None:
                sketch.add(quantities[reference.quantity])
        ended = self._clock()
        self._next_at = max(self._next_at, ended + (ended - began) / MAX_SHARE)
        if ended - self._sent_at < SEND_EVERY_S:
            return
        self._sent_at = ended
        sketched = Sketched(tuple(each.take() for each in self._sketches))
        # A core that does not read must not stop the worker.
        with contextlib.suppress(BlockingIOError):
            self._send(encode(sketched))
