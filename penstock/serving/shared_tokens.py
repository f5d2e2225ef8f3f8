"""Tokens per second of API keys in a shard: the core counts, so that all shards together keep them.

A prompt waits for one answer of the core; generated tokens are reported once a turn of the loop.
Only keys with a limit cost anything.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping

from penstock.errors import QuotaExceeded
from penstock.serving.quotas import tokens_exceeded
from penstock.wire import frames

Decided = Callable[[QuotaExceeded | None], None]


class SharedTokens:
    """`TokenQuotas` of a shard. `send` sends a frame to the core, `soon` calls at the end of this
    turn of the event loop."""

    def __init__(
        self,
        send: Callable[[frames.Frame], None],
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._send = send
        self._soon = soon
        self._rates: Mapping[bytes, float] = {}
        self._calls = itertools.count(1)
        # Prompts that wait for the core, with their key.
        self._waiting: dict[int, tuple[bytes, Decided]] = {}
        self._used: Counter[bytes] = Counter()

    @property
    def is_active(self) -> bool:
        return bool(self._rates)

    def replace(self, rates: Mapping[bytes, float]) -> None:
        """Use new rates, in tokens per second."""
        self._rates = rates

    def start_prompt(self, caller: bytes, num_tokens: int, now: float, decided: Decided) -> bool:
        if caller not in self._rates:
            return True
        # Answers before this prompt count first.
        self._report()
        call = next(self._calls)
        self._waiting[call] = caller, decided
        self._send(frames.TakeTokens(call, caller, num_tokens))
        return False

    def taken(self, answer: frames.TokensTaken) -> None:
        """Go on with a prompt that waits for this answer."""
        caller, decided = self._waiting.pop(answer.call)
        rate = self._rates.get(caller, 0.0)
        decided(tokens_exceeded(rate, answer.wait_s) if answer.wait_s > 0 else None)

    def use_tokens(self, caller: bytes, num_tokens: int, now: float) -> None:
        if caller not in self._rates:
            return
        if not self._used:
            self._soon(self._report)
        self._used[caller] += num_tokens

    def _report(self) -> None:
        used, self._used = self._used, Counter()
        for caller, num_tokens in used.items():
            self._send(frames.UseTokens(caller, num_tokens))
