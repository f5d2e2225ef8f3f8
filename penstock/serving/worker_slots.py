"""The slots of one worker on the shared page: which of them run a batch, and until when.

Shards predict waits from them, and send batches unasked to a worker that shows an idle slot. Owned
by the worker's thread that decides what runs.
"""

from __future__ import annotations

from penstock.serving.claims import StartBatch
from penstock.serving.shared_page import SharedPage
from penstock.serving.shares import Queued


class WorkerSlots:
    """`block` is the model's on the page, `slots` are the worker's in it. The last of them do not
    exist if the worker can run only `num_slots` batches at once."""

    def __init__(self, page: SharedPage, block: int, slots: range, num_slots: int) -> None:
        self._page = page
        self._block = block
        self._free = list(slots[:num_slots])
        self._busy: dict[StartBatch, int] = {}
        for slot in self._free:
            page.show_idle(block, slot)
        for slot in slots[num_slots:]:
            page.show_missing(block, slot)

    def start(self, batch: StartBatch) -> None:
        self._busy[batch] = slot = self._free.pop(0)
        self._page.show_batch(self._block, slot, batch.began, batch.ends_at, batch.num_rows)

    def end(self, batch: StartBatch) -> None:
        """Free the slot of a batch. It is not shown as idle before `rest`: the worker may know what
        it runs next."""
        self._free.append(self._busy.pop(batch))

    def rest(self) -> None:
        """Show the free slots as idle: the worker knows nothing that could run in them."""
        for slot in self._free:
            self._page.show_idle(self._block, slot)

    def read(self, shard: int, now: float) -> Queued:
        """Return what a shard shows of its queue."""
        return self._page.read_queue(self._block, shard, now)

    def close(self) -> None:
        self._page.close()
