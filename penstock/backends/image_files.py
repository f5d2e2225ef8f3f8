"""Encoded image files before they are decoded: formats by their first bytes, and damage that Pillow
does not notice. Knows no image library.

PNG has a checksum for every chunk, JPEG has none: there only markers can be checked.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from penstock.backends import jpeg

PNG = b"\x89PNG\r\n\x1a\n"
LAST_CHUNK = b"IEND"
# First bytes, up to where they differ, of formats that are not decoded.
OTHERS: Mapping[bytes, str] = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\1\0": "ICO",
    b"%PDF": "PDF",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"<svg": "SVG",
    b"8BPS": "Photoshop",
}
# In ISO media files, the brand behind `ftyp`.
BRANDS: Mapping[bytes, str] = {b"avif": "AVIF", b"heic": "HEIC", b"mif1": "HEIF"}


def other_format(data: bytes) -> str:
    """Return the name of a format that is known and not decoded; empty for unknown bytes."""
    if data[4:8] == b"ftyp":
        return BRANDS.get(data[8:12], "")
    return next((name for start, name in OTHERS.items() if data.startswith(start)), "")


def find_damage(data: bytes) -> str:
    """Return the damage to a JPEG or PNG file that can be seen without decoding it; empty if there
    is none."""
    if data.startswith(jpeg.START):
        return jpeg.find_damage(data)
    return _png_damage(data) if data.startswith(PNG) else ""


def _png_damage(data: bytes) -> str:
    at = len(PNG)
    # A file that ends early is left to the decoder: it knows whether pixels are missing.
    while len(data) >= at + 12:
        kind, end = data[at + 4 : at + 8], at + 8 + int.from_bytes(data[at : at + 4])
        if end + 4 > len(data):
            return ""
        if zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4]):
            return f"the checksum of chunk {kind.decode('latin-1')!r} at byte {at} is wrong"
        if kind == LAST_CHUNK:
            return ""
        at = end + 4
    return ""
