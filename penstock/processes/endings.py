"""How child processes end: with their parent, and what their exit status says."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, for whatever reason. The child calls
    it: Python code between fork and exec (`preexec_fn`) is unsafe where gRPC has threads."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_status(status: int) -> str:
    """Return "exited with status 3" or "was killed by SIGSEGV" for a `returncode`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
