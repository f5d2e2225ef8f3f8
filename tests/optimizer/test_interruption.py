"""Ctrl-C is heard at once, whatever the main thread does; the second one ends everything."""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock.optimizer.interruption import Interruption, finish
from penstock.system.exit_codes import ExitCode

LONG_S = 60.0


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """A shell that runs tests in the background ignores SIGINT for all of them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Heard:
    """What was told, and how the process would have ended."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.codes: list[int] = []
        self.told = threading.Semaphore(0)
        self.ended = threading.Event()

    def tell(self, count: int) -> None:
        self.counts.append(count)
        self.told.release()

    def end(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()


def interrupt(heard: Heard, number: signal.Signals = signal.SIGINT) -> None:
    """From the terminal, while this process waits for something."""
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
        threading.Event().wait(LONG_S)
    assert heard.told.acquire(timeout=LONG_S)


def test_the_first_is_told_and_ends_what_runs() -> None:
    heard = Heard()
    with Interruption(heard.tell, heard.end) as interruption:
        interrupt(heard)
    assert (heard.counts, heard.codes) == ([1], [])
    assert interruption.count == 1


def test_sigterm_ends_a_run_as_ctrl_c_does() -> None:
    heard = Heard()
    # Without the handler SIGTERM would end the tests.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with Interruption(heard.tell, heard.end) as interruption:
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
            interrupt(heard, signal.SIGTERM)
            interrupt(heard)
        assert (heard.counts, interruption.count) == ([1, 2], 2)
        assert signal.getsignal(signal.SIGTERM) not in (signal.default_int_handler, None)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_is_told_while_the_main_thread_is_inside_a_library() -> None:
    """A lock of C, which no signal interrupts, is released only when the Ctrl-C has been told: a
    signal handler of Python would run after that."""
    libc = ctypes.CDLL(None)
    lock = ctypes.create_string_buffer(256)
    assert libc.pthread_mutex_init(lock, None) == 0
    libc.pthread_mutex_lock(lock)
    heard = Heard()
    was_told: list[bool] = []

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        was_told.append(heard.told.acquire(timeout=LONG_S))
        libc.pthread_mutex_unlock(lock)

    with Interruption(heard.tell, heard.end), pytest.raises(KeyboardInterrupt):
        presser = threading.Timer(0.2, press)
        presser.start()
        libc.pthread_mutex_lock(lock)
        threading.Event().wait(LONG_S)
    presser.join()
    assert was_told == [True]


def test_the_second_ends_it_after_a_while_and_the_third_at_once() -> None:
    heard = Heard()
    with Interruption(heard.tell, heard.end, grace_s=0.01):
        interrupt(heard)
        assert not heard.ended.wait(0.1), "the first one may take as long as it needs"
        interrupt(heard)
        assert heard.ended.wait(LONG_S)
    assert heard.codes == [ExitCode.INTERRUPTED]
    heard = Heard()
    with Interruption(heard.tell, heard.end, grace_s=LONG_S):
        for _ in range(3):
            interrupt(heard)
        assert heard.ended.wait(LONG_S)
    assert (heard.counts, heard.codes) == ([1, 2, 3], [ExitCode.INTERRUPTED])


def test_a_second_one_that_ends_in_time_ends_as_usual() -> None:
    heard = Heard()
    with Interruption(heard.tell, heard.end, grace_s=10 * LONG_S):
        interrupt(heard)
        interrupt(heard)
    for thread in threading.enumerate():
        if thread.name.startswith("interruption"):
            thread.join(LONG_S)
            assert not thread.is_alive(), "it still waits to end the process"
    assert heard.codes == []


def test_a_terminal_that_is_gone_changes_nothing() -> None:
    told = threading.Event()

    def gone(count: int) -> None:
        told.set()
        raise OSError("stderr is closed")

    with Interruption(gone) as interruption:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(LONG_S)
        assert told.wait(LONG_S)
    assert interruption.count == 1


def test_afterwards_everything_is_as_it_was() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Interruption(lambda count: None):
        pass
    assert set(os.listdir("/proc/self/fd")) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_nothing_is_heard() -> None:
    def run() -> None:
        with Interruption(lambda count: None):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


class TestFinish:
    def test_the_first_interruption_is_noted_and_the_work_done(self) -> None:
        findings = SimpleNamespace(is_interrupted=False)
        turns = iter([KeyboardInterrupt, None])

        def work() -> str:
            if next(turns):
                raise KeyboardInterrupt
            return "saved"

        assert finish(findings, work) == "saved"
        assert findings.is_interrupted

    def test_the_second_ends_it(self) -> None:
        def work() -> str:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            finish(SimpleNamespace(is_interrupted=True), work)
        with pytest.raises(KeyboardInterrupt):
            finish(SimpleNamespace(is_interrupted=False), work)
