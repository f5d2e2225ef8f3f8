"""Validity period of a certificate, from its PEM text. Pure.

The ssl module shows the dates of a peer's certificate but not of one that a server loads, so this
module reads the DER fields up to them (RFC 5280, section 4.1).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
# DER tags.
SEQUENCE, VERSION, UTC_TIME, GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


@dataclass(frozen=True, slots=True)
class Validity:
    begins: datetime
    ends: datetime

    def problem(self, now: datetime) -> str:
        """Return why the certificate is not valid now; empty if it is."""
        if now > self.ends:
            return f"expired on {self.ends:%Y-%m-%d %H:%M} UTC"
        if now < self.begins:
            return f"not valid before {self.begins:%Y-%m-%d %H:%M} UTC"
        return ""


def read_validity(text: str) -> Validity:
    """Return the validity of the first certificate of a PEM file, which is the server's own.
    ValueError if it is missing or cannot be read."""
    begin = text.find(BEGIN)
    end = text.find(END, begin)
    if begin < 0 or end < 0:
        raise ValueError("no PEM certificate")
    try:
        data = ssl.PEM_cert_to_DER_cert(text[begin : end + len(END)])
        _, certificate, _ = _split(data, SEQUENCE)
        _, fields, _ = _split(certificate, SEQUENCE)
        if fields[0] == VERSION:
            fields = _split(fields)[2]
        for _ in ("serial number", "signature", "issuer"):
            fields = _split(fields)[2]
        _, period, _ = _split(fields, SEQUENCE)
        first_tag, first, rest = _split(period)
        last_tag, last, _ = _split(rest)
        return Validity(_time(first_tag, first), _time(last_tag, last))
    except (ValueError, IndexError):
        raise ValueError("not a certificate") from None


def _split(data: bytes, expected: int | None = None) -> tuple[int, bytes, bytes]:
    """Return the tag and content of the first value, and the data after it."""
    tag, length, start = data[0], data[1], 2
    if expected not in (None, tag):
        raise ValueError(f"tag {tag:#x}; expected {expected:#x}")
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start])
    if start + length > len(data):
        raise ValueError("truncated")
    return tag, data[start : start + length], data[start + length :]


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != GENERALIZED_TIME:
        raise ValueError(f"tag {tag:#x} is not a time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
