"""How many requests each API key may send, and how much of a queue they may fill.

One `Quotas` for a server: the rate holds for all models together, the share for each model's queue.
Time is an argument. Pure. What a key may do at all is for the gate to say; whether the server is
overloaded, for the batchers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import QuotaExceeded

# A key that was idle may send this many seconds' worth of requests at once.
BURST_S = 1.0
# After an overload, the estimate of how much a queue holds doubles in this time without another.
FULL_GROWTH_S = 10.0
# Weight of the newest overload in that estimate.
FULL_WEIGHT = 0.25
# When asking again may make sense while a key's share of a queue is full.
SHARE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """What one key may take; None: any amount."""

    requests_per_s: float | None = None
    # Largest share of a model's queued and running requests: above 0, at most 1.
    queue_share: float | None = None


class Bucket:
    """Token bucket: holds at most `burst` requests, refilled at `rate` per second."""

    __slots__ = ("_burst", "_filled_at", "_rate", "_tokens")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._burst = max(1.0, rate * BURST_S)
        self._tokens = self._burst
        self._filled_at = now

    def take(self, now: float) -> float:
        """0 when the request may pass; else how long until one may."""
        filled = self._tokens + (now - self._filled_at) * self._rate
        self._tokens = min(self._burst, filled)
        self._filled_at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate


class QueueSize:
    """How many requests a model can hold: as many as it may, or as many as it had when it refused
    others for lack of capacity. Latency limits refuse requests long before the queue is full, and a
    share of a size that is never reached limits nobody."""

    __slots__ = ("_full_at", "_max_pending", "_refused_at")

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._full_at = 0.0
        self._refused_at = -math.inf

    def refused(self, num_held: int, now: float) -> None:
        """Note that a model with this many requests had no capacity for another."""
        known = self._full_at if now - self._refused_at < FULL_GROWTH_S else num_held
        self._full_at = known + FULL_WEIGHT * (num_held - known)
        self._refused_at = now

    def estimate(self, now: float) -> int:
        growth = 1 + (now - self._refused_at) / FULL_GROWTH_S
        if self._full_at == 0.0 or self._full_at * growth >= self._max_pending:
            return self._max_pending
        return max(1, int(self._full_at * growth))


class Quotas:
    """Quotas by the digest of the API key (`Request.caller`); replaced when the file changes."""

    def __init__(self, quotas: Mapping[bytes, Quota] | None = None) -> None:
        self._quotas: Mapping[bytes, Quota] = quotas or {}
        self._buckets: dict[bytes, Bucket] = {}

    @property
    def is_active(self) -> bool:
        return bool(self._quotas)

    def replace(self, quotas: Mapping[bytes, Quota]) -> None:
        """Keys whose rate stays as it is go on with what they have left."""
        kept = {
            caller: bucket
            for caller, bucket in self._buckets.items()
            if caller in quotas and self._quotas[caller] == quotas[caller]
        }
        self._quotas, self._buckets = quotas, kept

    def check_rate(self, caller: bytes, now: float) -> None:
        """Count a request; QuotaExceeded when the key sends more than it may."""
        quota = self._quotas.get(caller)
        if quota is None or quota.requests_per_s is None:
            return
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = Bucket(quota.requests_per_s, now)
        wait_s = bucket.take(now)
        if wait_s > 0:
            raise QuotaExceeded(
                f"the API key may send {quota.requests_per_s:g} requests/s; "
                f"retry in {wait_s:.3g} s",
                wait_s,
            )

    def has_share(self, caller: bytes) -> bool:
        """Whether the requests of this key must be counted while a model has them."""
        quota = self._quotas.get(caller)
        return quota is not None and quota.queue_share is not None

    def check_share(self, caller: bytes, num_held: int, queue_size: int) -> None:
        """QuotaExceeded when a model that holds `queue_size` requests at most has enough of this
        key's already."""
        quota = self._quotas.get(caller)
        if quota is None or quota.queue_share is None:
            return
        most = max(1, int(quota.queue_share * queue_size))
        if num_held >= most:
            raise QuotaExceeded(
                f"the API key has {num_held} requests in this model's queue; its share is {most} "
                f"of {queue_size}",
                SHARE_RETRY_S,
            )
