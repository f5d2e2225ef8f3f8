"""Explains why a text is not JSON, where the decoder's own message misleads. Pure.

The decoder calls three different mistakes "truncated": an empty text, an incomplete text, and a
complete one with half a surrogate pair.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import msgspec

from penstock.types import Buffer

# JSON from a client, whose values may be anything.
JsonObject: TypeAlias = dict[str, Any]
JsonList: TypeAlias = list[Any]
# What decoders raise.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Escaped backslashes, surrogate pairs, or (the group) a lone surrogate.
_ESCAPES = re.compile(rb"\\\\|%b%b|(%b|%b)" % (_HIGH, _LOW, _HIGH, _LOW))


def explain(data: Buffer, error: Exception) -> str:
    """Return what is wrong with a text that the decoder refused with this error."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = bytes(data)
    if not text.strip():
        return "the body is empty; expected JSON"
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    for match in _ESCAPES.finditer(text):
        if match[1] is not None:
            half = match[1].decode()
            return f"a string holds a lone surrogate ({half}); expected a pair or another character"
    return str(error)
