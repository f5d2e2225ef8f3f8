"""How an encoded image becomes a model's pixels: the settings, and the text of `penstock.image`.

`resize=shortest 256; interpolation=bilinear; channels=rgb; mean=0.485,0.456,0.406;
std=0.229,0.224,0.225`. The model's input says the final size, the layout and the datatype. Knows
no image library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.types import TensorSpec

# Pillow's numbers of its filters.
FILTERS: Mapping[str, int] = {
    "nearest": 0,
    "lanczos": 1,
    "bilinear": 2,
    "bicubic": 3,
    "box": 4,
    "hamming": 5,
}
NUM_CHANNELS = 3
DATATYPES = ("FP32", "FP16", "UINT8")
KEYS = ("resize", "interpolation", "channels", "scale", "mean", "std", "decoder")
SHAPES = "one input [3, height, width] or [height, width, 3] of fixed size"
RESIZE = re.compile(
    r"shortest\s+(?P<shortest>[1-9]\d{0,4})|(?P<h>[1-9]\d{0,4})x(?P<w>[1-9]\d{0,4})"
)
RESIZES = "expected exact, none, 'shortest 256', or height and width as 256x320"
Colours = tuple[float, float, float]


class Placement(NamedTuple):
    """The size that an image is resized to, and the corner of the crop in it. The corner is
    negative for images smaller than the crop, which get a black border."""

    height: int
    width: int
    top: int
    left: int


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How an image becomes pixels: resized, cropped to `height` x `width`, scaled, normalised."""

    height: int
    width: int
    # Height and width before the crop; None if only the shortest edge is given, or neither.
    resize: tuple[int, int] | None
    # 0: not used.
    shortest_edge: int
    # Filter of Pillow, by its number.
    resample: int
    scale: float
    # In the order of the model's channels.
    mean: Colours
    std: Colours
    is_bgr: bool = False
    # Whether CPU threads decode also in front of a GPU.
    is_decoded_on_cpu: bool = False

    def place(self, width: int, height: int) -> Placement:
        """Return how an image of this size is resized and cropped."""
        if self.shortest_edge:
            short = self.shortest_edge
            if width <= height:
                width, height = short, int(short * height / width)
            else:
                width, height = int(short * width / height), short
        elif self.resize is not None:
            height, width = self.resize
        return Placement(height, width, (height - self.height) // 2, (width - self.width) // 2)

    def check(self, spec: TensorSpec) -> None:
        """Raise ConfigError if a model's input does not take these pixels."""
        if _size(spec) != (self.height, self.width):
            what = f"images of {self.height}x{self.width}"
            raise ConfigError(f"{what}, but '{spec.name}' has shape {list(spec.shape)}")


def parse(text: str, spec: TensorSpec) -> ImageSettings:
    """Return the settings for a model's input. ConfigError says what is wrong, and what is
    accepted."""
    height, width = _size(spec)
    is_raw = spec.datatype == "UINT8"
    given = _pairs(text)
    resize, shortest = _resize(given.get("resize", "exact"), (height, width))
    name = given.get("interpolation", "bilinear")
    if name not in FILTERS:
        raise ConfigError(f"interpolation: '{name}' is not one of {', '.join(FILTERS)}")
    channels = given.get("channels", "rgb")
    if channels not in ("rgb", "bgr"):
        raise ConfigError(f"channels: '{channels}' is not rgb or bgr")
    decoder = given.get("decoder", "auto")
    if decoder not in ("auto", "cpu"):
        raise ConfigError(f"decoder: '{decoder}' is not auto or cpu")
    for key in ("scale", "mean", "std"):
        if is_raw and key in given:
            raise ConfigError(f"{key}: not for UINT8; '{spec.name}' gets the values 0 to 255")
    scale = _scale(given["scale"]) if "scale" in given else 1.0 if is_raw else 1 / 255
    mean, std = _colours("mean", given, 0.0), _colours("std", given, 1.0)
    if not all(each > 0 for each in std):
        raise ConfigError(f"std: '{given['std']}': expected numbers above 0")
    return ImageSettings(
        height,
        width,
        resize,
        shortest,
        FILTERS[name],
        scale,
        mean,
        std,
        is_bgr=channels == "bgr",
        is_decoded_on_cpu=decoder == "cpu",
    )


def is_channels_first(spec: TensorSpec) -> bool:
    return spec.shape[0] == NUM_CHANNELS


def _size(spec: TensorSpec) -> tuple[int, int]:
    """Return height and width of a model's input."""
    if spec.datatype not in DATATYPES:
        what = f"'{spec.name}' is {spec.datatype}"
        raise ConfigError(f"{what}; expected one of {', '.join(DATATYPES)}")
    match spec.shape:
        case (3, height, width) if height > 0 and width > 0:
            return height, width
        case (height, width, 3) if height > 0 and width > 0:
            return height, width
    raise ConfigError(f"'{spec.name}' has shape {list(spec.shape)}; expected {SHAPES}")


def _pairs(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in KEYS:
            known = ", ".join(KEYS)
            raise ConfigError(f"'{item}': expected key=value, divided by ';', of {known}")
        if key in given:
            raise ConfigError(f"{key}: is given twice")
        given[key] = value
    return given


def _resize(text: str, size: tuple[int, int]) -> tuple[tuple[int, int] | None, int]:
    """Return height and width, or the shortest edge, to resize to. `size` is the model's."""
    if text == "exact":
        return size, 0
    if text == "none":
        return None, 0
    found = RESIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"resize: '{text}': {RESIZES}")
    height, width = size
    given = [int(edge) for edge in found.groups() if edge]
    # If the shortest edge is given, the other one depends on the image.
    least = [min(size)] if found["shortest"] else list(size)
    if any(edge < needed for edge, needed in zip(given, least, strict=True)):
        border = "every image would get a black border"
        raise ConfigError(f"resize: '{text}': less than the model's {height}x{width}, so {border}")
    if found["shortest"]:
        return None, given[0]
    return (given[0], given[1]), 0


def _scale(text: str) -> float:
    above, slash, below = text.partition("/")
    scale = _number(above) / (_number(below) or math.nan) if slash else _number(text)
    if not scale > 0:
        raise ConfigError(f"scale: '{text}': expected a number above 0, such as 1/255")
    return scale


def _colours(key: str, given: Mapping[str, str], default: float) -> Colours:
    if key not in given:
        return default, default, default
    values = [_number(each) for each in given[key].split(",")]
    if len(values) == 1:
        values *= NUM_CHANNELS
    if len(values) != NUM_CHANNELS or not all(map(math.isfinite, values)):
        raise ConfigError(f"{key}: '{given[key]}': expected one number, or three divided by ','")
    return values[0], values[1], values[2]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
