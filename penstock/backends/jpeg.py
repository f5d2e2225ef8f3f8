"""The header of a JPEG file: size, coding and EXIF orientation, without decoding anything.

It decides whether a GPU decodes the file, so what is unusual or damaged is only noticed here;
Pillow then decodes it, or says what is wrong with it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

START = b"\xff\xd8"
END = b"\xff\xd9"
FILL, SCAN, ADOBE, EXIF_OR_XMP = 0xFF, 0xDA, 0xEE, 0xE1
# Frames: baseline, extended sequential and progressive, all with Huffman coding. The others are
# lossless, hierarchical, or arithmetically coded.
FRAMES = range(0xC0, 0xD0)
NOT_FRAMES = (0xC4, 0xC8, 0xCC)
HUFFMAN = (0xC0, 0xC1, 0xC2)
# Markers without a segment.
ALONE = (0x01, *range(0xD0, 0xD8))
EXIF = b"Exif\0\0"
XMP_ORIENTATION = b"tiff:Orientation"
ORIENTATION, SHORT = 0x0112, 3
UPRIGHT, NUM_ORIENTATIONS = 1, 8
# Entries of an EXIF directory that are looked at.
MAX_ENTRIES = 512


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """A header as stored: width and height are those before the orientation is applied."""

    width: int
    height: int
    # As in EXIF, 1 to 8.
    orientation: int
    # Whether nvJPEG decodes such files as Pillow does: 8 bits, Huffman coding, grey or YCbCr, and
    # the end is there.
    is_usual: bool


def read_header(data: bytes) -> JpegHeader | None:
    """Return the header; None if the file is no JPEG or its header is damaged."""
    try:
        return _read(data) if data.startswith(START) else None
    except (struct.error, IndexError, _Damaged):
        return None


class _Damaged(Exception):
    """The bytes are no segments."""


def _read(data: bytes) -> JpegHeader | None:
    frames: list[tuple[int, int]] = []
    is_usual, orientation = True, 0
    at = len(START)
    for marker, segment, end in _segments(data):
        at = end
        if marker in FRAMES and marker not in NOT_FRAMES:
            _, height, width = struct.unpack_from(">BHH", segment)
            frames.append((width, height))
            is_usual &= _is_usual_frame(marker, segment)
        elif marker == ADOBE and segment.startswith(b"Adobe"):
            # 1: YCbCr. The colours of others are stored as they are.
            is_usual &= segment[11] == 1
        elif marker == EXIF_OR_XMP and segment.startswith(EXIF):
            orientation = orientation or _orientation(segment[len(EXIF) :])
        elif marker == EXIF_OR_XMP:
            # Pillow knows where the orientation may be in there.
            is_usual &= XMP_ORIENTATION not in segment
    if len(frames) != 1:
        return None
    if not UPRIGHT <= orientation <= NUM_ORIENTATIONS:
        orientation = UPRIGHT
    # It is nearly always at the very end.
    return JpegHeader(*frames[0], orientation, is_usual and data.rfind(END, at) >= 0)


def _segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield marker, contents and end of each segment up to the first scan."""
    at = len(START)
    while True:
        if data[at] != FILL:
            raise _Damaged
        while data[at] == FILL:
            at += 1
        marker = data[at]
        at += 1
        if marker in ALONE:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        segment = data[at + 2 : at + length]
        if length < 2 or len(segment) != length - 2:
            raise _Damaged
        at += length
        if marker == SCAN:
            return
        yield marker, segment, at


def _is_usual_frame(marker: int, segment: bytes) -> bool:
    precision, height, width, num_components = struct.unpack_from(">BHHB", segment)
    # Components called R, G and B are no YCbCr.
    is_ycc = num_components in (1, 3) and segment[6 : 6 + 3 * num_components : 3] != b"RGB"
    return bool(marker in HUFFMAN and precision == 8 and height and width and is_ycc)


def _orientation(exif: bytes) -> int:
    """Return the orientation in an EXIF block, which is a TIFF file; 0 if there is none."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    try:
        if order is None or struct.unpack_from(f"{order}H", exif, 2) != (42,):
            return 0
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        for number in range(min(count, MAX_ENTRIES)):
            entry = start + 2 + 12 * number
            tag, kind, _ = struct.unpack_from(f"{order}HHI", exif, entry)
            if tag == ORIENTATION and kind == SHORT:
                return int(struct.unpack_from(f"{order}H", exif, entry + 8)[0])
    except struct.error:
        pass
    return 0
