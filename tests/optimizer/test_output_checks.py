"""Every output of a lossy candidate is held to the original's, whatever labels say of others."""

import msgspec
import numpy as np
import pytest

from penstock.optimizer.output_checks import OutputCheck, check_outputs, matched_cosine
from penstock.types import Array

RANDOM = np.random.default_rng(3)
NUM = 200


def answers(**outputs: Array) -> list[dict[str, Array]]:
    return [{name: values[row] for name, values in outputs.items()} for row in range(NUM)]


def noisy(values: Array, share: float) -> Array:
    """With an error of this share of the standard deviation, as INT8 has."""
    return (values + RANDOM.normal(0, share * values.std(), values.shape)).astype(np.float32)


EMBEDDING = RANDOM.normal(size=(NUM, 64)).astype(np.float32)
LOGITS = RANDOM.normal(0, 3, size=(NUM, 10)).astype(np.float32)
# As a trained classifier has them: one class stands out.
LOGITS[np.arange(NUM), RANDOM.integers(0, 10, NUM)] += 12
BOXES = np.concatenate(
    [RANDOM.uniform(0, 640, (NUM, 4)), RANDOM.uniform(0, 1, (NUM, 1))], axis=1
).astype(np.float32)


def check(before: Array, after: Array, name: str = "embedding", **more: object) -> OutputCheck:
    found = check_outputs(answers(**{name: before}), answers(**{name: after}), [name], **more)  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[OutputCheck]) == found
    return found[0]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.06])
def test_the_noise_of_a_healthy_build_passes(share: float) -> None:
    assert not check(EMBEDDING, noisy(EMBEDDING, share)).problem
    assert not check(LOGITS, noisy(LOGITS, share), "logits").problem
    columns = np.stack([noisy(column, share / 4) for column in BOXES.T], axis=1)
    assert not check(BOXES, columns, "dets").problem


def test_an_output_of_zeros_fails() -> None:
    found = check(EMBEDDING, np.zeros_like(EMBEDDING))
    assert "median cosine 0.0000" in found.problem
    assert check(LOGITS, np.zeros_like(LOGITS), "logits").problem


def test_values_that_are_not_finite_fail() -> None:
    broken = EMBEDDING.copy()
    broken[3] = np.nan
    assert "worst row's cosine -1.0000" in check(EMBEDDING, broken).problem


def test_one_broken_row_fails() -> None:
    broken = EMBEDDING.copy()
    broken[17] = -broken[17]
    found = check(EMBEDDING, broken)
    assert found.median_cosine == pytest.approx(1)
    assert "worst row's cosine -1.0000, at least 0.95" in found.problem


def test_one_broken_column_beside_larger_ones_fails() -> None:
    """The cosine of a row is that of its pixels; its score is gone."""
    broken = BOXES.copy()
    broken[:, 4] = broken[:, 4].mean()
    found = check(BOXES, broken, "dets")
    assert found.worst_cosine == pytest.approx(1, abs=1e-4)
    assert "column 4 is off by 1 of its standard deviation" in found.problem


def test_one_broken_channel_of_a_map_fails() -> None:
    maps = RANDOM.uniform(0, 1, (NUM, 3, 4, 4)).astype(np.float32)
    maps[:, 0] *= 640
    broken = maps.copy()
    broken[:, 2] = 0
    found = check(maps, broken, "maps")
    assert found.worst_column == 2 and found.problem


def test_one_broken_token_of_many_fails() -> None:
    tokens = RANDOM.normal(size=(NUM, 128, 6)).astype(np.float32)
    assert not check(tokens, noisy(tokens, 0.05), "tokens").problem
    broken = tokens.copy()
    broken[:, 77] = RANDOM.normal(size=(NUM, 6))
    found = check(tokens, broken, "tokens")
    assert found.median_cosine is not None and found.median_cosine > 0.99
    assert "position 77 is off by" in found.problem


def test_a_column_that_never_varies_may_round() -> None:
    constant = EMBEDDING.copy()
    constant[:, 5] = 5.0
    rounded = constant.copy()
    rounded[:, 5] += 0.01
    assert not check(constant, rounded).problem
    rounded[:, 5] += 1.0
    assert "column 5" in check(constant, rounded).problem


def test_scores_are_held_to_their_best_class_and_their_scale() -> None:
    other = LOGITS.copy()
    other[: NUM // 10] = np.roll(other[: NUM // 10], 1, axis=1)
    assert "the same best class in 9" in check(LOGITS, other, "logits").problem
    assert "of its length" in check(LOGITS, LOGITS / 10, "logits").problem


def test_scores_beside_larger_columns_of_one_kind_are_guarded_too() -> None:
    """Several columns of each: they look like scores of classes, and a pixel is always the best."""
    wide = np.concatenate([RANDOM.uniform(0, 40, (NUM, 4)), LOGITS[:, :4] / 4], axis=1)
    broken = wide.copy()
    broken[:, 4:] = 0
    found = check(wide.astype(np.float32), broken.astype(np.float32), "dets")
    assert found.kind == "scores" and "column" in found.problem


def test_values_that_all_shrink_by_a_third_fail() -> None:
    assert "of its length" in check(EMBEDDING, EMBEDDING * np.float32(0.655)).problem


def test_of_what_the_score_reads_only_the_scale_is_checked() -> None:
    judged = frozenset({"logits"})
    other = np.roll(LOGITS, 1, axis=0)
    found = check(LOGITS, other, "logits", judged=judged)
    assert found.agreement is not None and found.agreement < 0.5
    assert "of its length" in found.problem
    near = LOGITS.copy()
    near[: NUM // 10, 0] += 15
    assert check(LOGITS, near, "logits").problem
    assert not check(LOGITS, near, "logits", judged=judged).problem


def test_whole_numbers_and_texts_must_be_equal_nearly_always() -> None:
    ids = RANDOM.integers(0, 9, (NUM, 1))
    other = ids.copy()
    other[: NUM // 50] += 1
    assert not check(ids, other, "ids").problem
    other[: NUM // 10] += 1
    assert "equal in 9" in check(ids, other, "ids").problem
    texts = np.array([[f"{i}".encode()] for i in range(NUM)], object)
    assert not check(texts, texts, "text").problem
    assert check(texts, texts[::-1], "text").problem


def test_rows_that_are_next_to_nothing_must_stay_so() -> None:
    sparse = EMBEDDING.copy()
    sparse[0] = 0
    near = sparse.copy()
    near[0] += 1e-3
    assert not check(sparse, near).problem
    near[0] += 1
    assert check(sparse, near).problem


def found_rows(num: int, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    boxes = random.uniform(0, 640, (num, 4))
    return np.concatenate([boxes, random.uniform(0.3, 1, (num, 1))], axis=1).astype(np.float32)


def test_rows_whose_number_depends_on_the_data_are_matched() -> None:
    rows = found_rows(6)
    assert matched_cosine(rows, rows[::-1]) == pytest.approx(1)
    assert matched_cosine(rows, rows[:5]) == pytest.approx(5 / 6, abs=1e-3)
    assert matched_cosine(rows[:5], rows) == pytest.approx(5 / 6, abs=1e-3)
    assert matched_cosine(rows[:0], rows[:0]) == 1
    assert matched_cosine(rows[:0], rows) == 0
    assert matched_cosine(rows, np.full_like(rows, np.nan)) == 0


def test_a_candidate_that_loses_rows_fails() -> None:
    before = [{"dets": found_rows(3 + seed % 4, seed)} for seed in range(NUM)]
    swapped = [{"dets": each["dets"][::-1]} for each in before]
    swapped[0] = {"dets": before[0]["dets"][:0]}
    found = check_outputs(before, swapped, ["dets"])[0]
    assert found.kind == "rows" and "worst row's cosine 0.0000" in found.problem
    halved = [{"dets": each["dets"][: len(each["dets"]) // 2]} for each in before]
    assert "median cosine" in check_outputs(before, halved, ["dets"])[0].problem
    other = [{"dets": each["dets"][:, :4]} for each in before]
    assert "became" in check_outputs(before, other, ["dets"])[0].problem


def test_no_examples_no_checks() -> None:
    assert check_outputs([], [], ["y"]) == []


def test_outliers_do_not_hide_what_happens_to_all_other_rows() -> None:
    """One positive number per row: its cosine is always 1, and outliers make the deviation huge."""
    prices = (29.5 + 4 * RANDOM.normal(size=(NUM, 1))).astype(np.float32)
    prices[:6] *= 400
    broken = prices.copy()
    broken[20:60] = 20.0
    found = check(prices, broken, "price")
    assert found.median_cosine == 1 and found.worst_column_error < 0.5
    assert "column 0 is off by more than its usual spread in" in found.problem
    assert not check(prices, prices * np.float32(1.02), "price").problem
