"""JPEG files without decoding them: size, coding, EXIF orientation, and damage to their markers.

The header decides whether a GPU decodes the file, so what is unusual or damaged is only noticed
there; Pillow then decodes it, or says what is wrong with it. `find_damage` sees what decoders pass
over silently. The format has no checksums: bytes of the coded pixels that are no markers may be
anything.
"""

from __future__ import annotations

import re
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
SEQUENTIAL = (0xC0, 0xC1)
HUFFMAN = (*SEQUENTIAL, 0xC2)
# Markers without a segment.
RESTARTS = range(0xD0, 0xD8)
ALONE = (0x01, *RESTARTS)
LAST, RESTART_INTERVAL = 0xD9, 0xDD
# What may follow a scan: tables, further scans, comments and data of applications.
BETWEEN_SCANS = (0xC4, SCAN, 0xDB, 0xDC, RESTART_INTERVAL, *range(0xE0, 0xF0), 0xFE)
# A marker in the coded pixels, where the byte 255 is followed by 0. Fill bytes may precede it.
MARKER = re.compile(rb"\xff+([^\x00\xff])")
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
    # Whether nvJPEG decodes such files as Pillow does: 8 bits, Huffman coding, grey or YCbCr, the
    # end is there and the markers before it are whole.
    is_usual: bool


def read_header(data: bytes) -> JpegHeader | None:
    """Return the header; None if the file is no JPEG or its header is damaged."""
    try:
        return _read(data) if data.startswith(START) else None
    except (struct.error, IndexError, _Damaged):
        return None


def find_damage(data: bytes) -> str:
    """Return what is wrong with the markers from the first scan to the end of the image; empty if
    nothing is, or if the header cannot be read or the end is missing, which decoders notice."""
    header = _header(data)
    if not header:
        return ""
    interval = max((_number(each[1]) for each in header if each[0] == RESTART_INTERVAL), default=0)
    restart, at = 0, header[-1][2]
    while (found := MARKER.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        what = f"marker {marker:02X} at byte {at - 1}"
        if marker == LAST:
            return ""
        if marker in RESTARTS:
            due = f"{RESTARTS[restart]:02X} is due" if interval else "the file has no such markers"
            if not interval or marker != RESTARTS[restart]:
                return f"restart {what}, where {due}"
            restart = (restart + 1) % len(RESTARTS)
            continue
        length = _number(data[at : at + 2])
        if marker not in BETWEEN_SCANS or length < 2 or at + length > len(data):
            return f"{what}, inside the coded pixels"
        if marker == RESTART_INTERVAL:
            interval = _number(data[at + 2 : at + 4])
        restart, at = 0, at + length
    return ""


def end_of_only_scan(data: bytes) -> int:
    """Return where the coded pixels end in a file whose pixels are all in one scan; 0 for others,
    and if the end is missing."""
    header = _header(data)
    num_components = [segment[5:6] for marker, segment, _ in header if marker in SEQUENTIAL]
    if not header or num_components != [header[-1][1][:1]]:
        return 0
    for found in MARKER.finditer(data, header[-1][2]):
        marker = found[1][0]
        if marker not in RESTARTS:
            return found.end() - len(END) if marker == LAST else 0
    return 0


def _header(data: bytes) -> list[tuple[int, bytes, int]]:
    """Return the segments up to that of the first scan; none if they cannot be read."""
    try:
        return list(_segments(data)) if data.startswith(START) else []
    except (struct.error, IndexError, _Damaged):
        return []


def _number(two_bytes: bytes) -> int:
    return int.from_bytes(two_bytes[:2])


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
    # The end is nearly always at the very end.
    is_usual = is_usual and data.rfind(END, at) >= 0 and not find_damage(data)
    return JpegHeader(*frames[0], orientation, is_usual)


def _segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield marker, contents and end of each segment up to the header of the first scan."""
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
        yield marker, segment, at
        if marker == SCAN:
            return


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
