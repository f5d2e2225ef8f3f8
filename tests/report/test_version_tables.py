"""Versions in a terminal: every row on its line, however narrow, and nothing that it would obey."""

import io
import re

import pytest
from rich.console import Console, RenderableType

from penstock.report import version_tables as tables
from penstock.wire.version_rows import (
    FigureRow,
    FileChange,
    HistoryEvent,
    PruneAnswer,
    VerifyRow,
    VersionDiff,
    VersionRow,
)

ROWS = [
    VersionRow(
        "digits",
        "1",
        is_served=True,
        slo="p99 < 20ms at 200/s poisson",
        outcome="kept",
        p99_s=0.0123,
        max_rate=310.0,
        accuracy=0.912,
        num_bytes=40_000,
        created="2026-11-15T06:30:00+00:00",
        hardware="EPYC 9354, 16 cores, 2 x H200",
    ),
    VersionRow("digits", "2", is_served=False, is_loaded=True, is_rollback_target=True),
    VersionRow("llama", "", is_served=True),
]
EVENT = HistoryEvent("2026-11-15T06:30:00+00:00", "promoted", "2", ("1",), "ada", "faster")


def text_of(shown: RenderableType, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_versions_have_their_figures() -> None:
    head, first, second, third = text_of(tables.show_versions(ROWS)).splitlines()
    assert head.split()[:3] == ["model", "version", "state"]
    for word in ("digits", "served", "kept", "12.3 ms", "310/s", "0.912", "39.1 KiB", "2026-11-15"):
        assert word in first
    assert "digits" not in second and "loaded, rollback" in second and "by hand" in second
    assert "llama" in third and "no versions" in third


def test_a_version_that_cannot_be_read_was_not_made_by_hand() -> None:
    row = VersionRow("digits", "3", is_served=False, problems=["3/manifest.json: cannot be read"])
    shown = text_of(tables.show_versions([row]))
    assert "unreadable" in shown and "by hand" not in shown
    assert "digits: 3/manifest.json: cannot be read" in shown


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_narrow_terminals_have_a_line_for_each_version(width: int) -> None:
    lines = text_of(tables.show_versions(ROWS), width).splitlines()
    assert len(lines) == 4 and lines[1].startswith("di")
    assert max(map(len, lines)) <= width


def test_problems_are_told_below_the_table() -> None:
    row = VersionRow("digits", "3", is_served=False, problems=["3/manifest.json: cannot be read"])
    text = text_of(tables.show_versions([row]))
    assert "unreadable" in text and text.endswith("digits: 3/manifest.json: cannot be read")


def test_the_history_tells_who_and_why() -> None:
    forced = HistoryEvent("t", "forced", "3", ("2",), "ada", "now", {"problems": ["no evidence"]})
    text = text_of(tables.show_history([EVENT, forced]))
    assert re.search(r"2026-11-15 06:30:00 +promoted +2 +1 +ada +faster", text)
    assert "now; no evidence" in text
    assert text_of(tables.show_history([])) == "nothing was promoted yet"


def test_what_terminals_would_obey_is_replaced() -> None:
    event = HistoryEvent("t", "promoted", "2", (), "a\x1b]0;x\x07", "\x9b31m\nred")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text_of(tables.show_history([event])))


def test_a_change_tells_when_it_is_served() -> None:
    text = text_of(tables.show_change(EVENT, "digits", is_live=True))
    assert text == "digits: version 2 serves now; before: 1"
    figures = {"warnings": ["torch is 2.14; measured with 2.13"], "problems": ["no evidence"]}
    event = HistoryEvent("t", "forced", "2", figures=figures)
    text = text_of(tables.show_change(event, "digits", is_live=False))
    assert text.splitlines() == [
        "digits: version 2 is served from the next start or load on; before: none",
        "forced: no evidence",
        "warning: torch is 2.14; measured with 2.13",
    ]


ADDED, COST = FileChange("x", "added", None, 1), FigureRow("cost", "", None, 1.0, None)


def diff(**changes: object) -> VersionDiff:
    made = {
        "config": ["--- 1/config.pbtxt", "+++ 2/config.pbtxt", "-a", "+b"],
        "files": [
            FileChange("model.onnx", "changed", 2048, 1024),
            FileChange("x", "added", None, 1),
        ],
        "figures": [
            FigureRow("p99", "s", 0.012, 0.006, 0.5),
            FigureRow("cost", "", None, 1.0, None),
        ],
        "a_steps": [],
        "b_steps": ["int8", "fold"],
        "notes": ["hardware differs"],
    }
    return VersionDiff("digits", "1", "2", **(made | changes))


def test_a_comparison_has_all_its_parts() -> None:
    text = text_of(tables.show_diff(diff()))
    for pattern in (
        "digits: version 2 compared with 1",
        "note: hardware differs",
        r"p99 +12.0 ms +6.00 ms +0.500x",
        r"cost +- +1.00",
        "steps of 1: none",
        "steps of 2: int8 → fold",
        r"model.onnx +changed +2.00 KiB +1.00 KiB",
        r"x +added +1.00 B",
        r"^\+b",
    ):
        assert re.search(pattern, text, re.M), pattern
    same = text_of(tables.show_diff(diff(config=[], files=[], figures=[])))
    assert "all the same" in same and "the same" in same and "none" in same


def test_colours_say_what_is_better() -> None:
    def style(name: str, ratio: float) -> str:
        figure = FigureRow(name, "", 1.0, ratio, ratio)
        console = Console(
            file=io.StringIO(), force_terminal=True, color_system="standard", width=80
        )
        with console.capture() as capture:
            console.print(tables.show_diff(diff(figures=[figure])))
        line = next(each for each in capture.get().splitlines() if name in each)
        return "".join(re.findall(r"\x1b\[(\d+)m", line.partition("1.00")[2])).replace("0", "")

    assert style("p99", 0.5) == style("max rate", 2.0) == "32"
    assert style("p99", 2.0) == style("accuracy", 0.5) == "31"
    assert style("p99", 1.01) == "2"


def test_damage_and_removals_are_told() -> None:
    rows = [VerifyRow("m", "1", "whole"), VerifyRow("m", "2", "damaged", ["2/w: missing"])]
    text = text_of(tables.show_verification(rows))
    assert text.endswith("m: 2/w: missing") and re.search(r"m +2 +damaged", text)
    kept = {"3": "served"}
    text = text_of(tables.show_pruning(PruneAnswer("m", ["1", "2"], kept, 2048, dry_run=False)))
    assert text.splitlines() == ["m: removed: 1, 2 (2.00 KiB)", "  kept 3: served"]
    text = text_of(tables.show_pruning(PruneAnswer("m", ["1"], kept, 2048, dry_run=True)))
    assert text.startswith("m: would be removed: 1 ")
    text = text_of(tables.show_pruning(PruneAnswer("m", [], kept, 0, dry_run=True)))
    assert text.startswith("m: nothing to remove")
    assert (
        text_of(tables.show_versions([])) == text_of(tables.show_verification([])) == "no versions"
    )
