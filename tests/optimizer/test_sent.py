"""What the data shows of the inputs, before a model has said anything."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.optimizer.plan import Plan
from penstock.optimizer.sent import (
    MAX_ROWS,
    as_long_as_told,
    read_sent,
    specs_of,
    without_labels,
)
from penstock.types import TensorSpec


def plan(path: Path, **wishes: str) -> Plan:
    return Plan("model.onnx", "model", "out", data=str(path), **wishes)


def test_rows_of_texts_are_bytes_and_labels_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"text": "é", "label": 1}, {"text": "two words", "label": 0}]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_sent(plan(path, labels="label"))
    assert [row["text"].tolist() for row in found] == [["é".encode()], [b"two words"]]
    assert specs_of(found) == (TensorSpec("text", "BYTES", (1,)),)


def test_labels_that_nobody_named_are_left_out_too(tmp_path: Path) -> None:
    rows = [{"text": np.array([b"a"], object), "label": np.array([1])}]
    assert [list(row) for row in without_labels(rows)] == [["text"]]
    assert [list(row) for row in without_labels(rows, taken=["label"])] == [["text", "label"]]
    assert without_labels([]) == []


def test_lists_of_different_lengths_leave_the_size_free(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"ids": [1, 2], "x": [0.5]}, {"ids": [1], "x": [1.5]}]))
    assert specs_of(read_sent(plan(path))) == (
        TensorSpec("ids", "INT64", (-1,)),
        TensorSpec("x", "FP32", (1,)),
    )


def test_arrays_keep_their_datatypes_and_some_rows_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    images = np.zeros((MAX_ROWS + 5, 4, 4, 3), np.uint8)
    np.savez(path, image=images, y=np.zeros(len(images), np.int64))
    rows = read_sent(plan(path, labels="y"))
    assert len(rows) == MAX_ROWS
    assert specs_of(rows) == (TensorSpec("image", "UINT8", (4, 4, 3)),)


def test_array_without_a_name_has_the_one_that_was_said(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.zeros((2, 3)))
    assert specs_of(read_sent(plan(path, data_name="x"))) == (TensorSpec("x", "FP32", (3,)),)


def test_files_of_a_folder_are_sent_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"png")
    (row,) = read_sent(plan(tmp_path / "images"))
    assert row["image"].tolist() == [b"png"]


def test_no_data_is_no_rows() -> None:
    assert read_sent(Plan("model.onnx", "model", "out")) == []


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "data.xlsx").write_text("a,b")
    with pytest.raises(ConfigError, match="expected a file that ends in .npz"):
        read_sent(plan(tmp_path / "data.xlsx"))
    with pytest.raises(ConfigError, match="there is no such file"):
        read_sent(plan(tmp_path / "none.npz"))


def test_rows_that_do_not_agree_are_told_all_at_once() -> None:
    one = {"a": np.zeros(1), "b": np.zeros((1, 1), np.int64), "c": np.zeros(1, np.complex64)}
    other = {"b": np.zeros(1, np.int64), "c": np.zeros(1, np.complex64)}
    with pytest.raises(ConfigError) as error:
        specs_of([one, other])
    assert error.value.problems == (
        "input 'a': not every example has it",
        "input 'b': examples differ in datatype or number of axes",
        "input 'c': complex64 is no datatype of the protocol",
    )


def filled(*lengths: int) -> list[dict[str, np.ndarray]]:
    return [
        {"ids": np.arange(4), "size": np.zeros(2), "lengths": np.array([each])} for each in lengths
    ]


def test_filled_up_rows_are_as_long_as_told() -> None:
    rows = as_long_as_told(filled(4, 3, 1), ("ids", "size"))
    assert [row["ids"].tolist() for row in rows] == [[0, 1, 2, 3], [0, 1, 2], [0]]
    assert all(list(row) == ["ids", "size"] for row in rows)
    assert specs_of(rows) == (TensorSpec("ids", "INT64", (-1,)), TensorSpec("size", "FP64", (2,)))


def test_a_model_that_takes_lengths_gets_them() -> None:
    rows = filled(4, 3)
    assert as_long_as_told(rows, ("ids", "lengths")) == rows


def test_arrays_of_bytes_and_texts_keep_their_content_and_shape(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, a=np.array([[b"ab", b"c"], [b"d", b"e"]]), b=np.array([["ä", "b"]] * 2))
    first, _ = read_sent(plan(path))
    assert first["a"].tolist() == [b"ab", b"c"]
    assert first["b"].tolist() == ["ä".encode(), b"b"]


def test_a_file_of_labels_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, y=np.zeros(4))
    with pytest.raises(ConfigError, match="holds only the labels"):
        read_sent(plan(path, labels="y"))
