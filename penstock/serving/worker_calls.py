"""A worker's end of the calls that its model's code makes to other models.

Calls leave on a socket of their own to each shard, because the thread that reads the others waits
for the model meanwhile. A thread that starts with the first call reads the answers. Calls go to the
shard of the batch that makes them: it knows for whom the batch runs, and has the table of models.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from penstock.backends import model_calls
from penstock.backends.model_calls import CalledAnswer, Deliver, ModelCall
from penstock.errors import BackendFailed, InvalidRequest, NotReady, TooLarge
from penstock.processes.channel import Channel
from penstock.serving.call_parcels import Packed, pack, unpack
from penstock.wire import frames

log = logging.getLogger("penstock.worker")

# Shards hear of the time that calls were open at least this often, as a share of `hang_s`.
REPORT_SHARE = 0.1
SHARD_GONE = "the shard that ran the call has ended"
CLOSED = "the model is being closed, and calls no others any more"


class Route(NamedTuple):
    """A batch of a shard, by the number of its link."""

    link: int
    batch: int


@dataclass(frozen=True, slots=True)
class BatchCalls:
    """Where the calls of one batch go (`CallLine`): to the first of its shards that is there."""

    calls: WorkerCalls
    routes: tuple[Route, ...]

    def start(self, call: ModelCall, deliver: Deliver) -> Callable[[], None]:
        return self.calls.start(self.routes, call, deliver)


class WaitClock:
    """Counts the time in which any calls are open. Pure."""

    def __init__(self) -> None:
        self._num_open = 0
        self._total_s = 0.0
        self._since = 0.0

    def opened(self, now: float) -> None:
        if not self._num_open:
            self._since = now
        self._num_open += 1

    def ended(self, now: float) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._total_s += now - self._since

    def total_s(self, now: float) -> float:
        return self._total_s + (now - self._since if self._num_open else 0.0)


class OpenCall(NamedTuple):
    deliver: Deliver
    link: int


class WorkerCalls:
    """Invariant: a call in `_open` gets its final answer or is cancelled, whatever happens to its
    shard and to this worker. The lock guards everything; answers are delivered without it."""

    def __init__(self, hang_s: float) -> None:
        self._report_s = hang_s * REPORT_SHARE
        self._lock = threading.Lock()
        self._channels: dict[int, Channel] = {}
        self._open: dict[int, OpenCall] = {}
        self._numbers = itertools.count(1)
        self._clock = WaitClock()
        self._reported_s = 0.0
        self._poll = select.epoll()
        # Ends the thread.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake_fd, select.EPOLLIN)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def attach(self, link: int, fd: int) -> None:
        """Use the socket to one more shard."""
        channel = Channel(socket.socket(fileno=fd))
        with self._lock:
            self._channels[link] = channel
            self._poll.register(channel.fileno(), select.EPOLLIN)
        # For code that runs for no batch.
        model_calls.use(BatchCalls(self, ()))

    def detach(self, link: int) -> None:
        """Forget a shard that is gone. If there is a thread, it hears of that itself: descriptors
        that it may be about to read are closed by it alone."""
        with self._lock:
            if self._thread is None:
                self._drop(link)

    def begin(self, routes: Sequence[Route]) -> None:
        """Send the calls of the batch that this thread is about to run to its shards."""
        model_calls.use(BatchCalls(self, tuple(routes)))

    def start(
        self, routes: Sequence[Route], call: ModelCall, deliver: Deliver
    ) -> Callable[[], None]:
        """As in `CallLine`."""
        packed = pack(call.inputs)
        try:
            number = self._send(routes, call, packed, deliver)
        finally:
            packed.close()
        return lambda: self._cancel(number)

    def close(self) -> None:
        """Fail what is open, and refuse what comes."""
        if self._poll.closed:
            return
        with self._lock:
            self._is_closed = True
            lost = self._take(lambda call: True)
        _fail_all(lost, CalledAnswer(error_kind="NotReady", error=CLOSED))
        if self._thread is not None:
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
        for link in list(self._channels):
            self._drop(link)
        self._poll.close()
        os.close(self._wake_fd)

    def _send(
        self, routes: Sequence[Route], call: ModelCall, packed: Packed, deliver: Deliver
    ) -> int:
        """Send a call and return its number."""
        with self._lock:
            if self._is_closed:
                raise NotReady(CLOSED)
            link, batch = self._choose(routes)
            number = next(self._numbers)
            frame = frames.CallModel(
                number,
                batch,
                call.model_name,
                call.model_version,
                packed.parcel,
                call.id,
                tuple(call.outputs),
                dict(call.parameters),
                call.action,
            )
            data = _encode(frame)
            if len(data) > frames.MAX_FRAME_BYTES:
                raise TooLarge("the names, the id and the parameters of the call are too large")
            try:
                self._channels[link].send(data, packed.fds)
            except OSError as error:
                raise BackendFailed(f"the call cannot be sent: {error}") from None
            self._open[number] = OpenCall(deliver, link)
            self._clock.opened(time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
            return number

    def _choose(self, routes: Sequence[Route]) -> Route:
        """Return the first route whose shard is there; any shard, without batch, if none is: the
        batch has ended, but its code goes on."""
        for route in routes:
            if route.link in self._channels:
                return route
        if not self._channels:
            raise NotReady(SHARD_GONE)
        return Route(next(iter(self._channels)), 0)

    def _cancel(self, number: int) -> None:
        with self._lock:
            for call in self._take_one(number):
                channel = self._channels.get(call.link)
                if channel is not None:
                    with contextlib.suppress(OSError):
                        channel.send(frames.encode(frames.CancelCall(number)))

    def _take_one(self, number: int) -> list[OpenCall]:
        """Return an open call, which is over now; nothing if it was."""
        call = self._open.pop(number, None)
        if call is None:
            return []
        self._clock.ended(time.monotonic())
        return [call]

    def _take(self, is_chosen: Callable[[OpenCall], bool]) -> list[OpenCall]:
        numbers = [number for number, call in self._open.items() if is_chosen(call)]
        return [call for number in numbers for call in self._take_one(number)]

    def _drop(self, link: int) -> None:
        channel = self._channels.pop(link, None)
        if channel is not None:
            self._poll.unregister(channel.fileno())
            channel.close()

    # The thread that reads answers.

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                for fd, _ in self._poll.poll(self._report_s):
                    if fd != self._wake_fd:
                        self._receive(fd)
                self._report()
        except BaseException:  # Whoever waits must not wait for ever.
            log.exception("the thread that reads the answers of other models failed")
            with self._lock:
                self._is_closed = True
                lost = self._take(lambda call: True)
            _fail_all(lost, CalledAnswer(error_kind="BackendFailed", error=CLOSED))

    def _receive(self, fd: int) -> None:
        with self._lock:
            [(link, channel)] = [each for each in self._channels.items() if each[1].fileno() == fd]
        received = channel.receive()
        if received is None:
            with self._lock:
                self._drop(link)
                lost = self._take(lambda call: call.link == link)
            _fail_all(lost, CalledAnswer(error_kind="BackendFailed", error=SHARD_GONE))
            return
        data, fds = received
        frame = frames.decode_call_answer(data)
        try:
            outputs = unpack(frame.parcel, fds)
            answer = CalledAnswer(
                outputs,
                frame.parameters,
                frame.error_kind,
                frame.error,
                frame.is_final,
                frame.is_empty,
            )
        except BackendFailed as error:
            answer = CalledAnswer(error_kind="BackendFailed", error=str(error))
        with self._lock:
            if answer.is_final:
                calls = self._take_one(frame.call)
            else:
                calls = [self._open[frame.call]] if frame.call in self._open else []
        for call in calls:
            call.deliver(answer)

    def _report(self) -> None:
        """Tell all shards for how long calls were open, if that is news."""
        with self._lock:
            total_s = self._clock.total_s(time.monotonic())
            if total_s - self._reported_s < self._report_s:
                return
            self._reported_s = total_s
            data = frames.encode(frames.Waited(total_s))
            for channel in self._channels.values():
                with contextlib.suppress(OSError):
                    channel.send(data)


def _encode(frame: frames.CallModel) -> bytes:
    """Encode a call. The code of a model may have given its fields any type; what the shard cannot
    read, it would not answer."""
    try:
        data = frames.encode(frame)
        frames.decode_worker_call(data)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the call cannot be sent: {error}") from None
    return data


def _fail_all(calls: Sequence[OpenCall], answer: CalledAnswer) -> None:
    for call in calls:
        call.deliver(answer)
