"""Warm-up of a loaded Runner: every batch size, and the `model_warmup` requests.

The worker runs them before it is ready; the times seed what batchers predict. Random numbers are
small, so that they are valid indices into most tables: integers below 100,
floats from 0 to 1. They are the same at every load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.backends import Batch, Outputs, PerRequest, Runner
from penstock.backends.heads import Headed
from penstock.backends.processing import Processed
from penstock.config import ModelConfig, Warmup, WarmupInput, ladder
from penstock.errors import ConfigError
from penstock.serving.executor import checked
from penstock.serving.padding import Pads, bf16_bits
from penstock.types import DATATYPES, Array, Tensor, num_elements, to_array
from penstock.wire import frames

SEED = 2
MAX_INTEGER = 100
LONG_WARM_UP_S = 0.25


def make_batch(config: ModelConfig, warmup: Warmup) -> Batch:
    """Make the batch of one warm-up request. ConfigError if a file does not hold its tensor."""
    chance = np.random.default_rng(SEED)
    inputs: dict[str, Array] = {}
    for tensor in warmup.inputs:
        has_rows = config.max_batch_size > 0
        shape = (warmup.num_rows, *tensor.shape) if has_rows else tensor.shape
        values = _values(tensor, shape, Path(warmup.folder), chance)
        inputs[tensor.name] = values
    return _batch(inputs, warmup.num_rows, warmup.name)


def _batch(inputs: dict[str, Array], num_rows: int, name: str = "") -> Batch:
    for values in inputs.values():
        values.flags.writeable = False  # As those of requests.
    return Batch(inputs, num_rows, [frames.RequestPart(name, num_rows)])


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
    """Read a tensor from a file with its bytes as in a request: all rows, or one to repeat."""
    try:
        data = path.read_bytes()
    except OSError as error:
        text = f"model_warmup: {tensor.file} cannot be read: {error.strerror}"
        raise ConfigError([text]) from None
    for filled in (shape, tensor.shape):
        try:
            values = to_array(Tensor(tensor.name, tensor.datatype, filled, data))
        except ValueError:
            continue
        return np.array(np.broadcast_to(values, shape))
    text = f"expected {tensor.datatype} values of shape {list(tensor.shape)}"
    raise ConfigError([f"model_warmup: {tensor.file} does not fill '{tensor.name}'; {text}"])


def warm_up_all(
    config: ModelConfig, runner: Runner, proof: frames.Proof
) -> tuple[dict[int, float], dict[int, dict[int, float]]]:
    """Warm up; return the times by batch size, and by bucket and batch size. Pre- and
    postprocessing functions are skipped, because zeros mean nothing to them, unless they have
    inputs of their own."""
    if isinstance(runner, Processed | Headed) and not runner.has_own_rehearsals:
        config, runner = config.model, runner.inner
    timings = warm_up(config, runner)
    is_padded = config.padding is not None and not proof.unpadded
    return timings, warm_up_buckets(config, runner) if is_padded else {}


def warm_up_as_asked(config: ModelConfig, runner: Runner) -> None:
    """Run the requests of `model_warmup`; their errors are raised."""
    for warmup in config.warmups:
        batch = make_batch(config, warmup)
        for _ in range(warmup.count):
            for answer in runner.start(batch).wait():
                _check_answers(answer)


def _check_answers(answer: Outputs | PerRequest) -> None:
    """Raise the first error of a request."""
    for each in answer.answers if isinstance(answer, PerRequest) else ():
        if isinstance(each, Exception):
            raise each


def warm_up(config: ModelConfig, runner: Runner) -> dict[int, float]:
    """Run zeros at every size of the batch ladder, twice; return the time of each second run.
    Errors of the model are raised. Empty for models with variable shapes, which have no shape to
    warm up with, and for models that see single requests, which only get real ones."""
    is_unknown = runner.needs_requests or config.joins_requests
    is_unknown = is_unknown or not all(spec.is_fixed for spec in config.inputs)
    if is_unknown and not runner.has_own_rehearsals:
        return {}
    shapes = [spec.shape for spec in config.inputs]
    # Without inputs each request is a batch of one row.
    return _warm_up_rungs(config, runner, shapes, config.max_batch_size if shapes else 1)


def warm_up_buckets(config: ModelConfig, runner: Runner) -> dict[int, dict[int, float]]:
    """Like `warm_up`, for every bucket of a padded model; empty if other axes vary too."""
    pads = Pads(config)
    timings: dict[int, dict[int, float]] = {}
    for bucket in pads.buckets:
        shapes = pads.shapes(tuple(spec.shape for spec in config.inputs), bucket)
        if any(size < 0 for shape in shapes for size in shape):
            return {}
        timings[bucket] = _warm_up_rungs(config, runner, shapes, config.max_rows(bucket))
    return timings


def _warm_up_rungs(
    config: ModelConfig, runner: Runner, row_shapes: Sequence[tuple[int, ...]], max_rows: int
) -> dict[int, float]:
    timings: dict[int, float] = {}
    for rung in ladder(max_rows):
        inputs = {
            spec.name: np.zeros(
                (rung, *shape) if config.max_batch_size else shape,
                dtype=DATATYPES[spec.datatype].numpy,
            )
            for spec, shape in zip(config.inputs, row_shapes, strict=True)
        }
        batch = _batch(inputs, rung)
        for each in runner.rehearsals(batch):
            timings[rung] = _warm_up_batch(config, runner, each)
    return timings


def _warm_up_batch(config: ModelConfig, runner: Runner, batch: Batch) -> float:
    """Run a batch twice; return the seconds of the second run."""
    took_s = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for answer in runner.start(batch).wait():
            _check_answers(answer)
            if not isinstance(answer, PerRequest):
                for spec in config.outputs:
                    checked(config, spec, answer, batch.num_rows)
        took_s = time.perf_counter() - began
        # In so long a run, one-time work hardly counts, so one run will do; not on a GPU, where it
        # may be nearly all of the time.
        if took_s > LONG_WARM_UP_S and not runner.runs_ahead:
            break
    return took_s
