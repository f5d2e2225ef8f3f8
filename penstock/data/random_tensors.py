"""Random tensors from a model's signature, different for every request.

Drawing numbers per request would cost more than sending it. Instead a long array of random elements
is drawn once per input, and each request gets another window of it. Windows overlap, but none
repeats until all were used; then the array is drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from penstock.data.lengths import Sizes
from penstock.data.samples import Origin, RequestForm, Sample
from penstock.serving.padding import bf16_bits
from penstock.types import DATATYPES, Array, TensorSpec, num_elements

# Primes, so that steps of any size visit every window before repeating one.
NUM_WINDOWS = 1_048_573
NUM_STRING_WINDOWS = 65_537
# The golden ratio spreads consecutive windows widely.
STEP_SHARE = 0.6180339887
# Embeddings crash on ids outside their table; every vocabulary has this many tokens.
NUM_TOKEN_IDS = 1000
NUM_INTEGERS = 100
LETTERS = (97, 123)
LONGEST_WORD = 8

Seed = tuple[int, ...]
# One input: returns its next tensor, with variable dimensions of this length.
Column = Callable[[int], Array]


class RandomTensors:
    """A source of random tensors. All variable dimensions of a request have the same length, the
    next of `sizes`, or 1 without sizes. Optional inputs are left out."""

    def __init__(
        self, form: RequestForm, batch_size: int, seed: Seed, sizes: Sizes, digest: str = ""
    ) -> None:
        leading = (batch_size,) if form.has_batch else ()
        self._columns = [
            (spec.name, _column(spec, leading, (*seed, position)))
            for position, spec in enumerate(form.required)
        ]
        self._lengths = sizes.requests
        self.origin = Origin(_text(form, sizes.requests_text), is_random=True, digest=digest)

    def next(self) -> tuple[int | None, Sample]:
        length = 1 if self._lengths is None else next(self._lengths)
        return None, Sample({name: take(length) for name, take in self._columns})


def has_variable_dimension(form: RequestForm) -> bool:
    return any(-1 in spec.shape for spec in form.required)


class Windows:
    """Random elements, a different window each time."""

    def __init__(self, spec: TensorSpec, leading: tuple[int, ...], seed: Seed) -> None:
        self._spec = spec
        self._random = np.random.Generator(np.random.SFC64(seed))
        self._num_windows = NUM_STRING_WINDOWS if spec.datatype == "BYTES" else NUM_WINDOWS
        self._step = int(self._num_windows * STEP_SHARE)
        self._start = 0
        self._shape = (*leading, *spec.shape)
        self._elements = self._draw(_shape_for(self._shape, 1)[1])

    def take(self, length: int) -> Array:
        shape, size = _shape_for(self._shape, length)
        start = self._start + self._step
        if start >= self._num_windows:
            start -= self._num_windows
        # Zero comes last: all other windows are used up.
        if start == 0 or start + size > len(self._elements):
            self._elements = self._draw(2 * size)
        self._start = start
        return self._elements[start : start + size].reshape(shape)

    def _draw(self, size: int) -> Array:
        """Draw enough elements for every window of this size."""
        return _elements(self._spec, self._random, self._num_windows + size)


@cache
def _shape_for(shape: tuple[int, ...], length: int) -> tuple[tuple[int, ...], int]:
    """Return the shape with variable dimensions of this length, and its number of elements."""
    found = tuple(length if size < 0 else size for size in shape)
    return found, num_elements(found)


def _column(spec: TensorSpec, leading: tuple[int, ...], seed: Seed) -> Column:
    if DATATYPES[spec.datatype].numpy.kind in "iub" and _role(spec) in ("mask", "type", "position"):
        # These must not be random.
        shape = (*leading, *spec.shape)
        return cache(lambda length: _meant(spec, _shape_for(shape, length)[0]))
    return Windows(spec, leading, seed).take


def _role(spec: TensorSpec) -> str:
    """Guess what an integer input is for from the names that common encoders use."""
    name = spec.name.lower()
    for role, words in {
        "mask": ("mask",),
        "type": ("token_type", "segment"),
        "position": ("position_ids", "positions"),
        "token": ("input_ids", "token", "_ids"),
    }.items():
        if any(word in name for word in words):
            return role
    return ""


def _meant(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    dtype = DATATYPES[spec.datatype].numpy
    if _role(spec) == "position":
        return np.ascontiguousarray(np.broadcast_to(np.arange(shape[-1]), shape), dtype=dtype)
    return np.full(shape, 1 if _role(spec) == "mask" else 0, dtype)


def _elements(spec: TensorSpec, random: np.random.Generator, count: int) -> Array:
    dtype = DATATYPES[spec.datatype].numpy
    if spec.datatype == "BYTES":
        return _words(random, count)
    if spec.datatype == "BF16":
        return bf16_bits(random.random(count, np.float32))
    if dtype.kind == "f":
        wide = np.float64 if spec.datatype == "FP64" else np.float32
        return random.random(count, wide).astype(dtype, copy=False)
    if dtype.kind == "b":
        return random.integers(0, 2, count, np.uint8).astype(np.bool_)
    if dtype.itemsize == 1:
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, count, dtype, endpoint=True)
    limit = NUM_TOKEN_IDS if _role(spec) == "token" else NUM_INTEGERS
    return random.integers(0, limit, count, dtype)


def _words(random: np.random.Generator, count: int) -> Array:
    """Return words of 3 to 8 lower-case letters."""
    letters = random.integers(*LETTERS, (count, LONGEST_WORD), np.uint8)
    lengths = random.integers(3, LONGEST_WORD, count, endpoint=True)
    letters[np.arange(LONGEST_WORD) >= lengths[:, None]] = 0
    # numpy treats trailing zeros of a string as padding.
    return letters.view(f"S{LONGEST_WORD}").ravel().astype(np.object_)


def _text(form: RequestForm, lengths_text: str) -> str:
    text = "random values from the model's signature: real data may behave differently"
    if not has_variable_dimension(form):
        return text
    if lengths_text:
        return f"{text}; variable dimensions: {lengths_text}"
    return f"{text}; variable dimensions are 1 long, as no lengths were given"
