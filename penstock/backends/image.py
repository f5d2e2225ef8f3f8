"""The built-in `image` step: encoded images to a network's pixels, by the batch.

Decodes JPEG, PNG and WebP, resizes, crops and normalises as the folder's preprocessor_config.json
says (`pretrained.image_settings`), the way transformers does it with Pillow. Sizes are checked
before anything is decoded.
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

from penstock.config import ModelConfig
from penstock.errors import ConfigError, InvalidRequest, first_line
from penstock.repository import pretrained
from penstock.types import DATATYPES, Array, TensorSpec

if TYPE_CHECKING:
    from PIL.Image import Image

# Decoders of rarer formats are where image libraries have their vulnerabilities.
FORMATS = ("JPEG", "PNG", "WEBP")
# An image of 36 megapixels takes about 100 MB when it is decoded.
MAX_PIXELS = 36_000_000
# Pillow computes without the interpreter's lock.
MAX_THREADS = 4
Row = Mapping[str, Array]


class ImageStep:
    """Encoded images to `specs[0]`, the network's pixels."""

    def __init__(self, config: ModelConfig, specs: Sequence[TensorSpec]) -> None:
        self._input = config.inputs[0].name
        (self._spec,) = specs
        self._settings = pretrained.image_settings(config.folder)
        self._pillow = _pillow()
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(num_threads, "image")

    def tried_all(self, rows: Sequence[Row]) -> list[Row | Exception]:
        """Return the pixels of each row; an InvalidRequest for those that are no image."""
        return list(self._threads.map(self._tried, [row[self._input] for row in rows]))

    def stack(self, rows: Sequence[Row]) -> dict[str, Array]:
        return {self._spec.name: np.stack([row[self._spec.name] for row in rows])}

    def num_tokens(self, row: Row) -> int:
        return 0

    def names(self) -> dict[str, str]:
        return {"image": f"{self._settings.width} x {self._settings.height}"}

    def close(self) -> None:
        self._threads.shutdown()

    def _tried(self, values: Array) -> Row | Exception:
        item = values.ravel()[0]
        data = item if isinstance(item, bytes) else str(item).encode()
        try:
            return {self._spec.name: self._pixels(self._decode(data))}
        except InvalidRequest as error:
            return InvalidRequest(f"input '{self._input}': {error}")
        except Exception as error:  # Pillow raises many types for files it cannot read.
            reason = first_line(error)
            return InvalidRequest(f"input '{self._input}': cannot be decoded: {reason}")

    def _decode(self, data: bytes) -> Image:
        library = self._pillow
        with warnings.catch_warnings():
            # The limit below is stricter.
            warnings.simplefilter("ignore", library.DecompressionBombWarning)
            try:
                image = library.open(io.BytesIO(_plain(data)), formats=FORMATS)
            except library.UnidentifiedImageError:
                expected = "expected a JPEG, PNG or WebP file"
                raise InvalidRequest(f"{len(data)} bytes that are no image; {expected}") from None
            except library.DecompressionBombError:
                raise InvalidRequest(f"more than {MAX_PIXELS} pixels") from None
        width, height = image.size
        if width * height > MAX_PIXELS:
            size = f"{width} x {height} pixels"
            raise InvalidRequest(f"{size}; at most {MAX_PIXELS} in all")
        upright: Image = importlib.import_module("PIL.ImageOps").exif_transpose(image)
        return upright.convert("RGB")

    def _pixels(self, image: Image) -> Array:
        settings = self._settings
        if settings.shortest_edge:
            size = _scaled(image.size, settings.shortest_edge)
            image = image.resize(size, settings.resample)
        elif settings.resize is not None:
            height, width = settings.resize
            image = image.resize((width, height), settings.resample)
        # Smaller images get a black border.
        left, top = (image.width - settings.width) // 2, (image.height - settings.height) // 2
        if image.size != (settings.width, settings.height):
            image = image.crop((left, top, left + settings.width, top + settings.height))
        pixels: Array = np.asarray(image, np.float32) * np.float32(settings.scale)
        pixels = (pixels - np.array(settings.mean, np.float32)) / np.array(settings.std, np.float32)
        return pixels.transpose(2, 0, 1).astype(DATATYPES[self._spec.datatype].numpy)


def _scaled(size: tuple[int, int], shortest: int) -> tuple[int, int]:
    """Return width and height with this shortest edge and the same aspect ratio."""
    width, height = size
    if width <= height:
        return shortest, int(shortest * height / width)
    return int(shortest * width / height), shortest


def _plain(data: bytes) -> bytes:
    """Return the file; base64, with or without a `data:` prefix, is what JSON can carry."""
    if data.startswith((b"\xff\xd8", b"\x89PNG", b"RIFF")):
        return data
    text = data.partition(b"base64,")[2] if data.startswith(b"data:") else data
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return data


def _pillow() -> ModuleType:
    try:
        return importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        what = "images need the package 'pillow', which is not installed"
        raise ConfigError(f'preprocess: {what}; pip install "penstock[data]" brings it') from error
