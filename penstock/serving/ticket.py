"""A model's record of an admitted request: how it runs, and which memory and quota it holds."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.serving.lanes import Lane
    from penstock.serving.plan import Fit
    from penstock.serving.slab import Slab
    from penstock.types import Request


class Ticket:
    """`fit` is set by admission, `queue` by the batcher's lanes (its lane, or the reruns; None: not
    queued), `slab` and `row` by the request's place in shared memory (None: it has no rows)."""

    __slots__ = ("fit", "queue", "row", "slab")

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.queue: Lane | deque[Request] | None = None
        self.slab: Slab | None = None
        self.row = 0
