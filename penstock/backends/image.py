"""The built-in `image` step: encoded images to a network's pixels, by the batch.

Decodes JPEG, PNG and WebP, resizes, crops and normalises as `penstock.image` or the folder's
preprocessor_config.json says (`pretrained.image_settings`), the way transformers does it with
Pillow. Sizes are checked before anything is decoded. In front of a GPU, `torch_images` does what it
can there and leaves the rest to this step's threads.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends import image_files, jpeg
from penstock.config import ModelConfig
from penstock.errors import ConfigError, InvalidRequest, first_line
from penstock.repository import image_settings, pretrained
from penstock.repository.image_settings import Placement
from penstock.types import DATATYPES, Array, TensorSpec

if TYPE_CHECKING:
    from PIL.Image import Image

# Decoders of rarer formats are where image libraries have their vulnerabilities.
FORMATS = ("JPEG", "PNG", "WEBP")
# An image of 36 megapixels takes about 100 MB when it is decoded.
MAX_PIXELS = 36_000_000
# Pillow computes without the interpreter's lock. Behind them, a GPU needs no cores.
MAX_THREADS, MAX_GPU_THREADS = 4, 16
# Of images for warm-up.
SEED, NOISE = 5, 36
# Bytes that libjpeg reads ahead of the pixels, at most 8; and Pillow's words for missing ones.
READ_AHEAD_BYTES = 16
DAMAGED, TRUNCATED = "the file is damaged", "truncated"
Row = Mapping[str, Array]


class ImageStep:
    """Encoded images to `specs[0]`, the network's pixels. `text` is that of `penstock.image`."""

    def __init__(
        self, config: ModelConfig, specs: Sequence[TensorSpec], text: str | None = None
    ) -> None:
        self.input = config.inputs[0].name
        (self.spec,) = specs
        if text is None:
            self.settings = pretrained.image_settings(config.folder)
        else:
            self.settings = image_settings.parse(text, self.spec)
        self._pillow = _pillow()
        most = MAX_GPU_THREADS if config.decodes_on_gpu else MAX_THREADS
        self.threads = ThreadPoolExecutor(min(most, len(os.sched_getaffinity(0))), "image")

    def tried_all(self, rows: Sequence[Row]) -> list[Row | Exception]:
        """Return the pixels of each row; an InvalidRequest for those that are no image."""
        return list(self.threads.map(self._tried, [row[self.input] for row in rows]))

    def stack(self, rows: Sequence[Row]) -> dict[str, Array]:
        return {self.spec.name: np.stack([row[self.spec.name] for row in rows])}

    def num_tokens(self, row: Row) -> int:
        return 0

    def names(self) -> dict[str, str]:
        return {"image": f"{self.settings.width} x {self.settings.height}"}

    def close(self) -> None:
        self.threads.shutdown()

    def file_in(self, values: Array) -> bytes:
        """Return the encoded image of a row."""
        item = values.ravel()[0]
        return _plain(item if isinstance(item, bytes) else str(item).encode())

    def tried_crop(self, data: bytes) -> Array | InvalidRequest:
        """Return the pixels of an image, [height, width, 3] from 0 to 255, resized and cropped; an
        InvalidRequest if it is no image."""
        try:
            return self._crop(self._decode(data))
        except InvalidRequest as error:
            return self.refused(str(error))
        except Exception as error:  # Pillow raises many types for files it cannot read.
            if TRUNCATED in str(error) and jpeg.end_of_only_scan(data):
                return self.refused(f"{DAMAGED}: its coded pixels end before the image does")
            return self.refused(f"cannot be decoded: {first_line(error)}")

    def refused(self, problem: str) -> InvalidRequest:
        return InvalidRequest(f"input '{self.input}': {problem}")

    def _tried(self, values: Array) -> Row | Exception:
        pixels = self.tried_crop(self.file_in(values))
        if isinstance(pixels, Exception):
            return pixels
        return {self.spec.name: self._normalised(pixels)}

    def _decode(self, data: bytes) -> Image:
        library = self._pillow
        if damage := image_files.find_damage(data):
            raise InvalidRequest(f"{DAMAGED}: {damage}")
        # Behind the end marker, the library makes missing pixels grey; without one, it asks for
        # more of the file, which is an error. It reads a few bytes ahead.
        end = jpeg.end_of_only_scan(data)
        if end:
            data = data[:end] + bytes(READ_AHEAD_BYTES)
        with warnings.catch_warnings():
            # The limit below is stricter.
            warnings.simplefilter("ignore", library.DecompressionBombWarning)
            try:
                image = library.open(io.BytesIO(data), formats=FORMATS)
            except library.UnidentifiedImageError:
                other = image_files.other_format(data)
                what = f"{other} files are not decoded" if other else "bytes that are no image"
                size = "" if other else f"{len(data)} "
                raise InvalidRequest(f"{size}{what}; expected a JPEG, PNG or WebP file") from None
            except library.DecompressionBombError:
                raise InvalidRequest(f"more than {MAX_PIXELS} pixels") from None
        check_size(*image.size)
        upright: Image = importlib.import_module("PIL.ImageOps").exif_transpose(image)
        if upright.mode.startswith("I"):
            # Grey with 16 bits, where `convert` clips values instead of dropping the lower byte.
            upright = library.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        return upright.convert("RGB")

    def _crop(self, image: Image) -> Array:
        settings = self.settings
        placed = settings.place(*image.size)
        check_resized(placed)
        if settings.shortest_edge or settings.resize is not None:
            image = image.resize((placed.width, placed.height), settings.resample)
        # Smaller images get a black border.
        if image.size != (settings.width, settings.height):
            right, bottom = placed.left + settings.width, placed.top + settings.height
            image = image.crop((placed.left, placed.top, right, bottom))
        return np.asarray(image)

    def _normalised(self, pixels: Array) -> Array:
        settings = self.settings
        if settings.is_bgr:
            pixels = pixels[..., ::-1]
        if self.spec.datatype != "UINT8":
            pixels = pixels.astype(np.float32) * np.float32(settings.scale)
            mean, std = (np.array(each, np.float32) for each in (settings.mean, settings.std))
            pixels = (pixels - mean) / std
        if image_settings.is_channels_first(self.spec):
            pixels = pixels.transpose(2, 0, 1)
        return np.asarray(pixels, DATATYPES[self.spec.datatype].numpy)


def check_size(width: int, height: int) -> None:
    """Raise InvalidRequest for an image that is too large to be decoded."""
    if width * height > MAX_PIXELS:
        raise InvalidRequest(f"{width} x {height} pixels; at most {MAX_PIXELS} in all")


def check_resized(placed: Placement) -> None:
    """Raise InvalidRequest for an image whose long edge would grow too much with its short one."""
    if placed.width * placed.height > MAX_PIXELS:
        size = f"{placed.width} x {placed.height} pixels"
        raise InvalidRequest(f"resized to {size}; at most {MAX_PIXELS} in all")


def draw_sample(width: int, height: int, seed: int = SEED) -> bytes:
    """Return a JPEG for warm-up: smooth colours with noise, about as large as a photo's file."""
    chance = np.random.default_rng(seed)
    library = _pillow()
    coarse = library.fromarray(chance.integers(0, 256, (6, 8, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), library.Resampling.BICUBIC), np.int16)
    noisy = smooth + chance.integers(-NOISE, NOISE, smooth.shape, np.int16)
    file = io.BytesIO()
    library.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def _plain(data: bytes) -> bytes:
    """Return the file; base64, with or without a `data:` prefix, is what JSON can carry."""
    if data.startswith((b"\xff\xd8", b"\x89PNG", b"RIFF")):
        return data
    text = data.partition(b"base64,")[2] if data.startswith(b"data:") else data
    try:
        # Encoders break lines.
        return base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error:
        return data


def _pillow() -> ModuleType:
    try:
        return importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        what = "images need the package 'pillow', which is not installed"
        raise ConfigError(f'preprocess: {what}; pip install "penstock[data]" brings it') from error
