"""Statistics of the data that a version was optimised on, for its evidence.

The server compares live inputs with them: what clients send and, behind a built-in preprocessing
step, what the network gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.backends.processing import apply
from penstock.config import ModelConfig
from penstock.serving.input_statistics import InputStatistics, collect, watched_inputs
from penstock.serving.pipeline import stages_of
from penstock.types import Array

# Rows that are preprocessed for the network's own inputs: decoding images takes time.
MAX_PREPROCESSED = 300


def statistics_of(config: ModelConfig, rows: Sequence[Mapping[str, Array]]) -> InputStatistics:
    """Return statistics of the inputs that workers of this version get. Rows are without the batch
    dimension. PenstockError if they cannot be preprocessed."""
    found: InputStatistics = {}
    if config.is_staged:
        *_, network = stages_of(config)
        some = rows[:: max(1, -(-len(rows) // MAX_PREPROCESSED))]
        found |= collect(watched_inputs(network.config), apply(config, some))
    return found | collect(watched_inputs(config), rows)
