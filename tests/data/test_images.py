"""Images as tensors: layout, size, scale; what is read, what is left out, what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.data.images import find_images, read_images
from penstock.errors import ConfigError
from penstock.types import TensorSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images of one colour: red, 8 wide and 4 high; blue, 6 by 6, in a folder of its own."""
    (tmp_path / "inner").mkdir()
    Image.new("RGB", (8, 4), (255, 0, 0)).save(tmp_path / "b.png")
    Image.new("RGB", (6, 6), (0, 0, 51)).save(tmp_path / "inner" / "a.BMP", format="BMP")
    (tmp_path / "labels.txt").write_text("not an image")
    return tmp_path


def image(datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec("image", datatype, shape)


def test_images_are_found_in_inner_folders_too(folder: Path) -> None:
    assert [path.name for path in find_images(folder)] == ["b.png", "a.BMP"]


def test_channels_first_floats_are_scaled(folder: Path) -> None:
    images = read_images(folder, image("FP32", 3, 2, 5), seed=0)
    red, blue = images.examples
    assert red.shape == blue.shape == (3, 2, 5)
    assert red.dtype == np.float32
    assert red[0].tolist() == [[1.0] * 5] * 2
    assert red[1:].max() == 0
    assert blue[2] == pytest.approx(0.2)
    assert images.treatment == "resized to 5 x 2, RGB, scaled to 0..1"


def test_channels_last_bytes_are_raw(folder: Path) -> None:
    images = read_images(folder, image("UINT8", 2, 5, 3), seed=0)
    assert images.examples[0].shape == (2, 5, 3)
    assert images.examples[0][0, 0].tolist() == [255, 0, 0]
    assert images.examples[1][1, 4].tolist() == [0, 0, 51]
    assert "raw 0..255" in images.treatment


@pytest.mark.parametrize("shape", [(1, 2, 5), (2, 5, 1)])
def test_one_channel_is_grey(folder: Path, shape: tuple[int, ...]) -> None:
    red = read_images(folder, image("UINT8", *shape), seed=0).examples[0]
    assert red.shape == shape
    assert set(red.ravel().tolist()) == {76}


@pytest.mark.parametrize(("datatype", "bits"), [("FP16", np.float16), ("BF16", np.uint16)])
def test_short_floats(folder: Path, datatype: str, bits: type) -> None:
    red = read_images(folder, image(datatype, 3, 2, 2), seed=0).examples[0]
    assert red.dtype == bits
    assert red[0, 0, 0] == (0x3F80 if datatype == "BF16" else 1.0)


def test_variable_sizes_keep_that_of_the_image(folder: Path) -> None:
    images = read_images(folder, image("UINT8", 3, -1, -1), seed=0)
    assert [array.shape for array in images.examples] == [(3, 4, 8), (3, 6, 6)]


def test_a_model_that_takes_bytes_gets_the_file(folder: Path) -> None:
    images = read_images(folder, image("BYTES", 1), seed=0)
    assert images.examples[0].tolist() == [(folder / "b.png").read_bytes()]
    assert images.treatment == ""


def test_as_many_as_fit_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    for number in range(10):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / f"{number}.png")
    spec = image("UINT8", 3, 4, 4)
    images = read_images(tmp_path, spec, seed=0, max_bytes=3 * 48)
    assert len(images.examples) == len(images.paths) == 3
    assert images.num_found == 10
    assert [array[0, 0, 0] for array in images.examples] == [int(p.stem) for p in images.paths]
    again = read_images(tmp_path, spec, seed=0, max_bytes=3 * 48)
    assert again.paths == images.paths
    other = {tuple(read_images(tmp_path, spec, seed, max_bytes=144).paths) for seed in range(5)}
    assert len(other) > 1


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (image("FP32", 10), r"images fit \[3, H, W\].*, not \[10\]"),
        (image("FP32", 4, 8, 8), r"not \[4, 8, 8\]"),
        (image("INT32", 3, 8, 8), "images become UINT8, floats or BYTES, not INT32"),
    ],
)
def test_inputs_that_are_no_images_are_refused(
    folder: Path, spec: TensorSpec, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_images(folder, spec, seed=0)


def test_broken_images_are_named(folder: Path) -> None:
    (folder / "c.jpg").write_bytes(b"no image")
    whole = (folder / "b.png").read_bytes()
    (folder / "d.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError) as caught:
        read_images(folder, image("FP32", 3, 2, 2), seed=0)
    assert len(caught.value.problems) == 2
    assert all("cannot be read as an image" in problem for problem in caught.value.problems)


def test_an_image_that_unpacks_to_far_more_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 31)
    with pytest.raises(ConfigError, match="cannot be read as an image"):
        read_images(folder, image("FP32", 3, 2, 2), seed=0)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no images; expected files that end in \.bmp"):
        find_images(tmp_path)


def test_without_the_library_the_error_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[data\]'"):
        read_images(folder, image("FP32", 3, 2, 2), seed=0)
