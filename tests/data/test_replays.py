"""Recorded requests as a load: their times, their order, their answers."""

from pathlib import Path

import numpy as np
import pytest
from made_recordings import digits, write_recording, write_texts

from penstock.data import InputSpec, RequestForm, Source, open_source
from penstock.data.replays import plan_replay
from penstock.errors import ConfigError
from penstock.types import TensorSpec, to_array

FORM = RequestForm("tensors", (TensorSpec("x", "FP32", (4,)),), has_batch=True)
CHAT = RequestForm("messages")


def opened(path: Path, count: int, form: RequestForm = FORM, place: tuple[int, int] = (0, 1)):
    return open_source(InputSpec(str(path), num_replayed=count), form, *place)


def first_values(source: Source, count: int) -> list[float]:
    return [float(source.next()[1].tensors["x"][0, 0]) for _ in range(count)]


def test_times_count_from_the_first_request(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(3), times=[5.0, 5.5, 9.0])
    plan = plan_replay(str(folder))
    assert plan.trace.times_s == pytest.approx((0.0, 0.5, 4.0))
    assert plan.trace.name == "m" and not plan.has_answers
    answers = write_recording(tmp_path / "more", digits(1), digits(1))
    assert plan_replay(str(answers)).has_answers


def test_requests_come_in_the_order_of_their_arrival_and_with_all_rows(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(4, rows=3), times=[3, 1, 2, 0])
    source = opened(folder, 4)
    assert first_values(source, 6) == [3, 1, 2, 0, 3, 1]
    assert source.next()[1].tensors["x"].shape == (3, 4)
    assert source.origin.text.startswith("4 requests of m, in the order of their arrival")


def test_processes_share_the_requests(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(5))
    assert first_values(opened(folder, 5, place=(0, 2)), 3) == [0, 2, 4]
    assert first_values(opened(folder, 5, place=(1, 2)), 3) == [1, 3, 0]


def test_recorded_answers_come_along(tmp_path: Path) -> None:
    answers = [{"y": np.array([[float(n)]])} for n in range(2)]
    source = opened(write_recording(tmp_path, digits(2), answers), 2)
    for number in range(2):
        (reference,) = source.next()[1].reference
        assert (reference.name, to_array(reference).tolist()) == ("y", [[float(number)]])


def test_invalid_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    statuses = ["ok", "InvalidRequest", "Overloaded"]
    folder = write_recording(tmp_path, digits(3), statuses=statuses)
    assert len(plan_replay(str(folder)).trace.times_s) == 2
    source = opened(folder, 2)
    assert first_values(source, 2) == [0, 2] and "1 cannot be sent again" in source.origin.text
    none = write_recording(tmp_path / "none", digits(1), statuses=["InvalidRequest"])
    with pytest.raises(ConfigError, match="no recorded request can be sent again"):
        plan_replay(str(none))


def test_a_recording_that_grows_is_replayed_as_planned(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(3))
    write_recording(tmp_path, digits(5)[3:], times=[10, 11])
    assert first_values(opened(folder, 3), 4) == [0, 1, 2, 0]


def test_a_recording_that_has_lost_requests_is_refused(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(3))
    with pytest.raises(ConfigError, match="has changed since it was opened"):
        opened(folder, 4)


def test_texts_are_asked_as_the_target_takes_them(tmp_path: Path) -> None:
    asked = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}]}]
    folder = write_texts(tmp_path, [*asked, {"prompt": [1, 2]}])
    assert len(plan_replay(str(folder)).trace.times_s) == 2
    source = opened(folder, 2, CHAT)
    samples = [source.next()[1] for _ in range(2)]
    assert [each.fields["messages"][0]["content"] for each in samples] == ["one", "two"]
    assert [each.max_tokens for each in samples] == [7, 7]
    assert [to_array(each.reference[0]).tolist() for each in samples] == [
        [b"answer 0"],
        [b"answer 1"],
    ]


def test_texts_and_tensors_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is of a language model"):
        opened(write_texts(tmp_path, [{"prompt": "one"}]), 1)
    with pytest.raises(ConfigError, match="is of a model of tensors"):
        opened(write_recording(tmp_path, digits(1)), 1, CHAT)


def test_a_missing_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such recording"):
        plan_replay(str(tmp_path / "none"))
