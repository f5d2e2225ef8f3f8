"""Runs a model's code in a child process that reports what it found.

For what is known only by running the code: the tensors of a Python file, a module that a factory
makes. The server never runs such code itself. The child gets the environment of a model's code,
and its time is limited.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from penstock.errors import ConfigError
from penstock.processes.endings import describe_status
from penstock.system import environment

# Importing torch and loading weights takes seconds; code that takes longer should not do it when it
# is imported.
TIME_LIMIT_S = 120.0


def run(module: str, *arguments: str) -> bytes:
    """Run `python -m MODULE FD ARGUMENT...` and return what it writes to the file descriptor."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as answer:
        with os.fdopen(theirs, "wb"):
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs), *arguments],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                # Its prints belong to the log, not to the output of a command.
                stdout=2,
                process_group=0,
                env=environment.allowed(os.environ),
            )
        try:
            code = process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"running its code to learn its tensors took more than {TIME_LIMIT_S:.0f} s"
            ) from None
        finally:
            _end(process)
        text = answer.read()
    if not text:
        raise ConfigError(
            f"running its code to learn its tensors failed: it {describe_status(code)}"
        )
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
