"""A timer finer than an event loop's: libuv and epoll have millisecond resolution, too coarse for
request schedules. Uses Linux's timerfd, which wakes the loop like a socket; elsewhere it falls back
to the loop's own timer.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import os
import time
from collections.abc import Callable

CLOCK_MONOTONIC = 1
TFD_NONBLOCK = os.O_NONBLOCK
TFD_CLOEXEC = os.O_CLOEXEC
TFD_TIMER_ABSTIME = 1
PR_SET_TIMERSLACK = 29


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Setting(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Alarm:
    """Calls `ring` on the loop at the moment given to `set`; setting again replaces the earlier
    moment. Times are `time.monotonic` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._libc = _libc()
        self._fd = -1
        if self._libc is not None:
            self._libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
            self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._woken)
        self._setting = _Setting()
        self._pointer = ctypes.byref(self._setting)

    def set(self, moment: float) -> None:
        if self._fd < 0 or self._libc is None:
            self.cancel()
            self._handle = self._loop.call_later(max(0.0, moment - time.monotonic()), self._ring)
            return
        # Zero would disarm the timer; a moment in the past fires at once.
        nanoseconds = max(1, int(moment * 1e9))
        value = self._setting.value
        value.seconds, value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, self._pointer, None)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._fd >= 0 and self._libc is not None:
            self._setting.value.seconds = self._setting.value.nanoseconds = 0
            self._libc.timerfd_settime(self._fd, 0, self._pointer, None)

    def close(self) -> None:
        self.cancel()
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


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None
    return libc if hasattr(libc, "timerfd_create") else None
