"""The limit on open files of this process."""

from __future__ import annotations

import resource


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit does: each connection is one, and the usual soft
    limit of 1,024 is for programs that use select(). Child processes inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
