"""A batch that a worker has been sent and has not answered."""

from __future__ import annotations

from penstock.serving.metrics import Waits
from penstock.types import Request
from penstock.wire import frames


class RunningBatch:
    """`extents` are those of each request, if they have no rows; `closed_by` says why it took no
    more requests. The number of tokens is 0 if the model has no token budget."""

    __slots__ = (
        "closed_by",
        "extents",
        "id",
        "instance",
        "num_rows",
        "num_tokens",
        "requests",
        "started",
    )

    def __init__(self, id: int, requests: list[Request], started: float) -> None:
        self.id = id
        self.requests = requests
        self.num_rows = 0
        self.num_tokens = 0
        self.started = started
        self.extents: list[tuple[frames.Extent, ...]] = []
        self.instance = 0
        self.closed_by = ""

    def waits(self) -> Waits:
        """Return the mean waits of its requests, for a batch and for an instance."""
        queue_s = sum(self.started - request.timings.queued for request in self.requests)
        instance_s = sum(request.timings.instance_wait_s for request in self.requests)
        count = len(self.requests)
        return (queue_s - instance_s) / count, instance_s / count
