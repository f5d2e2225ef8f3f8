"""Headers that become parameters of a request (Triton's `--http-header-forward-pattern`). Pure.

Python's expressions backtrack, so a bad one could take very long for a name that a client chooses.
Patterns are therefore restricted, names are short, and what was found is remembered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from penstock.config import HeaderPatterns
from penstock.types import Request

MAX_PATTERN = 500
# Repetitions of any length in a pattern: time grows with this power of the length of a name.
MAX_REPETITIONS = 3
MAX_NAME = 64
MAX_VALUE = 4096
# Names whose match is remembered.
NUM_NAMES = 4096
# Never forwarded: API keys are not for models, and parameters that begin so are reserved.
SECRET = frozenset((b"authorization", b"x-api-key", b"proxy-authorization", b"cookie"))
RESERVED = b"triton_"
_ESCAPED = re.compile(r"\\.|\[\^?\]?[^]]*\]")


def pattern_problem(pattern: str) -> str:
    """Return what is wrong with a pattern; empty if it can be used."""
    if len(pattern) > MAX_PATTERN:
        return f"it is longer than {MAX_PATTERN} characters"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"it is no regular expression: {error}"
    if re.search(r"\\[1-9]|\(\?P=", pattern):
        return "it refers to a group"
    bare = _ESCAPED.sub("x", pattern)
    if re.search(r"\)[*+{]", bare):
        return "it repeats a group, which may take very long"
    if len(re.findall(r"[*+{]", bare)) > MAX_REPETITIONS:
        return f"it has more than {MAX_REPETITIONS} repetitions, which may take very long"
    return ""


class HeaderForwarding:
    """Adds the headers whose name the pattern finds to the parameters of requests; the names are in
    lower case. A parameter of the request itself goes before a header."""

    def __init__(self, pattern: str) -> None:
        """The pattern must have no problem."""
        search = re.compile(pattern, re.IGNORECASE).search

        @lru_cache(NUM_NAMES)
        def matches(name: bytes) -> bool:
            if len(name) > MAX_NAME or name in SECRET or name.startswith(RESERVED):
                return False
            return search(name.decode("latin-1")) is not None

        self._matches = matches

    def add(self, request: Request, headers: Mapping[bytes, bytes]) -> None:
        found = {
            name.decode("latin-1"): value.decode("utf-8", "replace")
            for name, value in headers.items()
            if len(value) <= MAX_VALUE and self._matches(name)
        }
        if found:
            request.parameters = {**found, **(request.parameters or {})}


def make_forwarding(patterns: HeaderPatterns) -> dict[str, HeaderForwarding]:
    """Return what is forwarded, by protocol."""
    given = {"http": patterns.http, "grpc": patterns.grpc}
    return {name: HeaderForwarding(pattern) for name, pattern in given.items() if pattern}
