"""Answers through a real server, by many clients at once."""

from pathlib import Path

import numpy as np
import pytest
from served_builds import null_build

from penstock.errors import BackendFailed
from penstock.optimizer import served_answers
from penstock.optimizer.plan import Plan
from penstock.optimizer.served import ServedBench
from penstock.types import Array


def numbers(*values: float) -> list[dict[str, Array]]:
    return [{"x": np.array([value], np.float32)} for value in values]


def a_bench(rows: list[dict[str, Array]]) -> ServedBench:
    return ServedBench(Plan("m.onnx", "model", "out"), rows, lambda doing: None)


def test_every_row_is_answered_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_answers, "NUM_REQUESTS", 64)
    rows = numbers(*range(10))
    found = a_bench(rows).answers(null_build(tmp_path, max_batch=4), 60.0)
    assert len(found) == 64
    assert {place for place, _ in found} == set(range(10))
    for place, answer in found:
        assert np.array_equal(answer["y"], rows[place]["x"])


def test_a_server_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match="the server answered 500"):
        a_bench(numbers(7)).answers(null_build(tmp_path, fail_on=7), 60.0)


def test_no_time_still_asks_once(tmp_path: Path) -> None:
    found = a_bench(numbers(1, 2)).answers(null_build(tmp_path), 0.0)
    assert 1 <= len(found) <= served_answers.NUM_CLIENTS
