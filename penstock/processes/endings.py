"""How child processes end: with their parent, and what their exit status says."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec little is allowed.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, for whatever reason. Also works
    between fork and exec (`preexec_fn`): the setting survives the exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_status(status: int) -> str:
    """Return "exited with status 3" or "was killed by SIGSEGV" for a `returncode`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
