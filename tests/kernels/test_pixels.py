"""Plain torch makes of pixels what Pillow makes of them."""

import numpy as np
import pytest
from PIL import Image, ImageOps

torch = pytest.importorskip("torch")

from penstock.kernels import pixels  # noqa: E402

FORM = {"scale": 1 / 255, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def photo(height, width, seed=0):
    """Smooth colours with edges and noise."""
    chance = np.random.default_rng(seed)
    coarse = Image.fromarray(chance.integers(0, 256, (5, 5, 3), np.uint8))
    shown = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    shown[height // 3 :, : width // 2] //= 2
    noise = chance.integers(-12, 13, shown.shape)
    return (shown + noise).clip(0, 255).astype(np.uint8)


def placed(resized, crop):
    return (*resized, (resized[0] - crop[0]) // 2, (resized[1] - crop[1]) // 2)


def by_pillow(image, resized, crop, resample):
    image = image.resize(resized[::-1], resample)
    *_, top, left = placed(resized, crop)
    return np.asarray(image.crop((left, top, left + crop[1], top + crop[0])))


def a_batch(rows, height, width, dtype=torch.float32, is_last=False):
    """A batch [rows, 3, height, width] of numbers that are to be overwritten."""
    if is_last:
        return torch.full((rows, height, width, 3), 77, dtype=dtype).permute(0, 3, 1, 2)
    return torch.full((rows, 3, height, width), 77, dtype=dtype)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize(
    ("source", "resized", "crop"),
    [((61, 47), (24, 18), (16, 16)), ((9, 7), (20, 18), (16, 18)), ((30, 30), (8, 9), (16, 15))],
)
def test_torch_resizes_and_crops_as_pillow_does(source, resized, crop, resample):
    shown = photo(*source)
    batch = a_batch(2, *crop, dtype=torch.uint8)
    form = pixels.PixelForm(resample, 1.0, (0.0,) * 3, (1.0,) * 3, False)
    image = pixels.DecodedImage(
        torch.from_numpy(shown).permute(2, 0, 1), 1, placed(resized, crop), 1
    )
    pixels.place_plainly([image], [0], batch, form)
    expected = by_pillow(Image.fromarray(shown), resized, crop, resample)
    gap = np.abs(batch[1].permute(1, 2, 0).numpy().astype(int) - expected.astype(int))
    assert gap.max() <= 1 and (gap > 0).mean() < 0.05
    assert (batch[0] == 0).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations_are_those_of_pillow(orientation):
    shown = photo(21, 34)
    file = Image.fromarray(shown)
    file.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(file))
    height, width = expected.shape[:2]
    assert pixels.upright_size(34, 21, orientation) == (width, height)
    batch = a_batch(1, height, width, dtype=torch.uint8)
    form = pixels.PixelForm(2, 1.0, (0.0,) * 3, (1.0,) * 3, False)
    image = pixels.DecodedImage(
        torch.from_numpy(shown).permute(2, 0, 1), orientation, (height, width, 0, 0), 0
    )
    pixels.place_plainly([image], [], batch, form)
    np.testing.assert_array_equal(batch[0].permute(1, 2, 0).numpy(), expected)


def test_channels_in_either_order_normalised_by_their_own_numbers():
    shown = photo(8, 8)
    given = torch.from_numpy(shown).permute(2, 0, 1)
    batch = a_batch(2, 8, 8)
    for row, is_bgr in enumerate((False, True)):
        image = pixels.DecodedImage(given, 1, (8, 8, 0, 0), row)
        pixels.place_plainly([image], [], batch, pixels.PixelForm(2, **FORM, is_bgr=is_bgr))
        values = shown[..., ::-1] if is_bgr else shown
        expected = (values / 255 - np.array(FORM["mean"])) / np.array(FORM["std"])
        np.testing.assert_allclose(batch[row].permute(1, 2, 0), expected, atol=1e-5)


def test_rows_without_an_image_are_black_ones():
    batch = a_batch(3, 8, 8)
    image = pixels.DecodedImage(torch.zeros(3, 8, 8, dtype=torch.uint8), 1, (8, 8, 0, 0), 1)
    pixels.place([image], [0, 2], batch, pixels.PixelForm(2, **FORM, is_bgr=False), torch.clone)
    assert torch.equal(batch[0], batch[1]) and torch.equal(batch[2], batch[1])
