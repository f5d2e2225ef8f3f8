"""Batches of a model: those that run, their time limits, the last ones, counts by shape. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.serving.held_rows import HeldBatch
from penstock.serving.response_counts import ResponseTimes
from penstock.types import Request
from penstock.wire import frames

if TYPE_CHECKING:
    from penstock.serving.metrics import Waits

NUM_RECENT = 64
# Shapes that are counted individually; later ones are counted together.
MAX_SHAPES = 1024
HANG_FACTOR = 20
NUM_REMEMBERED = 128

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch that a worker has been sent and has not answered. `extents` are those of each
    request, if they have no rows; `closed_by` says why it took no more requests."""

    id: int
    requests: list[Request]
    started: float
    num_rows: int = 0
    # 0 without a token budget.
    num_tokens: int = 0
    extents: list[tuple[frames.Extent, ...]] = field(default_factory=list)
    instance: int = 0
    closed_by: str = ""
    # If several shards share the worker: whether it runs the batch yet, and with their rows in it.
    is_started: bool = True
    is_merged: bool = False
    # The worker was asked not to start it.
    is_recalled: bool = False
    # When it was started; it may have waited in the worker for a batch of another shard.
    began: float = 0.0
    # For how long its worker had waited for other models when it was sent.
    waited_s: float = 0.0
    # Inputs and outputs that are not in shared memory.
    held: HeldBatch | None = None
    # Of a decoupled model: the requests without a final response, by index; those that had theirs
    # before the worker took the next batch; and whether it has done that.
    unanswered: dict[int, ResponseTimes] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)
    has_returned: bool = False

    def waits(self) -> Waits:
        """Return the mean waits of its requests, for a batch and for an instance."""
        queue_s = sum(self.started - request.timings.queued for request in self.requests)
        instance_s = sum(request.timings.instance_wait_s for request in self.requests)
        count = len(self.requests)
        return (queue_s - instance_s) / count, instance_s / count


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


@dataclass(slots=True)
class Seen:
    """Counts of the requests of one shape."""

    num_requests: int = 0
    num_rows: int = 0
    num_batches: int = 0


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


class HangLimits:
    """How long a batch may take: HANG_FACTOR times the 99th percentile of earlier ones of about the
    same size, at least `min_s`."""

    def __init__(self, min_s: float) -> None:
        self._min_s = min_s
        self._recent: dict[int, deque[float]] = {}

    def seed(self, timings: Mapping[int, float]) -> None:
        """Note the durations of warm-up batches, by rows."""
        for num_rows, duration_s in timings.items():
            self.note(num_rows, duration_s)

    def note(self, num_rows: int, duration_s: float) -> None:
        # Sizes with the same number of bits count together.
        recent = self._recent.get(num_rows.bit_length())
        if recent is None:
            recent = self._recent[num_rows.bit_length()] = deque(maxlen=NUM_REMEMBERED)
        recent.append(duration_s)

    @property
    def longest_s(self) -> float:
        """The limit of a batch of any size that was seen."""
        limits = (self.limit_s(1 << (num_bits - 1)) for num_bits in self._recent if num_bits)
        return max(limits, default=self._min_s)

    def limit_s(self, num_rows: int) -> float:
        recent = sorted(self._recent.get(num_rows.bit_length(), ()))
        p99 = recent[int(len(recent) * 0.99)] if recent else 0.0
        return max(self._min_s, HANG_FACTOR * p99)
