"""Files of every format: what is in them, and what is said of those that cannot be read."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from penstock.data.files import digest, read_arrays, read_rows
from penstock.errors import ConfigError


def problems(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_arrays(path) if path.suffix in (".npz", ".npy") else read_rows(path)
    return "\n".join(caught.value.problems)


def test_npz_holds_arrays_by_name(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "data.npz", a=np.arange(3), b=np.array(["x", "y", "z"]))
    arrays = read_arrays(tmp_path / "data.npz")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "a": [0, 1, 2],
        "b": ["x", "y", "z"],
    }


def test_npy_holds_one_array_without_a_name(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.eye(2))
    assert read_arrays(tmp_path / "data.npy")[""].tolist() == [[1, 0], [0, 1]]


def test_arrays_of_different_numbers_of_examples_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", a=np.zeros(3), b=np.zeros(4), c=np.zeros(()))
    found = problems(tmp_path / "data.npz")
    assert "different numbers of examples: 'a' 3, 'b' 4" in found
    assert "array 'c': expected an array whose first axis counts examples" in found


@pytest.mark.parametrize("count", [0, None])
def test_no_examples(tmp_path: Path, count: int | None) -> None:
    np.savez(tmp_path / "data.npz", **({} if count is None else {"a": np.zeros((count, 3))}))
    assert "has no examples" in problems(tmp_path / "data.npz")


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", a=np.array([{}, []], dtype=object))
    assert "holds Python objects, which are never loaded" in problems(tmp_path / "data.npz")


@pytest.mark.parametrize(
    "name", ["data.npz", "data.npy", "data.json", "data.jsonl", "data.parquet"]
)
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"\x93NUMPY", b"text \xff"])
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert str(tmp_path / name) in problems(tmp_path / name)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "data.npz", a=np.random.default_rng(0).random(1000))
    content = bytearray((tmp_path / "data.npz").read_bytes())
    content[200:300] = bytes(100)
    (tmp_path / "data.npz").write_bytes(content)
    assert "cannot be read" in problems(tmp_path / "data.npz")


@pytest.mark.parametrize("name", ["data.npz", "data.json", "data.jsonl", "data.parquet"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    assert "No such file" in problems(tmp_path / name)


def test_jsonl_has_a_row_a_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"x": [1, 2]}\n\n{"x": "text", "y": null}\n')
    rows = read_rows(tmp_path / "data.jsonl")
    assert list(rows.rows) == [{"x": [1, 2]}, {"x": "text", "y": None}]
    assert [rows.place(0), rows.place(1)] == ["line 1", "line 3"]


def test_txt_has_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two words \n")
    rows = read_rows(tmp_path / "a.txt")
    assert rows.rows == [{"prompt": "one"}, {"prompt": "two words"}]
    assert [rows.place(index) for index in range(2)] == ["line 1", "line 3"]
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"b\.txt: not UTF-8"):
        read_rows(tmp_path / "b.txt")


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"x": 1}\n{"x": \n[1]\n')
    found = problems(tmp_path / "data.jsonl")
    assert "data.jsonl, line 2: expected a JSON object" in found
    assert "data.jsonl, line 3: expected a JSON object" in found


@pytest.mark.parametrize("wrapped", [True, False])
def test_json_is_a_list_or_what_perf_analyzer_reads(tmp_path: Path, wrapped: bool) -> None:
    rows = [{"IN": [1, 2]}, {"IN": {"b64": "AA=="}}]
    document = {"data": rows, "validation_data": [{}]} if wrapped else rows
    (tmp_path / "data.json").write_text(json.dumps(document))
    assert list(read_rows(tmp_path / "data.json").rows) == rows


def test_bodies_that_genai_perf_wrapped_are_rows(tmp_path: Path) -> None:
    document = {"data": [{"payload": [{"prompt": "a", "max_tokens": 3}]}]}
    (tmp_path / "inputs.json").write_text(json.dumps(document))
    assert list(read_rows(tmp_path / "inputs.json").rows) == [{"prompt": "a", "max_tokens": 3}]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"rows": []}, "expected a list of objects"),
        ([], "has no examples"),
        ([{"x": 1}, 2], "example 2: expected an object, got int"),
        ({"data": [[{"x": 1}]]}, "sequences of requests are not supported"),
    ],
)
def test_json_of_another_form_is_refused(tmp_path: Path, document: object, problem: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps(document))
    assert problem in problems(tmp_path / "data.json")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    columns = {
        "ragged": pyarrow.array([[1, 2], [3], []], pyarrow.list_(pyarrow.int32())),
        "equal": pyarrow.array([[1, 2], [3, 4], [5, 6]], pyarrow.list_(pyarrow.float32(), 2)),
        "nested": pyarrow.array([[[1], [2]], [[3], [4]], [[5], [6]]]),
        "text": pyarrow.array(["a", "b", None]),
        "words": pyarrow.array([["a"], ["b", "c"], []]),
        "number": pyarrow.array([1.5, 2.5, 3.5]),
        "holes": pyarrow.array([[1, None], None, [2, 3]]),
    }
    path = tmp_path / "data.parquet"
    # Several row groups: columns come in chunks.
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize("as_arrays", [True, False])
def test_parquet_has_a_value_a_row(table: Path, as_arrays: bool) -> None:
    rows = [
        {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in row.items()}
        for row in read_rows(table, as_arrays).rows
    ]
    assert [row["ragged"] for row in rows] == [[1, 2], [3], []]
    assert [row["equal"] for row in rows] == [[1, 2], [3, 4], [5, 6]]
    assert [row["nested"] for row in rows] == [[[1], [2]], [[3], [4]], [[5], [6]]]
    assert [row.get("text") for row in rows] == ["a", "b", None]
    assert [row["words"] for row in rows] == [["a"], ["b", "c"], []]
    assert [row["number"] for row in rows] == [1.5, 2.5, 3.5]
    assert [row.get("holes") for row in rows] == [[1, None], None, [2, 3]]


def test_lists_of_numbers_come_as_arrays_of_their_type(table: Path) -> None:
    row = read_rows(table, as_arrays=True).rows[0]
    assert row["ragged"].dtype == np.int32
    assert row["equal"].dtype == np.float32


def test_parquet_without_its_library_says_what_to_install(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'penstock[data]'" in problems(table)


def test_a_digest_is_the_sha256_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    path.write_bytes(b"content")
    assert digest([path]) == hashlib.sha256(b"content").hexdigest()


def test_the_digest_of_several_files_depends_on_each(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(b"content")
    before = digest(paths)
    paths[1].write_bytes(b"Content")
    assert digest(paths) != before


def test_csv_columns_of_numbers_become_numbers(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text('\ufefftext,label,score\n"one, two",1,0.5\n"a ""b""",2,1\n', encoding="utf-8")
    rows = read_rows(path)
    assert rows.rows == [
        {"text": "one, two", "label": 1, "score": 0.5},
        {"text": 'a "b"', "label": 2, "score": 1.0},
    ]
    assert rows.place(1) == "line 3"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a,b\n1\n", "line 2: more or fewer values than there are columns"),
        (b"a,b\n1,2,3\n", "line 2: more or fewer values"),
        (b"a\n\xff\n", "not a CSV file in UTF-8"),
        (b"a,b\n", "has no examples"),
    ],
)
def test_csv_files_that_are_none_are_refused(tmp_path, content, problem):
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_rows(path)
