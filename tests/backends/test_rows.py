"""How many rows a batch runs with: those of the next warmed-up size, within a token budget."""

from dataclasses import replace

import numpy as np
import pytest
from suites.backend import model_config

from penstock.backends import Batch
from penstock.backends.rows import rows_to_run, rungs_of
from penstock.config import BatchPolicy, PadAxis, Padding
from penstock.types import TensorSpec

TOKENS = TensorSpec("ids", "INT64", (-1,))
CONFIG = replace(
    model_config("null", "", [TOKENS], [TOKENS], 12), batching=BatchPolicy(12, is_dynamic=True)
)


def batch(rows: int, length: int = 4) -> Batch:
    return Batch({"ids": np.zeros((rows, length), np.int64)}, rows)


def test_rungs_are_those_of_the_warm_up_if_the_model_is_batched() -> None:
    assert rungs_of(CONFIG) == [1, 2, 4, 8, 12]
    assert rungs_of(replace(CONFIG, batching=BatchPolicy(12))) == []
    assert rungs_of(replace(CONFIG, max_batch_size=0)) == []


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (3, 4), (8, 8), (9, 12), (13, 13)])
def test_a_batch_is_padded_to_the_next_rung(rows: int, expected: int) -> None:
    assert rows_to_run(CONFIG, rungs_of(CONFIG), batch(rows)) == expected


def test_without_rungs_nothing_is_padded() -> None:
    assert rows_to_run(CONFIG, [], batch(3)) == 3


def test_a_token_budget_limits_the_padding() -> None:
    padding = Padding((PadAxis("ids", 0),), (4, 8))
    policy = BatchPolicy(12, is_dynamic=True, max_tokens=40)
    limited = replace(CONFIG, padding=padding, batching=policy)
    rungs = rungs_of(limited)
    assert rows_to_run(limited, rungs, batch(3, 8)) == 4
    # Five rows of eight tokens are the budget.
    assert rows_to_run(limited, rungs, batch(5, 8)) == 5
    assert rows_to_run(limited, rungs, batch(9, 4)) == 10
