"""Padding sequences of different lengths to share a batch: buckets, padding and cropping. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from penstock.config import ModelConfig
from penstock.types import DATATYPES, Array, Buffer

Shapes = tuple[tuple[int, ...], ...]
# An output axis, counted without the batch, whose length follows the padded axes.
Crop = tuple[str, int]


class Pads:
    """The padding of one model, by input index."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.padding is not None
        self.buckets = config.padding.buckets
        self._is_packed = config.is_packed
        self._max_tokens = config.batching.max_tokens
        names = [spec.name for spec in config.inputs]
        self.axes = tuple((names.index(each.input), each.axis) for each in config.padding.axes)
        self._dtypes = [DATATYPES[spec.datatype].numpy for spec in config.inputs]
        # Padding value of each input.
        self.values = {
            names.index(each.input): element(
                config.inputs[names.index(each.input)].datatype, each.value
            )
            for each in config.padding.axes
        }

    def length(self, row_shapes: Shapes) -> int | None:
        """Return the common length of all padded axes; None if they differ."""
        lengths = {row_shapes[index][axis] for index, axis in self.axes}
        return lengths.pop() if len(lengths) == 1 else None

    def row_tokens(self, length: int, bucket: int | None) -> int:
        """Return a row's share of a token budget: its own length if padding is not computed,
        otherwise its bucket, if it has one; at least 1."""
        return max(1, length if bucket is None or self._is_packed else bucket)

    def warm_times(self, timings: Mapping[int, float], bucket: int) -> dict[int, float]:
        """Convert a bucket's warm-up times by rows to the unit that limits batches, rows or tokens.
        If padding is not computed, a batch never runs more tokens than its budget."""
        if self._max_tokens is None:
            return dict(timings)
        most = self._max_tokens if self._is_packed else math.inf
        return {int(min(rows * bucket, most)): timings[rows] for rows in sorted(timings)}

    def bucket(self, length: int) -> int | None:
        """Return the smallest bucket that holds this length; None if none does, or for length 0."""
        index = bisect_left(self.buckets, length)
        return self.buckets[index] if length > 0 and index < len(self.buckets) else None

    def shapes(self, row_shapes: Shapes, length: int) -> Shapes:
        """Return these shapes with every padded axis set to this length."""
        sized = [list(shape) for shape in row_shapes]
        for index, axis in self.axes:
            sized[index][axis] = length
        return tuple(map(tuple, sized))

    def write(
        self, index: int, target: Buffer, data: Buffer, shape: Sequence[int], full: Sequence[int]
    ) -> None:
        """Write `data`, rows of `shape`, into `target`, padded to rows of the shape `full`."""
        dtype = self._dtypes[index]
        rows = np.frombuffer(target, dtype).reshape(-1, *full)
        if index in self.values:
            rows[...] = self.values[index]
        rows[:, *map(slice, shape)] = np.frombuffer(data, dtype).reshape(-1, *shape)

    def read(self, index: int, source: Buffer, shape: Sequence[int], full: Sequence[int]) -> bytes:
        """Return the rows of `shape` that `write` put there."""
        rows = np.frombuffer(source, self._dtypes[index]).reshape(-1, *full)
        return rows[:, *map(slice, shape)].tobytes()

    def filled(self, index: int, values: Array, full: Sequence[int]) -> Array:
        """Return a copy of `values`, batch first, padded to rows of the shape `full`."""
        if index not in self.values:
            return values
        rows = np.full((len(values), *full), self.values[index], self._dtypes[index])
        rows[tuple(map(slice, values.shape))] = values
        return rows


def element(datatype: str, value: float) -> Array:
    """Return one element of the datatype; for BF16 its bits."""
    if datatype == "BF16":
        return bf16_bits(np.array(value, np.float32))
    return np.array(value, DATATYPES[datatype].numpy)


def bf16_bits(floats: Array) -> Array:
    """Convert FP32 to the bits of BF16, truncated rather than rounded."""
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def bf16_floats(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cropped(name: str, values: Array, crops: Collection[Crop], length: int) -> Array:
    """Crop an output to its length without padding; batch first."""
    axes = range(values.ndim - 1)
    return values[:, *(slice(length if (name, axis) in crops else None) for axis in axes)]
