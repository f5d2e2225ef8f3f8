"""The scorecard's rows, its journal, and the table in docs/reliability.md."""

import re
from pathlib import Path

import pytest
import scorecard
from scorecard import ROWS, Row, Run

DOCUMENT = scorecard.ROOT / "docs" / "reliability.md"
ROW = Row(5, "a test", "0 lost", ("tests/a.py",))


def make(row: int = 5, commit: str = "abc", num_failed: int = 0, **more: object) -> Run:
    values = {"began": "2026-11-16T15:00:00Z", "took_s": 1.0, "num_passed": 2} | more
    return Run(row, commit, num_failed=num_failed, **values)  # type: ignore[arg-type]


def test_rows_are_numbered_without_a_gap():
    assert [row.number for row in ROWS] == list(range(1, 26))


@pytest.mark.parametrize("row", [row for row in ROWS if row.tests], ids=lambda row: row.number)
def test_the_tests_of_a_row_exist(row: Row):
    for test in row.tests:
        file, _, name = test.partition("::")
        text = (scorecard.ROOT / file).read_text()
        if name:
            assert re.search(rf"def {re.escape(name.split('[')[0])}\(", text), test


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_a_row_without_a_test_says_what_is_open(row: Row):
    assert row.tests or row.missing or row.pending


def test_what_waits_for_features_is_marked():
    assert {row.number for row in ROWS if row.pending} == {18}


class TestJournal:
    def test_a_row_runs_three_times_and_each_run_is_kept(self, tmp_path: Path):
        journal = tmp_path / "new" / "journal.jsonl"
        runs = scorecard.resume(ROW, "abc", journal, lambda row, commit: make())
        assert runs == [make()] * 3 == scorecard.read_journal(journal)

    def test_an_interrupted_row_resumes(self, tmp_path: Path):
        journal = tmp_path / "journal.jsonl"
        started = 0

        def run_once(row: Row, commit: str) -> Run:
            nonlocal started
            started += 1
            if started == 3:
                raise KeyboardInterrupt
            return make(took_s=float(started))

        with pytest.raises(KeyboardInterrupt):
            scorecard.resume(ROW, "abc", journal, run_once)
        runs = scorecard.resume(ROW, "abc", journal, run_once)
        assert [run.took_s for run in runs] == [1.0, 2.0, 4.0]
        assert scorecard.resume(ROW, "abc", journal, run_once) == runs and started == 4

    def test_another_commit_or_row_is_measured_anew(self, tmp_path: Path):
        journal = tmp_path / "journal.jsonl"
        for _ in range(3):
            scorecard.append(journal, make(commit="old"))
            scorecard.append(journal, make(row=6))
        runs = scorecard.resume(ROW, "abc", journal, lambda row, commit: make(took_s=9.0))
        assert [run.took_s for run in runs] == [9.0] * 3

    def test_a_line_of_a_killed_writer_spoils_nothing(self, tmp_path: Path):
        journal = tmp_path / "journal.jsonl"
        scorecard.append(journal, make())
        with journal.open("a") as file:
            file.write('{"row": 5, "comm')
        scorecard.append(journal, make(took_s=2.0))
        assert scorecard.read_journal(journal) == [make(), make(took_s=2.0)]


class TestFigures:
    output = (
        "============ test session starts ============",
        "collected 2 items",
        "tests/e2e/test_a.py::test_one ",
        "slo 2x goodput 961/s, accepted p99 46.2 ms",
        "PASSED",
        "no number here",
        "============ FAILURES ============",
        "took 7 ms",
        "==== 1 failed, 11 passed, 2 skipped in 12.34s ====",
    )

    def test_figures_are_what_tests_printed(self):
        found = scorecard.find_figures(self.output)
        assert found == ("slo 2x goodput 961/s, accepted p99 46.2 ms",)

    def test_outcomes_are_those_of_the_last_line(self):
        counts = scorecard.count_outcomes(self.output)
        assert counts == {"passed": 11, "failed": 1, "error": 0, "skipped": 2}

    def test_the_worst_run_counts(self):
        bad = make(num_failed=1, figures=("p99 99 ms",))
        runs = [make(took_s=9.0, figures=("p99 1 ms",)), bad]
        assert scorecard.worst(runs) == bad
        assert scorecard.describe(ROW, runs) == "1 of 2 runs passed, 2026-11-16 at abc; p99 99 ms"

    def test_a_run_in_which_nothing_ran_has_not_passed(self):
        assert not make(num_passed=0).has_passed

    def test_without_a_run_there_is_no_figure(self, tmp_path: Path):
        assert scorecard.describe(ROW, []) == "not measured yet"
        lines = scorecard.table(tmp_path / "none").splitlines()
        assert len(lines) == 2 + len(ROWS)
        assert all("not measured yet" in line for line in lines[2:])


def read_lines() -> dict[int, str]:
    """The lines of the document's table, by row."""
    lines = DOCUMENT.read_text().splitlines()
    found = [(re.match(r"\| (\d+) \|", line), line) for line in lines]
    return {int(match[1]): line for match, line in found if match}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_each_row_has_a_line_in_the_document(row: Row):
    line = read_lines()[row.number]
    assert row.title in line and row.target in line and row.triton in line
    assert row.command in line and row.missing in line and row.pending in line


def test_the_document_has_no_other_line():
    assert read_lines().keys() == {row.number for row in ROWS}
