"""Request rates of API keys in a shard, for all its protocols: what finds no leased token waits
until the core has answered (`serving.leases`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from penstock.errors import QuotaExceeded
from penstock.serving.leases import Leases
from penstock.wire import frames

# Goes on with a message that has waited, or refuses it.
Decided = Callable[[QuotaExceeded | None], None]


class LeasedRates:
    """Belongs to the shard's event loop; `send` sends a frame to the core."""

    def __init__(self, send: Callable[[frames.Frame], None]) -> None:
        self._leases = Leases(lambda key, amount: send(frames.Lease(key, amount)))
        self.replace = self._leases.replace
        # Those that wait for a token, by key.
        self._waiting: dict[bytes, deque[Decided]] = {}

    def take(self, key: bytes, decided: Decided) -> bool:
        """Take a token of a key; True also for keys without a limit. False: `decided` is called
        once the core has answered."""
        waiting = self._waiting.get(key, ())
        if self._leases.take(key, time.monotonic(), len(waiting)):
            return True
        self._waiting.setdefault(key, deque()).append(decided)
        return False

    def leased(self, leased: frames.Leased) -> None:
        """Go on with what waits for tokens of this key."""
        waiting = self._waiting.pop(leased.key, deque())
        num_served, may_wait = self._leases.granted(leased.key, leased.amount, len(waiting))
        if may_wait and num_served < len(waiting):
            self._waiting[leased.key] = deque(list(waiting)[num_served:])
        for number, decided in enumerate(waiting):
            if number < num_served:
                decided(None)
            elif may_wait:
                return
            else:
                decided(self._leases.refusal(leased.key, leased.wait_s))

    def give_back(self) -> None:
        """Give unused tokens back to the core; call it periodically."""
        self._leases.give_back(time.monotonic())
