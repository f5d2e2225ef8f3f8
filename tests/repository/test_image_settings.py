"""`penstock.image`: what is accepted, what is refused and how that is told."""

import pytest

from penstock.errors import ConfigError
from penstock.repository.image_settings import (
    FILTERS,
    ImageSettings,
    Placement,
    is_channels_first,
    parse,
)
from penstock.types import TensorSpec

X = TensorSpec("x", "FP32", (3, 224, 200))
ONES, ZEROS = (1.0,) * 3, (0.0,) * 3


def test_defaults():
    plain = ImageSettings(224, 200, (224, 200), 0, 2, 1 / 255, ZEROS, ONES, is_bgr=False)
    assert parse("", X) == parse(" ; ", X) == plain
    raw = parse("", TensorSpec("x", "UINT8", (224, 200, 3)))
    assert (raw.height, raw.width, raw.scale) == (224, 200, 1.0)


def test_everything_given():
    text = (
        "resize = shortest 256; interpolation=bicubic; channels=bgr; scale=1; "
        "mean=103.5, 116.3 ,123.7; std=58"
    )
    found = parse(text, TensorSpec("x", "FP16", (64, 48, 3)))
    mean, std = (103.5, 116.3, 123.7), (58.0, 58.0, 58.0)
    assert found == ImageSettings(64, 48, None, 256, 3, 1.0, mean, std, is_bgr=True)
    assert parse("scale=2/510", X).scale == pytest.approx(1 / 255)
    assert parse("resize=256x320", X).resize == (256, 320)
    assert parse("resize=none", X).resize is None
    assert parse("decoder=cpu", X).is_decoded_on_cpu and not found.is_decoded_on_cpu
    assert [parse(f"interpolation={name}", X).resample for name in FILTERS] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "size", "placed"),
    [
        ("", (640, 480), Placement(224, 200, 0, 0)),
        ("resize=shortest 256", (500, 375), Placement(256, 341, 16, 70)),
        ("resize=shortest 256", (375, 500), Placement(341, 256, 58, 28)),
        ("resize=256x320", (10, 10), Placement(256, 320, 16, 60)),
        ("resize=none", (201, 223), Placement(223, 201, -1, 0)),
    ],
)
def test_how_images_are_resized_and_cropped(text, size, placed):
    assert parse(text, X).place(*size) == placed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("size=3", "'size=3': expected key=value, divided by ';', of resize, interpolation"),
        ("bilinear", "'bilinear': expected key=value"),
        ("mean=1; mean=2", "mean: is given twice"),
        ("resize=256", "resize: '256': expected exact, none, 'shortest 256', or height and width"),
        ("resize=shortest 0", "resize: 'shortest 0'"),
        ("resize=1x999999", "resize: '1x999999'"),
        ("resize=223x200", "resize: '223x200': less than the model's 224x200, so every"),
        ("resize=shortest 199", "resize: 'shortest 199': less than the model's 224x200"),
        ("interpolation=cubic", "interpolation: 'cubic' is not one of nearest, lanczos, bilinear"),
        ("decoder=gpu", "decoder: 'gpu' is not auto or cpu"),
        ("channels=grey", "channels: 'grey' is not rgb or bgr"),
        ("scale=1/0", "scale: '1/0': expected a number above 0, such as 1/255"),
        ("scale=-1", "scale: '-1'"),
        ("scale=inf", "scale: 'inf'"),
        ("mean=1,2", "mean: '1,2': expected one number, or three divided by ','"),
        ("mean=a,b,c", "mean: 'a,b,c'"),
        ("std=1,0,1", "std: '1,0,1': expected numbers above 0"),
    ],
)
def test_what_is_wrong_is_told(text, problem):
    with pytest.raises(ConfigError) as caught:
        parse(text, X)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("datatype", "shape", "text", "problem"),
    [
        ("INT64", (3, 8, 8), "", "'x' is INT64; expected one of FP32, FP16, UINT8"),
        ("FP32", (3, -1, -1), "", "'x' has shape [3, -1, -1]; expected one input [3, height"),
        ("FP32", (1, 28, 28), "", "'x' has shape [1, 28, 28]; expected one input"),
        ("FP32", (3, 8), "", "'x' has shape [3, 8]"),
        ("UINT8", (3, 8, 8), "mean=1", "mean: not for UINT8; 'x' gets the values 0 to 255"),
    ],
)
def test_inputs_that_are_no_images(datatype, shape, text, problem):
    with pytest.raises(ConfigError) as caught:
        parse(text, TensorSpec("x", datatype, shape))
    assert problem in str(caught.value)


def test_the_layout_follows_from_the_shape():
    assert is_channels_first(X)
    assert not is_channels_first(TensorSpec("x", "FP32", (224, 200, 3)))
