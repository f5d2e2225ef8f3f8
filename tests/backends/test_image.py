"""Pixels are those of transformers' image processors; what is no image is refused by itself."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import tiny_pretrained as tiny
from PIL import Image

from penstock.backends.image import ImageStep
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError, InvalidRequest
from penstock.types import TensorSpec

transformers = pytest.importorskip("transformers")
SHORTEST = {"size": {"shortest_edge": 40}, "do_center_crop": True}
CROP = {"crop_size": {"height": 32, "width": 32}}
KINDS = {
    "plain": ("ViT", {}),
    "bicubic": ("ViT", {"resample": 3}),
    "cropped": ("DeiT", {"size": {"height": 48, "width": 40}, "do_center_crop": True, **CROP}),
    "shortest edge": ("Bit", {**SHORTEST, **CROP}),
    "smaller than the crop": ("Bit", {**SHORTEST, "size": {"shortest_edge": 20}, **CROP}),
    "convnext": ("ConvNext", {"size": {"shortest_edge": 32}, "crop_pct": 0.875}),
    "not normalised": ("ViT", {"do_normalize": False}),
}


def open_step(folder):
    config = ModelConfig(
        name="m",
        version="1",
        backend="preprocess",
        artifact=str(folder / "config.json"),
        inputs=(TensorSpec("IMAGE", "BYTES", (1,)),),
        outputs=(),
        max_batch_size=8,
        batching=BatchPolicy(8),
    )
    return ImageStep(config, [TensorSpec("pixel_values", "FP32", (3, 32, 32))])


def rows(*images):
    return [{"IMAGE": np.array([image], dtype=object)} for image in images]


@pytest.fixture
def step(tmp_path):
    step = open_step(tiny.write_image_classifier(tmp_path / "m"))
    yield step
    step.close()


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_transformers(tmp_path, kind):
    name, settings = KINDS[kind]
    folder = tiny.write_image_classifier(tmp_path / "m", name, **settings)
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)
    step = open_step(folder)
    for size in ((32, 32), (61, 47), (40, 90)):
        data = tiny.draw_image(*size)
        (row,) = step.tried_all(rows(data))
        image = Image.open(io.BytesIO(data)).convert("RGB")
        expected = theirs(image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(row["pixel_values"], expected, atol=2e-5)
    step.close()


def test_formats_modes_and_base64_are_one_image(step):
    plain = tiny.draw_image(40, 40)
    coded = base64.b64encode(plain)
    forms = plain, coded, b"data:image/png;base64," + coded, base64.encodebytes(plain)
    made = step.tried_all(rows(*forms))
    for each in made[1:]:
        np.testing.assert_array_equal(each["pixel_values"], made[0]["pixel_values"])
    others = [tiny.draw_image(40, 40, form=form) for form in ("JPEG", "WEBP")]
    others += [tiny.draw_image(40, 40, mode=mode) for mode in ("L", "RGBA", "P")]
    for each in step.tried_all(rows(*others)):
        assert each["pixel_values"].shape == (3, 32, 32)


def bomb(width, height):
    """A PNG of zeros: few bytes, many pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 16), 9)
    chunks = chunk(b"IHDR", head), chunk(b"IDAT", data), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"not an image", "12 bytes that are no image; expected a JPEG, PNG or WebP file"),
        (b"", "0 bytes that are no image"),
        (tiny.draw_image(64, 64)[:100], "cannot be decoded"),
        (b"GIF89a" + bytes(100), "GIF files are not decoded; expected a JPEG, PNG or WebP file"),
        (tiny.draw_image(9, 9, form="BMP"), "BMP files are not decoded"),
        (tiny.draw_image(9, 9, form="TIFF"), "TIFF files are not decoded"),
        (bomb(7000, 7000), "7000 x 7000 pixels; at most 36000000 in all"),
        (bomb(12000, 12000), "12000 x 12000 pixels"),
        (bomb(60000, 60000), "more than 36000000 pixels"),
    ],
)
def test_what_is_no_image_fails_alone(step, data, problem):
    good, bad = step.tried_all(rows(tiny.draw_image(32, 32), data))
    assert good["pixel_values"].shape == (3, 32, 32)
    assert isinstance(bad, InvalidRequest)
    assert str(bad).startswith("input 'IMAGE': ") and problem in str(bad)


def test_damage_that_pillow_passes_over_is_refused(step):
    photo = bytearray(tiny.draw_image(64, 64, form="JPEG"))
    photo[-40:-38] = b"\xff\x17"
    png = bytearray(tiny.draw_image(64, 64))
    png[png.index(b"IDAT") + 200] ^= 1
    for data, problem in ((photo, "marker 17 at byte"), (png, "checksum of chunk 'IDAT'")):
        (refused,) = step.tried_all(rows(bytes(data)))
        assert isinstance(refused, InvalidRequest)
        assert str(refused).startswith("input 'IMAGE': the file is damaged: ")
        assert problem in str(refused)


def test_pixels_that_are_missing_in_the_coded_stream_are_refused(step):
    # 200 zeros: the decoder leaves the rest of the image grey.
    photo = bytearray(tiny.draw_image(200, 160, form="JPEG"))
    photo[1000:1200] = bytes(200)
    (refused,) = step.tried_all(rows(bytes(photo)))
    problem = "the file is damaged: its coded pixels end before the image does"
    assert str(refused) == f"input 'IMAGE': {problem}"


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 2},
        {"optimize": True},
        {"restart_marker_rows": 1},
        {"progressive": True},
    ],
    ids=str,
)
def test_whole_photos_have_the_pixels_of_pillow(tmp_path, options):
    chance = np.random.default_rng(3)
    for number in range(20):
        width, height = (int(size) for size in chance.integers(1, 200, 2))
        file = io.BytesIO()
        pixels = chance.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=20 + 4 * number, **options)
        spec = TensorSpec("x", "UINT8", (height, width, 3))
        found = made_by(tmp_path, "", spec, file.getvalue())
        np.testing.assert_array_equal(found, np.asarray(Image.open(file)))


def test_grey_with_16_bits_keeps_the_upper_8(tmp_path):
    file = io.BytesIO()
    values = np.array([[0, 0x00FF], [0x4000, 0xFFFF]], np.uint16)
    Image.fromarray(values).save(file, "PNG")
    found = made_by(tmp_path, "", TensorSpec("x", "UINT8", (2, 2, 3)), file.getvalue())
    np.testing.assert_array_equal(found[..., 0], [[0, 0], [64, 255]])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"image_processor_type": "LevitImageProcessor"}, "'LevitImageProcessor' is not supported"),
        ({"size": {"shortest_edge": 32}}, "images would have any size"),
        ({"size": {"longest_edge": 3, "shortest_edge": 2}}, "longest_edge is not supported"),
        ({"size": {"max_height": 32}}, "size: {'max_height': 32}; expected height and width"),
        ({"image_mean": [0.5]}, "image_mean: [0.5]; expected three numbers"),
    ],
)
def test_settings_that_are_not_supported_are_named(tmp_path, settings, problem):
    folder = tiny.write_image_classifier(tmp_path / "m", **settings)
    with pytest.raises(ConfigError) as caught:
        open_step(folder)
    assert problem in str(caught.value)


def test_a_folder_without_a_preprocessor_says_so(tmp_path):
    folder = tiny.write_image_classifier(tmp_path / "m")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="no preprocessor_config.json"):
        open_step(folder)


def made_by(folder, text, spec, data):
    config = ModelConfig(
        name="m",
        version="1",
        backend="preprocess",
        artifact=str(folder / "model.onnx"),
        inputs=(TensorSpec("IMAGE", "BYTES", (1,)),),
        outputs=(),
        max_batch_size=8,
        batching=BatchPolicy(8),
    )
    step = ImageStep(config, [spec], text)
    (row,) = step.tried_all(rows(data))
    step.close()
    return row if isinstance(row, Exception) else row["x"]


@pytest.mark.parametrize("datatype", ["UINT8", "FP16", "FP32"])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_settings_of_a_configuration(tmp_path, datatype, is_first, channels):
    data = tiny.draw_image(61, 47)
    shape = (3, 32, 30) if is_first else (32, 30, 3)
    text = f"resize=40x38; channels={channels}; interpolation=lanczos"
    if datatype != "UINT8":
        text += "; scale=1/128; mean=1,2,3; std=0.5"
    found = made_by(tmp_path, text, TensorSpec("x", datatype, shape), data)
    image = Image.open(io.BytesIO(data)).resize((38, 40), Image.Resampling.LANCZOS)
    expected = np.asarray(image.crop((4, 4, 34, 36)))[..., :: 1 if channels == "rgb" else -1]
    if datatype != "UINT8":
        expected = (expected / 128 - np.array([1, 2, 3])) / 0.5
    expected = expected.transpose(2, 0, 1) if is_first else expected
    assert found.dtype == {"UINT8": np.uint8, "FP16": np.float16, "FP32": np.float32}[datatype]
    np.testing.assert_allclose(found, expected, atol=1e-2 if datatype == "FP16" else 1e-5)


def test_the_orientation_is_applied_before_anything_else(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.open(io.BytesIO(tiny.draw_image(40, 20))).save(file, "PNG", exif=exif)
    found = made_by(tmp_path, "", TensorSpec("x", "UINT8", (40, 20, 3)), file.getvalue())
    stored = np.asarray(Image.open(file))
    np.testing.assert_array_equal(found, np.rot90(stored, -1))


def test_a_narrow_image_is_not_blown_up(tmp_path):
    data = tiny.draw_image(1, 65000)
    spec = TensorSpec("x", "UINT8", (32, 32, 3))
    refused = made_by(tmp_path, "resize=shortest 32", spec, data)
    assert isinstance(refused, InvalidRequest)
    problem = "input 'IMAGE': resized to 32 x 2080000 pixels; at most 36000000 in all"
    assert str(refused) == problem
