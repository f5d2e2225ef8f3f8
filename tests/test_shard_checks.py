"""The list of `make verify-shards`: its tests exist, and what they print is read."""

import subprocess
import sys
from pathlib import Path

import pytest
import shard_checks
from shard_checks import CHECKS, ShardCheck, lowest, run


def test_titles_differ_and_every_check_runs_something() -> None:
    assert len({check.title for check in CHECKS}) == len(CHECKS)
    assert all(bool(check.tests) != bool(check.command) for check in CHECKS)
    for number in (1, 2, 4):
        assert sum(check.title.endswith(f", {number} shards") for check in CHECKS) >= 7


def test_named_tests_exist() -> None:
    named = [test for check in CHECKS for test in check.tests if "::" in test]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", *named]
    found = subprocess.run(command, cwd=shard_checks.ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:]
    assert sum("::" in line for line in found.stdout.splitlines()) == len(set(named))


def test_the_lowest_goodput_is_shown() -> None:
    figures = ["a: goodput 0.991 of one shard's", "b: goodput 0.973 of one shard's"]
    assert lowest(figures) == "lowest of 2: b: goodput 0.973 of one shard's"
    assert lowest(["32 good"]) == ""


@pytest.mark.parametrize(
    ("body", "has_passed", "figure"),
    [
        ("print('\\n7 good')", True, "7 good"),
        ("assert False", False, ""),
        ("import pytest; pytest.skip('busy')", False, "not judged"),
    ],
)
def test_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, has_passed: bool, figure: str
) -> None:
    monkeypatch.setattr(shard_checks, "LOGS", tmp_path / "logs")
    test = tmp_path / "test_made.py"
    test.write_text(f"def test_it():\n    {body}\n")
    outcome = run(ShardCheck("made", (str(test),)))
    assert outcome.has_passed == has_passed
    assert "".join(outcome.figures).startswith(figure)
