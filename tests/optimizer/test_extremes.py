"""Extreme rows are among those that are chosen, whatever makes them extreme."""

import numpy as np
import pytest

from penstock.optimizer.extremes import choose_rows


def many(num: int = 500) -> list[dict[str, np.ndarray]]:
    values = np.random.default_rng(1).normal(size=(num, 6)).astype(np.float32)
    return [{"x": value} for value in values]


@pytest.mark.parametrize(
    "odd",
    [
        np.array([0, 0, 0, 0, 0, 900], np.float32),
        np.array([0, 0, 0, -900, 0, 0], np.float32),
        np.full(6, 3.2, np.float32),
        np.zeros(6, np.float32),
        np.array([np.nan, 0, 0, 0, 0, 1e30], np.float32),
    ],
    ids=["large", "negative", "long", "zeros", "not finite"],
)
def test_an_extreme_row_is_chosen(odd: np.ndarray) -> None:
    rows = many()
    rows[321] = {"x": odd}
    assert 321 in choose_rows(rows, 16)


def test_a_row_with_one_odd_feature_is_chosen_beside_larger_features() -> None:
    """Its value is far below the largest ones, which another feature has."""
    rows = many()
    for index, row in enumerate(rows):
        row["x"][0] = 1000 + index % 7
        row["x"][3] *= 1e-3
    rows[123]["x"][3] = 0.5
    assert 123 in choose_rows(rows, 8)


def test_the_longest_and_the_shortest_sequence_are_chosen() -> None:
    rows = [{"ids": np.ones(20 + index % 5, np.int64)} for index in range(100)]
    rows[40] = {"ids": np.ones(3, np.int64)}
    rows[60] = {"ids": np.ones(64, np.int64)}
    assert {40, 60} <= set(choose_rows(rows, 8))


def test_texts_are_told_apart_by_their_length() -> None:
    rows = [{"text": np.array([b"word"], np.object_)} for _ in range(50)]
    rows[17] = {"text": np.array([b"word" * 99], np.object_)}
    assert 17 in choose_rows(rows, 6)


def test_half_of_them_are_ordinary_and_no_row_comes_twice() -> None:
    chosen = choose_rows(many(), 32)
    assert len(chosen) == len(set(chosen)) == 32
    assert chosen == choose_rows(many(), 32)
    norms = np.array([np.linalg.norm(row["x"]) for row in many()])
    usual = [index for index in chosen if 1.5 < norms[index] < 3.5]
    assert len(usual) >= 8


def test_a_prefix_has_both_kinds() -> None:
    rows = many()
    rows[321] = {"x": np.full(6, 900, np.float32)}
    first = choose_rows(rows, 32)[:2]
    assert 321 in first and len(first) == 2


def test_few_rows_are_all_chosen() -> None:
    assert sorted(choose_rows(many(3), 32)) == [0, 1, 2]
    assert choose_rows([], 32) == []
