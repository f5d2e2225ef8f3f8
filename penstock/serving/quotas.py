"""Quotas of API keys: request and token rates, and the share of a queue that a key may fill.

One `Quotas` per server: rates apply to all models together, the share to each model's queue. Time
is an argument. Pure. The gate decides what a key may do at all; batchers decide about overload.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import QuotaExceeded
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere

# A key that was idle may send this many seconds' worth at once.
BURST_S = 1.0
# The estimate of a queue's capacity doubles if this much time passes without an overload.
FULL_GROWTH_S = 10.0
# Weight of the newest overload in that estimate.
FULL_WEIGHT = 0.25
# Retry time while a key's share of a queue is full.
SHARE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one key; None: no limit."""

    requests_per_s: float | None = None
    # Tokens of language models, prompts and answers together.
    tokens_per_s: float | None = None
    # Largest share of a model's queued and running requests: above 0, at most 1.
    queue_share: float | None = None


UNLIMITED = Quota()


class Bucket:
    """Token bucket: holds at most `burst`, refilled at `rate` per second. May be overdrawn."""

    __slots__ = ("_burst", "_filled_at", "_level", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._burst = max(1.0, rate * BURST_S)
        self._level = self._burst
        self._filled_at = now

    def lease(self, amount: int, now: float) -> int:
        """Take as many whole tokens as it holds, at most `amount`; a negative amount comes back."""
        self._refill(now)
        taken = min(amount, max(0, int(self._level)))
        self._level = min(self._burst, self._level - taken)
        return taken

    def wait_s(self, now: float) -> float:
        """Return the time until the bucket holds 1; 0 if it does now."""
        self._refill(now)
        return max(0.0, (1.0 - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        self._level = min(self._burst, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now


def rate_exceeded(rate: float, wait_s: float) -> QuotaExceeded:
    text = f"the API key may send {rate:g} requests/s"
    return QuotaExceeded(f"{text}; retry in {wait_s:.3g} s", wait_s)


def tokens_exceeded(rate: float, wait_s: float) -> QuotaExceeded:
    text = f"the API key may use {rate:g} tokens/s, prompts and answers together"
    return QuotaExceeded(f"{text}; retry in {wait_s:.3g} s", wait_s)


class TokenQuotas(Protocol):
    """Tokens of API keys, as language models use them."""

    @property
    def is_active(self) -> bool:
        """Whether any key has a quota."""

    def start_prompt(
        self,
        caller: bytes,
        num_tokens: int,
        now: float,
        decided: Callable[[QuotaExceeded | None], None],
    ) -> bool:
        """Count the tokens of a prompt. QuotaExceeded if the key has used up its tokens. False:
        `decided` is called later, with None or why not."""

    def use_tokens(self, caller: bytes, num_tokens: int, now: float) -> None:
        """Count tokens of an answer."""


def _bucket(
    known: dict[bytes, Bucket], caller: bytes, rate: float | None, now: float
) -> Bucket | None:
    """Return the key's bucket; None without a limit."""
    if rate is not None and caller not in known:
        known[caller] = Bucket(rate, now)
    return known[caller] if rate is not None else None


@dataclass(slots=True, eq=False)
class QueueSize:
    """Estimate of how many requests a model can hold: the configured limit, or as many as it had
    when it refused others for lack of capacity. Latency limits refuse requests long before the
    queue is full, and a share of a size that is never reached would limit no key."""

    _max_pending: int
    _full_at: float = 0.0
    _refused_at: float = -math.inf

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
        self._requests: dict[bytes, Bucket] = {}
        self._tokens: dict[bytes, Bucket] = {}
        self._quotas: Mapping[bytes, Quota] = {}
        self.replace(quotas or {})

    def replace(self, quotas: Mapping[bytes, Quota]) -> None:
        """Use new quotas. Keys whose quota is unchanged keep their token buckets."""
        same = {key for key, quota in quotas.items() if self._quotas.get(key) == quota}
        self._requests = {key: each for key, each in self._requests.items() if key in same}
        self._tokens = {key: each for key, each in self._tokens.items() if key in same}
        self._quotas = quotas
        # Attributes: every request asks. Keys whose requests must be counted while a model has
        # them have a number each, the same in all shards. A share of 1 sets no limit, because the
        # size of a queue is only an estimate.
        self.is_active = bool(quotas)
        limited = (key for key, share in self.shares.items() if share < 1)
        self.numbers = {key: number for number, key in enumerate(sorted(limited))}

    def check_rate(self, caller: bytes, now: float) -> None:
        """Count a request. QuotaExceeded if the key exceeds its rate."""
        quota = self._quotas.get(caller, UNLIMITED)
        bucket = _bucket(self._requests, caller, quota.requests_per_s, now)
        if bucket is None:
            return
        if (wait_s := bucket.wait_s(now)) > 0:
            raise rate_exceeded(quota.requests_per_s or 0.0, wait_s)
        bucket.take(1, now)

    @property
    def rates(self) -> dict[bytes, float]:
        """Requests per second of the keys that have a limit."""
        quotas = self._quotas.items()
        return {k: each.requests_per_s for k, each in quotas if each.requests_per_s is not None}

    @property
    def shares(self) -> dict[bytes, float]:
        """Shares of queues of the keys that have one."""
        quotas = self._quotas.items()
        return {k: each.queue_share for k, each in quotas if each.queue_share is not None}

    def lease(self, caller: bytes, amount: int, now: float) -> tuple[int, float]:
        """Lease tokens of a key's request rate to a shard, or take them back if `amount` is
        negative. Return how many it gets, and how long until there are more."""
        rate = self._quotas.get(caller, UNLIMITED).requests_per_s
        bucket = _bucket(self._requests, caller, rate, now)
        if bucket is None:
            return amount, 0.0
        return bucket.lease(amount, now), bucket.wait_s(now)

    @property
    def token_rates(self) -> dict[bytes, float]:
        """Tokens per second of the keys that have a limit."""
        quotas = self._quotas.items()
        return {k: each.tokens_per_s for k, each in quotas if each.tokens_per_s is not None}

    def take_tokens(self, caller: bytes, num_tokens: int, now: float) -> float:
        """Count the tokens of a prompt and return 0; if the key has used up its tokens, return how
        long. The length of an answer is unknown in advance, so a request may overdraw the quota;
        later ones are refused until it refills."""
        bucket = self._token_bucket(caller, now)
        if bucket is None:
            return 0.0
        if (wait_s := bucket.wait_s(now)) > 0:
            return wait_s
        bucket.take(num_tokens, now)
        return 0.0

    def start_prompt(
        self,
        caller: bytes,
        num_tokens: int,
        now: float,
        decided: Callable[[QuotaExceeded | None], None],
    ) -> bool:
        """As in `TokenQuotas`; decides at once."""
        if (wait_s := self.take_tokens(caller, num_tokens, now)) > 0:
            raise tokens_exceeded(self._quotas[caller].tokens_per_s or 0.0, wait_s)
        return True

    def use_tokens(self, caller: bytes, num_tokens: int, now: float) -> None:
        """Count tokens of a prompt or an answer."""
        bucket = self._token_bucket(caller, now)
        if bucket is not None:
            bucket.take(num_tokens, now)

    def _token_bucket(self, caller: bytes, now: float) -> Bucket | None:
        rate = self._quotas.get(caller, UNLIMITED).tokens_per_s
        return _bucket(self._tokens, caller, rate, now)

    def check_share(self, caller: bytes, num_held: int, queue_size: int) -> None:
        """Raise QuotaExceeded if this key's requests fill its share of a queue of this size."""
        share = self._quotas.get(caller, UNLIMITED).queue_share
        if share is not None and num_held >= (most := max(1, int(share * queue_size))):
            text = f"the API key has {num_held} requests in this model's queue"
            raise QuotaExceeded(f"{text}; its share is {most} of {queue_size}", SHARE_RETRY_S)


class QueueShares:
    """How much of one model's queue, of `max_pending` requests, each key fills in all shards. With
    one shard, only requests of keys with a share are in `held`. Levels are priority levels, 0 the
    highest: requests of lower levels queue behind a request and do not count against it."""

    __slots__ = (
        "_elsewhere", "_num_admitted", "_num_held", "_num_levels",
        "_quotas", "_shown", "_sizes", "held",
    )  # fmt: skip

    def __init__(
        self,
        quotas: Quotas,
        max_pending: int,
        num_levels: int = 1,
        elsewhere: Elsewhere = NOTHING_ELSEWHERE,
    ) -> None:
        self._quotas = quotas
        self._elsewhere = None if elsewhere is NOTHING_ELSEWHERE else elsewhere
        self._num_levels = num_levels
        self._num_admitted = 0
        # The numbers of keys that other shards see.
        self._shown = quotas.numbers
        # By level: low levels may be refused while there is room for higher ones.
        self._sizes = tuple(QueueSize(max_pending) for _ in range(num_levels))
        self._num_held: Counter[tuple[bytes, int]] = Counter()
        # The key and level of each request, and how many it counts as.
        self.held: dict[object, tuple[bytes, int, int]] = {}

    def check(self, caller: bytes, now: float, level: int = 0) -> None:
        """Raise QuotaExceeded if the key's share is full."""
        number = self._quotas.numbers.get(caller)
        if number is not None:
            num_held = sum(self._num_held[caller, each] for each in range(level + 1))
            if self._elsewhere is not None:
                num_held += self._elsewhere.num_held(number, level)
            self._quotas.check_share(caller, num_held, self._sizes[level].estimate(now))

    def refused(self, num_held: int, now: float, level: int = 0) -> None:
        """Note that the model, with this many requests here, had no capacity for another."""
        if self._elsewhere is not None:
            num_held += self._elsewhere.num_admitted()
        self._sizes[level].refused(num_held, now)

    def enter(self, request: object, caller: bytes, amount: int = 1, level: int = 0) -> None:
        numbers = self._quotas.numbers
        if caller in numbers or (numbers and self._elsewhere is not None):
            self.held[request] = caller, level, amount
            self._num_held[caller, level] += amount
            self._num_admitted += amount
            self._show(caller)

    def leave(self, request: object) -> None:
        """Remove a request, however it ended; one that never entered is ignored."""
        found = self.held.pop(request, None)
        if found is not None:
            caller, level, amount = found
            self._num_held[caller, level] -= amount
            self._num_admitted -= amount
            self._show(caller)

    def show(self) -> None:
        """Show other shards what all keys have here; call it periodically."""
        if self._elsewhere is None or not (self._quotas.numbers or self._shown):
            return
        for number in self._shown.values():
            self._elsewhere.show_held(number, (0,) * self._num_levels)
        self._shown = self._quotas.numbers
        for caller in self._shown:
            self._show(caller)

    def _show(self, caller: bytes) -> None:
        if self._elsewhere is None:
            return
        self._elsewhere.show_admitted(self._num_admitted)
        number = self._quotas.numbers.get(caller)
        if number is not None:
            held = [self._num_held[caller, level] for level in range(self._num_levels)]
            self._elsewhere.show_held(number, held)
