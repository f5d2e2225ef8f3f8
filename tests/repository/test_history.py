"""The history of a model: what is written is read back, old lines too, and it is the way back."""

import json
from pathlib import Path

import pytest

from penstock.repository import history
from penstock.repository.history import Cause, HistoryEvent


def test_what_is_appended_is_read_in_its_order(tmp_path: Path) -> None:
    first = Cause(actor="ada", reason="faster").event("2", ["1"])
    second = Cause(history.FORCED, "ada", "no time", {"problems": ["é"], "n": 1.5}).event("3", "2")
    assert history.read(tmp_path) == []
    for event in (first, second):
        history.append(tmp_path, event)
    assert history.read(tmp_path) == [first, second]
    assert (first.kind, first.version, first.previous) == ("promoted", "2", ("1",))
    assert first.time.endswith("+00:00")
    assert {each.kind for each in (first, second)} <= set(history.KINDS)


def test_lines_without_a_kind_are_promotions(tmp_path: Path) -> None:
    line = {"time": "2026-11-15T06:30:00+00:00", "version": "2", "previous": ["1"]}
    (tmp_path / history.NAME).write_text(json.dumps(line) + "\n")
    assert history.read(tmp_path) == [HistoryEvent(line["time"], "promoted", "2", ("1",))]


def test_fields_of_later_releases_are_no_obstacle(tmp_path: Path) -> None:
    line = {"time": "t", "kind": "praised", "version": "2", "stars": 5}
    (tmp_path / history.NAME).write_text(json.dumps(line) + "\n")
    assert history.read(tmp_path) == [HistoryEvent("t", "praised", "2")]


@pytest.mark.parametrize(
    "bad", [b'{"time":"t","ver', b"\xff\xfe", b"[]", b'{"time":"t"}', b"[" * 9999]
)
def test_lines_that_are_no_events_are_named_and_hide_no_others(tmp_path: Path, bad: bytes) -> None:
    event = Cause().event("1")
    history.append(tmp_path, event)
    with open(tmp_path / history.NAME, "ab") as file:
        file.write(bad)
    history.append(tmp_path, event)
    assert history.read(tmp_path) == [event, event]
    assert history.unreadable_lines(tmp_path) == [2]


# The way back. A change is "kind version<previous".


def events(*changes: str) -> list[HistoryEvent]:
    made = []
    for change in changes:
        kind, _, rest = change.rpartition(" ")
        version, _, previous = rest.partition("<")
        made.append(HistoryEvent("", kind, version, tuple(filter(None, previous.split("+")))))
    return made


@pytest.mark.parametrize(
    "changes, served, target",
    [
        ([], "1", ""),
        (["promoted 2<1"], "2", "1"),
        (["forced 2<1"], "2", "1"),
        (["promoted 2<1", "promoted 3<2"], "3", "2"),
        # The second rollback goes further back.
        (["promoted 2<1", "promoted 3<2", "rolled back 2<3"], "2", "1"),
        (["promoted 2<1", "promoted 3<2", "rolled back 2<3", "rolled back 1<2"], "1", ""),
        # What was rolled back is not gone back to.
        (["promoted 2<1", "rolled back 1<2", "promoted 3<1"], "3", "1"),
        (["promoted 2<1", "promoted 1<2", "promoted 2<1"], "2", "1"),
        # A version that is pinned while it is served.
        (["promoted 2<2"], "2", ""),
        (["promoted 2<1", "promoted 2<2"], "2", "1"),
        # Events that change nothing.
        (["promoted 2<1", "canary started 3<2", "failed 3<2", "pruned 1<2"], "2", "1"),
        # Their writers were killed before the change.
        (["promoted 2<1", "promoted 3<2"], "2", "1"),
        (["promoted 2<1", "rolled back 1<2"], "2", "1"),
        (["promoted 2<1", "promoted 3<2", "promoted 4<2"], "4", "2"),
        (["promoted 1<2", "promoted 2<1", "rolled back 1<2"], "2", "1"),
        # Changed by hand, or by a commit that is served at once.
        (["promoted 2<1"], "3", "2"),
        (["promoted 2<1", "promoted 4<3"], "4", "3"),
        (["promoted 2<1", "promoted 4<3", "rolled back 3<4"], "3", "2"),
        # Several were served at once.
        (["promoted 3<1+2"], "3", "1+2"),
    ],
)
def test_the_way_back(changes: list[str], served: str, target: str) -> None:
    found = history.rollback_target(events(*changes), [served])
    assert "+".join(found) == target
