"""What a model sees of a batch: `reshape`, ragged inputs, batch inputs and batch outputs.

Clients and the rest of the server see the dims of config.pbtxt. A Viewed runner gives the model of
another runner the shapes that its file has: the bytes of `reshape` stay where they are, ragged
inputs of all requests of a batch are concatenated (`backends.joined_requests`), and what an ONNX
file has without dimensions is [ 1 ] outside. Also says how a backend has to load the file for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.backends import Batch, Execution, LoadRunner, Outputs, PerRequest, Runner
from penstock.backends.joined_requests import JoinedBatch
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import onnx_file
from penstock.types import Array, TensorSpec, shape_fits

PYTHON = "python"


def with_scalars(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the tensors that an ONNX file has without dimensions reshaped
    to that. Clients of a model without batches send and get them as [ 1 ], as with Triton."""
    specs = [spec for spec in (*config.inputs, *config.outputs) if _is_one(spec)]
    if config.max_batch_size or not specs or not config.artifact.endswith(".onnx"):
        return config
    names = onnx_file.find_scalars(Path(config.artifact))

    def reshaped(spec: TensorSpec) -> TensorSpec:
        is_scalar = _is_one(spec) and spec.name in names
        return replace(spec, reshape=()) if is_scalar else spec

    inputs, outputs = tuple(map(reshaped, config.inputs)), tuple(map(reshaped, config.outputs))
    return replace(config, inputs=inputs, outputs=outputs)


def _is_one(spec: TensorSpec) -> bool:
    return bool(spec.shape) and set(spec.shape) == {1} and spec.reshape is None


def seen_by_model(config: ModelConfig) -> ModelConfig:
    """Return the configuration as the model's file has it, without views."""
    seen = replace(
        config,
        inputs=tuple(map(_reshaped, config.inputs)),
        outputs=tuple(map(_reshaped, config.outputs)),
    )
    if not config.joins_requests or config.backend == PYTHON:
        return seen
    # The model gets a batch as one request without rows.
    rows = (-1,) if config.max_batch_size else ()
    scattered = {name for each in config.batch_outputs for name in each.names}
    made = [
        TensorSpec(name, each.datatype, (-1, -1) if each.kind == "BATCH_ITEM_SHAPE" else (-1,))
        for each in config.batch_inputs
        for name in each.names
    ]
    return replace(
        seen,
        inputs=(*(_joined(spec, rows) for spec in seen.inputs), *made),
        outputs=tuple(
            # Its file may declare it with any rank.
            replace(spec, shape=(-1,), is_ragged=True)
            if spec.name in scattered
            else replace(spec, shape=(*rows, *spec.shape))
            for spec in seen.outputs
        ),
        max_batch_size=0,
        batching=replace(config.batching, is_dynamic=False),
        batch_inputs=(),
        batch_outputs=(),
    )


def _reshaped(spec: TensorSpec) -> TensorSpec:
    return spec if spec.reshape is None else replace(spec, shape=spec.reshape, reshape=None)


def _joined(spec: TensorSpec, rows: tuple[int, ...]) -> TensorSpec:
    shape = (-1,) if spec.is_ragged else (*rows, *spec.shape)
    return replace(spec, shape=shape, is_ragged=False)


def fill_shape(
    pattern: Sequence[int], like: Sequence[int], found: Sequence[int]
) -> tuple[int, ...]:
    """Return a shape with its variable dimensions replaced by those that `found` has where `like`
    is variable, in their order."""
    if -1 not in pattern:
        return tuple(pattern)
    sizes = iter([size for size, limit in zip(found, like, strict=False) if limit == -1])
    return tuple(next(sizes) if limit == -1 else limit for limit in pattern)


class Viewed(Runner):
    """The runner of a model, with clients' shapes outside and the model's inside."""

    def __init__(self, config: ModelConfig, inner: Runner) -> None:
        self.inner = inner
        self.inputs, self.outputs = inner.inputs, inner.outputs
        self.needs_requests = inner.needs_requests
        self.has_own_rehearsals = inner.has_own_rehearsals
        self.keeps_rows_apart = inner.keeps_rows_apart
        self.runs_ahead = inner.runs_ahead
        self._config = config
        self._has_batch = config.max_batch_size > 0
        self._inputs = {spec.name: spec for spec in config.inputs if spec.reshape is not None}
        self._outputs = {spec.name: spec for spec in config.outputs if spec.reshape is not None}
        self._joins = config.joins_requests and config.backend != PYTHON

    def built(self) -> Mapping[str, str]:
        return self.inner.built()

    def start(self, batch: Batch) -> Execution:
        seen = self._seen(batch)
        if not self._joins:
            return _ViewedExecution(self, self.inner.start(seen))
        joined = JoinedBatch(self._config, seen)
        return _ViewedExecution(self, self.inner.start(joined.batch), joined)

    def close(self) -> None:
        self.inner.close()

    def pin(self, memory: memoryview) -> None:
        self.inner.pin(memory)

    def pin_foreign(self, memory: memoryview) -> bool:
        # The CPU concatenates.
        return not self._joins and self.inner.pin_foreign(memory)

    def unpin(self, memory: memoryview) -> None:
        self.inner.unpin(memory)

    def rehearsals(self, batch: Batch) -> Iterable[Batch]:
        if self._joins:
            yield batch
            return
        for each in self.inner.rehearsals(self._seen(batch)):
            yield self._mapped(each, self._to_client)

    def stop_filling(self) -> None:
        self.inner.stop_filling()

    def compiled(self) -> Mapping[str, bytes]:
        return self.inner.compiled()

    def settle(self) -> None:
        self.inner.settle()

    @property
    def restart_reason(self) -> str:
        return self.inner.restart_reason

    def is_lost(self) -> bool:
        return self.inner.is_lost()

    def shown(self, outputs: Outputs) -> Outputs:
        """Return a model's outputs in clients' shapes; another shape than `reshape` says stays, and
        is refused with the other outputs."""
        if not self._outputs:
            return outputs
        return {
            name: _view(values, spec.reshape or (), spec.shape, has_batch=self._has_batch)
            if (spec := self._outputs.get(name)) is not None
            else values
            for name, values in outputs.items()
        }

    def _seen(self, batch: Batch) -> Batch:
        return self._mapped(batch, self._to_model) if self._inputs else batch

    def _to_model(self, spec: TensorSpec, values: Array) -> Array:
        return _view(values, spec.shape, spec.reshape or (), has_batch=self._has_batch)

    def _to_client(self, spec: TensorSpec, values: Array) -> Array:
        return _view(values, spec.reshape or (), spec.shape, has_batch=self._has_batch)

    def _mapped(self, batch: Batch, view: Callable[[TensorSpec, Array], Array]) -> Batch:
        pieces = [
            {
                name: view(spec, values) if (spec := self._inputs.get(name)) is not None else values
                for name, values in piece.items()
            }
            for piece in batch.all_pieces
        ]
        return Batch.of(pieces, batch.num_rows, batch.requests)


class _ViewedExecution:
    """A batch of the model, whose answers are shown as clients see them."""

    def __init__(self, runner: Viewed, inner: Execution, joined: JoinedBatch | None = None) -> None:
        self._runner = runner
        self._inner = inner
        self._joined = joined

    @property
    def prepare_s(self) -> float:
        return self._inner.prepare_s

    @property
    def finish_s(self) -> float:
        return self._inner.finish_s

    def wait(self) -> Iterable[Outputs | PerRequest]:
        for answer in self._inner.wait():
            if isinstance(answer, PerRequest):
                shown = [self._shown(each) for each in answer.answers]
                yield PerRequest(shown, answer.parameters)
            elif self._joined is not None:
                found = self._joined.divide(answer)
                if isinstance(found, PerRequest):
                    yield PerRequest([self._shown(each) for each in found.answers])
                else:
                    yield self._runner.shown(found)
            else:
                yield self._runner.shown(answer)

    def _shown(self, answer: Outputs | Exception) -> Outputs | Exception:
        return answer if isinstance(answer, Exception) else self._runner.shown(answer)


def _view(
    values: Array, like: tuple[int, ...], pattern: tuple[int, ...], *, has_batch: bool
) -> Array:
    """Return the values of one shape as another one; unchanged if they are not like that."""
    rows = values.shape[:1] if has_batch else ()
    found = values.shape[len(rows) :]
    if not shape_fits(found, like):
        return values
    return values.reshape((*rows, *fill_shape(pattern, like, found)))


def load(config: ModelConfig, load_model: LoadRunner) -> Runner:
    """Load a model whose tensors clients see in other shapes."""
    inner = load_model(seen_by_model(config))
    if config.joins_requests and config.backend == PYTHON and not inner.needs_requests:
        inner.close()
        problem = "a function gets the rows of a batch in one array; use a TritonPythonModel"
        raise ConfigError(f"input.allow_ragged_batch: {problem}")
    return Viewed(config, inner)
