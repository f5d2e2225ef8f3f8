"""A folder of images as examples of one input. Knows image formats and sizes, but no protocol.

Images are decoded before the load starts, so that decoding adds no latency; a folder that is too
large for that is sampled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from penstock.data.fitting import DataMismatch, example
from penstock.errors import ConfigError
from penstock.types import DATATYPES, Array, TensorSpec

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
# Decoders of rarer formats are where image libraries have their vulnerabilities.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
# Kept per process; 890 images of 3 x 224 x 224 in FP32.
MAX_BYTES = 512 * 1024 * 1024
MAX_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class Images:
    """Examples in the order of their names. `num_found` includes those left out."""

    examples: Sequence[Array]
    paths: Sequence[Path]
    num_found: int
    # How an image became a tensor; "" for raw bytes.
    treatment: str


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Height, width and channels of the tensor. 0: as in the image."""

    height: int
    width: int
    num_channels: int
    is_channels_first: bool


def read_images(folder: Path, spec: TensorSpec, seed: int, max_bytes: int = MAX_BYTES) -> Images:
    paths = find_images(folder)
    if spec.datatype == "BYTES":
        return _read(paths, lambda path: example(spec, path.read_bytes()), seed, max_bytes)
    layout = _layout(spec)
    try:
        from PIL import Image as pillow
    except ImportError:
        raise ConfigError([f"{folder}: images need Pillow: pip install 'penstock[data]'"]) from None
    images = _read(paths, lambda path: _decoded(pillow, path, spec, layout), seed, max_bytes)
    size = f"{layout.width or 'own width'} x {layout.height or 'own height'}"
    scale = "raw 0..255" if spec.datatype == "UINT8" else "scaled to 0..1"
    colours = "RGB" if layout.num_channels == 3 else "grey"
    return replace(images, treatment=f"resized to {size}, {colours}, {scale}")


def find_images(folder: Path) -> list[Path]:
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not paths:
        endings = ", ".join(sorted(SUFFIXES))
        raise ConfigError([f"{folder}: has no images; expected files that end in {endings}"])
    return paths


def _read(
    paths: Sequence[Path], read: Callable[[Path], Array], seed: int, max_bytes: int
) -> Images:
    """Read as many as fit, chosen at random: the first by name may all be of one class."""
    found: dict[Path, Array] = {}
    problems: list[str] = []
    num_bytes = 0
    for position in np.random.default_rng(seed).permutation(len(paths)):
        path = paths[position]
        try:
            array = read(path)
        except DataMismatch as misfit:
            raise ConfigError([str(misfit)]) from None
        # Pillow raises SyntaxError for broken PNG files.
        except (OSError, ValueError, SyntaxError) as error:
            problems.append(f"{path}: cannot be read as an image: {error}")
            if len(problems) >= MAX_PROBLEMS:
                break
            continue
        num_bytes += len(array.item()) if array.dtype == np.object_ else array.nbytes
        if found and num_bytes > max_bytes:
            break
        found[path] = array
    if problems:
        raise ConfigError(problems)
    chosen = sorted(found)
    return Images([found[path] for path in chosen], chosen, len(paths), "")


def _layout(spec: TensorSpec) -> ImageLayout:
    match spec.shape:
        case (1 | 3 as channels, height, width):
            layout = ImageLayout(max(0, height), max(0, width), channels, True)
        case (height, width, 1 | 3 as channels):
            layout = ImageLayout(max(0, height), max(0, width), channels, False)
        case _:
            fitting = f"[3, H, W], [H, W, 3], [1, H, W] or [H, W, 1], not {list(spec.shape)}"
            raise ConfigError([f"input '{spec.name}': images fit {fitting}"])
    kind = DATATYPES[spec.datatype].numpy.kind
    if spec.datatype not in ("UINT8", "BF16") and kind != "f":
        possible = f"UINT8, floats or BYTES, not {spec.datatype}"
        raise ConfigError([f"input '{spec.name}': images become {possible}"])
    return layout


def _decoded(pillow: ModuleType, path: Path, spec: TensorSpec, layout: ImageLayout) -> Array:
    with warnings.catch_warnings():
        # Refuse a suspiciously large image instead of warning.
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            with pillow.open(path, formats=FORMATS) as image:
                pixels = _pixels(image, layout)
        except (pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            raise ValueError(str(error)) from None
    if spec.datatype == "UINT8":
        return example(spec, pixels)
    return example(spec, pixels.astype(np.float32) / 255)


def _pixels(image: Image.Image, layout: ImageLayout) -> Array:
    if layout.height and layout.width:
        # Lets the JPEG decoder skip detail that resizing would discard.
        image.draft(None, (layout.width, layout.height))
    converted = image.convert("RGB" if layout.num_channels == 3 else "L")
    size = (layout.width or image.width, layout.height or image.height)
    if converted.size != size:
        converted = converted.resize(size)
    pixels: Array = np.asarray(converted, np.uint8)
    pixels = pixels.reshape(*pixels.shape[:2], layout.num_channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if layout.is_channels_first else pixels)
