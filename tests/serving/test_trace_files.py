"""Trace files are valid JSON after every write, and bounded."""

import json
from pathlib import Path

import pytest

from penstock.serving.trace_files import TraceFile


def read(path: Path) -> list[object]:
    found = json.loads(path.read_text())
    assert isinstance(found, list)
    return found


def test_one_file_is_a_list_after_every_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of an earlier run, and longer than what is written now")
    made = TraceFile(path)
    for number in range(3):
        assert made.write([b'{"id":%d}' % number, b'{"id":%d,"more":1}' % number])
        assert len(read(path)) == 2 * (number + 1)
    made.close()
    assert len(read(path)) == 6


def test_a_frequency_makes_a_file_of_so_many_traces(tmp_path: Path) -> None:
    made = TraceFile(tmp_path / "t")
    for number in range(5):
        made.write([b"%d" % number], 2)
    made.close()
    assert (tmp_path / "t.0").stat().st_mode & 0o777 == 0o600
    assert {each.name: read(each) for each in tmp_path.iterdir()} == {
        "t.0": [0, 1],
        "t.1": [2, 3],
        "t.2": [4],
    }


def test_a_changed_frequency_begins_another_file(tmp_path: Path) -> None:
    made = TraceFile(tmp_path / "t")
    made.write([b"1"])
    made.write([b"2"], 10)
    made.close()
    assert read(tmp_path / "t") == [1] and read(tmp_path / "t.0") == [2]


def test_a_full_file_takes_no_more_and_stays_valid(tmp_path: Path) -> None:
    made = TraceFile(tmp_path / "t", max_bytes=100)
    results = [made.write([b'"%s"' % (b"x" * 20)]) for _ in range(10)]
    assert results[0] and not results[-1]
    assert len(read(tmp_path / "t")) == sum(results)


def test_the_oldest_of_several_files_goes(tmp_path: Path) -> None:
    made = TraceFile(tmp_path / "t", max_bytes=120)
    for _ in range(10):
        assert made.write([b'"%s"' % (b"x" * 20)], 1)
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names[-1] == "t.9" and "t.0" not in names
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 120


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "t").symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        TraceFile(tmp_path / "t").write([b"1"])
    assert not (tmp_path / "other").exists()
