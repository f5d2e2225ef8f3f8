"""How many requests and tokens each API key may send, and how much of a queue it may fill.

One `Quotas` for a server: rates hold for all models together, the share for each model's queue.
Time is an argument. Pure. What a key may do at all is for the gate to say; whether the server is
overloaded, for the batchers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import QuotaExceeded

# A key that was idle may send this many seconds' worth at once.
BURST_S = 1.0
# When asking again may make sense while a key's share of a queue is full.
SHARE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """What one key may take; None: any amount."""

    requests_per_s: float | None = None
    # Of language models, prompts and answers together.
    tokens_per_s: float | None = None
    # Largest share of a model's queued and running requests: above 0, at most 1.
    queue_share: float | None = None


class Bucket:
    """Token bucket: holds at most `burst`, refilled at `rate` per second. May be overdrawn."""

    __slots__ = ("_burst", "_filled_at", "_level", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._burst = max(1.0, rate * BURST_S)
        self._level = self._burst
        self._filled_at = now

    def wait_s(self, now: float) -> float:
        """How long until it holds 1; 0 if it does."""
        self._refill(now)
        return max(0.0, (1.0 - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        self._level = min(self._burst, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now


class Quotas:
    """Quotas by the digest of the API key (`Request.caller`); replaced when the file changes."""

    def __init__(self, quotas: Mapping[bytes, Quota] | None = None) -> None:
        self._quotas: Mapping[bytes, Quota] = quotas or {}
        self._requests: dict[bytes, Bucket] = {}
        self._tokens: dict[bytes, Bucket] = {}

    @property
    def is_active(self) -> bool:
        return bool(self._quotas)

    def replace(self, quotas: Mapping[bytes, Quota]) -> None:
        """Keys whose quota stays as it is go on with what they have left."""
        same = {key for key, quota in quotas.items() if self._quotas.get(key) == quota}
        self._requests = {key: each for key, each in self._requests.items() if key in same}
        self._tokens = {key: each for key, each in self._tokens.items() if key in same}
        self._quotas = quotas

    def check_rate(self, caller: bytes, now: float) -> None:
        """Count a request; QuotaExceeded when the key sends more than it may."""
        quota = self._quotas.get(caller)
        if quota is None or quota.requests_per_s is None:
            return
        bucket = self._requests.get(caller)
        if bucket is None:
            bucket = self._requests[caller] = Bucket(quota.requests_per_s, now)
        wait_s = bucket.wait_s(now)
        if wait_s > 0:
            raise QuotaExceeded(
                f"the API key may send {quota.requests_per_s:g} requests/s; "
                f"retry in {wait_s:.3g} s",
                wait_s,
            )
        bucket.take(1, now)

    def check_tokens(self, caller: bytes, now: float) -> None:
        """QuotaExceeded when the key has used more tokens than it may. How long an answer becomes
        is not known before, so a request may overdraw the quota and later ones wait for it."""
        bucket = self._token_bucket(caller, now)
        wait_s = 0.0 if bucket is None else bucket.wait_s(now)
        if wait_s > 0:
            raise QuotaExceeded(
                f"the API key may use {self._quotas[caller].tokens_per_s:g} tokens/s, prompts and "
                f"answers together; retry in {wait_s:.3g} s",
                wait_s,
            )

    def use_tokens(self, caller: bytes, num_tokens: int, now: float) -> None:
        """Count tokens of a prompt or an answer."""
        bucket = self._token_bucket(caller, now)
        if bucket is not None:
            bucket.take(num_tokens, now)

    def _token_bucket(self, caller: bytes, now: float) -> Bucket | None:
        quota = self._quotas.get(caller)
        if quota is None or quota.tokens_per_s is None:
            return None
        bucket = self._tokens.get(caller)
        if bucket is None:
            bucket = self._tokens[caller] = Bucket(quota.tokens_per_s, now)
        return bucket

    def has_share(self, caller: bytes) -> bool:
        """Whether the requests of this key must be counted while a model has them."""
        quota = self._quotas.get(caller)
        return quota is not None and quota.queue_share is not None

    def check_share(self, caller: bytes, num_held: int, max_pending: int) -> None:
        """QuotaExceeded when a model that may hold `max_pending` requests has enough of this key's
        already."""
        quota = self._quotas.get(caller)
        if quota is None or quota.queue_share is None:
            return
        most = max(1, int(quota.queue_share * max_pending))
        if num_held >= most:
            raise QuotaExceeded(
                f"the API key has {num_held} requests in this model's queue; its share is {most} "
                f"of {max_pending}",
                SHARE_RETRY_S,
            )


class QueueShares:
    """How much of one model's queue, of `max_pending` requests, each key has filled. Only requests
    of keys with a share are in `held`."""

    __slots__ = ("_max_pending", "_num_held", "_quotas", "held")

    def __init__(self, quotas: Quotas, max_pending: int) -> None:
        self._quotas = quotas
        self._max_pending = max_pending
        self._num_held: Counter[bytes] = Counter()
        # The key of each request and how many it counts as.
        self.held: dict[object, tuple[bytes, int]] = {}

    def check(self, caller: bytes) -> None:
        """QuotaExceeded when the key's share is full."""
        self._quotas.check_share(caller, self._num_held[caller], self._max_pending)

    def enter(self, request: object, caller: bytes, amount: int = 1) -> None:
        if self._quotas.has_share(caller):
            self.held[request] = caller, amount
            self._num_held[caller] += amount

    def leave(self, request: object) -> None:
        """However it ended; one that never entered may leave too."""
        found = self.held.pop(request, None)
        if found is not None:
            caller, amount = found
            self._num_held[caller] -= amount
