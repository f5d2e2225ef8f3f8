"""Rows of two versions compared."""

import numpy as np
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.serving.divergence import Divergence, OutputComparer
from penstock.serving.split_counts import SplitCounts
from penstock.types import TensorSpec, from_array


def compare(
    stable: np.ndarray, candidate: np.ndarray, datatype: str = "FP32", name: str = "logits"
) -> tuple[list[float], list[float]]:
    comparer = OutputComparer(TensorSpec(name, datatype, stable.shape[1:]), has_rows=True)
    tensors = [from_array(name, datatype, each) for each in (stable, candidate)]
    disagreeing, distances = comparer.compare(*tensors)
    return disagreeing.tolist(), distances.tolist()


def floats(*rows: object) -> np.ndarray:
    return np.array(rows, np.float32)


def test_scores_disagree_where_the_best_class_differs() -> None:
    disagreeing, distances = compare(
        floats([1.0, 5.0, 2.0], [4.0, 0.0, 3.9]), floats([1.1, 5.2, 2.0], [4.0, 0.0, 4.1])
    )
    assert disagreeing == [0, 1]
    assert 0 < max(distances) < 0.1


def test_scores_that_are_far_apart_disagree_although_the_class_is_the_same() -> None:
    disagreeing, distances = compare(floats([1.0, 5.0]), floats([10.0, 50.0]))
    assert disagreeing == [1]
    assert distances[0] == pytest.approx(0.9, abs=0.01)


def test_rows_with_several_decisions_disagree_in_part() -> None:
    tokens = np.zeros((1, 4, 2), np.float32)
    tokens[:] = [1.0, 0.95]
    changed = tokens.copy()
    changed[0, 0] = [0.95, 1.0]
    assert compare(tokens, changed)[0] == [0.25]


def test_embeddings_are_not_compared_by_their_largest_element() -> None:
    vector = floats([0.6, -0.8, 0.0])
    turned = floats([0.599, -0.8, 0.6])
    close = floats([-0.001, -0.8, 0.6])
    assert compare(vector, floats([0.58, -0.81, 0.0]))[0] == [0]
    assert compare(vector, close)[0] == [1], "far apart"
    named = compare(floats([3.0, 2.99]), floats([2.99, 3.0]), name="pooled_output")
    assert named[0] == [0]
    assert compare(floats([3.0, 2.99]), floats([2.99, 3.0]))[0] == [1]
    assert compare(vector, turned)[0] == [1]


def test_small_values_count_as_small_beside_usual_ones() -> None:
    """A probability of 0.001 or 0.002 is the same answer, if others are near 1."""
    stable = floats([0.9], [0.95], [0.001])
    disagreeing, distances = compare(stable, floats([0.9], [0.95], [0.002]), name="probability")
    assert disagreeing == [0, 0, 0]
    assert distances[2] < 0.01


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_disagree_unless_both_are(value: float) -> None:
    finite, broken = floats([1.0, 2.0]), floats([value, 2.0])
    assert compare(finite, broken) == ([1], [2])
    assert compare(broken, finite) == ([1], [2])
    assert compare(broken, broken) == ([0], [0])


def test_the_largest_values_can_be_compared() -> None:
    largest = np.array([[np.finfo(np.float64).max, 1.0]])
    assert compare(largest, -largest, "FP64", "y_pooled") == ([1], [2])
    assert compare(largest, largest, "FP64", "y_pooled") == ([0], [0])


def test_integers_booleans_and_strings_are_equal_or_not() -> None:
    numbers = np.array([[1, 2], [3, 4]])
    assert compare(numbers, np.array([[1, 2], [3, 5]]), "INT64")[0] == [0, 1]
    flags = np.array([[True], [False]])
    assert compare(flags, ~flags, "BOOL")[0] == [1, 1]
    texts = np.array([[b"a"], [b"bb"]], dtype=object)
    others = np.array([[b"a"], [b"bc"]], dtype=object)
    assert compare(texts, others, "BYTES")[0] == [0, 1]


@pytest.mark.parametrize("datatype", ["FP16", "FP64"])
def test_other_floats(datatype: str) -> None:
    assert compare(floats([1.0, 2.0]), floats([2.0, 1.0]), datatype)[0] == [1]


def test_bf16_is_read_as_floats() -> None:
    bits = (np.array([[1.0, 2.0]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert compare(bits, bits[:, ::-1], "BF16")[0] == [1]
    assert compare(bits, bits, "BF16")[0] == [0]


def test_other_shapes_disagree() -> None:
    assert compare(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)) == ([1, 1], [2, 2])


def test_empty_outputs_agree() -> None:
    empty = np.zeros((1, 0), np.float32)
    assert compare(empty, empty) == ([0], [0])


def test_a_row_disagrees_if_one_of_its_outputs_does() -> None:
    specs = (TensorSpec("scores", "FP32", (2,)), TensorSpec("label", "INT64", (1,)))
    config = ModelConfig("m", "1", "null", "", (), specs, 8, BatchPolicy(8))
    counts = SplitCounts()
    divergence = Divergence(config, counts)
    scores = from_array("scores", "FP32", floats([1, 2], [2, 1]))
    labels = [from_array("label", "INT64", np.array(each)) for each in ([[1], [0]], [[1], [7]])]
    divergence.compare([scores, labels[0]], [labels[1], scores])
    assert (counts.num_compared, counts.num_disagreeing) == (2, 1)
    assert counts.outputs["scores"].num_disagreeing == 0
    assert counts.outputs["label"].num_disagreeing == 1
    divergence.fail(3)
    assert (counts.num_compared, counts.num_disagreeing) == (5, 4)


def test_a_model_without_a_batch_dimension_has_one_row() -> None:
    config = ModelConfig(
        "m", "1", "null", "", (), (TensorSpec("y", "FP32", (2, 2)),), 0, BatchPolicy(0)
    )
    counts = SplitCounts()
    array = np.array([[1, 2], [3, 4]], np.float32)
    other = np.array([[2, 1], [3, 4]], np.float32)
    Divergence(config, counts).compare(
        [from_array("y", "FP32", array)], [from_array("y", "FP32", other)]
    )
    assert (counts.num_compared, counts.num_disagreeing) == (1, 0.5)
