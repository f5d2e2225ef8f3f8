"""Headers of JPEG files are what Pillow reads of them; files for Pillow alone are told apart."""

import io

import numpy as np
import pytest
import tiny_pretrained as tiny
from PIL import Image

from penstock.backends.jpeg import JpegHeader, end_of_only_scan, find_damage, read_header

PHOTO = tiny.draw_image(61, 47, form="JPEG")
ADOBE_RGB = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
XMP = b"http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation='6'/>"


def encoded(mode="RGB", height=40, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (height, 30, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def oriented(orientation, order="<"):
    exif = Image.Exif()
    exif.endian = order
    # A tag before and one behind it.
    exif[0x010F], exif[0x0112], exif[0x0131] = "maker", orientation, "software"
    return encoded(exif=exif)


def inserted(segment):
    return PHOTO[:2] + segment + PHOTO[2:]


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"optimize": True}, {"subsampling": 0}, {"mode": "L"}],
    ids=str,
)
def test_usual_files(options):
    assert read_header(encoded(**options)) == JpegHeader(30, 40, 1, True)


def test_restart_markers_and_comments_are_passed_over():
    data = encoded(restart_marker_rows=1, comment=b"\xff\xd9 is no end")
    assert read_header(data) == JpegHeader(30, 40, 1, True)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", [*range(1, 9), 0, 9, 255])
def test_the_orientation_is_that_of_exif(orientation, order):
    data = oriented(orientation, order)
    expected = orientation if 1 <= orientation <= 8 else 1
    assert Image.open(io.BytesIO(data)).getexif()[0x0112] == orientation
    assert read_header(data) == JpegHeader(30, 40, expected, True)


def frame_at(data):
    return data.index(b"\xff\xc0")


def changed(offset, value):
    """Return the photo with a byte of its frame changed; 1 is the marker."""
    data = bytearray(PHOTO)
    data[frame_at(PHOTO) + offset] = value
    return bytes(data)


UNUSUAL = {
    "CMYK": encoded(mode="CMYK"),
    "RGB by its components": encoded(keep_rgb=True),
    "RGB by Adobe's segment": inserted(ADOBE_RGB),
    "arithmetic coding": changed(1, 0xC9),
    "lossless": changed(1, 0xC3),
    "12 bits": changed(4, 12),
    "orientation in XMP": inserted(b"\xff\xe1" + (len(XMP) + 2).to_bytes(2, "big") + XMP),
    "no end": PHOTO[:-40],
}


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_files_for_pillow_alone(data):
    header = read_header(data)
    assert header is not None and not header.is_usual


def test_a_size_of_zero_is_for_pillow():
    data = bytearray(PHOTO)
    at = frame_at(PHOTO) + 5
    data[at : at + 2] = bytes(2)
    header = read_header(bytes(data))
    assert header is not None and not header.is_usual


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"GIF89a", b"\xff\xd8\xff\xe0\0"]
)
def test_what_is_no_jpeg_has_no_header(data):
    assert read_header(data) is None


def test_no_part_or_changed_byte_of_a_file_raises():
    header = PHOTO[: PHOTO.index(b"\xff\xda") + 20]
    for end in range(len(header)):
        assert read_header(header[:end]) is None or not read_header(header[:end]).is_usual
    exif = oriented(6)
    for at in range(2, 200):
        for value in (0, 1, 0x7F, 0xFF):
            read_header(exif[:at] + bytes([value]) + exif[at + 1 :])


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"mode": "L"}, {"mode": "CMYK"}],
    ids=str,
)
def test_whole_files_have_no_damage(options):
    data = encoded(**options)
    # What follows the image is not looked at: cameras append further images.
    assert find_damage(data) == find_damage(data + b"\xff\x17") == ""


def test_fill_bytes_before_a_marker_are_allowed():
    assert find_damage(PHOTO[:-2] + b"\xff\xff" + PHOTO[-2:]) == ""


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        (b"\xff\x17", "marker 17 at byte {}, inside the coded pixels"),
        (b"\xff\xd3", "restart marker D3 at byte {}, where the file has no such markers"),
        (b"\xff\xe1\xff\xff", "marker E1 at byte {}, inside the coded pixels"),
        (b"\xff\xc0", "marker C0 at byte {}, inside the coded pixels"),
    ],
    ids=str,
)
def test_markers_inside_the_coded_pixels_are_damage(marker, problem):
    at = len(PHOTO) - 60
    data = PHOTO[:at] + marker + PHOTO[at + len(marker) :]
    assert find_damage(data) == problem.format(at + 1)
    # So a GPU does not decode it either.
    assert not read_header(data).is_usual


def test_a_missing_restart_marker_is_damage():
    data = encoded(restart_marker_rows=1, height=80)
    at = data.index(b"\xff\xd1")
    broken = data[:at] + b"\0\0" + data[at + 2 :]
    after = broken.index(b"\xff\xd2") + 1
    assert find_damage(broken) == f"restart marker D2 at byte {after}, where D1 is due"


@pytest.mark.parametrize(
    "options", [{}, {"restart_marker_rows": 1}, {"mode": "L"}, {"optimize": True}], ids=str
)
def test_the_end_of_the_only_scan(options):
    data = encoded(**options)
    assert end_of_only_scan(data + b"\xff\xd9") == len(data) - 2
    # Without the marker the end is not known.
    assert end_of_only_scan(data[:-2]) == 0


def test_files_with_several_scans_have_no_only_scan():
    assert end_of_only_scan(encoded(progressive=True)) == end_of_only_scan(b"no JPEG") == 0
