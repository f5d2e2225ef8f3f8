"""Draws pictures with handwritten digits and asks the ensemble `read_digits` what is in them.

Serve it with `penstock serve examples/read_digits/repository examples/repository`. The digits are
those that the classifier of `examples/train_digits.py` has not seen in training.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tritonclient.http as httpclient
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_digits import held_out

SIZE, CELL = 8, 12
NOISE = 0.05


class Picture(NamedTuple):
    pixels: NDArray[np.float32]
    # By the corner of each digit: which it is.
    digits: dict[tuple[int, int], int]


def draw(rng: np.random.Generator, num_digits: int, *, on_paper: bool) -> Picture:
    """Draw digits at random places, without overlaps, with noise."""
    images, labels = held_out()
    side = max(2, int(np.ceil(np.sqrt(2 * num_digits))))
    pixels = np.zeros((side * CELL, side * CELL), np.float32)
    digits: dict[tuple[int, int], int] = {}
    for cell in rng.choice(side * side, num_digits, replace=False):
        y, x = (int(k) * CELL + int(rng.integers(0, 2)) for k in divmod(cell, side))
        chosen = int(rng.integers(len(labels)))
        pixels[y : y + SIZE, x : x + SIZE] = images[chosen, 0]
        digits[y, x] = int(labels[chosen])
    pixels = np.clip(pixels + rng.normal(0, NOISE, pixels.shape), 0, 1).astype(np.float32)
    return Picture(1 - pixels if on_paper else pixels, digits)


def read(url: str, pixels: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the boxes that the server finds, and the digits in them."""
    with httpclient.InferenceServerClient(url) as client:
        tensor = httpclient.InferInput("PICTURE", list(pixels.shape), "FP32")
        tensor.set_data_from_numpy(pixels)
        answer = client.infer("read_digits", [tensor])
        return answer.as_numpy("BOXES"), answer.as_numpy("LOGITS").argmax(axis=1)


def count_right(picture: Picture, boxes: NDArray[np.int32], found: NDArray[np.int64]) -> int:
    """Count the digits that a box lies on and that are read as what they are."""
    right = 0
    for (y, x), digit in picture.digits.items():
        for (top, left, bottom, right_side), guess in zip(boxes, found, strict=True):
            is_there = (
                abs((top + bottom) / 2 - y - 4) <= 2 and abs((left + right_side) / 2 - x - 4) <= 2
            )
            if is_there and guess == digit:
                right += 1
                break
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("--pictures", type=int, default=40)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    counts = [int(rng.integers(0, 20)) for _ in range(options.pictures)]
    pictures = [draw(rng, n, on_paper=bool(i % 2)) for i, n in enumerate(counts)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: read(options.url, each.pixels), pictures))
    pairs = zip(pictures, answers, strict=True)
    num_right = sum(count_right(picture, *answer) for picture, answer in pairs)
    num_found, total = sum(len(boxes) for boxes, _ in answers), sum(counts)
    print(f"{num_found} digits found in {len(pictures)} pictures with {total}")
    print(f"{num_right} of {total} read right: {num_right / total:.1%}")
    return 0 if num_right >= 0.95 * total else 1


if __name__ == "__main__":
    raise SystemExit(main())
