"""Requests of a model that is scaled to zero: they wait for its first instance, or are refused.

A shard's part: asks the core for an instance, and holds the queue meanwhile. Knows no process.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import ModelConfig
from penstock.errors import NotReady
from penstock.serving.core_link import CoreLink
from penstock.serving.request_queue import RequestQueue

# The core is asked again after this time.
ASK_AGAIN_S = 1.0


class ColdRequests:
    """`is_cold` from when the core stops the last instance until the next one is ready."""

    def __init__(
        self, config: ModelConfig, core: CoreLink, queue: RequestQueue, clock: Callable[[], float]
    ) -> None:
        self._name = config.name
        self._budget_s = config.scaling.cold_start_s
        self._core = core
        self._queue = queue
        self._clock = clock
        self.is_cold = False
        # How long an instance takes to be ready.
        self._load_s = 0.0
        # When a request first had to wait, and when the core was last asked; None: not yet.
        self._since: float | None = None
        self._asked_at: float | None = None
        # Why no instance is ready yet, if the core has said so.
        self.reason = ""
        # Why none can be started, and until when requests are refused for it.
        self._problem, self._refuse_until = "", 0.0

    @property
    def refuses(self) -> bool:
        """Whether requests are refused because no instance could be started."""
        return bool(self._problem) and self._clock() < self._refuse_until

    def begin(self, load_s: float) -> None:
        """Hear that the last instance is being stopped."""
        self.is_cold = True
        self._load_s = load_s
        self._since = self._asked_at = None
        if self._queue.num_waiting:
            # They came when the core had decided already.
            self._hold()
            self.wake()

    def end(self) -> None:
        """Hear that an instance is ready."""
        self.is_cold = False
        self.reason = self._problem = ""
        if self._since is not None:
            self._since = None
            self._queue.batcher.end_cold_start(self._clock())

    def check(self) -> None:
        """Prepare for a request that has to wait; NotReady if loading has just failed, or takes
        longer than it may."""
        if self.refuses:
            raise self._refusal()
        self._problem = ""
        if self._load_s <= self._budget_s:
            self._hold()
            return
        self.wake()
        waited_s = self._clock() - self._since if self._since is not None else 0.0
        raise NotReady(
            f"model '{self._name}' has no instance now; loading one takes {self._load_s:.1f} s and "
            f"requests wait for {self._budget_s:g} s (penstock.cold_start_s)",
            retry_after_s=max(1.0, self._load_s - waited_s),
        )

    def refuse(self, problem: str, refuse_s: float) -> None:
        """Hear that no instance can be started: refuse what waits, and what comes soon."""
        self._problem, self._refuse_until = problem, self._clock() + refuse_s
        self._queue.refuse_all(self._refusal())
        self._since = self._asked_at = None

    def _refusal(self) -> NotReady:
        left_s = max(1.0, self._refuse_until - self._clock())
        text = f"model '{self._name}' cannot be loaded now: {self._problem}"
        return NotReady(text, retry_after_s=left_s)

    def wake(self) -> None:
        """Ask the core for an instance."""
        now = self._clock()
        if self._since is None:
            self._since = now
        if self._asked_at is None or now - self._asked_at >= ASK_AGAIN_S:
            self._asked_at = now
            self._core.wake()

    def tick(self) -> None:
        """Refuse the requests that have waited for too long."""
        if self.is_cold and self._queue.num_waiting:
            self.wake()
            late = f"no instance of model '{self._name}' was ready in {self._budget_s:g} s"
            why = f": {self.reason}" if self.reason else ""
            text = f"{late} (penstock.cold_start_s){why}"
            error = NotReady(text, retry_after_s=max(1.0, self._load_s))
            self._queue.refuse_older(self._clock() - self._budget_s, error)

    def _hold(self) -> None:
        if self._since is None:
            now = self._since = self._clock()
            self._queue.batcher.begin_cold_start(self._load_s, now)
