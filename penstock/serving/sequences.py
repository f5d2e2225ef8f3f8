"""The live sequences of one model: which of them holds a slot of which instance, and whose request
may run. Pure: time is an argument. `sequence_batcher` forms batches of what is ready.

Invariant: at most one request of a sequence runs, on the instance of its slot; the others wait in
their order. A sequence without a slot waits in line for the next free one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from penstock.errors import BackendFailed, InvalidRequest, PenstockError
from penstock.serving.model_gauges import ModelGauges
from penstock.types import Parameter, Request

# Ended sequences whose fate a late request is told.
MAX_REMEMBERED = 1024
Fate = Literal["end", "restarted", "idle", "lost", "cancelled"]
FATES: tuple[Fate, ...] = ("end", "restarted", "idle", "lost", "cancelled")
Broken = list[tuple[Request, PenstockError]]


def sequence_id(request: Request) -> Parameter:
    """Return the id of a request's sequence; 0 or an empty text if it belongs to none."""
    return request.parameters.get("sequence_id", 0) if request.parameters else 0


def is_start(request: Request) -> bool:
    return bool(request.parameters and request.parameters.get("sequence_start"))


def is_end(request: Request) -> bool:
    return bool(request.parameters and request.parameters.get("sequence_end"))


class LiveSequence:
    """`place` is its instance and slot; None: it waits in line. While it `is_open`, requests that
    do not start a sequence may follow. `idle_since` counts if nothing waits or runs."""

    __slots__ = ("caller", "id", "idle_since", "is_open", "place", "running", "waiting")

    def __init__(self, id: Parameter, caller: bytes) -> None:
        self.id = id
        # Digest of the API key that it belongs to.
        self.caller = caller
        self.place: tuple[int, int] | None = None
        self.waiting: deque[Request] = deque()
        self.running: Request | None = None
        self.is_open = True
        self.idle_since = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether a request of it has run, so that there is a state to lose."""
        return self.running is not None or not self.waiting or not is_start(self.waiting[0])


class SequenceTable:
    """Owned by the core's event loop."""

    def __init__(
        self,
        model: str,
        num_slots: int,
        max_idle_s: float,
        num_ended: dict[str, int] | None = None,
    ) -> None:
        """`num_ended` is a table to count in."""
        self._model = model
        self._num_slots = num_slots
        self._max_idle_s = max_idle_s
        self._live: dict[Parameter, LiveSequence] = {}
        # Sequences without a slot, in the order in which they get one.
        self._line: OrderedDict[LiveSequence, None] = OrderedDict()
        # By open instance: its free slots as a heap, and the sequences whose next request may run.
        self._free: dict[int, list[int]] = {}
        self._ready: dict[int, dict[LiveSequence, None]] = {}
        # Open instances that get no further sequences.
        self._vacated: set[int] = set()
        self._running: dict[Request, LiveSequence] = {}
        # When an idle sequence may end; entries of sequences that went on are skipped.
        self._idle: list[tuple[float, int, LiveSequence]] = []
        self._turns = itertools.count()
        self._fates: OrderedDict[Parameter, str] = OrderedDict()
        self.num_ended = {} if num_ended is None else num_ended
        self.num_ended.update(dict.fromkeys(FATES, 0))

    @property
    def num_live(self) -> int:
        """Sequences that hold a slot."""
        return len(self._live) - len(self._line)

    @property
    def num_in_line(self) -> int:
        return len(self._line)

    @property
    def num_slots(self) -> int:
        """Slots of all open instances, without those that get no further sequences."""
        return self._num_slots * len(self._free.keys() - self._vacated)

    @property
    def next_idle(self) -> float | None:
        """When the next sequence may end because it is idle."""
        return self._idle[0][0] if self._idle else None

    def requests(self) -> Iterator[Request]:
        """Yield the requests that wait."""
        for sequence in self._live.values():
            yield from sequence.waiting

    def open(self, instance: int) -> None:
        """Offer the slots of an instance."""
        self._free[instance] = list(range(self._num_slots))
        self._ready[instance] = {}
        self._fill()

    def close(self, instance: int, reason: str) -> Broken:
        """End the sequences of an instance whose worker is gone; return what waited in them. What
        runs there is answered by others."""
        self._free.pop(instance, None)
        self._ready.pop(instance, None)
        self._vacated.discard(instance)
        broken: Broken = []
        again: list[LiveSequence] = []
        for sequence in list(self._live.values()):
            if sequence.place is None or sequence.place[0] != instance:
                continue
            if sequence.has_begun:
                broken += self._break(sequence, "lost", f"lost: {reason}")
            if sequence.running is not None:
                del self._running[sequence.running]
                sequence.running = None
            sequence.place = None
            if sequence.waiting:
                again.append(sequence)
            else:
                del self._live[sequence.id]
        for sequence in reversed(again):
            self._line[sequence] = None
            self._line.move_to_end(sequence, last=False)
        self._fill()
        return broken

    def vacate(self, instance: int) -> bool:
        """Begin no sequence on an instance; those that it has go on. Return whether it has none."""
        if instance in self._free:
            self._vacated.add(instance)
        return instance not in self._free or len(self._free[instance]) == self._num_slots

    def occupy(self, instance: int) -> None:
        """Offer the free slots of an instance again."""
        self._vacated.discard(instance)
        self._fill()

    def add(self, request: Request, now: float) -> LiveSequence:
        """Queue a request in its sequence; InvalidRequest if it cannot belong to it."""
        id = sequence_id(request)
        if not id:
            what = f"inference request to model '{self._model}'"
            raise InvalidRequest(f"{what} must specify a non-zero or non-empty correlation ID")
        self.expire(now)
        sequence = self._live.get(id)
        if sequence is not None and sequence.caller != request.caller:
            raise InvalidRequest(f"sequence {id} of model '{self._model}' is of another API key")
        starts = is_start(request)
        if not starts and (sequence is None or not sequence.is_open):
            raise InvalidRequest(self._needs_start(id))
        if sequence is None:
            sequence = self._live[id] = LiveSequence(id, request.caller)
            self._line[sequence] = None
        elif starts and sequence.is_open:
            self.num_ended["restarted"] += 1
        if starts:
            self._fates.pop(id, None)
        sequence.is_open = not is_end(request)
        sequence.waiting.append(request)
        if sequence.place is None:
            self._fill()
        else:
            self._check_ready(sequence)
        return sequence

    def ready(self, instance: int) -> list[Request]:
        """Return the requests that may run on an instance now, one of each sequence, the one that
        came first before the others."""
        found = [sequence.waiting[0] for sequence in self._ready.get(instance, ())]
        return sorted(found, key=_came)

    def take(self, request: Request, sequence: LiveSequence) -> int:
        """Run a request that is ready; return the slot of its sequence."""
        assert sequence.place is not None and sequence.waiting[0] is request
        instance, slot = sequence.place
        sequence.waiting.popleft()
        sequence.running = request
        self._running[request] = sequence
        del self._ready[instance][sequence]
        return slot

    def put_back(self, request: Request) -> LiveSequence | None:
        """Undo a `take` of a request that was not run. None if its sequence is lost meanwhile."""
        sequence = self._running.pop(request, None)
        if sequence is not None:
            sequence.running = None
            sequence.waiting.appendleft(request)
            self._check_ready(sequence)
        return sequence

    def finish(self, request: Request, now: float) -> None:
        """Go on after a request that has run. Does nothing for one that is known no more."""
        sequence = self._running.pop(request, None)
        if sequence is None:
            return
        sequence.running = None
        if is_end(request):
            self.num_ended["end"] += 1
        self._go_on(sequence, now, yields=True)

    def remove(self, request: Request, sequence: LiveSequence, now: float) -> Broken:
        """Take away a request that waits. The rest of its sequence cannot be computed without it;
        return what waited behind it."""
        if sequence.place is not None and sequence.place[0] in self._ready:
            self._ready[sequence.place[0]].pop(sequence, None)
        before = list(itertools.takewhile(lambda each: each is not request, sequence.waiting))
        for _ in range(len(before) + 1):
            sequence.waiting.popleft()
        broken: Broken = []
        if is_end(request):
            self.num_ended["cancelled"] += 1
        else:
            broken = self._break(sequence, "cancelled", "cancelled: a request of it was")
        sequence.waiting.extendleft(reversed(before))
        self._go_on(sequence, now, yields=not before)
        return broken

    def expire(self, now: float) -> None:
        """End the sequences that have been idle for too long."""
        while self._idle and self._idle[0][0] <= now:
            due, _, sequence = heapq.heappop(self._idle)
            is_idle = sequence.running is None and not sequence.waiting
            if not is_idle or self._live.get(sequence.id) is not sequence:
                continue
            if sequence.idle_since + self._max_idle_s > now:
                continue  # It went on meanwhile, and has a later entry.
            text = f"ended after {self._max_idle_s:g} s without a request"
            self._end(sequence, "idle", text)
            self._free_slot(sequence)
        self._fill()

    def end_idle(self, now: float) -> None:
        """End every sequence as soon as nothing of it waits: no more requests will come."""
        self._max_idle_s = 0.0
        for sequence in list(self._live.values()):
            if sequence.place is not None and sequence.running is None and not sequence.waiting:
                heapq.heappush(self._idle, (now, next(self._turns), sequence))
                sequence.idle_since = min(sequence.idle_since, now)
        self.expire(now)

    def drop_all(self) -> list[Request]:
        """Forget what waits and return it; what runs is finished."""
        dropped = list(self.requests())
        for sequence in list(self._live.values()):
            sequence.waiting.clear()
            sequence.is_open = False
            if sequence.running is None:
                self._free_slot(sequence)
        self._line.clear()
        for ready in self._ready.values():
            ready.clear()
        return dropped

    def _needs_start(self, id: Parameter) -> str:
        what = f"inference request for sequence {id} to model '{self._model}'"
        text = f"{what} must specify the START flag on the first request of the sequence"
        fate = self._fates.get(id)
        return f"{text}; the sequence {fate}" if fate else text

    def _go_on(self, sequence: LiveSequence, now: float, *, yields: bool) -> None:
        """Make the next request ready, or give the slot to another sequence; if it `yields`, also
        if the same id starts again."""
        if sequence.running is not None:
            return
        if sequence.waiting:
            is_new = yields and is_start(sequence.waiting[0])
            if sequence.place is not None and self._line and is_new:
                # A new sequence of the same id waits its turn.
                self._give_up(sequence)
                self._line[sequence] = None
                self._fill()
            else:
                self._check_ready(sequence)
        elif not sequence.is_open or sequence.place is None:
            self._free_slot(sequence)
            self._fill()
        else:
            sequence.idle_since = now
            due = now + self._max_idle_s
            heapq.heappush(self._idle, (due, next(self._turns), sequence))

    def _check_ready(self, sequence: LiveSequence) -> None:
        if sequence.place is not None and sequence.running is None and sequence.waiting:
            self._ready[sequence.place[0]][sequence] = None

    def _break(self, sequence: LiveSequence, fate: Fate, why: str) -> Broken:
        """End a sequence that cannot go on; return its requests up to the next START."""
        broken: Broken = []
        while sequence.waiting and not is_start(sequence.waiting[0]):
            request = sequence.waiting.popleft()
            broken.append((request, BackendFailed(f"sequence {sequence.id} {why}")))
        if not sequence.waiting:
            was_open, sequence.is_open = sequence.is_open, False
            self._end(sequence, fate, f"was {why}" if was_open else "")
        else:
            self.num_ended[fate] += 1
        return broken

    def _end(self, sequence: LiveSequence, fate: Fate, text: str) -> None:
        """Count an end, and remember it for late requests."""
        self.num_ended[fate] += 1
        if text:
            self._fates[sequence.id] = text
            self._fates.move_to_end(sequence.id)
            while len(self._fates) > MAX_REMEMBERED:
                self._fates.popitem(last=False)

    def _free_slot(self, sequence: LiveSequence) -> None:
        """Forget a sequence."""
        del self._live[sequence.id]
        self._line.pop(sequence, None)
        self._give_up(sequence)

    def _give_up(self, sequence: LiveSequence) -> None:
        if sequence.place is None:
            return
        instance, slot = sequence.place
        sequence.place = None
        if instance in self._free:
            self._ready[instance].pop(sequence, None)
            heapq.heappush(self._free[instance], slot)

    def _fill(self) -> None:
        """Give free slots to the sequences in line; instances with the most free slots first."""
        while self._line:
            offered = self._free.keys() - self._vacated
            instance = max(offered, key=self._room, default=-1)
            if instance < 0 or not self._free[instance]:
                return
            sequence, _ = self._line.popitem(last=False)
            sequence.place = instance, heapq.heappop(self._free[instance])
            self._check_ready(sequence)

    def _room(self, instance: int) -> tuple[int, int]:
        return len(self._free[instance]), -instance


def _came(request: Request) -> float:
    return request.timings.queued


def read_gauges(others: Callable[[], ModelGauges], table: SequenceTable) -> ModelGauges:
    """Return what a model holds, with its sequences."""
    counts = {"num_sequences": table.num_live, "num_waiting_sequences": table.num_in_line}
    return replace(others(), **counts)
