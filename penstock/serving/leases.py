"""Request rates of API keys in a shard: tokens that the core leases, a few at a time.

The core has one bucket for each key and leases only what the bucket holds, so all shards together
never exceed a rate. A request that finds no token waits for one answer of the core. Pure: time is
an argument, and the caller sends what `ask` gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.errors import QuotaExceeded
from penstock.serving.quotas import rate_exceeded

# Share of a key's tokens per second that is leased at once.
LEASE_SHARE = 0.05
# Tokens that were not used for this long go back.
IDLE_S = 0.05


@dataclass(slots=True)
class KeyLease:
    """What a shard has of one key. `num_asked` is 0 while no answer is due."""

    rate: float
    tokens: int = 0
    num_asked: int = 0
    used_at: float = -math.inf


class Leases:
    """`ask` sends the core a wish for tokens of a key; a negative number gives some back."""

    def __init__(self, ask: Callable[[bytes, int], None]) -> None:
        self._ask = ask
        self._keys: dict[bytes, KeyLease] = {}

    def replace(self, rates: Mapping[bytes, float]) -> None:
        """Use new rates, in requests per second; keys with another rate start without tokens."""
        kept = {key: each for key, each in self._keys.items() if rates.get(key) == each.rate}
        self._keys = {key: kept.get(key) or KeyLease(rate) for key, rate in rates.items()}

    def take(self, key: bytes, now: float, num_waiting: int = 0) -> bool:
        """Take a token; True also for keys without a limit. False: wait for `granted`, as these
        others do."""
        lease = self._keys.get(key)
        if lease is None:
            return True
        lease.used_at = now
        share = max(1, math.ceil(LEASE_SHARE * lease.rate))
        has_token = lease.tokens > 0 and not num_waiting
        if has_token:
            lease.tokens -= 1
        # The next lease is on its way before this one is used up.
        if not lease.num_asked and lease.tokens < share // 2 + (not has_token):
            lease.num_asked = share + num_waiting
            self._ask(key, lease.num_asked)
        return has_token

    def granted(self, key: bytes, amount: int, num_waiting: int) -> tuple[int, bool]:
        """Note the core's answer. Return how many that wait may go on, and whether the others may
        wait for the next answer; if not, their key has no tokens left."""
        lease = self._keys.get(key)
        if lease is None:
            return num_waiting, False
        is_all = amount >= lease.num_asked
        lease.num_asked = 0
        lease.tokens += amount
        num_served = min(lease.tokens, num_waiting)
        lease.tokens -= num_served
        if is_all and num_waiting > num_served:
            lease.num_asked = num_waiting - num_served
            self._ask(key, lease.num_asked)
        return num_served, is_all

    def give_back(self, now: float) -> None:
        """Return tokens that nobody uses here; call it periodically."""
        for key, lease in self._keys.items():
            if lease.tokens and not lease.num_asked and now - lease.used_at >= IDLE_S:
                self._ask(key, -lease.tokens)
                lease.tokens = 0

    def refusal(self, key: bytes, wait_s: float) -> QuotaExceeded:
        return rate_exceeded(self._keys[key].rate if key in self._keys else 0.0, wait_s)
