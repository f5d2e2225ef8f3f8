"""Which data may calibrate and judge: what is refused, what is only warned of, what is let be."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from penstock.optimizer.audit import (
    audit_calibration,
    audit_classes,
    audit_examples,
    audit_labels,
    clipped_share,
    kolmogorov_smirnov,
)
from penstock.optimizer.examples import Examples, Split, split_examples
from penstock.types import Array

Rows = list[dict[str, Array]]


def images(random: np.random.Generator, count: int) -> Rows:
    """Smooth pictures of 12 x 12, each of its own brightness."""
    rows = []
    for _ in range(count):
        slope, height = random.normal(0, 0.3, 2), random.uniform(0.2, 0.8)
        grid = np.linspace(-1, 1, 12)
        picture = height + slope[0] * grid[:, None] + slope[1] * grid[None]
        noise = random.normal(0, 0.02, (12, 12))
        rows.append({"image": np.clip(picture + noise, 0, 1)[None].astype(np.float32)})
    return rows


def tokens(random: np.random.Generator, count: int) -> Rows:
    lengths = random.integers(5, 60, count)
    drawn = [np.minimum(random.zipf(1.3, length), 30_000) for length in lengths]
    return [{"ids": ids, "mask": np.ones_like(ids)} for ids in drawn]


def changed(rows: Rows, change: Callable[[Array], Array]) -> Rows:
    return [{name: change(array) for name, array in row.items()} for row in rows]


@pytest.mark.parametrize(("num_times", "is_warned"), [(1, False), (4, True)])
def test_copies_among_what_is_judged_are_told(num_times: int, is_warned: bool) -> None:
    rows = images(np.random.default_rng(3), 400 // num_times) * num_times
    examples = Examples(rows, None, split_examples(len(rows), seed=0), "digest", "made")
    audit = audit_examples(examples, None, is_separate=False)
    told = [text for text in audit.warnings if "judged on are copies" in text]
    assert len(told) == is_warned


@pytest.mark.parametrize("make", [images, tokens])
def test_data_of_the_same_kind_is_let_be(make: Callable[..., Rows]) -> None:
    for seed in range(15):
        random = np.random.default_rng(seed)
        size = int(random.choice([100, 150, 300]))
        audit = audit_calibration(make(random, size), make(random, 400), is_separate=True)
        assert audit.problems == []


FOREIGN: dict[str, Callable[[Array], Array]] = {
    "not divided by 255": lambda image: image * 255,
    "another mean": lambda image: image - 0.5,
    "noise": lambda image: np.random.default_rng(int(image.sum() * 1e4)).random(
        image.shape, np.float32
    ),
    "inverted and narrowed": lambda image: (1 - image) * 0.3,
    "elements in another order": lambda image: (
        np.random.default_rng(0).permutation(image.ravel()).reshape(image.shape)
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_data_is_refused(name: str) -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        calibration = changed(images(random, 60), FOREIGN[name])
        audit = audit_calibration(calibration, images(random, 300), is_separate=True)
        assert any("calibration is other data" in problem for problem in audit.problems)
        assert "bring 100 to 300 rows" in audit.problems[0]


def test_foreign_tokens_are_refused() -> None:
    random = np.random.default_rng(0)
    uniform = [{"ids": random.integers(0, 30_000, 30), "mask": np.ones(30, int)} for _ in range(50)]
    audit = audit_calibration(uniform, tokens(random, 300), is_separate=True)
    assert "input 'ids'" in audit.problems[0]


def test_a_part_of_the_same_data_is_not_compared_with_it() -> None:
    random = np.random.default_rng(0)
    audit = audit_calibration(
        changed(images(random, 100), lambda image: image * 255),
        images(random, 300),
        is_separate=False,
    )
    assert audit.problems == []


def test_a_small_shift_in_much_data_is_a_warning() -> None:
    random = np.random.default_rng(0)
    brighter = changed(images(random, 1500), lambda image: np.clip(image + 0.06, 0, 1))
    audit = audit_calibration(brighter, images(random, 1500), is_separate=True)
    assert audit.problems == []
    assert any("calibration is other data" in warning for warning in audit.warnings)


def test_too_few_rows() -> None:
    random = np.random.default_rng(0)
    audit = audit_calibration(images(random, 9), [], is_separate=False)
    assert "calibration has 9 rows" in audit.problems[0]
    few = audit_calibration(images(random, 20), [], is_separate=False)
    assert few.problems == []
    assert "calibration has only 20 rows" in few.warnings[0]
    assert audit_calibration([], [], is_separate=False).problems


def test_copies() -> None:
    rows = images(np.random.default_rng(0), 100)
    for distinct in (1, 5, 40):
        audit = audit_calibration((rows[:distinct] * 100)[:100], [], is_separate=False)
        assert f"only {distinct} are distinct" in audit.problems[0]
    some = audit_calibration(rows[:80] + rows[:20], [], is_separate=False)
    assert some.problems == []
    assert some.facts["copies"] == pytest.approx(0.2)
    assert "20 % of the calibration rows are copies" in some.warnings[0]


def test_constant_rows() -> None:
    rows = [{"image": np.full((1, 8, 8), index / 100, np.float32)} for index in range(100)]
    audit = audit_calibration(rows, [], is_separate=False)
    assert "all elements are the same" in audit.problems[0]
    assert "bring 100 to 300 rows" in audit.problems[0]


def test_a_setting_may_be_constant() -> None:
    rows = images(np.random.default_rng(0), 100)
    beside = [{**row, "temperature": np.ones(1, np.float32)} for row in rows]
    assert audit_calibration(beside, [], is_separate=False).problems == []
    wide = [{**row, "bias": np.zeros(9, np.float32)} for row in rows]
    audit = audit_calibration(wide, [], is_separate=False)
    assert audit.problems == []
    assert any("input 'bias'" in warning for warning in audit.warnings)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(value: float) -> None:
    rows = images(np.random.default_rng(0), 100)
    rows[17]["image"][0, 3, 3] = value
    audit = audit_calibration(rows, [], is_separate=False)
    assert audit.problems == [], "tree models take NaN for a missing value"
    assert audit.warnings[0].startswith("1 of 100 calibration rows have values that are not finite")
    for row in rows[:95]:
        row["image"][0, 3, 3] = value
    audit = audit_calibration(rows, rows, is_separate=True)
    assert (audit.problems, len(audit.warnings)) == ([], 1), "five rows say nothing of ranges"


def test_rows_that_are_also_judged_on() -> None:
    random = np.random.default_rng(0)
    rows, others = images(random, 100), images(random, 100)
    audit = audit_calibration(rows, rows[:30] + others, is_separate=True)
    assert audit.facts["overlap"] == pytest.approx(0.3)
    assert any("which flatters INT8" in warning for warning in audit.warnings)
    assert audit_calibration(rows, others, is_separate=True).facts["overlap"] == 0


def test_ranges_that_one_row_decides() -> None:
    rows = images(np.random.default_rng(0), 100)
    rows[50]["image"] = rows[50]["image"] * 20
    audit = audit_calibration(rows, [], is_separate=False)
    assert any("ranges of two halves" in warning for warning in audit.warnings)


def test_texts() -> None:
    def texts(word: str, count: int) -> Rows:
        return [{"text": np.array([f"{word} {n}".encode()], object)} for n in range(count)]

    assert not audit_calibration(texts("a", 50), texts("b", 50), is_separate=True).problems
    audit = audit_calibration(texts("a" * 500, 50), texts("b", 50), is_separate=True)
    assert "calibration is other data" in audit.problems[0]


def test_classes_that_calibration_lacks() -> None:
    ten = np.arange(200) % 10
    assert audit_classes(ten, ten).warnings == []
    audit = audit_classes(ten[ten < 8], ten)
    assert audit.problems == []
    assert "no row of 2 of 10 classes (8, 9)" in audit.warnings[0]
    assert "rows of 1 of 10 classes" in audit_classes(np.zeros(50, int), ten).problems[0]


def test_a_model_that_only_guesses_is_refused() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        num_classes = int(random.integers(2, 20))
        labels = random.integers(0, num_classes, 200)
        good = np.where(random.random(200) < 0.8, labels, random.integers(0, num_classes, 200))
        assert audit_labels(good.astype(float), labels).problems == []
        moved = (good + 1) % num_classes
        assert "guessing gives" in audit_labels(moved.astype(float), labels).problems[0]
        always = np.full(200, float(np.bincount(labels).argmax()))
        assert audit_labels(always, labels).problems


def test_guesses_are_mostly_refused() -> None:
    random = np.random.default_rng(0)
    refused = [
        bool(audit_labels(random.integers(0, 4, 300).astype(float), np.arange(300) % 4).problems)
        for _ in range(100)
    ]
    assert np.mean(refused) > 0.88


def test_skill_on_a_rare_class_is_skill() -> None:
    """97 % of the labels are one class, and always answering it is right nearly as often."""
    labels = (np.arange(1000) < 30).astype(int)
    found = labels.copy()
    found[:10] = 0
    found[500:510] = 1
    assert audit_labels(found.astype(float), labels).problems == []


def test_values() -> None:
    labels = np.random.default_rng(0).normal(20, 3, 100)
    assert audit_labels(labels + 0.5, labels).problems == []
    assert "always answering the median" in audit_labels(labels * 1000, labels).problems[0]


def test_values_with_whole_numbers_as_labels() -> None:
    ages = np.random.default_rng(0).integers(1, 90, 100)
    assert audit_labels(ages + 0.4, ages).problems == []
    assert audit_labels(ages[::-1] + 0.4, ages).problems


def test_examples_as_a_whole() -> None:
    random = np.random.default_rng(0)
    rows, labels = images(random, 500), np.arange(500) % 5
    examples = Examples(rows, labels, split_examples(500, 0), "", "")
    right = labels[list(examples.split.choice)].astype(float)
    for predictions in (None, right):
        assert audit_examples(examples, predictions, is_separate=False).problems == []
    moved = (right + 1) % 5
    assert "guessing" in audit_examples(examples, moved, is_separate=False).problems[0]
    # Calibration rows without labels of their own cover no classes, and need not.
    extra = Split(tuple(range(400, 500)), tuple(range(200)), tuple(range(200, 400)))
    unknown = np.where(np.arange(500) < 400, labels, -1)
    apart = Examples(rows, unknown, extra, "", "")
    found = audit_examples(apart, labels[:200].astype(float), is_separate=True)
    assert found.problems == []
    one_class = np.where(np.arange(500) < 400, labels, 3)
    apart = Examples(rows, one_class, extra, "", "")
    found = audit_examples(apart, labels[:200].astype(float), is_separate=True)
    assert "rows of 1 of 5 classes" in found.problems[0]


def test_answers_that_are_not_finite() -> None:
    assert "not finite" in audit_labels(np.full(10, np.nan), np.zeros(10, int)).problems[0]


def test_the_two_sample_test_is_scipys() -> None:
    random = np.random.default_rng(4)
    for shift in (0.0, 0.2, 0.5, 1.0):
        one, other = random.normal(0, 1, 120), random.normal(shift, 1, 300)
        expected = stats.ks_2samp(one, other, method="asymp")
        distance, likely = kolmogorov_smirnov(one, other)
        assert distance == pytest.approx(expected.statistic)
        assert likely == pytest.approx(expected.pvalue, rel=0.35, abs=0.03)


def test_the_two_sample_test_raises_few_false_alarms() -> None:
    random = np.random.default_rng(5)
    found = [kolmogorov_smirnov(*random.normal(0, 1, (2, 40)))[1] < 0.05 for _ in range(400)]
    assert np.mean(found) < 0.08


def test_how_much_is_clipped() -> None:
    values = {"a": np.arange(10.0), "b": np.zeros(3)}
    found = clipped_share({"a": (1.0, 7.0), "b": (-1.0, 1.0), "c": (0.0, 1.0)}, values)
    assert found == {"a": pytest.approx(0.3), "b": 0.0}
