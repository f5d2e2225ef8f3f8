"""Calibration: histograms of a model's tensors over representative examples, and ranges from them
by three methods. Histograms are updated as examples stream by, so memory does not grow with their
number.

Results are cached on disk by the digest of model, examples and library.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.backends.processing import apply
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer import onnx_model
from penstock.optimizer.examples import Examples
from penstock.optimizer.extremes import as_floats
from penstock.optimizer.simulate import fitted
from penstock.types import Array

if TYPE_CHECKING:
    from onnx import ModelProto

Method = Literal["minmax", "entropy", "percentile"]
METHODS: tuple[Method, ...] = ("minmax", "entropy", "percentile")
PERCENTILE = 99.99
# Bins on each side of zero.
NUM_BINS = 2048
# Levels of a quantised tensor on each side of zero.
NUM_LEVELS = 128
# Step between the thresholds that the entropy method tries, in bins.
ENTROPY_STRIDE = 16
# More examples hardly move a range.
MAX_ROWS = 512
# Rows of equal shapes that are run together.
MAX_BATCH = 8
FILE = "calibration.json"
FORMAT = 1

Row = Mapping[str, Array]
Range = tuple[float, float]


@dataclass(slots=True)
class ValueHistogram:
    """Histogram around zero with bins of equal width, which doubles for values outside."""

    counts: Array = field(default_factory=lambda: np.zeros(2 * NUM_BINS, np.int64))
    width: float = 0.0
    low: float = np.inf
    high: float = -np.inf

    def add(self, values: Array) -> None:
        """Count the values; ConfigError if one is not finite, as no range would hold it."""
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ConfigError(["values that are not finite"])
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._widen(max(-low, high))
        if self.width == 0.0:
            self.counts[NUM_BINS] += values.size
            return
        # In 64 bits: in 32 bits the width would be 0 for very small values.
        places = np.floor(values.ravel() / np.float64(self.width)).astype(np.int64) + NUM_BINS
        np.clip(places, 0, 2 * NUM_BINS - 1, out=places)
        self.counts += np.bincount(places, minlength=2 * NUM_BINS)

    def _widen(self, largest: float) -> None:
        if self.width == 0.0:
            # All earlier values were 0. The next larger number puts the largest value inside.
            self.width = float(np.nextafter(largest / NUM_BINS, np.inf)) if largest > 0 else 0.0
        while self.width > 0 and largest > self.width * NUM_BINS:
            pairs = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.zeros_like(self.counts)
            self.counts[NUM_BINS // 2 : NUM_BINS // 2 + NUM_BINS] = pairs
            self.width *= 2

    def range(self, method: Method) -> Range:
        if self.width == 0.0 or method == "minmax":
            return self.low, self.high
        if method == "entropy":
            threshold = self._entropy_threshold()
            return max(self.low, -threshold), min(self.high, threshold)
        tail = self.counts.sum() * (1 - PERCENTILE / 100) / 2
        first = int(np.searchsorted(np.cumsum(self.counts), tail, side="right"))
        last = 2 * NUM_BINS - int(np.searchsorted(np.cumsum(self.counts[::-1]), tail, side="right"))
        low, high = (first - NUM_BINS) * self.width, (last - NUM_BINS) * self.width
        return max(self.low, low), min(self.high, high)

    def _entropy_threshold(self) -> float:
        """Return the clipping threshold that loses the least information: the one with the smallest
        KL divergence between the observed distribution and its 128 quantised levels."""
        absolute = (self.counts[NUM_BINS:] + self.counts[:NUM_BINS][::-1]).astype(np.float64)
        # Every threshold represents zero exactly. Without this, the many zeros behind a ReLU or
        # from padding would favour levels as narrow as a bin.
        absolute[0] = absolute[1]
        best, best_divergence = NUM_BINS, np.inf
        for num_kept in range(NUM_LEVELS, NUM_BINS + 1, ENTROPY_STRIDE):
            divergence = _divergence(absolute, num_kept)
            if divergence < best_divergence:
                best, best_divergence = num_kept, divergence
        return best * self.width


def _divergence(counts: Array, num_kept: int) -> float:
    seen = counts[:num_kept].copy()
    seen[-1] += counts[num_kept:].sum()
    # Each level spreads its count evenly over its bins that are not empty.
    level = np.arange(num_kept) * NUM_LEVELS // num_kept
    is_used = counts[:num_kept] > 0
    held = np.bincount(level, weights=counts[:num_kept], minlength=NUM_LEVELS)
    num_used = np.bincount(level, weights=is_used, minlength=NUM_LEVELS)
    shown = np.where(is_used, (held / np.maximum(num_used, 1))[level], 0.0)
    if shown.sum() == 0 or seen.sum() == 0:
        return np.inf
    p, q = seen / seen.sum(), shown / shown.sum()
    # Clipped values fall into the last bin, which may be empty in q.
    q = np.maximum(q, 1e-12)
    is_seen = p > 0
    return float(np.sum(p[is_seen] * np.log(p[is_seen] / q[is_seen])))


@dataclass(frozen=True, slots=True)
class Calibration:
    tensors: Mapping[str, ValueHistogram]
    # Minimum, maximum, mean and standard deviation of each input; for BYTES, of their lengths.
    inputs: Mapping[str, Mapping[str, float]]
    num_examples: int
    digest: str

    def ranges(self, method: Method) -> dict[str, Range]:
        return {name: histogram.range(method) for name, histogram in self.tensors.items()}

    def record(self, method: Method) -> dict[str, object]:
        """Return the content of calibration.json, the file beside the model."""
        return {
            "format": FORMAT,
            "method": method,
            "num_examples": self.num_examples,
            "digest": self.digest,
            "inputs": self.inputs,
            "tensors": {name: list(each) for name, each in self.ranges(method).items()},
        }


def model_rows(config: ModelConfig, examples: Examples, indices: Sequence[int]) -> list[Row]:
    """Return these examples, at most `MAX_ROWS`, preprocessed as the model takes them."""
    return list(apply(config, [examples.rows[index] for index in indices[:MAX_ROWS]]))


def calibrate(
    model: ModelProto,
    names: Sequence[str],
    config: ModelConfig,
    rows: Sequence[Row],
    cache: Path,
    check_time: Callable[[], None] = lambda: None,
) -> Calibration:
    """Return histograms of these tensors of a graph over the rows, from the cache if they are
    there. `check_time` is called before each batch, and may raise. ConfigError if there are no rows
    or a tensor is not finite on them."""
    if not rows:
        raise ConfigError(["calibration: there are no examples for it"])
    digest = _digest(model, names, rows)
    path = cache / f"calibration-{digest[:32]}.npz"
    tensors = _read(path)
    if tensors is None:
        tensors = {name: ValueHistogram() for name in names}
        loaded = onnx_model.session(onnx_model.with_outputs(model, names))
        for batch in feeds(model, config, rows):
            check_time()
            _observe(tensors, {**onnx_model.run(loaded, batch), **batch})
        _write(path, tensors)
    return Calibration(tensors, _input_ranges(rows), len(rows), digest)


def feeds(
    model: ModelProto, config: ModelConfig, rows: Sequence[Row]
) -> Iterator[dict[str, Array]]:
    """Yield rows as the graph takes them, with the inputs that it still has, batched by equal
    shapes if it has a batch dimension. `config` is of the model without preprocessing."""
    taken = {value.name for value in onnx_model.true_inputs(model.graph)}
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in fitted(rows, config):
        given = {name: array for name, array in row.items() if name in taken}
        if not config.max_batch_size:
            yield given
            continue
        shapes = tuple((name, array.shape) for name, array in sorted(row.items()))
        groups.setdefault(shapes, []).append(given)
    limit = min(MAX_BATCH, config.max_batch_size)
    for group in groups.values():
        for start in range(0, len(group), limit):
            some = group[start : start + limit]
            yield {name: np.stack([row[name] for row in some]) for name in some[0]}


def _observe(tensors: Mapping[str, ValueHistogram], seen: Mapping[str, Array]) -> None:
    for name, histogram in tensors.items():
        try:
            histogram.add(seen[name])
        except ConfigError as error:
            raise ConfigError([f"calibration: tensor '{name}': {error}"]) from None


def _input_ranges(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    found = {}
    for name in rows[0]:
        parts = [values for row in rows if (values := as_floats(row[name])).size]
        if parts:
            count = sum(values.size for values in parts)
            mean = float(sum(values.sum() for values in parts) / count)
            square = float(sum(np.square(values).sum() for values in parts) / count)
            found[name] = {
                "min": float(min(values.min() for values in parts)),
                "max": float(max(values.max() for values in parts)),
                "mean": mean,
                "std": math.sqrt(max(square - mean**2, 0.0)),
            }
    return found


def _digest(model: ModelProto, names: Sequence[str], rows: Sequence[Row]) -> str:
    import onnxruntime

    digest = hashlib.sha256(model.SerializeToString(deterministic=True))
    digest.update(json.dumps([onnxruntime.__version__, NUM_BINS, FORMAT, *names]).encode())
    for row in rows:
        for name, array in sorted(row.items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            if array.dtype.kind == "O":
                digest.update(repr(array.tolist()).encode())
            else:
                digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, ValueHistogram] | None:
    """Read a cache file; None if it is missing or unusable."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            names = json.loads(str(stored["names"]))
            counts, numbers = stored["counts"], stored["numbers"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    stored_numbers = zip(counts, numbers.tolist(), strict=True)
    histograms = (ValueHistogram(each, *values) for each, values in stored_numbers)
    return dict(zip(names, histograms, strict=True))


def _write(path: Path, tensors: Mapping[str, ValueHistogram]) -> None:
    """Write the cache file atomically: a process killed here leaves no partial file to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    each = list(tensors.values())
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        np.savez_compressed(
            file,
            names=np.array(json.dumps(list(tensors))),
            counts=np.array([one.counts for one in each]).reshape(-1, 2 * NUM_BINS),
            numbers=np.array([[one.width, one.low, one.high] for one in each]).reshape(-1, 3),
        )
    os.replace(file.name, path)
