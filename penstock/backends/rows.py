"""How many rows a batch runs with on a GPU, where libraries build kernels for each new shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from penstock.backends import Batch
from penstock.config import ModelConfig, ladder


def rungs_of(config: ModelConfig) -> list[int]:
    """Return the sizes to which batches are padded; none unless the model is batched, as only then
    it is tested whether rows influence each other."""
    is_batched = config.max_batch_size > 0 and config.batching.is_dynamic
    return ladder(config.max_batch_size) if is_batched else []


def rows_to_run(config: ModelConfig, rungs: Sequence[int], batch: Batch) -> int:
    """Return the rows to run: padded to the next rung of the ladder, which is warmed up. For each
    new shape libraries build kernels, which takes many times as long as a batch."""
    index = bisect_left(rungs, batch.num_rows)
    rung = rungs[index] if index < len(rungs) else batch.num_rows
    padding = config.padding
    if padding is None or config.batching.max_tokens is None:
        return rung
    # An optional input may be missing. All pieces have the same row shapes.
    inputs = batch.all_pieces[0]
    axes = [each for each in padding.axes if each.input in inputs]
    lengths = [inputs[each.input].shape[1 + each.axis] for each in axes]
    # At most the token budget, which is warmed up as well.
    most = config.max_rows(max(lengths, default=1))
    return max(batch.num_rows, min(rung, most))
