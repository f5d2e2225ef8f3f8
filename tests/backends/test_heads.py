"""Labels, scores and embeddings from a network's outputs."""

import numpy as np
import pytest

from penstock.backends.heads import Token, activate, group, pool

VECTORS = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
MASK = np.array([[1, 1, 0]])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean", [2, 3, 4, 5]),
        ("cls", [0, 1, 2, 3]),
        ("max", [4, 5, 6, 7]),
        ("lasttoken", [4, 5, 6, 7]),
        ("mean_sqrt_len_tokens", np.array([4, 6, 8, 10]) / np.sqrt(2)),
    ],
)
def test_pooling_ignores_tokens_that_are_masked(pooling, expected):
    np.testing.assert_allclose(pool(VECTORS, MASK, pooling), [expected], rtol=1e-6)


def test_scores_do_not_overflow():
    logits = np.array([[1000.0, 0.0], [-1000.0, 0.0]], np.float32)
    np.testing.assert_allclose(activate(logits, "softmax"), [[1, 0], [0, 1]])
    assert activate(logits, "none") is logits
    with np.errstate(all="raise"):
        np.testing.assert_allclose(activate(logits, "sigmoid"), [[1, 0.5], [0, 0.5]])


def test_adjacent_tokens_of_one_tag_are_one_entity():
    tokens = [
        Token("B-PER", 0.5, 0, 3),
        Token("I-PER", 1.0, 3, 5),
        Token("B-PER", 0.5, 6, 8),
        Token("O", 0.9, 9, 10),
        Token("LOC", 0.5, 11, 12),
    ]
    found = [(each.entity_group, each.score, each.start, each.end) for each in group(tokens)]
    assert found == [("PER", 0.75, 0, 5), ("PER", 0.5, 6, 8), ("LOC", 0.5, 11, 12)]
