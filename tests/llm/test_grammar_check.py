"""Grammars are checked in a fork, which may be slow or die without delaying other requests."""

import os
import signal
import threading
import time

import pytest

from penstock.errors import BackendFailed, InvalidRequest
from penstock.llm.grammar_check import check_apart


def test_what_the_check_raises_is_raised_here() -> None:
    check_apart(lambda: None)

    def refuse() -> None:
        raise InvalidRequest("the grammar is refused: é")

    with pytest.raises(InvalidRequest, match="the grammar is refused: é"):
        check_apart(refuse)


@pytest.mark.parametrize("error", [RuntimeError("x"), BackendFailed("y"), SystemExit(1)])
def test_other_errors_are_not_the_clients(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(BackendFailed, match="the grammar could not be checked"):
        check_apart(fail)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize("check", [end, out_of_memory])
def test_a_grammar_that_ends_its_process_is_the_clients(check) -> None:
    with pytest.raises(InvalidRequest, match="too much memory"):
        check_apart(check)


def test_one_that_takes_too_long_is_ended_while_others_go_on() -> None:
    def loop() -> None:
        while True:
            pass

    gaps, is_over = [], threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not is_over.wait(0.01):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    thread = threading.Thread(target=beat)
    thread.start()
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        check_apart(loop, cpu_s=1)
    took_s = time.monotonic() - began
    is_over.set()
    thread.join()
    assert 0.5 < took_s < 5 and len(gaps) > 10


def test_one_that_stands_still_is_ended_and_no_file_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.llm.grammar_check.WAIT_S", 0.1)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidRequest, match="to compile"):
        check_apart(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    assert len(os.listdir("/proc/self/fd")) == before
