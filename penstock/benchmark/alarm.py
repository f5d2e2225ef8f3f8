"""A timer finer than an event loop's: libuv and epoll have millisecond resolution, too coarse for
request schedules. Uses Linux's timerfd, which wakes the loop like a socket.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

TFD_TIMER_ABSTIME = 1
PR_SET_TIMERSLACK = 29
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """Calls `ring` on the loop at the moment given to `set`; setting again replaces the earlier
    moment. Times are `time.monotonic` seconds."""

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
