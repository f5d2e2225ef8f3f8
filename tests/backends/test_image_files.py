"""Formats are told apart by their first bytes; a PNG with a wrong checksum is damaged."""

import io

import pytest
import tiny_pretrained as tiny
from PIL import Image

from penstock.backends.image_files import find_damage, other_format

WHOLE = [tiny.draw_image(40, 30, form=form) for form in ("PNG", "JPEG", "WEBP")]


@pytest.mark.parametrize("name", ["GIF", "BMP", "TIFF", "ICO"])
def test_formats_that_pillow_writes_are_named(name):
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, name)
    assert other_format(file.getvalue()) == name


def test_brands_of_media_files_are_named():
    assert other_format(b"\0\0\0\x20ftypavif\0\0\0\0") == "AVIF"
    assert other_format(b"\0\0\0\x20ftypmp42\0\0\0\0") == ""


@pytest.mark.parametrize("data", WHOLE, ids=["png", "jpeg", "webp"])
def test_whole_files_have_no_damage_and_no_other_format(data):
    assert find_damage(data) == other_format(data) == ""


@pytest.mark.parametrize("kind", [b"IHDR", b"IDAT", b"IEND"])
def test_a_wrong_checksum_names_the_chunk(kind):
    data = bytearray(WHOLE[0])
    at = data.index(kind) - 4
    data[at + 8 + int.from_bytes(data[at : at + 4])] ^= 1
    problem = f"the checksum of chunk {kind.decode()!r} at byte {at} is wrong"
    assert find_damage(bytes(data)) == problem


def test_a_file_that_ends_early_is_left_to_the_decoder():
    assert all(find_damage(WHOLE[0][:end]) == "" for end in range(len(WHOLE[0])))
