"""Data as examples: every format, labels, ragged rows, and the parts."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import ConfigError
from penstock.optimizer.examples import (
    Examples,
    num_to_bring,
    open_examples,
    signature_examples,
    split_examples,
)
from penstock.optimizer.plan import Plan
from penstock.types import TensorSpec

X = [TensorSpec("x", "FP32", (4,))]
TOKENS = [TensorSpec("input_ids", "INT64", (-1,)), TensorSpec("mask", "INT64", (-1,))]
TEXT = [TensorSpec("text", "BYTES", (1,))]
VALUES = np.arange(200, dtype=np.float32).reshape(50, 4)
LABELS = np.arange(50) % 5


def opened(path: Path, inputs: list[TensorSpec] = X, **wishes: object) -> Examples:
    plan = Plan("m.onnx", "m", "models", data=str(path), **wishes)  # type: ignore[arg-type]
    return open_examples(plan, inputs, has_batch=True)


def problem(path: Path, inputs: list[TensorSpec] = X, **wishes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(path, inputs, **wishes)
    return str(caught.value)


def save(folder: Path, suffix: str, label: str = "labels") -> Path:
    """The same labelled examples in every format."""
    path = folder / f"data{suffix}"
    rows = [{"x": row.tolist(), label: int(each)} for row, each in zip(VALUES, LABELS, strict=True)]
    match suffix:
        case ".npz":
            np.savez(path, x=VALUES, **{label: LABELS})
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".parquet"])
def test_every_format_brings_rows_and_labels(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path, suffix)
    examples = opened(path)
    assert [row["x"].tolist() for row in examples.rows] == VALUES.tolist()
    assert examples.rows[0]["x"].dtype == np.float32
    assert examples.labels is not None
    assert examples.labels.tolist() == LABELS.tolist()
    assert examples.text == (f"50 examples of {path.name}, labelled; 20 to choose by, 20 held out")


def test_labels_by_their_usual_names_or_by_the_one_that_is_said(tmp_path: Path) -> None:
    for label in ("label", "y"):
        assert opened(save(tmp_path, ".npz", label)).labels is not None
    path = save(tmp_path, ".npz", "sentiment")
    assert opened(path, labels="sentiment").labels is not None
    unlabelled = opened(path)
    assert unlabelled.labels is None
    assert "without labels; ignored: 'sentiment'" in unlabelled.text
    assert "there are no labels 'class'; it has 'sentiment', 'x'" in problem(path, labels="class")
    assert "labels 'x': is an input of the model" in problem(path, labels="x")


@pytest.mark.parametrize("suffix", [".npz", ".jsonl", ".parquet"])
def test_names_that_match_no_input_are_listed_beside_the_inputs(
    tmp_path: Path, suffix: str
) -> None:
    inputs = [TensorSpec("X", "FP32", (4,))]
    text = problem(save(tmp_path, suffix, "y"), inputs)
    assert text.startswith(f"data{suffix} has 'x' and 'y'; the model's input is 'X' (FP32 [-1, 4])")


def test_rows_that_are_not_finite_are_known_and_not_calibrated_with(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    values = VALUES.copy()
    values[[3, 7], 1] = np.nan
    np.savez(path, x=values)
    bad = opened(path).non_finite
    assert [(each.input, each.index, each.place) for each in bad] == [
        ("x", 3, "row 3"),
        ("x", 7, "row 7"),
    ]
    many = tmp_path / "many.npz"
    values = np.tile(VALUES, (20, 1))
    values[::2, 0] = np.inf
    np.savez(many, x=values)
    examples = opened(many)
    assert 10 <= len(examples.split.calibration) < 200
    assert all(np.isfinite(examples.rows[i]["x"]).all() for i in examples.split.calibration)
    both = opened(path, calibration=str(many))
    assert [each.file for each in both.non_finite[:3]] == ["data.npz", "data.npz", "many.npz"]
    assert np.isinf(both.rows[both.non_finite[2].index]["x"]).any()


def test_padding_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    values = np.zeros((20, 6), np.float32)
    values[:, 4:] = np.nan
    np.savez(path, s=values, lengths=np.array([4] * 19 + [5]))
    bad = opened(path, [TensorSpec("s", "FP32", (-1,))]).non_finite
    assert [each.index for each in bad] == [19]


def test_an_input_may_be_called_like_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, y=VALUES)
    assert opened(path, [TensorSpec("y", "FP32", (4,))]).labels is None


def test_a_file_without_names_and_without_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, VALUES)
    examples = opened(path)
    assert examples.labels is None
    assert examples.text.startswith("50 examples of data.npy, without labels")
    assert "labels 'y'" in problem(path, labels="y")


def test_a_batch_that_is_fixed_at_one_may_be_left_out(tmp_path: Path) -> None:
    path = save(tmp_path, ".npz")
    plan = Plan("m.onnx", "m", "models", data=str(path))
    fixed = [TensorSpec("x", "FP32", (1, 4))]
    examples = open_examples(plan, fixed, has_batch=False)
    assert {row["x"].shape for row in examples.rows} == {(1, 4)}
    np.testing.assert_array_equal(examples.rows[3]["x"][0], VALUES[3])


def test_sequences_of_different_lengths(tmp_path: Path) -> None:
    rows = [{"input_ids": [7] * (n + 1), "mask": [1] * (n + 1), "label": n % 2} for n in range(12)]
    lines = tmp_path / "data.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    table = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    padded = tmp_path / "data.npz"
    ids = np.array([[7] * (n + 1) + [0] * (11 - n) for n in range(12)])
    lengths = np.arange(1, 13)
    np.savez(padded, input_ids=ids, mask=ids // 7, label=np.arange(12) % 2, lengths=lengths)
    for path in (lines, table, padded):
        examples = opened(path, TOKENS)
        assert [row["input_ids"].tolist() for row in examples.rows] == [
            row["input_ids"] for row in rows
        ]
        assert [row["mask"].tolist() for row in examples.rows] == [row["mask"] for row in rows]
        assert examples.labels is not None


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (np.full(3, 9), "expected lengths from 1 to 4"),
        (np.zeros(3, int), "expected lengths from 1 to 4"),
        (np.ones(3), "expected one whole number per example, got float64 of shape [3]"),
    ],
)
def test_lengths_that_cannot_be(tmp_path: Path, lengths: object, words: str) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, input_ids=np.ones((3, 4), int), mask=np.ones((3, 4), int), lengths=lengths)
    assert words in problem(path, TOKENS)


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "reviews.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"übel {n}", "label": 0}) for n in range(12)))
    examples = opened(path, TEXT)
    assert examples.rows[3]["text"].tolist() == ["übel 3".encode()]


def test_classes_are_sub_folders(tmp_path: Path) -> None:
    for name, shade in (("cat/a", 0), ("cat/b", 60), ("dog/c", 250)):
        path = tmp_path / "pets" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (shade, 0, 0)).save(path)
    inputs = [TensorSpec("image", "FP32", (3, 4, 4))]
    examples = opened(tmp_path / "pets", inputs)
    assert examples.labels is not None
    assert examples.labels.tolist() == [0, 0, 1]
    assert "classes are the sub-folders" in examples.text
    flat = opened(tmp_path / "pets" / "cat", inputs)
    assert flat.labels is None


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array(["good"] * 50), "expected a class number or a value per example, got <U4"),
        (np.zeros((50, 3)), "got float64 of shape [50, 3]"),
        (np.full(50, np.nan), "some are not finite"),
        (np.zeros(49), "arrays have different numbers of examples"),
    ],
)
def test_labels_that_cannot_be(tmp_path: Path, labels: object, words: str) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=VALUES, labels=labels)
    assert words in problem(path)


def test_an_evaluator_may_take_any_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"x": [0.0] * 4, "label": {"boxes": [1, n]}} for n in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    examples = opened(path, evaluator="my:function")
    assert examples.labels is not None
    assert examples.labels[3] == {"boxes": [1, 3]}
    assert "expected a class number" in problem(path)


def test_a_row_without_its_label(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"x": [1, 2, 3, 4], "label": 1}\n{"x": [1, 2, 3, 4]}')
    assert "1 rows have no 'label': line 2" in problem(path)


def test_labels_in_a_column_or_as_booleans(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, x=VALUES, labels=(LABELS > 2)[:, None])
    labels = opened(path).labels
    assert labels is not None
    assert (labels.dtype.kind, labels.shape) == ("i", (50,))


@given(st.integers(0, 3000), st.integers(0, 5))
def test_parts_are_disjoint_and_complete(num_examples: int, seed: int) -> None:
    split = split_examples(num_examples, seed)
    parts = (*split.calibration, *split.choice, *split.held_out)
    assert sorted(parts) == list(range(num_examples))
    assert len(split.calibration) == min(300, num_examples // 5)
    assert 0 <= len(split.choice) - len(split.held_out) <= 1
    assert split == split_examples(num_examples, seed)


def test_another_seed_is_another_split() -> None:
    assert split_examples(100, 0) != split_examples(100, 1)


@given(st.integers(1, 5000), st.booleans())
def test_what_to_bring_gives_parts_that_are_large_enough(needed: int, is_separate: bool) -> None:
    total = num_to_bring(needed, is_separate)
    smallest = total // 2 if is_separate else len(split_examples(total, 0).held_out)
    assert needed - 1 <= smallest <= needed + 1


def test_calibration_data_of_its_own(tmp_path: Path) -> None:
    path, extra = save(tmp_path, ".npz"), tmp_path / "calibration.npy"
    np.save(extra, np.full((30, 4), 7, np.float32))
    alone, examples = opened(path), opened(path, calibration=str(extra))
    assert len(examples.rows) == 80
    assert sorted(examples.split.calibration) == list(range(50, 80))
    assert sorted((*examples.split.choice, *examples.split.held_out)) == list(range(50))
    assert examples.labels is not None
    assert examples.labels.tolist() == [*LABELS.tolist(), *[-1] * 30]
    assert examples.digest != alone.digest
    assert examples.text.endswith("25 held out; calibrated with 30 of calibration.npy")


def test_calibration_data_may_have_labels_too(tmp_path: Path) -> None:
    path = save(tmp_path, ".npz")
    examples = opened(path, calibration=str(path))
    assert examples.labels is not None
    assert examples.labels.tolist() == LABELS.tolist() * 2


def test_the_digest_is_of_what_was_read(tmp_path: Path) -> None:
    first = opened(save(tmp_path, ".npz")).digest
    assert opened(save(tmp_path, ".npz")).digest == first
    np.savez(tmp_path / "data.npz", x=VALUES + 1, labels=LABELS)
    assert opened(tmp_path / "data.npz").digest != first


def test_few_examples_are_said_to_be_few(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, VALUES[:3])
    assert "too few to show anything" in opened(path).text


def test_data_that_does_not_fit_or_is_not_there(tmp_path: Path) -> None:
    assert "there is no such file" in problem(tmp_path / "nothing.npz")
    path = tmp_path / "data.npz"
    np.savez(path, x=VALUES[:, :3], labels=LABELS)
    assert "shape [3] does not fit [4]" in problem(path)


def test_examples_from_the_signature() -> None:
    examples = signature_examples([*TOKENS, *TEXT], has_batch=True, seed=1, num=8)
    again = signature_examples([*TOKENS, *TEXT], has_batch=True, seed=1, num=8)
    lengths = [len(row["input_ids"]) for row in examples.rows]
    assert all(row["mask"].shape == row["input_ids"].shape for row in examples.rows)
    assert len(set(lengths)) > 1
    assert all(16 <= length <= 128 for length in lengths)
    assert isinstance(examples.rows[0]["text"][0], bytes)
    assert [row["input_ids"].tolist() for row in again.rows] == [
        row["input_ids"].tolist() for row in examples.rows
    ]
    assert examples.split.calibration == ()
    assert examples.labels is None
    assert examples.text.startswith("random values from the model's signature")


def test_a_model_without_a_batch_dimension() -> None:
    examples = signature_examples([TensorSpec("x", "FP32", (1, 4))], False, seed=0, num=2)
    assert examples.rows[0]["x"].shape == (1, 4)
