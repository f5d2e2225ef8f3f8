"""Trial runs at load on random inputs: may rows of this model share a batch, and may they be
padded?

Batching: a row's answer must not change with the rows around it. Shapes and position stay the same,
so even rounding is the same. Padding: rows of several lengths, padded to a bucket, must give what
each gives alone and unpadded, up to a tolerance. A model that cannot run on random inputs is
unproven: it is batched as configured, with a note, and not padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from penstock.backends import Batch, Outputs, PerRequest, Runner
from penstock.backends.heads import Headed
from penstock.backends.processing import Processed, model_in
from penstock.config import CPU, ModelConfig
from penstock.errors import BackendFailed, first_line
from penstock.serving.padding import Crop, Pads, Shapes, bf16_bits, bf16_floats, cropped
from penstock.types import DATATYPES, Array, TensorSpec
from penstock.wire.frames import Proof, RequestPart

Found = TypeVar("Found")
SEED = 20
# Sizes of variable axes: the first with which the model runs is used.
SIZES = (16, 64, 224)
# Limits of random integers (indices, flags or masks): the first with finite outputs is used.
INTEGERS = (2, 100)
NUM_ROWS = 3
# Characters of a model's error that are kept.
MAX_CHARS = 200
# Relative to the largest value. Rounding differs between shapes, so padding needs a tolerance.
PADDING_TOLERANCE = {"FP64": 1e-6, "FP32": 1e-3, "FP16": 1e-2, "BF16": 5e-2}
# GPUs convolve in TF32, with different kernels for different shapes.
GPU_PADDING_TOLERANCE = {**PADDING_TOLERANCE, "FP32": 5e-3}
# Datatype that a model computes in, by the value of an option; outputs may have a wider one.
COMPUTED = {"fp16": "FP16", "bf16": "BF16"}
COMPANY_TOLERANCE = {"FP64": 1e-9, "FP32": 1e-5, "FP16": 1e-3, "BF16": 1e-2}


class Difference(Exception):
    """Outputs that should be equal are not."""


class Unproven(Exception):
    """The model cannot be tried out."""


def prove(config: ModelConfig, runner: Runner) -> Proof:
    """Try out a model; never raises because of its behaviour on random inputs. Inside functions,
    the model itself is tried out, and the runner is then told whether to pad."""
    if isinstance(runner, Processed | Headed):
        return _prove_inside(config, runner)
    # On a GPU single requests are padded too: each length would need a CUDA graph of its own.
    if config.max_batch_size == 0 or not (config.batching.is_dynamic or config.uses_gpu):
        reason = "the model is not batched dynamically" if config.padding else ""
        return Proof(unpadded=reason)
    trial = ProofTrial(config, runner)
    unbatched, notes = "", list[str]()
    is_batched = config.max_batch_size > 1 and config.batching.is_dynamic
    if is_batched and not runner.keeps_rows_apart:
        try:
            trial.check_company()
        except Difference as difference:
            unbatched = f"answers depend on what else is in the batch: {difference}"
        except Unproven as reason:
            notes.append(f"not checked whether rows of a batch influence each other: {reason}")
    unpadded, crops = "", tuple[Crop, ...]()
    if config.padding is not None and unbatched:
        unpadded = "the model is not batched"
    elif config.padding is not None:
        try:
            crops = trial.check_padding(Pads(config))
        except Difference as difference:
            unpadded = f"padding changes answers: {difference}"
        except Unproven as reason:
            unpadded = f"padding could not be checked: {reason}"
    return Proof(unbatched, unpadded, crops, tuple(notes))


def _prove_inside(config: ModelConfig, runner: Processed | Headed) -> Proof:
    proof = prove(config.model, runner.inner)
    if isinstance(runner, Headed):
        # A head names its outputs itself.
        proof = msgspec.structs.replace(proof, crops=runner.crops)
    apply_proof(runner, proof)
    return proof


def apply_proof(runner: Runner, proof: Proof) -> None:
    """Tell a runner that pads or crops itself whether it may, also with an earlier proof; for all
    others the server's core pads, and the worker crops."""
    if isinstance(runner, Processed) and not proof.unpadded:
        runner.allow_padding(proof.crops)
    if proof.unbatched:
        model_in(runner).stop_filling()


def agreed(proofs: Sequence[Proof]) -> Proof:
    """Combine proofs into what all instances of a model may do."""
    first = proofs[0]
    unpadded = next((proof.unpadded for proof in proofs if proof.unpadded), "")
    if any(proof.crops != first.crops for proof in proofs):
        unpadded = unpadded or "instances disagree on which outputs follow the length"
    return Proof(
        next((proof.unbatched for proof in proofs if proof.unbatched), ""),
        unpadded,
        first.crops,
        tuple(dict.fromkeys(note for proof in proofs for note in proof.notes)),
    )


class ProofTrial:
    """One model, run on random rows."""

    def __init__(self, config: ModelConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner
        self._random = np.random.default_rng(SEED)
        # For comparing answers to batches of different shapes.
        by_datatype = PADDING_TOLERANCE if config.device == CPU else GPU_PADDING_TOLERANCE
        computed = COMPUTED.get(config.options.get("penstock.dtype", ""), "FP64")
        least = by_datatype[computed]
        self._shapes_tolerance = {name: max(each, least) for name, each in by_datatype.items()}
        # Why it cannot be tried out at all.
        self._cannot = ""
        if runner.needs_requests:
            self._cannot = "it is code that sees only real requests"
        elif any(spec.datatype == "BYTES" for spec in config.inputs):
            self._cannot = "it takes BYTES"
        elif config.joins_requests:
            self._cannot = "it gets the requests of a batch as one"

    def check_company(self) -> None:
        """Raise Difference if other rows before or after a row change its answer."""
        num_rows = min(NUM_ROWS, self._config.max_batch_size)
        shapes, limit = self._runnable(num_rows)
        row = self._rows(shapes, 1, limit)
        self._check_repeats(self._rows(shapes, num_rows, limit))
        seen: list[Outputs] = []
        for position in (0, num_rows - 1):
            answers = []
            for _ in range(2):
                others = self._rows(shapes, num_rows, limit)
                for mine, theirs in zip(row, others, strict=True):
                    theirs[position] = mine[0]
                answers.append(self._run(others))
            one, other = (_row(answer, position) for answer in answers)
            self._compare(one, other, COMPANY_TOLERANCE)
            seen += answers
        self._compare(other, self._run(row), self._shapes_tolerance)
        _check_varied(seen)

    def _check_repeats(self, rows: Sequence[Array]) -> None:
        try:
            self._compare(self._run(rows), self._run(rows), COMPANY_TOLERANCE)
        except Difference:
            raise Unproven("the same batch does not give the same answers twice") from None

    def check_padding(self, pads: Pads) -> tuple[Crop, ...]:
        """Return how to crop the outputs; raise Difference if padding changes answers. All-equal
        integers are tried first, since they may be a mask."""
        is_free = any(n < 0 for shape in pads.shapes(self._shapes(), 1) for n in shape)
        return self._first(is_free, True, lambda *trial: self._check_padding(pads, *trial))

    def _first(
        self, is_free: bool, has_integers: bool, attempt: Callable[[Shapes, int], Found]
    ) -> Found:
        """Return the result of the first shapes and integer limit with which the model runs."""
        if self._cannot:
            raise Unproven(self._cannot)
        reasons: list[str] = []
        for size in SIZES if is_free else SIZES[:1]:
            for limit in INTEGERS if has_integers else INTEGERS[:1]:
                try:
                    return attempt(self._free_shapes(size), limit)
                except Unproven as error:
                    reasons.append(str(error))
        raise Unproven(reasons[0])

    def _check_padding(self, pads: Pads, shapes: Shapes, limit: int) -> tuple[Crop, ...]:
        """Check the lengths that need the most padding: one element, and one more than a bucket."""
        crops: set[Crop] = set()
        seen: list[Outputs] = []
        for lengths, bucket in _cases(pads.buckets, self._config.max_batch_size):
            apart = [self._padded_rows(pads, shapes, length, limit) for length in lengths]
            together = self._run(
                [
                    np.concatenate([pads.filled(index, rows[index], shape) for rows in apart])
                    for index, shape in enumerate(pads.shapes(shapes, bucket))
                ]
            )
            for position, (length, rows) in enumerate(zip(lengths, apart, strict=True)):
                mine = _row(together, position)
                alone = self._run(rows)
                seen.append(alone)
                crops |= _crops(alone, mine, (length, bucket))
                cut = {name: cropped(name, v, crops, length) for name, v in mine.items()}
                try:
                    self._compare(cut, alone, self._shapes_tolerance)
                except Difference as difference:
                    text = f"{difference}, with {length} filled up to {bucket}"
                    raise Difference(text) from None
        _check_varied(seen)
        return tuple(sorted(crops))

    def _padded_rows(self, pads: Pads, shapes: Shapes, length: int, limit: int) -> list[Array]:
        """Return one row of this length. Its integers differ from the padding value: a mask that
        marks real elements as padding would prove nothing."""
        rows = self._rows(pads.shapes(shapes, length), 1, limit)
        for index, value in pads.values.items():
            spec = self._config.inputs[index]
            if value.dtype.kind not in "iub" or spec.datatype == "BF16":
                continue
            if limit == INTEGERS[0] or value.dtype.kind == "b" or "mask" in spec.name.lower():
                rows[index][...] = 1 if value == 0 else 0
            else:
                rows[index][rows[index] == value] = 1 if value == 0 else 0
        return rows

    def _shapes(self) -> Shapes:
        return tuple(spec.shape for spec in self._config.inputs)

    def _free_shapes(self, size: int) -> Shapes:
        return tuple(tuple(size if n < 0 else n for n in shape) for shape in self._shapes())

    def _runnable(self, num_rows: int) -> tuple[Shapes, int]:
        """Return shapes and an integer limit with which the model gives finite outputs."""

        def attempt(shapes: Shapes, limit: int) -> tuple[Shapes, int]:
            outputs = self._run(self._rows(shapes, num_rows, limit))
            if not all(_is_finite(spec, outputs) for spec in self._config.outputs):
                raise Unproven("its outputs on made-up inputs are not finite")
            return shapes, limit

        specs = self._config.inputs
        is_free = any(-1 in spec.shape for spec in specs)
        has_integers = any(DATATYPES[spec.datatype].numpy.kind in "iu" for spec in specs)
        return self._first(is_free, has_integers, attempt)

    def _rows(self, shapes: Shapes, num_rows: int, limit: int) -> list[Array]:
        return [
            self._values(spec, (num_rows, *shape), limit)
            for spec, shape in zip(self._config.inputs, shapes, strict=True)
        ]

    def _values(self, spec: TensorSpec, shape: tuple[int, ...], limit: int) -> Array:
        dtype = DATATYPES[spec.datatype].numpy
        if spec.datatype == "BF16":
            return bf16_bits(self._random.standard_normal(shape, np.float32))
        if dtype.kind == "f":
            return self._random.standard_normal(shape).astype(dtype)
        values: Array = self._random.integers(0, 2 if dtype.kind == "b" else limit, shape)
        return values.astype(dtype)

    def _run(self, rows: Sequence[Array]) -> dict[str, Array]:
        """Return the outputs; Unproven if the model fails or they do not fit the configuration."""
        names = [spec.name for spec in self._config.inputs]
        num_rows = len(rows[0]) if rows else 0
        for values in rows:
            values.flags.writeable = False
        part = RequestPart("", num_rows)
        try:
            inputs = dict(zip(names, rows, strict=True))
            (answer,) = self._runner.start(Batch(inputs, num_rows, [part])).wait()
            return _rows_of(self._config, answer, num_rows)
        except BaseException as error:  # A model may do anything with inputs not made for it.
            raise Unproven(f"it fails on made-up inputs: {first_line(error)[:MAX_CHARS]}") from None

    def _compare(self, left: Outputs, right: Outputs, limits: Mapping[str, float]) -> None:
        for spec in self._config.outputs:
            tolerance = limits.get(spec.datatype, 0.0)
            if tolerance and self._config.tolerance is not None:
                tolerance = self._config.tolerance
            share = _difference(spec, left[spec.name], right[spec.name])
            if share > tolerance:
                raise Difference(
                    f"output '{spec.name}' moved by {share:.2g} of its largest value"
                    + (f", more than {tolerance:g}" if tolerance else "")
                )


def _cases(buckets: Sequence[int], max_rows: int) -> Iterator[tuple[list[int], int]]:
    """Yield lengths that share a batch, and their bucket."""
    below = 0
    chosen = {buckets[0], buckets[len(buckets) // 2], buckets[-1]}
    for full in buckets:
        if full in chosen:
            sizes = sorted({below + 1, (below + 1 + full) // 2, full})
            yield sizes[: max(1, min(NUM_ROWS, max_rows))], full
        below = full


def _crops(alone: Outputs, padded: Outputs, lengths: tuple[int, int]) -> set[Crop]:
    """Return the output axes whose length follows the padded ones."""
    crops: set[Crop] = set()
    for name, values in alone.items():
        before, after = values.shape[1:], padded[name].shape[1:]
        if len(before) != len(after):
            raise Difference(f"output '{name}' has another number of axes")
        for axis, pair in enumerate(zip(before, after, strict=True)):
            if pair[0] != pair[1] and pair != lengths:
                raise Difference(
                    f"output '{name}' is {pair[1]} long instead of {pair[0]} and cannot be cut back"
                )
            if pair[0] != pair[1]:
                crops.add((name, axis))
    return crops


def _rows_of(config: ModelConfig, answer: Outputs | PerRequest, num_rows: int) -> dict[str, Array]:
    """Return copies, so that the next run may reuse the memory."""
    if isinstance(answer, PerRequest):
        raise BackendFailed("it answers request by request")
    outputs: dict[str, Array] = {}
    for spec in config.outputs:
        values = np.array(answer[spec.name])
        if values.ndim == 0 or len(values) != num_rows:
            raise BackendFailed(f"output '{spec.name}' has no row for each row of the input")
        outputs[spec.name] = values
    return outputs


def _check_varied(answers: Sequence[Outputs]) -> None:
    """Raise Unproven if all rows have the same answer: then equal answers prove nothing."""
    for name in answers[0]:
        # A row of a 1-D output is a scalar.
        rows = [np.asarray(row) for answer in answers for row in answer[name]]
        by_shape: dict[tuple[int, ...], set[bytes]] = {}
        for row in rows:
            by_shape.setdefault(row.shape, set()).add(_content(row))
        values = {_content(np.unique(row)) for row in rows}
        if len(values) > 1 or any(len(different) > 1 for different in by_shape.values()):
            return
    raise Unproven("it gives the same answer to all made-up inputs")


def _content(values: Array) -> bytes:
    """Return bytes that are equal for equal values; an object array's own bytes are addresses."""
    return repr(values.tolist()).encode() if values.dtype.kind == "O" else values.tobytes()


def _row(outputs: Outputs, position: int) -> dict[str, Array]:
    return {name: values[position : position + 1] for name, values in outputs.items()}


def to_float64(spec: TensorSpec, values: Array) -> Array:
    """Return the numbers of a tensor; those of BF16 from their bits."""
    numbers = bf16_floats(values) if spec.datatype == "BF16" else values
    return numbers.astype(np.float64)


def _is_finite(spec: TensorSpec, outputs: Outputs) -> bool:
    if spec.datatype not in PADDING_TOLERANCE:
        return True
    return bool(np.isfinite(to_float64(spec, outputs[spec.name])).all())


def _difference(spec: TensorSpec, left: Array, right: Array) -> float:
    """Return the largest difference relative to the largest value; infinite if not finite."""
    if left.shape != right.shape:
        return float("inf")
    if not left.size or spec.datatype == "BYTES":
        return 0.0 if np.array_equal(left, right) else 1.0
    one, other = to_float64(spec, left), to_float64(spec, right)
    gap = float(np.abs(one - other).max())
    if not np.isfinite(gap):
        return float("inf")
    return 0.0 if gap == 0 else gap / max(float(np.abs(one).max()), float(np.abs(other).max()))
