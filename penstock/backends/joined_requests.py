"""The requests of one batch as one request to a model: Triton's ragged batching.

Ragged inputs are concatenated in one dimension, others along their rows; batch inputs describe the
requests. Answers are divided by rows, or by the shapes of an input. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.backends import Batch, Outputs, PerRequest
from penstock.config import BatchInput, ModelConfig
from penstock.errors import BackendFailed
from penstock.types import DATATYPES, Array, num_elements

Shapes = Sequence[tuple[int, ...]]


class JoinedBatch:
    """The inputs of a batch, one piece for each request, as the model gets them."""

    def __init__(self, config: ModelConfig, batch: Batch) -> None:
        self._config = config
        self._pieces = pieces = batch.all_pieces
        self._num_rows = [_rows(piece, config.max_batch_size) for piece in pieces]
        inputs: dict[str, Array] = {}
        ragged = {spec.name for spec in config.inputs if spec.is_ragged}
        for name in pieces[0]:
            parts = [piece[name] for piece in pieces]
            if name in ragged:
                parts = [part.reshape(-1) for part in parts]
            inputs[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for each in config.batch_inputs:
            values = describe(each, [piece[each.source].shape for piece in pieces])
            inputs |= dict.fromkeys(each.names, values)
        self.batch = Batch(inputs, 1)

    def divide(self, outputs: Outputs) -> Outputs | PerRequest:
        """Return the answer to each request; all rows together if none depends on a shape."""
        scattered = {
            name: each.source for each in self._config.batch_outputs for name in each.names
        }
        if not scattered:
            return outputs
        by_name: dict[str, Sequence[Array]] = {}
        for spec in self._config.outputs:
            values = outputs.get(spec.name)
            if values is None:
                continue
            if spec.name in scattered:
                shapes = [piece[scattered[spec.name]].shape for piece in self._pieces]
                has_batch = self._config.max_batch_size > 0
                wanted = [_output_shape(spec.shape, shape, has_batch) for shape in shapes]
                by_name[spec.name] = scatter(spec.name, values, wanted)
            else:
                ends = np.cumsum(self._num_rows)[:-1]
                by_name[spec.name] = np.split(values, ends) if len(ends) else [values]
        return PerRequest(
            [
                {name: parts[number] for name, parts in by_name.items()}
                for number in range(len(self._pieces))
            ]
        )


def describe(batch_input: BatchInput, shapes: Shapes) -> Array:
    """Return what a batch input says of its source's shapes, which include the rows, if any."""
    dtype = DATATYPES[batch_input.datatype].numpy
    counts = [num_elements(shape) for shape in shapes]
    match batch_input.kind:
        case "BATCH_ELEMENT_COUNT":
            return np.array(counts, dtype)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT":
            return np.cumsum(counts).astype(dtype)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return np.cumsum([0, *counts]).astype(dtype)
        case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            # Only its shape counts.
            return np.zeros(max(counts), dtype)
    items = [shape[1:] for shape in shapes for _ in range(shape[0])]
    if len({len(item) for item in items}) > 1:
        raise BackendFailed(f"batch_input '{batch_input.names[0]}': its source's ranks differ")
    values = np.array(items, dtype)
    return values.reshape(-1) if batch_input.kind == "BATCH_ITEM_SHAPE_FLATTEN" else values


def scatter(name: str, values: Array, shapes: Shapes) -> list[Array]:
    """Divide the elements of an output among shapes."""
    ends = np.cumsum([num_elements(shape) for shape in shapes])
    if values.size != ends[-1]:
        problem = f"{values.size} elements, but its requests' shapes have {ends[-1]}"
        raise BackendFailed(f"output '{name}': {problem} (batch_output)")
    parts = np.split(values.reshape(-1), ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _output_shape(dims: Sequence[int], source: tuple[int, ...], has_batch: bool) -> tuple[int, ...]:
    """Return an output's dims with variable ones as long as the source's."""
    pattern = (-1, *dims) if has_batch else tuple(dims)
    return tuple(
        size if limit == -1 else limit for limit, size in zip(pattern, source, strict=True)
    )


def _rows(piece: Mapping[str, Array], max_batch: int) -> int:
    return len(next(iter(piece.values()))) if max_batch else 1
