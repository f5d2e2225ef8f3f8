"""Labels, scores and embeddings from a network's outputs."""

import numpy as np
import pytest

from penstock.backends.heads import activate, pool

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
