"""The kernel (interpreted) makes of pixels what Pillow makes of them."""

import os

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from test_pixels import FORM, a_batch, by_pillow, photo, placed  # noqa: E402

from penstock.kernels import pixels, resize  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
# Height and width of the source, and of what it is resized to; and the crop.
SIZES = {
    "smaller": ((61, 47), (24, 18), (16, 16)),
    "much smaller": ((150, 97), (16, 10), (16, 10)),
    "larger": ((9, 7), (20, 18), (16, 18)),
    "half": ((32, 48), (16, 24), (16, 20)),
    "as it is": ((16, 20), (16, 20), (12, 12)),
    "smaller than the crop": ((30, 30), (8, 9), (16, 15)),
}


def made(shown, batch, form, orientation=1, sizes=()):
    image = pixels.DecodedImage(shown, orientation, placed(*sizes), 1)
    lines = [pixels.table_row(image, form.is_bgr), [0] * 10 + [0]]
    table = torch.tensor(lines, dtype=torch.int64)
    is_cubic = form.resample == pixels.BICUBIC
    resize.place(table, batch, form.scale, form.mean, form.std, is_cubic)
    return batch[1]


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_kernel_resizes_and_crops_as_pillow_does(sizes, resample):
    source, resized, crop = sizes
    shown = photo(*source)
    form = pixels.PixelForm(resample, 1.0, (0.0,) * 3, (1.0,) * 3, False)
    batch = a_batch(2, *crop, dtype=torch.uint8)
    found = made(torch.from_numpy(shown).permute(2, 0, 1), batch, form, sizes=(resized, crop))
    expected = by_pillow(Image.fromarray(shown), resized, crop, resample)
    gap = np.abs(found.permute(1, 2, 0).numpy().astype(int) - expected.astype(int))
    # Sums of floats and Pillow's of integers round differently where a value is half of one.
    assert gap.max() <= 1 and (gap > 0).mean() < 0.05
    assert (batch[0] == 0).all()


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_normalised_in_the_layout_and_type_of_the_batch(is_last, dtype):
    shown = torch.from_numpy(photo(20, 30)).permute(2, 0, 1).contiguous()
    batch = a_batch(2, 12, 14, dtype=dtype, is_last=is_last)
    plain = a_batch(2, 12, 14, dtype=dtype, is_last=is_last)
    form = pixels.PixelForm(2, **FORM, is_bgr=True)
    sizes = ((12, 14), (12, 14))
    made(shown, batch, form, sizes=sizes)
    pixels.place_plainly([pixels.DecodedImage(shown, 1, placed(*sizes), 1)], [0], plain, form)
    # A step of 8 bits, where a value is half of one.
    np.testing.assert_allclose(batch.float(), plain.float(), atol=1.05 / 255 / 0.225)
    np.testing.assert_allclose(batch[0].float(), plain[0].float(), rtol=1e-3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientations(orientation):
    shown = torch.from_numpy(photo(21, 34)).permute(2, 0, 1)
    form = pixels.PixelForm(2, **FORM, is_bgr=False)
    height, width = (34, 21) if orientation > 4 else (21, 34)
    batch, plain = a_batch(2, height, width), a_batch(2, height, width)
    sizes = ((height, width), (height, width))
    made(shown, batch, form, orientation, sizes)
    image = pixels.DecodedImage(shown, orientation, placed(*sizes), 1)
    pixels.place_plainly([image], [0], plain, form)
    np.testing.assert_allclose(batch, plain, atol=1e-5)
