"""Recordings as data: merged by time, split into examples, and as prompts."""

from pathlib import Path

import numpy as np
import pytest
from made_recordings import START, digits, write_recording, write_texts

from penstock.data import InputSpec, RequestForm, open_source
from penstock.data.datasets import read_dataset
from penstock.data.recordings import (
    example_rows,
    is_recording,
    notes_of,
    open_recording,
    text_rows,
)
from penstock.errors import ConfigError
from penstock.serving.recording_files import RingPlace
from penstock.types import TensorSpec

FORM = RequestForm("tensors", (TensorSpec("x", "FP32", (4,)),), has_batch=True)


def values(folder: Path, latest: int = 0) -> list[float]:
    rows = example_rows(open_recording(folder), has_batch=True, latest=latest).rows
    return [float(row["x"][0]) for row in rows]


def test_folders_and_files_of_segments_are_recordings(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(3))
    (file,) = folder.iterdir()
    assert all(is_recording(path) for path in (tmp_path, folder, file))
    assert not is_recording(tmp_path / "none")
    (tmp_path / "images").mkdir()
    assert not is_recording(tmp_path / "images")
    for path in (tmp_path, folder, file):
        assert len(open_recording(path).entries) == 3


def test_segments_of_shards_are_merged_by_arrival(tmp_path: Path) -> None:
    first, second = digits(6)[::2], digits(6)[1::2]
    write_recording(tmp_path, first, times=[0, 2, 4], place=RingPlace(0, 2))
    write_recording(tmp_path, second, times=[1, 3, 5], place=RingPlace(1, 2))
    assert values(tmp_path) == [0, 1, 2, 3, 4, 5]


def test_requests_of_several_rows_are_several_examples(tmp_path: Path) -> None:
    write_recording(tmp_path, [{"x": np.arange(8, dtype=np.float32).reshape(2, 4)}])
    rows = example_rows(open_recording(tmp_path), has_batch=True).rows
    assert [row["x"].tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (whole,) = example_rows(open_recording(tmp_path), has_batch=False).rows
    assert whole["x"].shape == (2, 4)


def test_only_answered_requests_are_examples(tmp_path: Path) -> None:
    statuses = ["ok", "Overloaded", "InvalidRequest", "ok"]
    folder = write_recording(tmp_path, digits(4), statuses=statuses)
    assert values(folder) == [0, 3]
    recording = open_recording(folder)
    assert [each.record.id for each in recording.replayable()] == ["0", "1", "3"]


def test_the_latest_different_rows(tmp_path: Path) -> None:
    write_recording(tmp_path, [*digits(5), *digits(3)])
    assert values(tmp_path) == [0, 1, 2, 3, 4, 0, 1, 2]
    assert values(tmp_path, latest=4) == [4, 0, 1, 2]
    assert values(tmp_path, latest=100) == [3, 4, 0, 1, 2]


def test_a_record_that_was_cut_off_is_skipped_and_noted(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(5))
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    recording = open_recording(folder)
    assert len(recording.entries) == 4 and recording.num_cut == 1
    assert "1 segment ended with an incomplete record" in notes_of(recording)


def test_an_empty_segment_is_skipped(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(2))
    (folder / "9999999999999999999-00-1.rec").write_bytes(b"")
    assert len(open_recording(folder).entries) == 2


def test_a_recording_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(b"PENREC1\n")
    with pytest.raises(ConfigError, match="has no recorded requests"):
        open_recording(tmp_path)
    write_recording(tmp_path / "b", digits(1), statuses=["Overloaded"])
    with pytest.raises(ConfigError, match="no recorded request was answered"):
        example_rows(open_recording(tmp_path / "b"), has_batch=True)


def test_of_several_models_one_is_named(tmp_path: Path) -> None:
    write_recording(tmp_path, digits(2), name="a")
    write_recording(tmp_path, digits(3), name="b")
    with pytest.raises(ConfigError, match=r"several models \(a, b\); name one"):
        open_recording(tmp_path)
    assert len(open_recording(tmp_path, "b").entries) == 3


def test_the_report_says_when_and_how_much_was_recorded(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(11), share=0.05)
    recording = open_recording(folder)
    assert recording.text == ("recorded 2023-11-14 22:13:20 to 22:13:21 UTC, 0.05 of the requests")
    assert recording.span[0].timestamp() == START


def test_tensors_of_every_kind_read_back(tmp_path: Path) -> None:
    arrays = {
        "text": np.array([[b"one\x00", b""]], object),
        "half": np.array([[1.5, np.nan]], np.float16),
        "flag": np.array([[True]]),
        "wide": np.array([[2**63]], np.uint64),
    }
    folder = write_recording(tmp_path, [arrays], [{"y": np.array([[1.0]])}])
    (entry,) = open_recording(folder).entries
    for name, array in entry.inputs().items():
        np.testing.assert_array_equal(array, arrays[name])
    assert entry.outputs()["y"].tolist() == [[1.0]]


def test_redacted_inputs_are_zeros_and_noted(tmp_path: Path) -> None:
    arrays = {"x": np.ones((1, 4), np.float32), "s": np.array([[b"secret"]], object)}
    folder = write_recording(tmp_path, [arrays], redacted=["s", "x"])
    (entry,) = open_recording(folder).entries
    assert entry.inputs()["x"].tolist() == [[0.0] * 4]
    assert entry.inputs()["s"].tolist() == [[b""]]
    assert "redacted, sent as zeros: 's', 'x'" in notes_of(open_recording(folder))
    found = read_dataset(InputSpec(str(write_recording(tmp_path / "n", digits(1)))), FORM)
    assert found.redacted == ()


def test_bench_and_optimise_read_recordings_as_data(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(3))
    source = open_source(InputSpec(str(folder)), FORM, 0, 1)
    found = {index: sample.tensors["x"][0, 0] for index, sample in (source.next() for _ in "123")}
    assert found == {0: 0, 1: 1, 2: 2}
    assert "3 examples of m, shuffled" in source.origin.text
    assert "recorded 2023-11-14" in source.origin.text
    latest = read_dataset(InputSpec(str(folder), latest=2), FORM).columns
    assert latest.num_examples == 2


def test_inputs_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, [{"other": np.zeros((1, 4), np.float32)}])
    with pytest.raises(ConfigError, match="rename 'other' to 'x'"):
        read_dataset(InputSpec(str(folder)), FORM)


def test_texts_are_prompts_and_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    folder = write_texts(tmp_path, [{"prompt": "one"}, {"messages": chat}, {"prompt": [5, 6]}])
    recording = open_recording(folder)
    assert recording.is_text
    rows = text_rows(recording)
    assert rows.rows == [{"prompt": "one", "max_tokens": 7}, {"messages": chat, "max_tokens": 7}]
    assert rows.place(1) == "request 2"
    source = open_source(InputSpec(str(folder)), RequestForm("messages"), 0, 1)
    asked = {source.next()[1].fields["messages"][0]["content"] for _ in "12"}
    assert asked == {"one", "hi"}
    with pytest.raises(ConfigError, match="is of a language model; the target takes tensors"):
        read_dataset(InputSpec(str(folder)), FORM)


def test_redacted_prompts_are_refused_as_data(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, [{}])
    with pytest.raises(ConfigError, match="has no prompts; were they redacted"):
        text_rows(open_recording(folder))
