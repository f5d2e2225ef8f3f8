"""Kills the process groups of workers when the core dies before it can do so.

A worker leads a process group, which contains all processes that its model forks; the core kills
the group when the worker exits. A core killed by SIGKILL cannot, and the kernel then kills only the
worker (PR_SET_PDEATHSIG), not its children. So a small process next to the core knows the groups
and kills them when its pipe from the core closes. Children that leave their group (setsid) escape.
Runs as a script, without the package: it must be small and start fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the time that importing typing takes.
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class Reaper:
    """The core's side. The reaper process runs while there is a group to watch; if it dies, the
    event loop of the last `watch` replaces it."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._loop: AbstractEventLoop | None = None
        # Readable for the loop when the process has died; -1 if no loop waits for that.
        self._pidfd = -1

    @property
    def pid(self) -> int:
        """Process id; 0 if it is not running."""
        return self._process.pid if self._process is not None else 0

    def watch(self, group: int, loop: AbstractEventLoop | None = None) -> None:
        """Kill the group when this process dies. If the reaper cannot be started, do nothing: the
        model can still be served."""
        self._groups.add(group)
        if loop is not self._loop:
            self._ignore_death()
            self._loop = loop
        if self._process is None or not self._send(f"+{group}"):
            self._restart()
        elif self._pidfd < 0:
            self._await_death()

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        if not self._groups:
            self._stop()
        elif not self._send(f"-{group}"):
            self._restart()

    def _send(self, line: str) -> bool:
        if self._process is None or self._process.stdin is None:
            return False
        try:
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
        except OSError:
            return False
        return True

    def _restart(self) -> None:
        self._stop()
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={},
                bufsize=0,
            )
            for group in self._groups:
                self._send(f"+{group}")
            self._await_death()

    def _await_death(self) -> None:
        if self._loop is None or self._process is None:
            return
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._restart)

    def _ignore_death(self) -> None:
        if self._pidfd < 0 or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1

    def _stop(self) -> None:
        """Kill the reaper process, without killing any group."""
        self._ignore_death()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def kill_group(group: int) -> None:
    """Kill all remaining processes of a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    # A signal to the whole service also stops the core; the reaper must outlive it to clean up.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    main()
