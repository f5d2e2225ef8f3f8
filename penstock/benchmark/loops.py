"""When the next request is sent: after an answer (closed loop), or when it is due (open loop).

Both live on a generator's event loop, take items from a feed and hand exchanges to a target. They
know nothing of protocols, pipes or statistics.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.benchmark.exchange import Collector, TimedExchange
from penstock.benchmark.pacer import Open, Replay, due_times
from penstock.benchmark.targets import Target
from penstock.data import Source
from penstock.types import Tensor

# Pause of a closed-loop client after a failure, so that a dead server is not hammered.
PAUSE_S = 0.02
# Requests sent per turn, before the event loop reads answers.
MAX_AT_ONCE = 32
MAX_KEPT_BYTES = 256 << 20
# Requests in a `RepeatedFeed`, however few inputs they have.
MAX_REPEATED = 4096
# More than any target has in flight. Requests due beyond this are sent later but still count from
# when they were due, so memory stays bounded however far a server falls behind.
MAX_UNDER_WAY = 100_000
MAX_BYTES_UNDER_WAY = 1 << 30
# Requests cancelled per turn, before reports are sent.
MAX_GIVEN_UP = 20_000
TFD_TIMER_ABSTIME = 1
PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None, use_errno=True)


class Feed:
    """Items for exchanges; repeated examples are encoded once."""

    def __init__(self, source: Source, target: Target) -> None:
        self._source = source
        self._encode = target.encode
        self._kept: dict[int, Any] = {}
        self._num_kept_bytes = 0
        # The recorded answer to the last item.
        self.expected: Sequence[Tensor] = ()

    def next(self) -> Any:
        index, sample = self._source.next()
        self.expected = sample.reference
        if index is None:
            return self._encode(sample)
        if index in self._kept:
            return self._kept[index]
        item = self._encode(sample)
        size = len(item) if isinstance(item, bytes) else 1 << 10
        if self._num_kept_bytes + size <= MAX_KEPT_BYTES:
            self._num_kept_bytes += size
            self._kept[index] = item
        return item


class RepeatedFeed:
    """The first requests of a source, all encoded when this is made, and repeated in their order.
    Ends at `max_inputs` different inputs, or when the next would exceed `max_bytes` in all; one is
    taken at least."""

    # Replayed requests are not repeated, so there is nothing to compare with.
    expected: Sequence[Tensor] = ()

    def __init__(self, source: Source, target: Target, max_inputs: int, max_bytes: int) -> None:
        self._items: list[Any] = []
        self._position = 0
        self.num_inputs = self.num_bytes = 0
        known: dict[int, Any] = {}
        while len(self._items) < MAX_REPEATED:
            index, sample = source.next()
            item = None if index is None else known.get(index)
            if item is None:
                size = sum(array.nbytes for array in sample.tensors.values())
                is_full = self.num_inputs == max_inputs or self.num_bytes + size > max_bytes
                if self._items and is_full:
                    break
                item = target.encode(sample)
                self.num_inputs += 1
                self.num_bytes += size
                if index is not None:
                    known[index] = item
            self._items.append(item)

    def __len__(self) -> int:
        return len(self._items)

    def next(self) -> Any:
        item = self._items[self._position]
        self._position = (self._position + 1) % len(self._items)
        return item

    def restart(self) -> None:
        """Begin with the first request again."""
        self._position = 0


class InFlightCount:
    """The number of exchanges in flight, each from its due time until it is done."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        # Done times minus due times, relative to `_zero`: small numbers, so that sums stay exact.
        self._sum_s = 0.0
        self._zero = time.monotonic()

    def begin(self, due: float) -> None:
        self.now += 1
        if self.now > self.most:
            self.most = self.now
        self._sum_s -= due - self._zero

    def end(self, done: float) -> None:
        self.now -= 1
        self._sum_s += done - self._zero

    def area_s(self, moment: float) -> float:
        """Return the number in flight, integrated over time up to this moment."""
        return self._sum_s + self.now * (moment - self._zero)


class LoadLoop:
    """What both loops have: items to send, and what became of them."""

    def __init__(self, feed: Feed | RepeatedFeed, target: Target) -> None:
        self.collector = Collector()
        self.in_flight = InFlightCount()
        self.ended = asyncio.Event()
        # Whether the load has reached its own end.
        self.is_through = False
        self._loop = asyncio.get_running_loop()
        self._next_item = feed.next
        self._send_to = target.send
        self._stop_at = float("inf")


class ClosedLoop(LoadLoop):
    """`share` clients with one request in flight each. Their first requests are due at the start,
    however late this process wakes up."""

    def __init__(self, feed: Feed | RepeatedFeed, target: Target, share: int) -> None:
        super().__init__(feed, target)
        self._share = share
        self._num_pausing = 0
        self._has_begun = False
        if share == 0:
            self.ended.set()

    def start(self, at: float) -> None:
        self._loop.call_later(max(0.0, at - time.monotonic()), self._begin, at)

    def stop(self, at: float) -> None:
        self._stop_at = at
        if at <= time.monotonic():
            self._end_if_done()

    def give_up(self) -> bool:
        """Return True: a closed loop has no unsent requests to cancel."""
        return True

    def close(self) -> None:
        pass

    def _begin(self, at: float) -> None:
        self._has_begun = True
        for _ in range(self._share):
            self._send(at)

    def _send(self, due: float) -> None:
        exchange = TimedExchange(due, self._next_item(), self._finish)
        self.in_flight.begin(time.monotonic())
        self._send_to(exchange)

    def _finish(self, exchange: TimedExchange) -> None:
        self.collector.add(exchange)
        self.in_flight.end(exchange.done)
        if exchange.failure is not None and exchange.done < self._stop_at:
            self._num_pausing += 1
            self._loop.call_later(PAUSE_S, self._resume)
        elif exchange.done < self._stop_at:
            self._send(time.monotonic())
        else:
            self._end_if_done()

    def _resume(self) -> None:
        self._num_pausing -= 1
        if (now := time.monotonic()) < self._stop_at:
            self._send(now)
        else:
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._has_begun and self.in_flight.now == 0 and self._num_pausing == 0:
            self.ended.set()


class Alarm:
    """Calls `ring` on the loop at the moment given to `set`, in `time.monotonic` seconds; setting
    again replaces the earlier moment. By Linux's timerfd, which wakes the loop like a socket: the
    timers of libuv and epoll have millisecond resolution, too coarse for request schedules."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        _libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        loop.add_reader(self._fd, self._woken)
        # An itimerspec: interval, then moment, each in seconds and nanoseconds.
        self._setting = (ctypes.c_long * 4)()

    def set(self, moment: float) -> None:
        # Zero would disarm the timer; a moment in the past fires at once.
        self._setting[2:] = list(divmod(max(1, int(moment * 1e9)), 1_000_000_000))
        _libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, self._setting, None)

    def cancel(self) -> None:
        self._setting[2:] = [0, 0]
        _libc.timerfd_settime(self._fd, 0, self._setting, None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _woken(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # The timer was set again after the wake-up.
        self._ring()


class OpenLoop(LoadLoop):
    """Sends each request when it is due, whatever happened to the earlier ones. `due` is this
    process's share of the schedule: ascending seconds from the start."""

    def __init__(self, feed: Feed | RepeatedFeed, target: Target, due: Iterator[float]) -> None:
        super().__init__(feed, target)
        self._due = due
        self._start = 0.0
        self._next_due: float | None = None
        # Encoded before it is due, so that encoding adds no latency.
        self._item: Any = None
        self._feed = feed
        self._expected: Sequence[Tensor] = ()
        self._is_held = False
        self._is_given_up = False
        self._alarm = Alarm(self._loop, self._ring)

    def start(self, at: float) -> None:
        self._start = at
        self._advance()
        self._await_next()

    def stop(self, at: float) -> None:
        self._stop_at = at
        if self._next_due is not None and self._next_due >= at:
            self._next_due = None
            self._alarm.cancel()
        self._end_if_done()

    def give_up(self) -> bool:
        """Cancel due but unsent requests, MAX_GIVEN_UP per call; True when none is left."""
        self._is_given_up = True
        self._alarm.cancel()
        now = time.monotonic()
        for _ in range(MAX_GIVEN_UP):
            if self._next_due is None:
                break
            TimedExchange(self._next_due, None, self.collector.add).end(now, "cancelled")
            self._advance()
        self._end_if_done()
        return self._next_due is None

    def close(self) -> None:
        self._alarm.close()

    def _advance(self) -> None:
        offset = next(self._due, None)
        if offset is None:
            self.is_through = True
            self._next_due = None
            return
        due = self._start + offset
        self._next_due = due if due < self._stop_at else None
        if self._next_due is not None and not self._is_given_up:
            self._item = self._next_item()
            self._expected = self._feed.expected

    def _ring(self) -> None:
        for _ in range(MAX_AT_ONCE):
            due = self._next_due
            if due is None or due > time.monotonic():
                break
            if self._is_full():
                self._is_held = True
                return
            self.in_flight.begin(due)
            exchange = TimedExchange(due, self._item, self._finish, expected=self._expected)
            self._send_to(exchange)
            self._advance()
        self._await_next()

    def _await_next(self) -> None:
        if self._next_due is None:
            self._alarm.cancel()
            self._end_if_done()
        else:
            self._alarm.set(self._next_due)

    def _finish(self, exchange: TimedExchange) -> None:
        self.collector.add(exchange)
        self.in_flight.end(exchange.done)
        if self._next_due is None:
            self._end_if_done()
        elif self._is_held and not self._is_given_up:
            self._is_held = False
            self._alarm.set(self._next_due)

    def _is_full(self) -> bool:
        size = len(self._item) if isinstance(self._item, bytes) else 0
        num = self.in_flight.now
        return num >= MAX_UNDER_WAY or num * size > MAX_BYTES_UNDER_WAY

    def _end_if_done(self) -> None:
        if self._next_due is None and self.in_flight.now == 0:
            self.ended.set()


def share_of(concurrency: int, index: int, num_processes: int) -> int:
    return concurrency // num_processes + (index < concurrency % num_processes)


def shared_times(load: Open | Replay, seed: int, index: int, num_processes: int) -> Iterator[float]:
    """Yield every n-th of the due times; all processes compute the same sequence."""
    num_before = 0
    for chunk in due_times(load, seed):
        offset = (index - num_before) % num_processes
        yield from chunk[offset::num_processes].tolist()
        num_before += len(chunk)
