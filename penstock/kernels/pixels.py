"""Decoded images of different sizes into one batch of a model's pixels: one kernel (`resize`), or
plain torch without Triton. Both resize as Pillow does. Knows tensors, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.kernels import has_triton

# Pillow's numbers of the filters that there are here, and torch's names of them.
BICUBIC = 3
FILTERS = {2: "bilinear", BICUBIC: "bicubic"}
# EXIF orientations of images that are stored transposed, and with rows or columns reversed.
TRANSPOSED, ROWS_REVERSED, COLUMNS_REVERSED = (5, 6, 7, 8), (3, 4, 6, 7), (2, 3, 7, 8)
NUM_COLUMNS = 11
Upload = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PixelForm:
    """How pixels are made: the number of the filter, and the normalisation."""

    resample: int
    scale: float
    # In the order of the batch's channels.
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    is_bgr: bool


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Pixels of one image, [3, height, width] of UINT8 in any strides, as stored in its file."""

    pixels: torch.Tensor
    # As in EXIF.
    orientation: int
    # Height and width that the upright image is resized to, and the corner of the crop in that.
    placed: tuple[int, int, int, int]
    # Its row of the batch.
    row: int


def upright_size(width: int, height: int, orientation: int) -> tuple[int, int]:
    return (height, width) if orientation in TRANSPOSED else (width, height)


def table_row(image: DecodedImage, is_bgr: bool) -> list[int]:
    """Return what the kernel reads: address of the upright image's first pixel, strides of
    channels, y and x, upright height and width, placement, and row. A turned or mirrored image is
    read with other strides."""
    pixels = image.pixels
    _, height, width = pixels.shape
    channel, row, column = pixels.stride()
    address = pixels.data_ptr()
    if is_bgr:
        address, channel = address + 2 * channel, -channel
    if image.orientation in ROWS_REVERSED:
        address, row = address + (height - 1) * row, -row
    if image.orientation in COLUMNS_REVERSED:
        address, column = address + (width - 1) * column, -column
    if image.orientation in TRANSPOSED:
        height, width, row, column = width, height, column, row
    return [address, channel, row, column, height, width, *image.placed, image.row]


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton()


def place(
    images: Sequence[DecodedImage],
    black_rows: Sequence[int],
    batch: torch.Tensor,
    form: PixelForm,
    upload: Upload,
) -> None:
    """Write images, and black ones, to their rows of a batch [rows, 3, height, width] on their
    device. `upload` copies a small tensor there. Launched, not finished: the images must stay until
    it is."""
    if not has_kernel(batch.device):
        place_plainly(images, black_rows, batch, form)
        return
    from penstock.kernels import resize

    lines = [table_row(each, form.is_bgr) for each in images]
    lines += [[0] * (NUM_COLUMNS - 1) + [row] for row in black_rows]
    if lines:
        table = upload(torch.tensor(lines, dtype=torch.int64))
        is_cubic = form.resample == BICUBIC
        resize.place(table, batch, form.scale, form.mean, form.std, is_cubic)


def place_plainly(
    images: Sequence[DecodedImage], black_rows: Sequence[int], batch: torch.Tensor, form: PixelForm
) -> None:
    """Like `place`, image by image in torch."""
    _, _, height, width = batch.shape
    for image in images:
        batch[image.row] = _normalised(_cropped(image, height, width, form), batch.dtype, form)
    for row in black_rows:
        black = torch.zeros((3, 1, 1), device=batch.device)
        batch[row] = _normalised(black, batch.dtype, form)


def _cropped(image: DecodedImage, height: int, width: int, form: PixelForm) -> torch.Tensor:
    pixels = _upright(image)
    *size, top, left = image.placed
    if form.is_bgr:
        pixels = pixels.flip(0)
    resized = pixels.float()
    # Pillow rounds after each.
    for step in ((pixels.shape[1], size[1]), tuple(size)):
        if tuple(resized.shape[1:]) != step:
            resized = torch.nn.functional.interpolate(
                resized[None], step, mode=FILTERS[form.resample], antialias=True
            )[0]
            resized = (resized + 0.5).floor().clamp(0, 255)
    made = torch.zeros((3, height, width), device=pixels.device)
    first_y, first_x = max(0, top), max(0, left)
    there = resized[:, first_y : first_y + height, first_x : first_x + width]
    # Smaller images are in the middle.
    down, right = max(0, -top), max(0, -left)
    made[:, down : down + there.shape[1], right : right + there.shape[2]] = there
    return made


def _upright(image: DecodedImage) -> torch.Tensor:
    pixels = image.pixels
    if image.orientation in ROWS_REVERSED:
        pixels = pixels.flip(1)
    if image.orientation in COLUMNS_REVERSED:
        pixels = pixels.flip(2)
    return pixels.transpose(1, 2) if image.orientation in TRANSPOSED else pixels


def _normalised(pixels: torch.Tensor, dtype: torch.dtype, form: PixelForm) -> torch.Tensor:
    if dtype == torch.uint8:
        return pixels
    mean, std = (
        torch.tensor(each, device=pixels.device).view(3, 1, 1) for each in (form.mean, form.std)
    )
    return (pixels * form.scale - mean) / std
