"""Takes batches back from workers that have not started them, because a request in them has ended.

Only workers of several shards hold such batches: another shard's batch may run first, for longer
than predicted. The worker answers with Recalled, or runs the batch if it has just started it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serving.replies import Replies
from penstock.serving.request_queue import QUEUE_TIMEOUT, RequestQueue
from penstock.serving.worker_place import WorkerPlace
from penstock.types import Request
from penstock.wire import frames


class Recalls:
    """`workers` are the dispatcher's."""

    def __init__(
        self, workers: Sequence[WorkerPlace], queue: RequestQueue, replies: Replies
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._replies = replies

    def expire(self, now: float) -> None:
        """Refuse the requests that waited too long, in the queue or in a worker."""
        for request in self._queue.expire(now):
            if self.recall(request):
                self._replies.refuse(request, QUEUE_TIMEOUT, is_queued=False)

    def recall(self, request: Request) -> bool:
        """Take back the batch of a request that ends now; the others in it are queued again. False
        if the request is in no batch that may be waiting for its start."""
        for worker in self._workers:
            for batch in worker.batches:
                if not batch.is_started and request in batch.requests:
                    if not batch.is_recalled:
                        batch.is_recalled = True
                        worker.send(frames.Recall(batch.id))
                    return True
        return False
