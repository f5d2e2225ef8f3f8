"""The backend of a preprocessing stage: a built-in step on batches, in a worker of its own.

`serving.pipeline` makes the configuration: `penstock.preprocess` names the step, the inputs are
what clients send, and the outputs are the network's inputs and the number of tokens of each row.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.backends import Batch, Execution, Outputs, PerRequest, Runner, split_rows
from penstock.backends.finished import Finished, good_rows
from penstock.config import IMAGE, TOKENIZER, ModelConfig
from penstock.types import Array, TensorSpec

# Option that names the step, and the output with the tokens of each row.
STEP, NUM_TOKENS = "penstock.preprocess", TensorSpec("penstock.num_tokens", "INT64", (1,))
MODULES = {
    TOKENIZER: ("penstock.backends.tokenizer", "TextTokenizer"),
    IMAGE: ("penstock.backends.image", "ImageStep"),
}
Row = Mapping[str, Array]


class BatchedStep(Protocol):
    """A built-in preprocessing step. A row that cannot be run gets its own exception."""

    def tried_all(self, rows: Sequence[Row]) -> list[Row | Exception]: ...
    def stack(self, rows: Sequence[Row]) -> dict[str, Array]:
        """Stack the rows of one request."""

    def num_tokens(self, row: Row) -> int:
        """Return the tokens of a row; 0 if it has none."""

    def names(self) -> dict[str, str]: ...
    def close(self) -> None: ...


def open_step(config: ModelConfig, name: str, specs: Sequence[TensorSpec]) -> BatchedStep:
    """Load a step by its name; `specs` are the tensors that it makes of `config.inputs`."""
    module, kind = MODULES[name]
    opened = getattr(importlib.import_module(module), kind)
    # A stage has the settings as an option, the whole model has them in its step.
    text = config.options.get(IMAGE) if config.preprocess is None else config.preprocess.image
    step: BatchedStep = opened(config, specs) if text is None else opened(config, specs, text)
    return step


class StepRunner(Runner):
    """A Runner of a step; each request gets its own answer or error."""

    needs_requests = True
    keeps_rows_apart = True

    def __init__(self, step: BatchedStep) -> None:
        self._step = step

    def built(self) -> Mapping[str, str]:
        return self._step.names()

    def start(self, batch: Batch) -> Execution:
        made = self._step.tried_all(split_rows(batch.inputs, batch.num_rows))
        return Finished(PerRequest([self._answer(rows) for rows in batch.by_request(made)]))

    def close(self) -> None:
        self._step.close()

    def _answer(self, rows: Sequence[Row | Exception]) -> Outputs | Exception:
        good = good_rows(rows)
        if isinstance(good, Exception):
            return good
        counts = [[self._step.num_tokens(row)] for row in good]
        return {**self._step.stack(good), NUM_TOKENS.name: np.array(counts, np.int64)}


def load(config: ModelConfig) -> StepRunner:
    specs = [each for each in config.outputs if each != NUM_TOKENS]
    return StepRunner(open_step(config, config.options[STEP], specs))
