"""The last batches of a model, and how often each shape was requested. Pure.

The model adds one record per batch; `explain` reads them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

NUM_RECENT = 64
# Shapes that are counted individually; later ones are counted together.
MAX_SHAPES = 1024

Shapes = tuple[tuple[int, ...], ...]


class BatchRecord(NamedTuple):
    """One batch. The waits are means over its requests; `duration_s` is from dispatch to answer, of
    which the worker computed for `compute_s`."""

    ended: float
    num_rows: int
    num_requests: int
    shapes: Shapes
    batch_wait_s: float
    instance_wait_s: float
    compute_s: float
    duration_s: float
    instance: int
    closed_by: str
    outcome: str
    # 0 without a token budget.
    num_tokens: int = 0


class Seen:
    """Counts of the requests of one shape."""

    __slots__ = ("num_batches", "num_requests", "num_rows")

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_requests = 0
        self.num_rows = 0


class History:
    def __init__(self) -> None:
        self.recent: deque[BatchRecord] = deque(maxlen=NUM_RECENT)
        self.shapes: dict[Shapes, Seen] = {}
        # Shapes that came when `shapes` was full.
        self.others = Seen()

    def note(self, record: BatchRecord) -> None:
        self.recent.append(record)
        seen = self.shapes.get(record.shapes)
        if seen is None:
            seen = self.others
            if len(self.shapes) < MAX_SHAPES:
                seen = self.shapes[record.shapes] = Seen()
        seen.num_batches += 1
        seen.num_requests += record.num_requests
        seen.num_rows += record.num_rows
