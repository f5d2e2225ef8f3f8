"""Batches for the `model_warmup` requests; the worker runs them before it is ready.

Random numbers are small, so that they are valid indices into most tables: integers below 100,
floats from 0 to 1. They are the same at every load.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.backends import Batch
from penstock.config import ModelConfig, Warmup, WarmupInput
from penstock.errors import ConfigError
from penstock.serving.padding import bf16_bits
from penstock.types import DATATYPES, Array, Tensor, num_elements, to_array
from penstock.wire import frames

SEED = 2
MAX_INTEGER = 100


def make_batch(config: ModelConfig, warmup: Warmup) -> Batch:
    """Make the batch of one warm-up request. ConfigError if a file does not hold its tensor."""
    chance = np.random.default_rng(SEED)
    inputs: dict[str, Array] = {}
    for tensor in warmup.inputs:
        has_rows = config.max_batch_size > 0
        shape = (warmup.num_rows, *tensor.shape) if has_rows else tensor.shape
        values = _values(tensor, shape, Path(warmup.folder), chance)
        values.flags.writeable = False  # As those of requests.
        inputs[tensor.name] = values
    part = frames.RequestPart(warmup.name, warmup.num_rows)
    return Batch(inputs, warmup.num_rows, [part])


def _values(
    tensor: WarmupInput, shape: tuple[int, ...], folder: Path, chance: np.random.Generator
) -> Array:
    match tensor.source:
        case "file":
            return _from_file(folder / tensor.file, tensor, shape)
        case "random":
            return _random(tensor.datatype, shape, chance)
    if tensor.datatype == "BYTES":
        return np.full(shape, b"", dtype=np.object_)
    return np.zeros(shape, DATATYPES[tensor.datatype].numpy)


def _random(datatype: str, shape: tuple[int, ...], chance: np.random.Generator) -> Array:
    if datatype == "BYTES":
        values = np.empty(num_elements(shape), dtype=np.object_)
        values[:] = [chance.bytes(8).hex().encode() for _ in range(len(values))]
        return values.reshape(shape)
    dtype = DATATYPES[datatype].numpy
    if datatype == "BF16":
        return bf16_bits(chance.random(shape, np.float32))
    if dtype.kind == "f":
        return chance.random(shape).astype(dtype)
    return chance.integers(0, 2 if dtype.kind == "b" else MAX_INTEGER, shape).astype(dtype)


def _from_file(path: Path, tensor: WarmupInput, shape: tuple[int, ...]) -> Array:
    """Read a tensor from a file with its bytes as in a request: all rows, or one that is
    repeated."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            [f"model_warmup: {tensor.file} cannot be read: {error.strerror}"]
        ) from None
    for filled in (shape, tensor.shape):
        try:
            values = to_array(Tensor(tensor.name, tensor.datatype, filled, data))
        except ValueError:
            continue
        return np.array(np.broadcast_to(values, shape))
    text = f"expected {tensor.datatype} values of shape {list(tensor.shape)}"
    raise ConfigError([f"model_warmup: {tensor.file} does not fill '{tensor.name}'; {text}"])
