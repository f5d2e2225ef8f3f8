"""Sends claims; also while the worker's only thread runs a batch, from a thread of its own.

For workers whose model computes in the thread that reads the sockets. `worker` arms the timer with
each batch. Nothing is received meanwhile: frames of shards may change memory that the batch uses.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping

from penstock.serving.claims import ClaimRows, Claims
from penstock.serving.shard_link import ShardLink
from penstock.wire import frames


def send_claim(claim: ClaimRows, links: Mapping[int, ShardLink]) -> None:
    """Ask a shard for its part of a batch."""
    share = claim.share
    # An offer without a geometry is merged with nothing.
    geometry = share.geometry if isinstance(share.geometry, str) else None
    frame = frames.Claim(
        claim.round,
        share.max_rows,
        share.others_rows,
        share.ends_at,
        share.drops_late,
        geometry,
        share.max_tokens,
        share.is_due,
    )
    next(link for link in links.values() if link.number == claim.shard).send(frame)


class ClaimTimer:
    """Invariant: its thread uses claims and links only between `arm_for_next` and the return of
    `disarm` or `close`; the worker's thread only outside of that."""

    def __init__(self, claims: Claims, links: Mapping[int, ShardLink]) -> None:
        self._claims = claims
        self._links = links
        self._changed = threading.Condition()
        self._at: float | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def arm_for_next(self) -> None:
        """Claim the batch after the one that starts now, when `Claims` wants to."""
        if self._claims.wake_at is None:
            return
        with self._changed:
            self._at = self._claims.wake_at
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()

    def disarm(self) -> None:
        """Return when the claims are sent, or will not be."""
        with self._changed:
            self._at = None

    def close(self) -> None:
        with self._changed:
            self._at, self._is_closed = None, True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                left_s = None if self._at is None else self._at - time.monotonic()
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                self._at = None
                for claim in self._claims.decide(time.monotonic()):
                    assert isinstance(claim, ClaimRows), "the only slot is busy"
                    # The worker's thread notices that a shard is gone.
                    with contextlib.suppress(OSError):
                        send_claim(claim, self._links)
