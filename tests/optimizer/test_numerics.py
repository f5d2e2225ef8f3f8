"""Answers against answers: shapes, datatypes, what is finite, how far apart."""

import msgspec
import numpy as np
import pytest

from penstock.optimizer.numerics import Numerics, agreements, compare, cosines, score_outputs
from penstock.types import Array

RANDOM = np.random.default_rng(0)
LOGITS = [{"logits": RANDOM.normal(0, 1, 10).astype(np.float32)} for _ in range(20)]


def changed(change: Array | float, position: int = 3) -> list[dict[str, Array]]:
    answers = [{name: array.copy() for name, array in answer.items()} for answer in LOGITS]
    answers[position]["logits"] = (answers[position]["logits"] + change).astype(np.float32)
    return answers


def test_the_same_answers() -> None:
    found = compare(LOGITS, LOGITS, tolerance=0.0)
    assert found == Numerics(20, True, True, 0.0, 0.0, pytest.approx(1.0), 1.0, [])


def test_the_largest_difference_of_all_examples_counts() -> None:
    column = np.array([answer["logits"][0] for answer in LOGITS])
    # The range without the outermost value at either end.
    span = float(np.ptp(np.sort(column)[1:-1]))
    found = compare(LOGITS, changed(np.eye(10)[0] * 0.25), tolerance=0.01)
    assert found.max_absolute == pytest.approx(0.25, rel=1e-4)
    assert found.max_relative == pytest.approx(0.25 / span, rel=1e-4)
    assert found.min_cosine < 1
    assert found.problems == [
        f"output 'logits': column 0 differs by {0.25 / span:.2g} of its range ({span:.3g}), "
        "allowed are 0.01"
    ]
    assert compare(LOGITS, changed(np.eye(10)[0] * 0.25), tolerance=None).problems == []


def test_another_best_class_is_no_agreement() -> None:
    found = compare(LOGITS, changed(-2 * LOGITS[3]["logits"]), tolerance=None)
    assert found.agreement == pytest.approx(19 / 20)
    assert found.min_cosine == pytest.approx(-1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_a_problem_at_any_tolerance(value: float) -> None:
    found = compare(LOGITS, changed(value), tolerance=None)
    assert not found.is_finite
    assert found.problems == ["output 'logits': 10 values are not finite where the original's are"]
    assert msgspec.json.decode(msgspec.json.encode(found), type=Numerics) == found


def test_what_the_original_masks_may_stay_masked() -> None:
    masked = [{"scores": np.array([1.0, -np.inf, 2.0], np.float32)}]
    other = [{"scores": np.array([1.0, -np.inf, 2.5], np.float32)}]
    found = compare(masked, other, tolerance=None)
    assert found.is_finite
    assert found.max_absolute == 0.5
    open_again = [{"scores": np.array([1.0, 0.0, 2.0], np.float32)}]
    assert not compare(masked, open_again, tolerance=None).is_finite


def test_other_shapes_datatypes_names_or_numbers_of_answers() -> None:
    wide = [{"logits": answer["logits"].astype(np.float64)} for answer in LOGITS]
    short = [{"logits": answer["logits"][:5]} for answer in LOGITS]
    named = [{"scores": answer["logits"]} for answer in LOGITS]
    cases = {
        "float32 [10] became float64 [10]": wide,
        "float32 [10] became float32 [5]": short,
        "expected outputs ['logits'], got ['scores']": named,
        "expected 20 answers, got 19": LOGITS[:19],
        "17 more of this kind": short,
    }
    for words, candidate in cases.items():
        found = compare(LOGITS, candidate, tolerance=None)
        assert not found.has_same_shapes
        assert words in "\n".join(found.problems)
    assert compare([], [], tolerance=None).problems == ["there are no answers"]


def test_integers_and_texts() -> None:
    one = [{"ids": np.array([1, 5]), "text": np.array([b"a", b"b"], object)}]
    other = [{"ids": np.array([1, 4]), "text": np.array([b"a", b"c"], object)}]
    assert compare(one, one, tolerance=0.0).problems == []
    found = compare(one, other, tolerance=0.01)
    assert found.agreement is None
    assert found.problems == [
        "output 'ids': 1 of 1 answers differ, allowed are 1 %",
        "output 'text': 1 of 1 answers differ, allowed are 1 %",
    ]


def test_whole_numbers_may_differ_where_rounding_breaks_a_tie() -> None:
    one = [{"ids": np.array([index])} for index in range(100)]
    other = [{"ids": np.array([index if index else 7])} for index in range(100)]
    assert compare(one, other, tolerance=1e-3).problems == []
    other[1] = {"ids": np.array([50])}
    assert compare(one, other, tolerance=1e-3).problems


def detections(scores: Array) -> list[dict[str, Array]]:
    """Four pixel coordinates and a score, as detectors give them."""
    boxes = np.random.default_rng(1).uniform(0, 640, (len(scores), 4))
    table = np.concatenate([boxes, scores[:, None]], axis=1).astype(np.float32)
    return [{"dets": row} for row in table]


def test_a_small_column_beside_large_ones_has_a_tolerance_of_its_own() -> None:
    scores = RANDOM.uniform(0, 1, 64)
    found = compare(detections(scores), detections(np.zeros(64)), tolerance=1e-3)
    assert found.max_relative > 0.9
    assert "column 4" in found.problems[0]
    rounded = detections(scores + RANDOM.uniform(-1e-4, 1e-4, 64))
    assert compare(detections(scores), rounded, tolerance=1e-3).problems == []


def test_columns_of_images_are_their_channels() -> None:
    maps = RANDOM.uniform(0, 1, (16, 2, 4, 4)).astype(np.float32)
    maps[:, 0] *= 640
    broken = maps.copy()
    broken[:, 1] = 0
    one, other = ([{"maps": each} for each in values] for values in (maps, broken))
    assert "column 1" in compare(one, other, tolerance=1e-3).problems[0]


def test_outputs_that_do_not_matter_are_left_out() -> None:
    one = [{"y": np.ones(2, np.float32), "debug": np.ones(2, np.float32)}] * 3
    other = [{"y": np.ones(2, np.float32), "debug": np.zeros(2, np.float32)}] * 3
    assert compare(one, other, tolerance=1e-3).problems
    assert compare(one, other, tolerance=1e-3, names=("y",)).problems == []


def test_a_lossy_step_may_find_another_number_of_rows() -> None:
    one = [{"dets": RANDOM.normal(size=(n, 5)).astype(np.float32)} for n in (3, 1, 0)]
    other = [{"dets": each["dets"][:1]} for each in one]
    assert compare(one, other, tolerance=None).problems == []
    assert "became" in compare(one, other, tolerance=1e-3).problems[0]


def test_nothing_but_zeros() -> None:
    zeros = [{"x": np.zeros((2, 3), np.float32)}]
    assert compare(zeros, zeros, tolerance=0.0).min_cosine == 1
    found = compare(zeros, [{"x": np.full((2, 3), 1e-3, np.float32)}], tolerance=0.01)
    assert found.problems
    assert found.min_cosine == 0


def test_which_outputs_are_scores() -> None:
    unit = RANDOM.normal(0, 1, (4, 8))
    unit /= np.linalg.norm(unit, axis=1)[:, None]
    answers = [
        {
            "logits": RANDOM.normal(0, 1, 8).astype(np.float32),
            "one_row": RANDOM.random((1, 8)).astype(np.float32),
            "sentence_embedding": RANDOM.normal(0, 1, 8).astype(np.float32),
            "vector": unit[index].astype(np.float32),
            "tokens": RANDOM.random((index + 1, 8)).astype(np.float32),
            "single": np.zeros(1, np.float32),
            "ids": np.arange(8),
        }
        for index in range(4)
    ]
    assert score_outputs(answers) == ["logits", "one_row"]
    assert score_outputs(detections(RANDOM.uniform(0, 1, 64))) == []
    assert score_outputs([]) == []


def test_agreement_and_cosine_by_example() -> None:
    other = changed(-2 * LOGITS[3]["logits"])
    assert agreements(LOGITS, other, ["logits"]).tolist() == [float(i != 3) for i in range(20)]
    found = cosines(LOGITS, other)
    assert found[3] == pytest.approx(-1)
    assert np.delete(found, 3) == pytest.approx(1)
    assert np.isnan(cosines(LOGITS, changed(np.nan))[3])


def test_rounding_is_relative_to_values_where_asked() -> None:
    """TF32: a column far from zero that hardly varies rounds by more than it varies."""
    random = np.random.default_rng(2)
    values = (100 + random.uniform(0, 1, (64, 4))).astype(np.float32)
    rounded = (values * (1 + random.uniform(-1e-3, 1e-3, values.shape))).astype(np.float32)
    one, other = ([{"y": row} for row in each] for each in (values, rounded))
    assert compare(one, other, tolerance=5e-3).problems
    assert compare(one, other, tolerance=5e-3, own_floor=1.0).problems == []


def ids(values: np.ndarray) -> list[dict[str, np.ndarray]]:
    return [{"account": np.array([value])} for value in values]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ids_in_floats_stay_the_same_numbers(dtype: type) -> None:
    """Their range makes the usual tolerance far larger than one."""
    values = np.random.default_rng(0).integers(10**6, 8 * 10**6, 64).astype(dtype)
    other = values.copy()
    other[7] += 1
    assert not compare(ids(values), ids(values), tolerance=1e-3).problems
    assert compare(ids(values), ids(other), tolerance=1e-3).problems
    # Numbers with fractions have the tolerance of their range.
    assert not compare(ids(values + dtype(0.5)), ids(other + dtype(0.5)), tolerance=1e-3).problems


def test_floats_that_are_too_large_for_fractions_are_not_taken_for_ids() -> None:
    values = np.random.default_rng(0).normal(size=64).astype(np.float32) * np.float32(1e9)
    other = values * np.float32(1 + 1e-5)
    assert not compare(ids(values), ids(other), tolerance=1e-3).problems
