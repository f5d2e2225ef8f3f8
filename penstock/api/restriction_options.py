"""Reads `--http-restricted-api` and `--grpc-restricted-protocol`, in Triton's form. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.config import Restriction

CATEGORIES = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository",
    "statistics", "trace", "logging",
)  # fmt: skip
HTTP_FLAG, GRPC_FLAG = "--http-restricted-api", "--grpc-restricted-protocol"
# Triton puts this before the key of a gRPC restriction.
GRPC_PREFIX = "triton-grpc-protocol-"
# RFC 9110, section 5.6.2.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


def read_restrictions(
    given: Sequence[str], flag: str, prefix: str = ""
) -> tuple[dict[str, Restriction], list[str]]:
    """Return the restrictions by category, and what is wrong with the flags. Values are secrets,
    and not repeated."""
    found: dict[str, Restriction] = {}
    problems: list[str] = []
    for text in given:
        names, colon, rest = text.partition(":")
        key, equals, value = rest.partition("=")
        if not (names and colon and equals and value):
            problems.append(f"{flag}: expected CATEGORY,...:KEY=VALUE")
            continue
        if not _TOKEN.fullmatch(key):
            problems.append(f"{flag} {names}:{key}: the key is not the name of a header")
        if not (value.isascii() and value.isprintable()) or value != value.strip():
            problems.append(f"{flag} {names}:{key}: the value cannot be sent in a header")
        restriction = Restriction((prefix + key).lower().encode(), value.encode("utf-8", "replace"))
        for name in names.split(","):
            if name not in CATEGORIES:
                problems.append(f"{flag}: '{name}' is not one of {', '.join(CATEGORIES)}")
            elif name in found:
                problems.append(f"{flag}: '{name}' can not be specified in multiple groups")
            else:
                found[name] = restriction
    return found, problems
