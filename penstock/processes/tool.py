"""A child process that does one job for this one: trials, test servers, profilers, model code.

It has its own session, dies with this process, and is killed with everything it forked. For
processes that serve, see `life`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Self

from penstock.processes.endings import describe_status

RUN = "penstock.processes.run_tool"
# How much of the end of its output is quoted, in whole lines. Compilers print hundreds of warnings.
TAIL_BYTES, TAIL_LINES = 2000, 8


class ToolProcess:
    """`python -m MODULE ARGUMENTS`, killed when the block ends. Keeps its output for errors."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` replaces that of this process."""
        # A file, so that the child never blocks on a reader.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", RUN, str(os.getpid()), module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output.fileno(),
                stderr=self._output.fileno(),
                pass_fds=pass_fds,
                start_new_session=True,
                env=environment,
            )
        except BaseException:
            self._output.close()
            raise
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """Everything it has written to stdout and stderr so far."""
        return self._read(0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return its exit status; TimeoutError if it is still running after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def tail(self, who: str = "it") -> str:
        """Return the end of its output as a clause for an error's text; empty without output."""
        begin = max(0, os.fstat(self._output.fileno()).st_size - TAIL_BYTES)
        lines = self._read(begin).splitlines()
        whole = lines[1:] if begin and len(lines) > 1 else lines
        text = "\n".join(whole[-TAIL_LINES:]).strip()
        return f"; {who} wrote: {text}" if text else ""

    def _read(self, begin: int) -> str:
        """Read its output without moving the file position, which it shares."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size - begin, begin).decode(errors="replace")

    def describe_end(self) -> str:
        """Wait for its end; return how it ended and the end of its output."""
        return f"{describe_status(self._process.wait())}{self.tail()}"

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM; kill it, with all it forked, after `timeout_s` or when it has ended."""
        try:
            if self.is_running:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it with all it forked. Afterwards only its exit status is known."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
