"""The queue of a model of sequences: which requests of which sequences run together, and when.

A batch has at most one request of a sequence, all of one instance (`sequences`). Pure: time is an
argument. As with the other batchers, the caller asks whenever an instance is free and again at
`wake_at`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.config import ModelConfig
from penstock.errors import InvalidRequest, Overloaded
from penstock.serving.batcher import Batcher
from penstock.serving.sequences import Broken, LiveSequence, SequenceTable, sequence_id
from penstock.types import Request

LARGEST_IDS = {
    "UINT64": (1 << 64) - 1, "INT64": (1 << 63) - 1, "UINT32": (1 << 32) - 1, "INT32": (1 << 31) - 1
}  # fmt: skip


class SequenceBatcher(Batcher):
    """Owned by the core's event loop. `broken` are requests that cannot run any more, with their
    errors; the caller takes them."""

    def __init__(self, config: ModelConfig, num_ended: dict[str, int] | None = None) -> None:
        super().__init__(config.batching)
        assert config.sequences is not None
        self._name = config.name
        types = [each.datatype for each in config.sequences.controls if each.kind == "CORRID"]
        # What the model takes ids as; empty: it does not see them.
        self._id_type = types[0] if types else ""
        slots = config.num_sequence_slots
        self.table = SequenceTable(config.name, slots, config.sequences.max_idle_s, num_ended)
        # With direct batching, as many rows are worth waiting for.
        self._enough = math.ceil(config.sequences.min_utilization * slots)
        self._is_direct = config.sequences.is_direct
        # By instance: when its requests have waited long enough for others.
        self._due: dict[int, float] = {}
        self.broken: Broken = []

    @property
    def next_expiry(self) -> float | None:
        return self.table.next_idle

    def requests(self) -> Iterator[Request]:
        """Yield the requests that wait."""
        return self.table.requests()

    def open(self, instance: int) -> None:
        """Use an instance whose worker is ready."""
        self.table.open(instance)

    def lose(self, instance: int, reason: str) -> None:
        """End the sequences of an instance whose worker is gone or about to go."""
        self._due.pop(instance, None)
        self._note(self.table.close(instance, reason))

    def add(self, request: Request, geometry: object, now: float) -> None:
        """Queue the request; raise InvalidRequest or Overloaded."""
        if request.num_rows != 1:
            text = "must specify batch-size 1 due to requirements of sequence batcher"
            raise InvalidRequest(f"inference request to model '{self._name}' {text}")
        self._check_id(request)
        try:
            self._admit(request, now)
        except Overloaded as error:
            table = self.table
            held = f"{table.num_live} of {table.num_slots} slots are held by sequences"
            text = f"{error}; {held}, {table.num_in_line} sequences wait for one"
            raise Overloaded(text) from None
        request.ticket.queue = self.table.add(request, now)
        self._count_queued(request, 1)

    def expire(self, now: float) -> list[Request]:
        """End idle sequences. No request of a sequence is refused because it waited."""
        self.table.expire(now)
        return []

    def next_of(self, instance: int, now: float) -> list[Request] | None:
        """Return the batch to run now on this instance; None: not yet (see `wake_at`)."""
        self._due.pop(instance, None)
        ready = self.table.ready(instance)
        batch = self._form_of(ready, instance, now) if ready else []
        for request in batch:
            sequence = request.ticket.queue
            assert isinstance(sequence, LiveSequence)
            request.ticket.slot = self.table.take(request, sequence)
            request.ticket.queue = None
            self._count_queued(request, -1)
        times = list(self._due.values())
        if self.next_expiry is not None:
            times.append(self.next_expiry)
        self.wake_at = min(times, default=None)
        return batch or None

    def finished(self, requests: list[Request], now: float) -> None:
        """Go on with the sequences of requests that have run, or that failed."""
        for request in requests:
            self.table.finish(request, now)

    def put_back(self, requests: list[Request], geometry: object) -> None:
        """Undo a `next_of` for requests that were not run."""
        self.closed_by = "no room"
        for request in requests:
            sequence = self.table.put_back(request)
            if sequence is not None:
                request.ticket.queue = sequence
                self._count_queued(request, 1)

    def remove(self, request: Request) -> bool:
        """Remove a request that need not run, which ends its sequence. False if it does not wait
        here."""
        sequence = request.ticket.queue
        if not isinstance(sequence, LiveSequence):
            return False
        request.ticket.queue = None
        self._count_queued(request, -1)
        self._note(self.table.remove(request, sequence, request.timings.queued))
        return True

    def drain(self) -> list[Request]:
        """Remove and return all requests that wait."""
        dropped = self.table.drop_all()
        for request in dropped:
            request.ticket.queue = None
            self._count_queued(request, -1)
        return dropped

    def take_broken(self) -> Broken:
        """Return the requests that cannot run any more, once."""
        broken, self.broken = self.broken, []
        return broken

    def describe(self) -> str:
        """Return the state of the sequences in one sentence."""
        table = self.table
        ended = ", ".join(f"{count} {fate}" for fate, count in table.num_ended.items() if count)
        slots = f"{table.num_live} sequences hold {table.num_slots} slots"
        return f"{slots}, {table.num_in_line} wait for one; ended: {ended or 'none'}"

    def _form_of(self, ready: list[Request], instance: int, now: float) -> list[Request]:
        """Return what runs now of the requests that are ready, oldest first."""
        geometry = ready[0].ticket.fit.plan.geometry
        alike = [each for each in ready if each.ticket.fit.plan.geometry is geometry]
        batch = alike[: self._max_rows]
        self.closed_by = "queue empty"
        if len(batch) == self._max_rows:
            self.closed_by = self._full
        elif len(alike) < len(ready):
            self.closed_by = "other shape"
        delay_s = self.policy.max_queue_delay_s
        if delay_s == 0 and (self._is_direct or not self._preferred):
            return batch
        is_late = now >= ready[0].timings.queued + delay_s
        if self._is_direct:
            is_due = is_late or len(batch) >= max(1, self._enough)
        else:
            sizes = [size for size in self._preferred if size <= len(batch)]
            if sizes and not is_late:
                self.closed_by = "preferred size"
                return batch[: max(sizes)]
            is_due = is_late or len(batch) == self._max_rows or len(alike) < len(ready)
        if is_due:
            self.closed_by = "delay expired" if is_late and delay_s else self.closed_by
            return batch
        self._due[instance] = ready[0].timings.queued + delay_s
        return []

    def _check_id(self, request: Request) -> None:
        """Check that the model's CORRID input can hold the id."""
        id = sequence_id(request)
        if not self._id_type or not id:
            return
        where = f"sequence_id {id!r:.40} of a request to model '{self._name}'"
        if isinstance(id, str) is not (self._id_type == "BYTES"):
            expected = "a string" if self._id_type == "BYTES" else "an integer"
            raise InvalidRequest(f"{where}: expected {expected}, its CORRID is {self._id_type}")
        if isinstance(id, int) and id > LARGEST_IDS[self._id_type]:
            text = f"the largest of its CORRID's type {self._id_type} is"
            raise InvalidRequest(f"{where}: {text} {LARGEST_IDS[self._id_type]}")

    def _note(self, broken: Broken) -> None:
        for request, _ in broken:
            request.ticket.queue = None
            self._count_queued(request, -1)
        self.broken += broken

    def _count_queued(self, request: Request, step: int) -> None:
        self.num_queued += step
        self._counts[request.priority] += step
        self._sizes[request.priority] += step
