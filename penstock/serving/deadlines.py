"""When queued requests must be answered: by the SLO, or sooner if they say so. Pure."""

from __future__ import annotations

import heapq
import math
from collections import deque

from penstock.serving.lanes import Lane
from penstock.types import Request


class Deadlines:
    """Deadlines of the SLO arrive in order, shorter ones of single requests do not."""

    def __init__(self, slo_s: float) -> None:
        self._slo_s = slo_s
        self._in_order: deque[tuple[float, Request]] = deque()
        self._others: list[tuple[float, int, Request]] = []
        self._num_added = 0

    @property
    def first(self) -> float:
        """Return the earliest deadline, or infinity."""
        first = self._in_order[0][0] if self._in_order else math.inf
        return min(first, self._others[0][0]) if self._others else first

    def allowed_s(self, request: Request) -> float:
        asked = request.timeout_s
        return self._slo_s if asked is None else min(asked, self._slo_s)

    def at(self, request: Request) -> float:
        asked = request.timeout_s  # As `allowed_s`, without the call.
        queued = request.timings.queued
        return queued + (self._slo_s if asked is None else min(asked, self._slo_s))

    def add(self, request: Request) -> None:
        """Add a request that has just arrived."""
        if request.timeout_s is None:
            self._in_order.append((self.at(request), request))
        else:
            self.add_late(request)

    def add_late(self, request: Request) -> None:
        """Add a request whose deadline may be before others."""
        self._num_added += 1
        heapq.heappush(self._others, (self.at(request), self._num_added, request))

    def take_passed(self, now: float) -> list[Request]:
        """Remove the deadlines that have passed; return their requests that are still queued in a
        lane. One that was put back has two deadlines."""
        passed: list[Request] = []
        in_order, others = self._in_order, self._others
        while in_order and (in_order[0][0] <= now or in_order[0][1].ticket.queue is None):
            passed.append(in_order.popleft()[1])
        while others and (others[0][0] <= now or others[0][2].ticket.queue is None):
            passed.append(heapq.heappop(others)[2])
        return [request for request in passed if isinstance(request.ticket.queue, Lane)]
