"""Checks a grammar in a process of its own, a fork of the renderer, which has read the vocabulary.

A grammar of a client may take seconds to compile, or end the process that compiles it. The fork
bears that: it has less priority than the processes that answer, and the kernel ends it when its
processor time is over. Nothing else of the renderer runs there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import NoReturn

from penstock.errors import BackendFailed, InvalidRequest, PenstockError, describe_error
from penstock.processes.endings import die_with_parent

log = logging.getLogger("penstock.text")
# Seconds of processor time for a grammar, and until an answer: the machine may be busy. A schema of
# 2000 patterns takes 0.25 s.
CPU_S, WAIT_S = 1, 4.0
# Priority below that of the processes that answer, by which engines compile too.
NICENESS = 5
MAX_ANSWER = 4096
FINE, INVALID, FAILED = b"=", b"i", b"f"


def check_apart(check: Callable[[], None], cpu_s: int = CPU_S) -> None:
    """Run `check` in a fork and raise what it raises; InvalidRequest if it takes too long or ends
    its process."""
    ours, theirs = os.pipe()
    try:
        try:
            if (child := os.fork()) == 0:
                _run(check, theirs, cpu_s)
        finally:
            os.close(theirs)
        answer = b""
        if select.select([ours], [], [], WAIT_S)[0]:
            answer = os.read(ours, MAX_ANSWER)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finally:
        os.close(ours)
    kind, text = answer[:1], answer[1:].decode("utf-8", "replace")
    if kind == INVALID:
        raise InvalidRequest(text)
    if kind == FAILED:
        log.error("a grammar could not be checked: %s", text)
        raise BackendFailed("the grammar could not be checked")
    if kind != FINE:
        raise InvalidRequest(
            f"the grammar is refused: it takes more than {cpu_s} s, or too much memory, to compile"
        )


def _run(check: Callable[[], None], fd: int, cpu_s: int) -> NoReturn:
    """Be the fork: write the outcome and end without the cleanup of the renderer."""
    try:
        die_with_parent()
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        answer = FINE
        try:
            check()
        except InvalidRequest as error:
            answer = INVALID + str(error).encode()
        except PenstockError as error:
            answer = FAILED + str(error).encode()
        except MemoryError:
            answer = b""
        except BaseException as error:  # Also panics of the library, which are not Exceptions.
            answer = FAILED + describe_error(error).encode()
        os.write(fd, answer[:MAX_ANSWER])
    finally:
        os._exit(0)
