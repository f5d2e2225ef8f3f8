"""Keys of memfds that clients register as shared memory, beside the names of files. Pure.

A memfd has no name that others could open; its key says where it is, `memfd:PID:FD:TOKEN`, and the
token, which is also in its name, that the client knows it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PREFIX = "memfd:"
# In the extensions of a server that takes such keys.
EXTENSION = "penstock_shared_memory"
_KEY = re.compile(r"memfd:([1-9][0-9]{0,9}):([0-9]{1,9}):([0-9a-f]{32})")


class MemfdKey(NamedTuple):
    pid: int
    fd: int
    token: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.pid}:{self.fd}:{self.token}"


def memfd_name(token: str) -> str:
    """Return the name that a memfd with this token is created with."""
    return f"penstock-{token}"


def parse_memfd_key(key: str) -> MemfdKey | None:
    """Parse a key; None if it is malformed."""
    match = _KEY.fullmatch(key)
    return None if match is None else MemfdKey(int(match[1]), int(match[2]), match[3])
